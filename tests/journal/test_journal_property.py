"""The journal on disk does what the one in memory does, whatever is done to it and however often it is opened anew."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from datetime import date
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatd.journal.journal import Journal
from chatd.journal.records import (
    Change,
    CountUsage,
    EraseSession,
    MessageRecord,
    RemoveMessages,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    ShareMessages,
)
from chatd.testing.journal import MemoryJournal
from chatd.testing.journal_records import make_answer, make_session, make_user_message

TEXTS = ["", "hello world", "Grüße aus Köln", "北京欢迎你", "ΣΊΣΥΦΟΣ", 'a "quoted" OR *', "nul\0inside", "🙂🙂🙂 x"]
QUERIES = [
    "hello",
    "lo wo",
    "ÜSSE",
    "京欢",
    "σίσυφοσ",
    '"quo',
    "OR",
    "*",
    "inside",
    "🙂🙂",
    "x",
    "absent",
    "  ",
    "ell wor",
]


class _Script:
    """Draws operations that a manager could come up with: trees, forks, answers in flight and their ends."""

    def __init__(self, draw: st.DataObject) -> None:
        self._draw = draw
        self._num_messages = 0
        self._num_commands = 0
        self.members: dict[str, list[str]] = {}
        self.messages: dict[str, MessageRecord] = {}
        self.num_ids: dict[str, int] = {}

    def pick(self, values: list[str]) -> str:
        return self._draw.draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        return self._draw.draw(st.integers(low, high))

    def session_with_messages(self) -> str | None:
        names = [name for name, members in self.members.items() if members]
        return self.pick(names) if names else None

    def in_flight(self) -> list[str]:
        return [name for name, message in self.messages.items() if message.status == "in_progress"]

    def changes(self) -> list[Change]:
        return [change for _ in range(self.number(1, 3)) for change in self.change()]

    def change(self) -> list[Change]:
        kinds = ["session", "say", "answer", "end", "fork", "remove", "erase", "command", "usage"]
        match self.pick(kinds if self.members else ["session"]):
            case "session":
                name = self.pick(["s1", "s2", "s3"])
                self.members.setdefault(name, [])
                return [SaveSession(make_session(name, title=self.pick(TEXTS), updated_at=float(self.number(0, 9))))]
            case "say":
                name = self.pick(list(self.members))
                parent = self.pick(self.members[name]) if self.members[name] else None
                return [self.save(name, make_user_message(self.new_message(), self.pick(TEXTS), parent))]
            case "answer" if (name := self.session_with_messages()) is not None:
                parent = self.pick(self.members[name])
                prompt_ids = [self.number(0, 2**32 - 1) for _ in range(self.number(0, 3))]
                return [self.save(name, make_answer(self.new_message(), parent, None, [], prompt_ids=prompt_ids))]
            case "end" if self.in_flight():
                message = self.messages[self.pick(self.in_flight())]
                name = next(name for name, members in self.members.items() if message.id in members)
                ended = make_answer(message.id, message.parent, self.pick(TEXTS), [7] * self.number(0, 5))
                return [self.save(name, ended)]
            case "fork" if (name := self.session_with_messages()) is not None:
                fork = f"f{len(self.members)}"
                path = self.path_to(self.pick(self.members[name]))
                own = self.members.setdefault(fork, [])
                own += [message for message in path if message not in own]
                return [SaveSession(make_session(fork)), ShareMessages(fork, tuple(path))]
            case "remove" if (name := self.session_with_messages()) is not None:
                message = self.members[name][-1]
                self.members[name].pop()
                self.forget_unused()
                return [RemoveMessages(name, (message, "unknown"))]
            case "erase":
                name = self.pick(list(self.members))
                del self.members[name]
                self.forget_unused()
                return [EraseSession(name)]
            case "command":
                self._num_commands += 1
                return [SaveAnswer("acme", "ann", f"c{self._num_commands}", b"\0", b"{}", float(self._num_commands))]
            case "usage":
                return [CountUsage("acme", self.pick(["k1", "k2"]), date(2026, 1, self.number(1, 3)), 3, 2, 1)]
        return []

    def new_message(self) -> str:
        self._num_messages += 1
        return f"m{self._num_messages}"

    def save(self, session: str, message: MessageRecord) -> SaveMessage:
        if message.id not in self.members[session]:
            self.members[session].append(message.id)
        self.messages[message.id] = message
        self.num_ids[message.id] = len(message.ids)
        return SaveMessage(session, message)

    def path_to(self, message: str) -> list[str]:
        path: list[str] = []
        at: str | None = message
        while at is not None:
            path.append(at)
            at = self.messages[at].parent
        return path[::-1]

    def forget_unused(self) -> None:
        used = {message for members in self.members.values() for message in members}
        self.messages = {name: message for name, message in self.messages.items() if name in used}

    def tokens(self) -> tuple[str, int, list[int]]:
        name = self.pick([*self.in_flight(), "unknown", *list(self.messages)[:1]])
        start = self.number(0, self.num_ids.get(name, 0))
        ids = [self.number(0, 2**32 - 1) for _ in range(self.number(0, 3))]
        if name in self.in_flight():
            self.num_ids[name] = start + len(ids)
        return name, start, ids


async def _is_the_same(journal: Journal, model: MemoryJournal, sessions: list[str]) -> None:
    await journal.flush()
    by_id = {session.id: session for session in await journal.sessions()}
    assert by_id == {session.id: session for session in await model.sessions()}
    assert sorted(await journal.in_flight()) == sorted(await model.in_flight())
    for session in [*sessions, "unknown"]:
        assert await journal.messages(session) == await model.messages(session)
    for query in QUERIES:
        for user in ("ann", "bob"):
            found = await journal.search("acme", user, query, 100)
            assert sorted(found) == sorted(await model.search("acme", user, query, 100)), query
            assert len(await journal.search("acme", user, query, 1)) == min(1, len(found))
    assert await journal.answers(2.0) == await model.answers(2.0)
    counted: dict[tuple[str, date], int] = {}
    for change in model.usage:
        counted[change.key_id, change.day] = counted.get((change.key_id, change.day), 0) + 1
    assert {(row.key_id, row.day): row.requests for row in await journal.usage("acme")} == counted


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data(), num_operations=st.integers(1, 12))
def test_the_journal_behaves_as_the_one_in_memory(draw: st.DataObject, num_operations: int) -> None:
    async def run() -> None:
        folder = Path(tempfile.mkdtemp())
        journal, model, script = Journal.open(folder / "journal"), MemoryJournal(), _Script(draw)
        try:
            for _ in range(num_operations):
                match script.pick(["commit", "commit", "commit", "tokens", "tokens", "reopen"]):
                    case "commit":
                        changes = script.changes()
                        await model.commit(changes)
                        await journal.commit(changes)
                    case "tokens":
                        run = script.tokens()
                        model.append_tokens(*run)
                        journal.append_tokens(*run)
                    case _:
                        await journal.close()
                        journal = Journal.open(folder / "journal")
            await _is_the_same(journal, model, list(script.members))
            await journal.close()
            journal = Journal.open(folder / "journal")
            await _is_the_same(journal, model, list(script.members))
        finally:
            await journal.close()
            shutil.rmtree(folder)

    asyncio.run(run())

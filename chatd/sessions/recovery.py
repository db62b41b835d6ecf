"""What a daemon takes up from the journal when it starts: every session by name, and the answers in progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from chatd.journal.records import RemoveMessages, SaveAnswer, SaveSession
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session
from chatd.sessions.store import SessionStore
from chatd.sessions.turn import Turn
from chatd.sessions.turns import TurnRunner

ANSWERS_KEPT_S = 24 * 3600.0
"""How long the answer to a command is kept for a client that sends it again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What was taken up.

    Attributes:
        num_sessions: All of them.
        turns: Answers that go on.
        answers: To commands that may come again, oldest first.
    """

    num_sessions: int
    turns: Sequence[Turn]
    answers: Sequence[SaveAnswer]


class Recovery:
    """Takes up what the journal has.

    Args:
        journal: Is read.
        recorder: Makes durable what cannot go on.
        store: Is given the sessions.
        runner: Goes on with the answers.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        journal: Journal,
        recorder: Recorder,
        store: SessionStore,
        runner: TurnRunner,
        clock: Callable[[], float],
    ) -> None:
        self._journal = journal
        self._recorder = recorder
        self._store = store
        self._runner = runner
        self._clock = clock

    async def restore(self) -> Restored:
        """Take everything up; see `SessionManager.restore`."""
        sessions = {record.id: self._store.add_stored(record) for record in await self._journal.sessions()}
        in_flight: dict[str, list[str]] = {}
        for session_id, message_id in await self._journal.in_flight():
            in_flight.setdefault(session_id, []).append(message_id)
        turns: list[Turn] = []
        for session_id, message_ids in in_flight.items():
            turn = await self._go_on(sessions[session_id], message_ids)
            if turn is not None:
                turns.append(turn)
        if self._runner.is_ready:
            self._runner.restorer.resume()
        answers = await self._journal.answers(self._clock() - ANSWERS_KEPT_S)
        return Restored(len(sessions), turns, answers)

    async def _go_on(self, session: Session, message_ids: Sequence[str]) -> Turn | None:
        """Go on with a session's answer; one that cannot go on is taken out, and what it answers stays.

        That is one whose ids are of another vocabulary, or that failed while the journal took nothing.
        """
        async with session.lock:
            stored = session.stored
            records = {message.id: message for message in await self._journal.messages(session.id)}
            head = stored.head if stored.head in message_ids else None
            if head is not None and stored.vocabulary != self._runner.model.vocabulary:
                answer, head = records[head], None
                stored = msgspec.structs.replace(
                    stored,
                    head=answer.parent,
                    num_items=stored.num_items - 1,
                    num_tokens=max(0, stored.num_tokens - len(answer.prompt_ids)),
                )
            lost = tuple(message_id for message_id in message_ids if message_id != head)
            if lost:
                _log.warning("an answer in progress of %s cannot go on and is taken out", session.id)
                await self._recorder.commit([SaveSession(stored), RemoveMessages(session.id, lost)])
                session.unload(stored)
            if head is None:
                return None
            await self._store.loader.load(session)
            return self._runner.restorer.take_up(session, records[head])

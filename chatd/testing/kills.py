"""Conversations with a daemon that is killed again and again, and what they would have been with one that is not.

Each client is the real one, and each says a script's messages one after another. Whatever is killed meanwhile, what it
shows at the end is compared, token for token, with an undisturbed run: every answer, its usage and why it ended, and
the list of messages as the daemon has it, in which nothing may be missing or double.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chatd.client import Client, Session, Turn
from chatd.errors import Unavailable
from chatd.protocol import OutputTextDelta, Params, SessionAttached

STUCK_S = 600.0
"""A conversation that has not gone on for so long is reported as stuck."""


@dataclass(frozen=True, slots=True)
class Said:
    """One turn as its client saw it."""

    content: str
    answer: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Script:
    """What one client says.

    Attributes:
        system: Of its session.
        messages: One after another, each once the one before is answered.
        params: Of all answers.
    """

    system: str
    messages: Sequence[str]
    params: Params


@dataclass(slots=True)
class Seen:
    """What happened in a run.

    Attributes:
        counts: Turns, kills and the like.
    """

    counts: Counter[str] = field(default_factory=Counter)


async def _say(session: Session, content: str, params: Params) -> tuple[Turn, str]:
    """Say something, again where an engine that starts anew refuses it; return the turn and what it showed."""
    while True:
        turn = session.say(content, params=params)
        shown = ""
        try:
            async for event in turn:
                assert not isinstance(event, SessionAttached), f"an answer was replaced after {shown!r}: {event}"
                shown += event.delta if isinstance(event, OutputTextDelta) else ""
        except Unavailable as refused:
            if refused.error_code != "engine_unavailable":
                raise
            # A refused message was not taken: that it is there once is compared at the end.
            await asyncio.sleep((refused.retry_after_ms or 0) / 1000)
        else:
            return turn, shown


async def converse(client: Client, script: Script, seen: Seen) -> list[Said]:
    """Say a script in a new session and return what was shown, once it is what the daemon has."""
    session = await client.create_session(system=script.system)
    said: list[Said] = []
    for content in script.messages:
        async with asyncio.timeout(STUCK_S):
            turn, shown = await _say(session, content, script.params)
        assert turn.usage is not None, "an answer ended without its usage"
        assert turn.item is not None, "an answer ended without its item"
        assert shown == turn.text == turn.item.content, f"{shown!r} was shown, the answer is {turn.item.content!r}"
        said.append(Said(content, turn.text, str(turn.reason), turn.usage.output_tokens))
        seen.counts["turns"] += 1
    _, items = await client.get_session(session.id)
    kept = [(item.role, item.content) for item in items if item.role != "system"]
    expected = [part for one in said for part in (("user", one.content), ("assistant", one.answer))]
    assert kept == expected, f"the daemon has {kept}, shown was {expected}"
    await client.close_session(session.id)
    return said


def client_of(url: str, key: str | None = None) -> Client:
    """Return a client that comes back as soon as the daemon does."""
    return Client(url, key=key, wait_s=STUCK_S, backoff=lambda _attempt: 0.02, allow_plaintext=True)


async def run_scripts(url: str, scripts: Sequence[Script], seen: Seen, key: str | None = None) -> list[list[Said]]:
    """Have one client for each script say it, all at once."""

    async def one(script: Script) -> list[Said]:
        async with client_of(url, key) as client:
            return await converse(client, script, seen)

    return list(await asyncio.gather(*(one(script) for script in scripts)))


async def run_under_kills(
    url: str,
    scripts: Sequence[Script],
    expected: Sequence[Sequence[Said]],
    kills: Iterable[Callable[[], Awaitable[None]]],
    key: str | None = None,
) -> Seen:
    """Say the scripts in new sessions, again and again, until all kills have happened.

    Args:
        url: Of the daemon.
        scripts: One for each client.
        expected: What each of them saw undisturbed.
        kills: Each waits for its moment, kills something, and starts it again where nobody else does.
        key: For the daemon.

    Raises:
        AssertionError: Something was lost, doubled or changed.
    """
    seen = Seen()
    started = time.monotonic()

    async def kill_all() -> None:
        for kill in kills:
            await kill()
            seen.counts["kills"] += 1

    async def talk(script: Script, saw: Sequence[Said]) -> None:
        async with client_of(url, key) as client:
            while True:
                said = await converse(client, script, seen)
                for now, before in zip(said, saw, strict=True):
                    assert now == before, f"{now} was shown under kills, {before} without"
                seen.counts["conversations"] += 1
                if killing.done():
                    return

    try:
        async with asyncio.TaskGroup() as group:
            # In the group: where a daemon does not start again, nobody waits for what it would have answered.
            killing = group.create_task(kill_all())
            for script, saw in zip(scripts, expected, strict=True):
                group.create_task(talk(script, saw))
    except BaseException as error:
        error.add_note(f"after {seen.counts}")
        raise
    seen.counts["seconds"] = round(time.monotonic() - started)
    return seen

"""One question to a daemon and its answer, written as it comes: what `chatd ask` does once a daemon runs.

It knows the client and a text stream. Whether a daemon runs, what was typed and piped, and what is shown of refusals is
`client_commands`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from dataclasses import dataclass, field
from typing import TextIO

import msgspec
from rich.console import Console
from rich.markup import escape

from chatd.clean import clean, clean_line
from chatd.client import Client, ConnectionPhase, ConnectionState, Session, Turn
from chatd.errors import ChatdError, Conflict, EngineError, EnvironmentProblem, NotFound, Unavailable
from chatd.protocol import OutputTextDelta, Params, ResponsePrefill, ResponseQueued, SessionAttached, SessionInfo
from chatd.titles import title_of

ANSWERED = 0
CUT_SHORT = 6
INTERRUPTED = 130
NOBODY_READS = 141

LAST = "last"
LOADING_WAIT_S = 600.0
RECONNECT_WAIT_S = 60.0
MAX_SESSIONS = 5000
_COMPLETED = ("stop", "stop_string")
_SESSION_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True)
class Question:
    """What is asked, and where.

    Attributes:
        text: The message.
        session: The id or title of the conversation that it goes on in, or "last"; None begins one.
        system: The conversation's system prompt from here on.
        params: The parameters of this answer, over the conversation's.
        as_json: Write one JSON object at the end in place of the text as it comes.
    """

    text: str
    session: str | None = None
    system: str | None = None
    params: Params = field(default_factory=Params)
    as_json: bool = False


async def ask_daemon(url: str, key: str | None, question: Question, out: TextIO, notices: Console) -> int:
    """Ask, write the answer to `out`, and return the exit code that says how it ended.

    The first Ctrl-C ends the answer and keeps what there is of it, the second one ends the waiting. Where nobody reads
    `out` any more, the answer is ended too.

    Raises:
        ChatdError: The daemon refused, failed, or did not come back.
    """
    return await _Asking(question, out, notices).run(url, key)


class _Asking:
    """One question on its way; `run` it once."""

    def __init__(self, question: Question, out: TextIO, notices: Console) -> None:
        self._question = question
        self._out = out
        self._notices = notices
        self._status = notices.status("connecting") if notices.is_terminal else None
        self._limit = asyncio.timeout(None)
        self._was_connected = False
        self._num_interrupts = 0
        self._task: asyncio.Task[object] | None = None
        self._session: Session | None = None
        self._turn: Turn | None = None
        self._cancelling: asyncio.Task[None] | None = None

    async def run(self, url: str, key: str | None) -> int:
        loop = asyncio.get_running_loop()
        self._task = task = asyncio.current_task()
        assert task is not None, "a question is asked in a task"
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        try:
            async with self._limit:
                return await self._ask(url, key)
        except TimeoutError:
            raise Unavailable(
                f"the connection was lost and did not come back in {RECONNECT_WAIT_S:.0f} s", code="unreachable"
            ) from None
        except asyncio.CancelledError:
            if not self._num_interrupts:
                raise
            task.uncancel()
            return INTERRUPTED
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            self._stop_status()

    async def _ask(self, url: str, key: str | None) -> int:
        if self._status is not None:
            self._status.start()
        async with Client(url, key=key, wait_s=LOADING_WAIT_S, on_state=self._on_state) as client:
            self._session = session = await self._open(client)
            self._turn = turn = session.say(self._question.text, params=self._question.params)
            try:
                await self._follow(turn)
                if self._question.as_json:
                    await self._write(_as_json(client, session, turn) + "\n")
                elif turn.text and not turn.text.endswith("\n"):
                    await self._write("\n")
            except BrokenPipeError:
                await self._cancel()
                return NOBODY_READS
            except ChatdError:
                if self._question.session is None and not turn.text:
                    await _erase_if_empty(client, session)
                raise
            finally:
                await self._end_cancelling()
            return self._exit_code(session, turn)

    # The conversation.

    async def _open(self, client: Client) -> Session:
        """Begin a conversation, or attach to the one that was named."""
        question = self._question
        if question.session is None:
            return await client.create_session(system=question.system, title=title_of(question.text))
        session = await _attached(client, question.session)
        if question.system is not None:
            await client.update_session(session.id, system=question.system)
        return session

    # The answer.

    async def _follow(self, turn: Turn) -> None:
        """Write what comes until the answer ends."""
        async for event in turn:
            if self._num_interrupts and self._cancelling is None:
                self._begin_cancelling()
            match event:
                case OutputTextDelta(delta=delta) if not self._question.as_json:
                    self._stop_status()
                    await self._write(clean(delta))
                case SessionAttached() if turn.text and not self._question.as_json:
                    raise EngineError("the daemon restarted and lost a part of this answer", code="answer_replaced")
                case ResponseQueued(position=position):
                    self._show("waiting, next in line" if position <= 1 else f"waiting, number {position} in line")
                case ResponsePrefill(done=done, total=total):
                    self._show(f"reading the prompt, {done} of {total} tokens")
                case _:
                    self._show("answering")

    async def _write(self, text: str) -> None:
        """Write off the loop: whoever reads may be slow, and Ctrl-C is to be heard meanwhile."""
        try:
            await asyncio.to_thread(_write_now, self._out, text)
        except BrokenPipeError:
            raise
        except OSError as error:
            await self._cancel()
            raise EnvironmentProblem(f"the answer cannot be written: {error.strerror}") from None

    def _exit_code(self, session: Session, turn: Turn) -> int:
        if turn.reason in _COMPLETED:
            return ANSWERED
        self._stop_status()
        if self._num_interrupts and turn.reason == "cancelled":
            self._note(f"stopped; what there is of the answer is kept in {session.id}")
            return INTERRUPTED
        self._note(f"the answer was cut short ({clean_line(turn.reason or '', 40)}); it is kept in {session.id}")
        return CUT_SHORT

    # Ctrl-C.

    def _interrupted(self) -> None:
        self._num_interrupts += 1
        assert self._task is not None, "an interrupt comes while the question runs"
        if self._num_interrupts > 1 or self._turn is None:
            self._task.cancel()
        elif self._turn.message is not None:
            self._begin_cancelling()
        # Else the daemon has nothing to end yet; the turn's first event does it.

    def _begin_cancelling(self) -> None:
        self._cancelling = asyncio.get_running_loop().create_task(self._cancel())

    async def _cancel(self) -> None:
        """End the answer in the daemon; it may have ended already."""
        assert self._session is not None, "there is no answer without a session"
        with contextlib.suppress(ChatdError):
            await self._session.cancel()

    async def _end_cancelling(self) -> None:
        cancelling, self._cancelling = self._cancelling, None
        if cancelling is not None:
            cancelling.cancel()
            await asyncio.gather(cancelling, return_exceptions=True)

    # The connection, and what is shown meanwhile.

    def _on_state(self, state: ConnectionState) -> None:
        """Wait for a lost connection, and not for ever."""
        if state.phase is ConnectionPhase.CONNECTED:
            self._was_connected = True
            if not self._limit.expired():
                self._limit.reschedule(None)
        elif self._was_connected:
            self._show("the connection is lost, trying again")
            if self._limit.when() is None:
                self._limit.reschedule(asyncio.get_running_loop().time() + RECONNECT_WAIT_S)
        elif state.error is not None:
            self._show("the daemon loads" if state.error.error_code == "loading" else "no daemon answers, trying again")

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))

    def _stop_status(self) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.stop()

    def _note(self, text: str) -> None:
        self._notices.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)


def _write_now(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()


async def _erase_if_empty(client: Client, session: Session) -> None:
    """Remove a conversation that was begun for a question which the daemon did not take, or could not answer."""
    with contextlib.suppress(ChatdError):
        _, items = await client.get_session(session.id)
        if all(item.role == "system" for item in items):
            await client.erase_session(session.id)


async def _attached(client: Client, named: str) -> Session:
    """Attach to the conversation with this id or title; an id goes before a title.

    Raises:
        NotFound: There is none.
        Conflict: Several have this title.
    """
    if named == LAST:
        newest = await client.list_sessions(limit=1)
        if not newest:
            raise NotFound("there is no conversation to go on with yet", param="session")
        return await client.attach(newest[0].id, history="none")
    if _SESSION_ID.fullmatch(named):
        try:
            return await client.attach(named, history="none")
        except NotFound:
            pass
    found = _titled(await client.list_sessions(limit=MAX_SESSIONS), named)
    if not found:
        raise NotFound(
            f"no conversation has the id or title {named[:80]!r}",
            param="session",
            hint="`--session last` is the newest",
        )
    if len(found) > 1:
        ids = ", ".join(info.id for info in found[:5])
        raise Conflict(
            f"{len(found)} conversations have {named[:80]!r} in their titles", param="session", hint=f"name one: {ids}"
        )
    return await client.attach(found[0].id, history="none")


def _titled(sessions: list[SessionInfo], named: str) -> list[SessionInfo]:
    """Return those of exactly this title, else those with it in their titles; case does not matter."""
    wanted = named.casefold()
    same = [info for info in sessions if info.title.casefold() == wanted]
    return same or [info for info in sessions if wanted in info.title.casefold()]


def _as_json(client: Client, session: Session, turn: Turn) -> str:
    """Return an answer as one JSON object in ASCII: the text is exact, and no terminal obeys it."""
    assert turn.message is not None and turn.item is not None, "an answer that ended has its messages"  # noqa: PT018
    shown = {
        "session": session.id,
        "message": turn.message.id,
        "answer": turn.item.id,
        "model": client.hello.model.id,
        "text": turn.item.content,
        "reason": turn.reason,
        "usage": msgspec.to_builtins(turn.usage),
        "timings": msgspec.to_builtins(turn.timings),
    }
    # The one control character that JSON lets stand.
    return json.dumps(shown).replace("\x7f", "\\u007f")

"""Commands that wait for their answers, across connections. Knows no socket and no session's contents."""

from __future__ import annotations

import asyncio
from typing import Any

from chatd.client.errors import error_from
from chatd.errors import ChatdError
from chatd.protocol import Command, Error, Event, ResponseCompleted, ResponseFailed, ResponseIncomplete, SessionAttached

_TERMINAL = (ResponseCompleted, ResponseIncomplete, ResponseFailed)


class Waiting:
    """A command that waits for its answer.

    Attributes:
        command: As it is sent.
        expect: The event that answers it.
        session: It is about; None for one about none.
        future: Of whoever waits; None where the client itself attaches again.
        ends_with_response: Whether the end of an answer is what is waited for.
        num_sends: How often it was sent.
    """

    __slots__ = ("command", "ends_with_response", "expect", "future", "num_sends", "session")

    def __init__(
        self,
        command: Command,
        expect: type,
        session: str | None,
        future: asyncio.Future[Any] | None,
        *,
        ends_with_response: bool = False,
    ) -> None:
        self.command = command
        self.expect = expect
        self.session = session
        self.future = future
        self.ends_with_response = ends_with_response
        self.num_sends = 0

    def settle(self, answer: object) -> None:
        """Give whoever waits an answer, or the error that it is."""
        if self.future is None or self.future.done():
            return
        if isinstance(answer, ChatdError):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class WaitingCommands:
    """All that a client has sent or will send and that was not answered."""

    def __init__(self) -> None:
        self._all: dict[str, Waiting] = {}

    def add(self, waiting: Waiting) -> None:
        """Expect an answer."""
        assert waiting.command.id is not None, "a command without an id is not answered"
        self._all[waiting.command.id] = waiting

    def reattach(self, command: Command, session: str) -> None:
        """Expect the answer to the client's own attachment to a session."""
        self.add(Waiting(command, SessionAttached, session, None))

    def forget(self, command_id: str | None) -> None:
        """Expect no answer any more."""
        self._all.pop(command_id or "", None)

    def forget_attachments(self) -> None:
        """Expect no answer to the client's own attachments, which were sent to a connection that is gone."""
        self._all = {ident: waiting for ident, waiting in self._all.items() if waiting.future is not None}

    def asked(self) -> list[Waiting]:
        """Return the commands that somebody waits for."""
        return [waiting for waiting in self._all.values() if waiting.future is not None]

    def take(self, event: Event) -> tuple[str, ChatdError] | None:
        """Settle what an event answers; return the session that the daemon does not let this client have again."""
        if isinstance(event, _TERMINAL):
            self.response_ended(event.session)
        re: str | None = getattr(event, "re", None)
        waiting = self._all.get(re) if re else None
        if waiting is None:
            return None
        if isinstance(event, Error):
            error = error_from(event.error)
            waiting.settle(error)
            if waiting.future is None:
                self.forget(re)
                return waiting.session or "", error
        elif isinstance(event, waiting.expect) and not waiting.ends_with_response:
            waiting.settle(event)
            if waiting.future is None:
                self.forget(re)
        return None

    def refuse(self, command_id: object, error: ChatdError) -> None:
        """Settle a command whose answer cannot be read."""
        waiting = self._all.get(command_id) if isinstance(command_id, str) else None
        if waiting is not None:
            waiting.settle(error)

    def response_ended(self, session: str) -> None:
        """Settle what waits for the end of a session's answer."""
        for waiting in self._all.values():
            if waiting.ends_with_response and waiting.session == session:
                waiting.settle(None)

    def end(self, error: ChatdError) -> None:
        """Settle everything with an error."""
        for waiting in self._all.values():
            waiting.settle(error)
        self._all.clear()

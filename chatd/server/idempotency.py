"""The first answer to a command that comes twice: a client that lost its connection sends what was not answered again.

In memory and bounded; a command whose answer is no longer kept is carried out again. The journal has each answer beside
the effect of its command, and `restore` takes them up after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from chatd.errors import Conflict, InvalidRequest
from chatd.journal.records import MAX_ANSWER_BYTES_PER_USER, MAX_ANSWERS_PER_USER, SaveAnswer
from chatd.protocol import Command, Event, decode_event
from chatd.sessions.recorder import Receipt

NO_SEQ = 0
"""Of an event that was kept by another start: events are numbered anew by each."""


@dataclass(slots=True)
class Answer:
    """What became of one command.

    Attributes:
        body: Tells the command from another one under the same id.
        event: The answer, once there is one; None where the command was refused.
        num_bytes: About how much memory the answer takes.
    """

    body: bytes
    event: asyncio.Future[Event | None]
    num_bytes: int = 0


class _Answers:
    """One user's answers by command id, the oldest first."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, Answer] = OrderedDict()
        self.num_bytes = 0


class AnswerCache:
    """Answers by tenant and user, and command id; what one user sends drives out nobody else's.

    Args:
        max_answers: Kept of a user at most; the oldest go first.
        max_bytes: Likewise.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS_PER_USER, max_bytes: int = MAX_ANSWER_BYTES_PER_USER) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._users: dict[tuple[str, str], _Answers] = {}

    async def earlier(self, tenant: str, user: str, command: Command) -> Event | None:
        """Return the first answer to this very command; None where it is new, and has now begun.

        `finish` or `forget` must follow where it is new. Waits where the command is being carried out.

        Raises:
            Conflict: The id was used for something else.
        """
        assert command.id is not None, "only commands with an id can come twice"
        answers = self._users.setdefault((tenant, user), _Answers())
        body = _digest(command)
        while True:
            known = answers.by_id.get(command.id)
            if known is None:
                answers.by_id[command.id] = Answer(body, asyncio.get_running_loop().create_future())
                self._expire(answers)
                return None
            if known.body != body:
                raise Conflict(f"{command.id!r} was the id of another command", code="id_reused", param="id")
            event = await asyncio.shield(known.event)
            if event is not None:
                return event

    def finish(self, tenant: str, user: str, command: Command, event: Event) -> None:
        """Keep the answer."""
        answers = self._users[tenant, user]
        answer = answers.by_id.get(command.id or "")
        if answer is not None:
            _settle(answer, event)
            answer.num_bytes = len(msgspec.json.encode(event))
            answers.num_bytes += answer.num_bytes
            self._expire(answers)

    def restore(self, kept: SaveAnswer) -> None:
        """Take up an answer that an earlier start gave; one that cannot be read is left out."""
        try:
            event = decode_event(kept.event)
        except InvalidRequest:
            return
        if event is None:
            return
        answers = self._users.setdefault((kept.tenant, kept.user), _Answers())
        answer = Answer(kept.body, asyncio.get_running_loop().create_future(), len(kept.event))
        answer.event.set_result(event)
        answers.by_id[kept.command] = answer
        answers.num_bytes += answer.num_bytes
        self._expire(answers)

    def erase(self, tenant: str, user: str, session: str) -> None:
        """Forget the answers that tell of a session: it is erased."""
        answers = self._users.get((tenant, user), _Answers())
        for command, answer in list(answers.by_id.items()):
            event = answer.event.result() if answer.event.done() else None
            if event is not None and session in msgspec.json.encode(event).decode():
                del answers.by_id[command]
                answers.num_bytes -= answer.num_bytes

    def erase_tenant(self, tenant: str) -> None:
        """Forget all answers to a tenant's commands."""
        for owner in [owner for owner in self._users if owner[0] == tenant]:
            answers = self._users[owner]
            for command, answer in list(answers.by_id.items()):
                if answer.event.done():
                    del answers.by_id[command]
                    answers.num_bytes -= answer.num_bytes
            if not answers.by_id:
                del self._users[owner]

    def forget(self, tenant: str, user: str, command: Command) -> None:
        """Forget a command that was refused: it may be sent again under its id."""
        answers = self._users[tenant, user]
        answer = answers.by_id.pop(command.id or "", None)
        if answer is not None:
            answers.num_bytes -= answer.num_bytes
            _settle(answer, None)

    def _expire(self, answers: _Answers) -> None:
        """Forget the oldest answers; not the last one, nor a command that is being carried out: it would be again."""
        num_left = len(answers.by_id)
        if num_left <= self._max_answers and answers.num_bytes <= self._max_bytes:
            return
        for command, answer in list(answers.by_id.items())[:-1]:
            if num_left <= self._max_answers and answers.num_bytes <= self._max_bytes:
                return
            if answer.event.done():
                del answers.by_id[command]
                answers.num_bytes -= answer.num_bytes
                num_left -= 1


def receipt_of(command: Command) -> Receipt | None:
    """Return what has the answer to a command kept, where it has an id to come again under."""
    return None if command.id is None else Receipt(command.id, _digest(command))


def _digest(command: Command) -> bytes:
    return hashlib.sha256(msgspec.json.encode(command)).digest()


def _settle(answer: Answer, event: Event | None) -> None:
    if not answer.event.done():
        answer.event.set_result(event)

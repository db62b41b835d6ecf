"""What a daemon takes up from the journal when it starts: every session by name, and the answers in progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from chatd.errors import DamagedRecord, StorageError
from chatd.journal.records import (
    ANSWER_TTL_S,
    Change,
    MessageRecord,
    RemoveMessages,
    SaveAnswer,
    SaveSession,
    SessionRecord,
)
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session
from chatd.sessions.store import SessionStore
from chatd.sessions.stored import are_ids_below
from chatd.sessions.turn import Turn
from chatd.sessions.turns import TurnRunner

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
            turn = None
            if session_id in sessions:  # Else its record is damaged, and it was left out.
                turn = await self._try_to_go_on(sessions[session_id], message_ids)
            if turn is not None:
                turns.append(turn)
        if self._runner.is_ready:
            self._runner.restorer.resume()
        answers = await self._journal.answers(self._clock() - ANSWER_TTL_S)
        return Restored(len(sessions), turns, answers)

    async def _try_to_go_on(self, session: Session, message_ids: Sequence[str]) -> Turn | None:
        """As `_go_on`; what is wrong with one session keeps no other from being served."""
        try:
            return await self._go_on(session, message_ids)
        except DamagedRecord as error:
            _log.error("an answer in progress of %s does not go on: %s", session.id, error.message)
        except StorageError:
            raise
        except Exception:
            _log.exception("an answer in progress of %s does not go on", session.id)
        return None

    async def _go_on(self, session: Session, message_ids: Sequence[str]) -> Turn | None:
        """Go on with a session's answer; one that cannot go on is taken out, and what it answers stays.

        That is one whose ids are of another vocabulary, that failed while the journal took nothing, or that fails now.
        """
        async with session.lock:
            stored = session.stored
            records = {message.id: message for message in await self._journal.messages(session.id)}
            head = stored.head if stored.head in message_ids else None
            if head is not None and not self._has_served_ids(stored, records[head]):
                stored, head = _without_answer(stored, records[head]), None
            await self._take_out(session, stored, [message_id for message_id in message_ids if message_id != head])
            if head is None:
                return None
            await self._store.loader.load(session)
            try:
                return self._runner.restorer.take_up(session, records[head])
            except Exception:
                # It would be so at each start.
                _log.exception("an answer in progress of %s could not be taken up", session.id)
                await self._take_out(session, _without_answer(stored, records[head]), [head])
                return None

    def _has_served_ids(self, stored: SessionRecord, answer: MessageRecord) -> bool:
        model = self._runner.model
        return stored.vocabulary == model.vocabulary and are_ids_below(model.vocab_size, [answer])

    async def _take_out(self, session: Session, stored: SessionRecord, message_ids: Sequence[str]) -> None:
        """Take answers out of a session, whose record is then `stored`."""
        if not message_ids:
            return
        _log.warning("an answer in progress of %s cannot go on and is taken out", session.id)
        changes: list[Change] = [SaveSession(stored), RemoveMessages(session.id, tuple(message_ids))]
        try:
            await self._recorder.commit(changes)
        except StorageError:
            # A full disk is no reason not to start.
            self._recorder.owe(changes)
        session.unload(stored)


def _without_answer(stored: SessionRecord, answer: MessageRecord) -> SessionRecord:
    """Return the record of a session whose head is an answer in progress, without that."""
    return msgspec.structs.replace(
        stored,
        head=answer.parent,
        num_items=stored.num_items - 1,
        num_tokens=max(0, stored.num_tokens - len(answer.prompt_ids)),
    )

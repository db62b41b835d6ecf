"""What a daemon takes up from the journal when it starts: every session by name, and the answers in progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from chatd.errors import DamagedRecord, StorageError
from chatd.journal.records import (
    ANSWER_TTL_S,
    Change,
    MessageRecord,
    RemoveMessages,
    SaveAnswer,
    SaveMessage,
    SaveSession,
    SessionRecord,
)
from chatd.sessions.crashes import MAX_CRASHES, Trials, counted
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session
from chatd.sessions.store import SessionStore
from chatd.sessions.stored import are_ids_below
from chatd.sessions.turn import Turn
from chatd.sessions.turns import TurnRunner

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


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


@dataclass(slots=True, eq=False)
class _Found:
    """An answer that can be gone on with.

    Attributes:
        session: Its session, whose head it is.
        messages: Of that, as the journal had them, until they are in memory.
        record: The answer.
    """

    session: Session
    messages: Sequence[MessageRecord]
    record: MessageRecord


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
        self._trials = Trials(recorder, runner.restorer)

    async def restore(self) -> Restored:
        """Take everything up; see `SessionManager.restore`."""
        sessions = {record.id: self._store.add_stored(record) for record in await self._journal.sessions()}
        in_flight: dict[str, list[str]] = {}
        for session_id, message_id in await self._journal.in_flight():
            in_flight.setdefault(session_id, []).append(message_id)
        found: list[_Found] = []
        for session_id, message_ids in in_flight.items():
            if session_id in sessions:  # Else its record is damaged, and it was left out.
                one = await self._unless_wrong(sessions[session_id], self._find(sessions[session_id], message_ids))
                found += [] if one is None else [one]
        turns = await self._go_on_with(await self._count_crash(found))
        if self._runner.is_ready:
            self._runner.restorer.resume()
        answers = await self._journal.answers(self._clock() - ANSWER_TTL_S)
        return Restored(len(sessions), turns, answers)

    async def close(self) -> None:
        """Go on with no more answers."""
        await self._trials.close()

    async def _unless_wrong(self, session: Session, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Return what comes of work on a session; what is wrong with one keeps no other from being served."""
        try:
            return await work
        except DamagedRecord as error:
            _log.error("an answer in progress of %s does not go on: %s", session.id, error.message)
        except StorageError:
            raise
        except Exception:
            _log.exception("an answer in progress of %s does not go on", session.id)
        return None

    async def _find(self, session: Session, message_ids: Sequence[str]) -> _Found | None:
        """Return the answer that a session can go on with; all others in progress are taken out.

        Those have ids of another vocabulary, or failed while the journal took nothing.
        """
        async with session.lock:
            stored = session.stored
            messages = await self._journal.messages(session.id)
            records = {message.id: message for message in messages}
            head = stored.head if stored.head in message_ids else None
            if head is not None and not self._has_served_ids(stored, records[head]):
                stored, head = _without_answer(stored, records[head]), None
            await self._take_out(session, stored, [message_id for message_id in message_ids if message_id != head])
            return None if head is None else _Found(session, messages, records[head])

    async def _count_crash(self, found: Sequence[_Found]) -> list[_Found]:
        """Count the crash of the daemon before, where it crashed; return those that can be gone on with."""
        has_crashed, changes, left = bool(self._journal.crash), [], []
        for one in found:
            before, one.record = one.record, counted(one.record, has_crashed=has_crashed)
            if one.record.num_crashes >= MAX_CRASHES:
                _log.error("an answer of %s has ended the daemon %d times", one.session.id, MAX_CRASHES)
                async with one.session.lock:
                    await self._take_out(one.session, _without_answer(one.session.stored, one.record), [one.record.id])
                continue
            if one.record != before:
                changes.append(SaveMessage(one.session.id, one.record))
            left.append(one)
        is_counted = True
        try:
            # Before anything is done with any of them.
            if changes:
                await self._recorder.commit(changes)
        except StorageError:
            _log.warning("the journal does not take that the daemon has crashed")
            is_counted = False
        self._journal.note_crashes(is_counted=is_counted)
        return left

    async def _go_on_with(self, found: Sequence[_Found]) -> list[Turn]:
        """Take answers up, those last that may have ended the daemon before; they go on one after another."""
        turns: list[Turn] = []
        held: list[Turn] = []
        for one in sorted(found, key=lambda one: one.record.num_crashes):
            is_suspect = one.record.num_crashes > 0
            if is_suspect:
                await self._trials.mark(one.session.id, one.record, is_tried=True)
            turn = await self._unless_wrong(one.session, self._take_up(one, is_held=is_suspect))
            if is_suspect and turn is not None:
                await self._trials.mark(one.session.id, one.record, is_tried=False)
                held.append(turn)
            turns += [] if turn is None else [turn]
        self._trials.begin(held)
        return turns

    async def _take_up(self, found: _Found, *, is_held: bool) -> Turn | None:
        """Go on with a session's answer; one that fails is taken out, and what it answers stays."""
        session = found.session
        async with session.lock:
            stored = session.stored
            await self._store.loader.load(session, found.messages)
            found.messages = ()
            try:
                return self._runner.restorer.take_up(session, found.record, is_held=is_held)
            except Exception:
                # It would be so at each start.
                _log.exception("an answer in progress of %s could not be taken up", session.id)
                await self._take_out(session, _without_answer(stored, found.record), [found.record.id])
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

"""Brings a session's messages into memory when it is used, and leaves them to the journal when it is not.

Sessions themselves are always in memory, so each is one object for as long as the daemon runs. Whoever changes one
holds its lock and has it loaded; whoever only reads does so in the step of the loop in which it was resolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from chatd.journal.records import MessageRecord
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session
from chatd.sessions.stored import are_ids_below, conversation_of, session_record, without_ids


class SessionLoader:
    """Loads and unloads.

    Args:
        journal: Has the messages.
        recorder: Says what is in it.
        model: Gives the served model.
    """

    def __init__(self, journal: Journal, recorder: Recorder, model: Callable[[], ModelProfile]) -> None:
        self._journal = journal
        self._recorder = recorder
        self._model = model
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def load(self, session: Session, messages: Sequence[MessageRecord] | None = None) -> None:
        """Return when a session's messages are in memory.

        Args:
            session: Which.
            messages: What the journal has, where that was read already.

        Raises:
            StorageError: The journal cannot be read.
        """
        while not session.is_loaded:
            loading = self._loading.get(session.id)
            if loading is None:
                loading = asyncio.get_running_loop().create_task(self._load(session, messages), name="session loading")
                self._loading[session.id] = loading
                loading.add_done_callback(lambda _done: self._loading.pop(session.id, None))
            await asyncio.shield(loading)

    async def _load(self, session: Session, known: Sequence[MessageRecord] | None) -> None:
        record = session.stored
        # What is in progress beside the head was to be taken out, and is still there for want of room.
        messages = [
            message
            for message in (await self._journal.messages(session.id) if known is None else known)
            if message.status != "in_progress" or message.id == record.head
        ]
        model = self._model()
        served = model.vocabulary
        # In threads, since there may be thousands.
        if record.vocabulary != served or not await asyncio.to_thread(are_ids_below, model.vocab_size, messages):
            recoded = without_ids(messages)
            by_id = {message.id: message for message in recoded}
            messages = [by_id.get(message.id, message) for message in messages]
            record = msgspec.structs.replace(record, vocabulary=served)
            session.recoded, session.vocabulary = recoded, served
        session.load(await asyncio.to_thread(conversation_of, record, messages))

    def can_unload(self, session: Session) -> bool:
        """Return whether nobody uses a session's messages, and the journal has all of them."""
        return (
            self._recorder.keeps(session)
            and session.is_loaded
            and session.turn is None
            and len(session.listeners) == 0
            and not session.lock.locked()
            and not self._recorder.owes(session)
        )

    def unload(self, session: Session) -> None:
        """Leave a session's messages to the journal."""
        assert self.can_unload(session), f"{session.id} is used and unloaded"
        record = session_record(session, model=self._model().id)
        if session.recoded:
            # In the journal they still have the ids of another vocabulary, so they lose them again.
            session.recoded.clear()
            record = msgspec.structs.replace(record, vocabulary="")
        session.unload(record)

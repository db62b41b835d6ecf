"""What a disk tier has of sessions that are removed while no engine runs: their KV goes with them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from chatd.errors import DamagedRecord
from chatd.journal.records import MessageRecord, SessionRecord
from chatd.kvcache.stored_sequences import StoredSequences
from chatd.sessions.erasing import logs_of
from chatd.sessions.ports import Journal
from chatd.sessions.stored import conversation_of

_log = logging.getLogger(__name__)


async def remove_stored_blocks(journal: Journal, root: Path, sessions: Collection[str]) -> Counter[str]:
    """Remove from a disk tier what was computed of sessions that the journal still has; return how much, by session.

    Of a damaged one nobody knows the ids, so its blocks stay until their room is needed.

    Raises:
        EnvironmentProblem: The directory cannot be used, or a daemon uses it.
        StorageError: The journal cannot be read.
    """
    removed: Counter[str] = Counter()
    if not sessions or not await asyncio.to_thread(root.is_dir):
        return removed
    records = [record for record in await journal.sessions() if record.id in sessions]
    with await asyncio.to_thread(StoredSequences, root) as stored:
        for record in records:
            try:
                messages = await journal.messages(record.id)
                for log in stored_logs(record, messages):
                    removed[record.id] += await asyncio.to_thread(stored.remove, record.tenant, log)
            except DamagedRecord as error:
                _log.error("the KV of a damaged session stays on the disk: %s", error.message)
    return removed


def stored_logs(record: SessionRecord, messages: Sequence[MessageRecord]) -> Iterator[Sequence[int]]:
    """Yield every log that a session's answers had, those in progress included; see `erasing.logs_of`.

    Raises:
        DamagedRecord: An answer has not what makes it one.
    """
    # What was computed of an answer in progress is as much there as if it had ended.
    ended = [
        msgspec.structs.replace(message, status="incomplete") if message.status == "in_progress" else message
        for message in messages
    ]
    yield from logs_of(conversation_of(record, ended))

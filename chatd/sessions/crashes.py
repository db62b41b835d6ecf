"""Which answers go on after a crash of the daemon itself, which of them one after another, and which do not.

A daemon that a fault in native code ends says so in its journal (`journal.crash_note`), and a kill for want of memory
is seen by the kernel's count of such kills (`journal.memory_kills`). Of any other kill no answer is to blame. After a
crash every answer that was in progress may have been the reason. Suspects are gone on with one after another: the
journal has which one before anything is done with it, until it has got on. So of those that a daemon goes on with only
one is to blame for its crash, and after two crashes an answer is taken out, or it would keep the daemon from ever
starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from chatd.errors import StorageError
from chatd.journal.records import MessageRecord, SaveMessage
from chatd.sessions.deaths import NUM_PASSING
from chatd.sessions.recorder import Recorder
from chatd.sessions.restoring import Restorer
from chatd.sessions.turn import Turn

MAX_CRASHES = 2
"""Of so many crashes, without getting on between them, an answer may have been the reason."""

LOOK_EVERY_S = 0.05

_log = logging.getLogger(__name__)


def counted(record: MessageRecord, *, has_crashed: bool) -> MessageRecord:
    """Return an answer in progress as it is to be kept after a start, with the crash before that counted.

    One that has got on since it was counted last is no suspect. A suspect whose turn has not come has done nothing.
    """
    has_passed = len(record.ids) >= record.crashed_at + NUM_PASSING
    num_crashes = 0 if has_passed else record.num_crashes
    if has_crashed and (not num_crashes or record.is_tried):
        return msgspec.structs.replace(record, num_crashes=num_crashes + 1, crashed_at=len(record.ids), is_tried=False)
    return msgspec.structs.replace(record, num_crashes=num_crashes, is_tried=False)


class Trials:
    """Goes on with suspects, one after another.

    Args:
        recorder: Has the journal know which.
        restorer: Has them computed.
    """

    def __init__(self, recorder: Recorder, restorer: Restorer) -> None:
        self._recorder = recorder
        self._restorer = restorer
        self._task: asyncio.Task[None] | None = None

    async def mark(self, session: str, record: MessageRecord, *, is_tried: bool) -> None:
        """Have the journal know whether an answer is the one that is gone on with; what fails keeps nobody from it."""
        try:
            changes = [SaveMessage(session, msgspec.structs.replace(record, is_tried=is_tried))]
            await self._recorder.commit(changes)
        except StorageError:
            _log.warning("the journal does not know that answer %s is tried", record.id)
        except Exception:
            _log.exception("the journal does not know that answer %s is tried", record.id)

    def begin(self, turns: Sequence[Turn]) -> None:
        """Go on with these, which are held back, one after another."""
        if turns:
            self._task = asyncio.get_running_loop().create_task(self._try_all(turns), name="suspects of a crash")

    async def close(self) -> None:
        """Go on with no more of them; they wait for the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _try_all(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            if turn.is_ending:
                continue
            assert turn.text is not None, "a turn without an answer was taken up"
            assert turn.record is not None, "a turn that no journal has was taken up"
            before = len(turn.text.ids)
            await self.mark(turn.session.id, msgspec.structs.replace(turn.record, ids=turn.text.ids[:]), is_tried=True)
            self._restorer.release(turn)
            while not turn.ended.is_set() and len(turn.text.ids) < before + NUM_PASSING:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(turn.ended.wait(), LOOK_EVERY_S)

"""Blocks of KV in files: written and read by two threads, bounded, and checked when they come back.

```
write ─> queue ─> writer ─> ROOT/…/digest.kv ─> reader <─ queue <─ read
                     └────────> results <────────┘
                                  poll
```
The tier moves bytes between its directory and the slots of the host's buffer, and decides only what to drop when it is
full: what was not used for longest. The writer alone changes the directory, so that what happens to one digest happens
in the order in which it was asked for. A cache: whatever goes wrong is a "failed" result, never a wrong byte.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chatd.errors import ConfigError, InvalidRequest
from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_directory import BlockDirectory
from chatd.kvcache.block_file import Origin, RefusedBlock, file_bytes, read_block, write_block
from chatd.kvcache.disk import DiskResult
from chatd.kvcache.io_health import IoHealth

CLOSE_S = 1.5
"""What is queued when the tier is closed is given so long to be done; less than an engine has to end."""

_SCAN_S = 0.5
_logger = logging.getLogger("chatd.disk_tier")


@dataclass(slots=True)
class _Job:
    digest: bytes
    origin: Origin
    slot: HostSlot
    is_forgotten: bool = False


class DiskTier:
    """A bounded directory of blocks. The methods are for one thread, and none but `settle` and `close` waits.

    Args:
        root: The directory; made where it is not there. Only one tier at a time can have it.
        capacity_bytes: Of all files together.
        block_bytes: Of one block; files of another size are removed.
        buffer: The host's slots, `num_slots * block_bytes` bytes that can be written. Kept until `close`.
        max_queued: Writes that wait at a time; likewise reads.
        clock: Seconds; only pauses are timed by it.

    Attributes:
        num_blocks: That it can hold.
        num_stored: Written since start.
        num_loaded: Read since start.
        num_refused: Found damaged or of another content when read, since start.

    Raises:
        DirectoryInUse: Another process has the directory.
        EnvironmentProblem: It cannot be made or written, or others may write to it.
        ConfigError: Not one block fits into the capacity.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        block_bytes: int,
        buffer: memoryview,
        *,
        max_queued: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = capacity_bytes // file_bytes(block_bytes)
        if self.num_blocks < 1:
            raise ConfigError(
                f"{capacity_bytes} bytes hold no block, which takes {file_bytes(block_bytes)} (engine.disk_space)",
                param="engine.disk_space",
            )
        self._memory = memoryview(buffer).cast("B")
        assert not self._memory.readonly, "the buffer cannot be written"
        assert len(self._memory) % block_bytes == 0, "the buffer is no whole number of blocks"
        self._block_bytes = block_bytes
        self._num_slots = len(self._memory) // block_bytes
        self._max_queued = max_queued
        self._of_writes, self._of_reads = IoHealth("writes", clock), IoHealth("reads", clock)
        self._directory = BlockDirectory(root)
        self.num_stored = self.num_loaded = self.num_refused = 0

        # All below is guarded by the lock, which is never held while the system is asked for anything.
        self._lock = threading.Lock()
        self._for_writer = threading.Condition(self._lock)
        self._for_reader = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._unwanted: dict[bytes, None] = {}  # files that are not served any more, and not removed yet
        self._undeletable: dict[bytes, None] = {}  # of those, the ones that the system did not remove when it was asked
        self._writes: deque[_Job] = deque()
        self._reads: deque[_Job] = deque()
        self._writing: _Job | None = None
        self._reading: _Job | None = None
        self._is_writer_busy = True
        self._is_scanned = False  # so it is known what the directory holds
        self._results: deque[DiskResult] = deque()
        self._closes_at: float | None = None
        self._is_unwanted_as_found = False  # so everything that is found is removed

        self._threads = [
            threading.Thread(target=self._run_writer, name="disk tier writer", daemon=True),
            threading.Thread(target=self._run_reader, name="disk tier reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        # What a large directory holds is found while the engine already works; a small one is known at once.
        self.settle(_SCAN_S)

    def __contains__(self, digest: object) -> bool:
        """Whether a `read` of this digest would be tried."""
        with self._lock:
            return digest in self._stored and self._closes_at is None and not self._of_reads.is_paused

    @property
    def num_used(self) -> int:
        """Blocks whose files take room."""
        with self._lock:
            return self._num_files()

    def write(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """Queue a slot to be written; it must stay as it is until the result.

        A digest that is stored already is only noted as used.

        Returns:
            False where the queue is full, or the tier pauses or is closed: there is no result then.
        """
        self._check_slot(slot)
        with self._lock:
            if self._closes_at is not None or self._of_writes.is_paused or len(self._writes) >= self._max_queued:
                return False
            if digest in self._stored:
                self._stored.move_to_end(digest)
                self._results.append(DiskResult("written", digest, slot))
                return True
            self._writes.append(_Job(digest, origin, slot))
            self._for_writer.notify()
            return True

    def read(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """Queue a slot to be filled; what it holds means nothing before a result that says "read".

        Returns:
            False where the queue is full: there is no result then.
        """
        self._check_slot(slot)
        with self._lock:
            if self._closes_at is not None or self._of_reads.is_paused:
                self._results.append(DiskResult("failed", digest, slot, "paused"))
                return True
            if digest not in self._stored:
                self._results.append(DiskResult("failed", digest, slot, "gone"))
                return True
            if len(self._reads) >= self._max_queued:
                return False
            self._stored.move_to_end(digest)
            self._reads.append(_Job(digest, origin, slot))
            self._for_reader.notify()
            return True

    def forget(self, digest: bytes) -> None:
        """Serve a block no more and remove its file; what is queued for it fails as "forgotten"."""
        with self._lock:
            for job in (*self._writes, *self._reads, self._writing, self._reading):
                if job is not None and job.digest == digest:
                    job.is_forgotten = True
            self._drop(digest)
            is_written = self._writing is not None and self._writing.digest == digest
            if is_written or not self._is_scanned:
                self._unwanted[digest] = None
                self._for_writer.notify()

    def clear(self) -> None:
        """Serve nothing any more of what is stored, and remove it; what is queued fails as "forgotten"."""
        with self._lock:
            for job in (*self._writes, *self._reads, self._writing, self._reading):
                if job is not None:
                    job.is_forgotten = True
            for digest in list(self._stored):
                self._drop(digest)
            if self._writing is not None:
                self._unwanted[self._writing.digest] = None
            self._is_unwanted_as_found = not self._is_scanned

    def poll(self) -> list[DiskResult]:
        """Return the results that there are, oldest first."""
        with self._lock:
            results = list(self._results)
            self._results.clear()
        return results

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued, in progress or to be removed; False where that takes too long."""
        with self._lock:
            return self._settled.wait_for(self._is_settled, timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Finish what is queued, or fail it when the time is over, and let go of the directory.

        Idempotent. A thread that the system keeps longer is left behind, with the directory still taken.
        """
        ends_at = time.monotonic() + timeout_s
        with self._lock:
            self._closes_at = ends_at
            self._for_writer.notify()
            self._for_reader.notify()
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        with self._lock:
            self._fail_queued()
        if self._threads and not any(thread.is_alive() for thread in self._threads):
            self._threads = []
            self._directory.close()
            self._memory.release()

    # The writer.

    def _run_writer(self) -> None:
        try:
            self._scan()
        except OSError as error:
            self._of_writes.note(error)
        while True:
            with self._lock:
                self._is_writer_busy = False
                self._tell_settled()
                self._for_writer.wait_for(lambda: self._unwanted or self._writes or self._closes_at is not None)
                if self._is_past_closing() or not (self._unwanted or self._writes):
                    return
                self._is_writer_busy = True
                unwanted = list(self._unwanted)
                job = None if unwanted else self._writes.popleft()
                self._writing = job
            if job is None:
                self._remove(unwanted)
            else:
                result = self._write(job)
                with self._lock:
                    self._writing = None
                    self._results.append(result)

    def _scan(self) -> None:
        """Take in what is there; until that has worked nothing is written, since nobody knows how much room is left."""
        found = self._directory.scan(file_bytes(self._block_bytes))
        with self._lock:
            self._is_scanned = True
            if self._is_unwanted_as_found:
                self._unwanted.update(dict.fromkeys(found))
            self._stored.update(dict.fromkeys(digest for digest in found if digest not in self._unwanted))
            while len(self._stored) > self.num_blocks:
                self._unwanted[self._stored.popitem(last=False)[0]] = None

    def _remove(self, digests: list[bytes]) -> None:
        """Remove files; those that the system keeps are tried again when their room is needed."""
        for digest in digests:
            try:
                self._directory.remove(digest)
            except OSError as error:
                if digest not in self._undeletable:
                    self._of_writes.note(error)
                    with self._lock:
                        self._undeletable[digest] = None
            else:
                with self._lock:
                    self._undeletable.pop(digest, None)
            with self._lock:
                self._unwanted.pop(digest, None)

    def _write(self, job: _Job) -> DiskResult:
        try:
            why = self._try_write(job)
        except OSError as error:
            why = self._of_writes.note(error)
        except InvalidRequest as error:
            why = error.message
        except Exception as error:
            _logger.exception("disk_tier.bug")
            why = type(error).__name__
        return DiskResult("failed" if why else "written", job.digest, job.slot, why)

    def _try_write(self, job: _Job) -> str:
        """Write a file under its name and return "", or why not."""
        with self._lock:
            if job.is_forgotten:
                return "forgotten"
            if job.digest in self._stored:
                return ""
        if not self._is_scanned:
            self._scan()
        if not self._make_room():
            return "no room"
        write_block(self._directory.writing, job.origin, self._slot(job.slot))
        self._directory.publish(job.digest)
        self._of_writes.note(None)
        with self._lock:
            if job.is_forgotten:
                return "forgotten"  # and `forget` has left the file to be removed
            self._undeletable.pop(job.digest, None)
            self._stored[job.digest] = None
            self.num_stored += 1
        return ""

    def _make_room(self) -> bool:
        """Remove files until one more fits; False where the system keeps them."""
        with self._lock:
            if self._num_files() < self.num_blocks:
                return True
            removable = [*self._unwanted, *self._undeletable]
        self._remove(removable)
        while True:
            with self._lock:
                if self._num_files() < self.num_blocks:
                    return True
                if not self._stored:
                    return False
                oldest, _ = self._stored.popitem(last=False)
                self._unwanted[oldest] = None
            self._remove([oldest])
            if oldest in self._undeletable:
                return False

    # The reader.

    def _run_reader(self) -> None:
        while True:
            with self._lock:
                self._reading = None
                self._tell_settled()
                self._for_reader.wait_for(lambda: self._reads or self._closes_at is not None)
                if self._is_past_closing() or not self._reads:
                    return
                job = self._reading = self._reads.popleft()
            why = self._read(job)
            with self._lock:
                why = "forgotten" if job.is_forgotten else why
                self.num_loaded += not why
                self._results.append(DiskResult("failed" if why else "read", job.digest, job.slot, why))

    def _read(self, job: _Job) -> str:
        """Fill a slot and return "", or why not; a file that cannot be served is served no more."""
        if job.is_forgotten:
            return "forgotten"
        try:
            read_block(self._directory.path(job.digest), job.origin, self._slot(job.slot))
        except FileNotFoundError:
            why = "gone"
        except RefusedBlock as refusal:
            why = str(refusal)
            self.num_refused += 1
            _logger.warning("disk_tier.refused", extra={"fields": {"why": why, "file": job.digest.hex()}})
        except InvalidRequest as error:
            return error.message
        except OSError as error:
            why = self._of_reads.note(error)
        except Exception as error:
            _logger.exception("disk_tier.bug")
            return type(error).__name__
        else:
            return self._of_reads.note(None)
        with self._lock:
            self._drop(job.digest)
        return why

    # Both; those without a docstring of their own are for whoever has the lock.

    def _check_slot(self, slot: HostSlot) -> None:
        """Refuse a slot that is not in the buffer; needs no lock."""
        assert 0 <= slot < self._num_slots, f"slot {slot} is not in the buffer of {self._num_slots}"

    def _slot(self, slot: HostSlot) -> memoryview:
        """Return the bytes of a slot; needs no lock."""
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def _drop(self, digest: bytes) -> None:
        if digest in self._stored:
            del self._stored[digest]
            self._unwanted[digest] = None
            self._for_writer.notify()

    def _num_files(self) -> int:
        return len(self._stored) + len(self._unwanted | self._undeletable)

    def _is_settled(self) -> bool:
        return not (self._is_writer_busy or self._reading is not None or self._writes or self._reads or self._unwanted)

    def _tell_settled(self) -> None:
        if self._is_settled():
            self._settled.notify_all()

    def _is_past_closing(self) -> bool:
        return self._closes_at is not None and time.monotonic() >= self._closes_at

    def _fail_queued(self) -> None:
        for job in (*self._writes, *self._reads):
            self._results.append(DiskResult("failed", job.digest, job.slot, "closed"))
        self._writes.clear()
        self._reads.clear()

"""A disk that takes as many polls as it is told to, loses what it is told to, and writes nothing down."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_file import Origin
from chatd.kvcache.disk import DiskResult
from chatd.testing.engine import HostContent, ProvenanceRunner


@dataclass(slots=True)
class _Job:
    verb: str
    digest: bytes
    origin: Origin
    slot: HostSlot
    due: int


class FakeDisk:
    """Stands where `DiskTier` stands, and moves what the provenance runner has in its host slots.

    Args:
        runner: Whose host slots are written and filled. At the end of a job, not at its beginning: a slot that was
            changed meanwhile is found out.
        num_blocks: That it holds; the longest unused goes.
        latency: Polls from asking to the result.
        max_queued: Jobs of each kind that wait at a time.

    Attributes:
        damaged: What is read of these is refused by its checksum.
        fails_writes: Writes fail as they do where the system has no room.
        fails_reads: Reads fail as they do where the system cannot read.
        is_paused: Nothing is taken.
        reads: Digests that were asked for, in order.
    """

    def __init__(
        self, runner: ProvenanceRunner, num_blocks: int = 1000, latency: int = 2, max_queued: int = 256
    ) -> None:
        self.num_blocks = num_blocks
        self.latency = latency
        self.num_stored = self.num_loaded = self.num_refused = 0
        self.damaged: set[bytes] = set()
        self.fails_writes = self.fails_reads = self.is_paused = False
        self.reads: list[bytes] = []
        self._runner = runner
        self._max_queued = max_queued
        self._stored: OrderedDict[bytes, tuple[Origin, HostContent]] = OrderedDict()
        self._jobs: list[_Job] = []
        self._num_polls = 0

    @property
    def num_used(self) -> int:
        """Blocks that it holds."""
        return len(self._stored)

    @property
    def digests(self) -> list[bytes]:
        """What it holds, the longest unused first."""
        return list(self._stored)

    def __contains__(self, digest: object) -> bool:
        """Whether a read would be tried."""
        return digest in self._stored and not self.is_paused

    def write(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """Queue a write."""
        if self.is_paused or self._num_queued("write") >= self._max_queued:
            return False
        assert self._runner.host[slot] is not None, f"slot {slot} is written to the disk with nothing in it"
        self._jobs.append(_Job("write", digest, origin, slot, self._num_polls + self.latency))
        return True

    def read(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """Queue a read."""
        if self._num_queued("read") >= self._max_queued:
            return False
        self.reads.append(digest)
        self._runner.host[slot] = None
        self._jobs.append(_Job("read", digest, origin, slot, self._num_polls + self.latency))
        return True

    def forget(self, digest: bytes) -> None:
        """Serve a block no more; what is queued for it fails."""
        self._stored.pop(digest, None)
        for job in self._jobs:
            if job.digest == digest:
                job.verb = "fail"

    def clear(self) -> None:
        """Serve nothing any more of what is stored."""
        for digest in [*self._stored, *(job.digest for job in self._jobs)]:
            self.forget(digest)

    def close(self) -> None:
        """Take nothing any more."""
        self.is_paused = True

    def poll(self) -> list[DiskResult]:
        """Return what is done by now."""
        self._num_polls += 1
        done = [job for job in self._jobs if job.due <= self._num_polls]
        self._jobs = [job for job in self._jobs if job.due > self._num_polls]
        return [self._do(job) for job in done]

    def _num_queued(self, verb: str) -> int:
        return sum(job.verb == verb for job in self._jobs)

    def _do(self, job: _Job) -> DiskResult:
        if job.verb == "fail":
            return DiskResult("failed", job.digest, job.slot, "forgotten")
        if job.verb == "write":
            return self._write(job)
        why = self._why_not(job)
        if why:
            self.num_refused += why in ("checksum", "other content")
            return DiskResult("failed", job.digest, job.slot, why)
        self._stored.move_to_end(job.digest)
        self._runner.host[job.slot] = self._stored[job.digest][1]
        self.num_loaded += 1
        return DiskResult("read", job.digest, job.slot)

    def _write(self, job: _Job) -> DiskResult:
        if self.fails_writes:
            return DiskResult("failed", job.digest, job.slot, "No space left on device")
        content = self._runner.host[job.slot]
        assert content is not None, f"slot {job.slot} was given up while it was written"
        tokens = [int.from_bytes(job.origin.tokens[i : i + 4], "little") for i in range(0, len(job.origin.tokens), 4)]
        assert content.token_ids == tokens, f"slot {job.slot} holds other tokens than those it is stored for"
        self._stored[job.digest] = (job.origin, content)
        self._stored.move_to_end(job.digest)
        if len(self._stored) > self.num_blocks:
            self._stored.popitem(last=False)
        self.num_stored += 1
        return DiskResult("written", job.digest, job.slot)

    def _why_not(self, job: _Job) -> str:
        if self.is_paused:
            return "paused"
        if self.fails_reads:
            return "Input/output error"
        found = self._stored.get(job.digest)
        if found is None:
            return "gone"
        if job.digest in self.damaged:
            return "checksum"
        return "" if found[0] == job.origin else "other content"

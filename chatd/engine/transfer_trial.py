"""Measures, at start, what it costs to move blocks between the pool, the host's buffer and the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from chatd.engine.host_buffer import HostBuffer
from chatd.kvcache.block_file import Origin, read_block, write_block
from chatd_kernels.gpu_device import wait_for_stream
from chatd_kernels.kv_cache import KVCache
from chatd_kernels.swap_blocks import load_blocks, store_blocks

DISK_TRIAL_S = 0.2
"""The disk is measured for at most so long; what was not seen by then is taken for as slow as that."""

_DISK_TRIAL_BYTES = 4 * 2**20
_HOST_TRIAL_BLOCKS = 8
_REPEATS = 3
_TRIAL = Origin(b"trial", b"", b"")
_logger = logging.getLogger("chatd.engine")


def measure_host(cache: KVCache, host: HostBuffer) -> tuple[float, float, float]:
    """Return the seconds of any move, and those of one more block out and in.

    Args:
        cache: The pool, which nobody uses yet; what its blocks hold stays.
        host: The buffer; its first slots are written.
    """
    most = min(_HOST_TRIAL_BLOCKS, host.num_slots, cache.num_blocks)

    def least_s(move: Callable[..., None], num_blocks: int) -> float:
        # Neighbors move together, which blocks of a pool in use seldom are: these lie the other way round.
        moves = [(block, most - 1 - block) for block in range(num_blocks)]

        def move_all() -> None:
            move(cache, host.slots, moves)
            wait_for_stream(cache.data.device)

        return min(_seconds(move_all) for _ in range(_REPEATS))

    # The slots of all that is loaded were stored before, so the pool gets back what it had.
    out_many, out_one = least_s(store_blocks, most), least_s(store_blocks, 1)
    in_many, in_one = least_s(load_blocks, most), least_s(load_blocks, 1)
    if most == 1:
        return 0.0, out_one, in_one
    out_s, in_s = max(0.0, out_many - out_one) / (most - 1), max(0.0, in_many - in_one) / (most - 1)
    return max(0.0, min(out_one - out_s, in_one - in_s)), out_s, in_s


def measure_disk(path: Path, block_bytes: int) -> tuple[float, float, float]:
    """Return the seconds before a file's first byte, and those of one block to the disk and back.

    Args:
        path: Of a file that is made for this, and removed.
        block_bytes: Of one block.
    """
    trial = _DiskTrial(path, block_bytes)
    thread = threading.Thread(target=trial.run, name="disk trial", daemon=True)
    thread.start()
    thread.join(DISK_TRIAL_S)
    return trial.costs()


class _DiskTrial:
    """Writes and reads one file a few times, past the system's cache; whoever started it need not wait for the end."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._first_byte: list[float] = []
        self._out: list[float] = []
        self._in: list[float] = []

    def run(self) -> None:
        """Measure; what the system refuses is taken for slow."""
        small, whole = memoryview(bytearray(1)), memoryview(bytearray(self._block_bytes))
        try:
            for _ in range(max(1, min(_REPEATS, _DISK_TRIAL_BYTES // self._block_bytes))):
                self._write(small)
                self._first_byte.append(_seconds(lambda: self._read(small)))
                self._out.append(_seconds(lambda: self._write(whole)))
                self._in.append(_seconds(lambda: self._read(whole)))
        except OSError as error:
            _logger.warning("disk_tier.failed", extra={"fields": {"direction": "trial", "why": str(error)}})
        finally:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def costs(self) -> tuple[float, float, float]:
        """Return the least of each, which is the least disturbed."""
        first_byte, out_s, in_s = (min(seen, default=DISK_TRIAL_S) for seen in (self._first_byte, self._out, self._in))
        # A disk may have been kept busy by others just while it was asked for the first byte.
        return first_byte, out_s, max(in_s - first_byte, in_s / 2)

    def _read(self, payload: memoryview) -> None:
        read_block(self._path, _TRIAL, payload)

    def _write(self, payload: memoryview) -> None:
        """Have a file on the disk, and there alone."""
        write_block(self._path, _TRIAL, payload)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _seconds(action: Callable[[], None]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start

"""Opens what is below the pool: the host's buffer, and the disk behind it."""

from __future__ import annotations

import logging
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from chatd.engine.host_buffer import HostBuffer
from chatd.engine.options import EngineOptions
from chatd.engine.transfer_costs import TransferCosts
from chatd.engine.transfer_trial import measure_disk, measure_host
from chatd.errors import EnvironmentProblem
from chatd.kvcache.block_directory import KEY_BYTES, DirectoryInUse, load_key
from chatd.kvcache.block_file import file_bytes
from chatd.kvcache.disk_tier import DiskTier
from chatd_kernels.kv_cache import KVCache, KVCacheLayout

_logger = logging.getLogger("chatd.engine")


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What is below the pool.

    Attributes:
        host: The buffer; None where there is nothing below the pool.
        disk: Behind it, where it was asked for and can be had.
        key: Secret of the names that blocks have below the pool.
        costs: Of moves.
        notes: For the person at the terminal.
    """

    host: HostBuffer | None = None
    disk: DiskTier | None = None
    key: bytes = b""
    costs: TransferCosts = field(default_factory=TransferCosts)
    notes: list[str] = field(default_factory=list)


def allocate_host(num_slots: int, layout: KVCacheLayout, *, is_pinned: bool) -> HostBuffer | None:
    """Return the buffer, None where it has no slots.

    Raises:
        EnvironmentProblem: The system does not give so much.
    """
    if not num_slots:
        return None
    try:
        return HostBuffer(num_slots, layout, is_pinned=is_pinned)
    except OSError as error:
        size = num_slots * layout.block_bytes / 2**20
        raise EnvironmentProblem(
            f"{size:,.0f} MiB for KV outside the pool could not be allocated: {error}",
            code="no_room_for_host",
            param="engine.host_memory",
            hint="ask for less with --host-memory",
        ) from error


def open_lower_tiers(options: EngineOptions, cache: KVCache, host: HostBuffer | None) -> LowerTiers:
    """Open the disk behind the buffer, and measure both. A disk that another daemon has is done without.

    Args:
        options: Sizes and places.
        cache: The pool, which no request uses yet; its blocks keep what they hold.
        host: The buffer.

    Raises:
        EnvironmentProblem: The directory cannot be made or written, or others may write to it.
        ConfigError: The disk's space holds no block.
    """
    if host is None:
        return LowerTiers()
    layout = cache.layout
    notes = []
    if options.host_memory_bytes:
        notes.append(_describe("the host", host.num_slots, layout))
    key, disk, disk_costs = secrets.token_bytes(KEY_BYTES), None, (0.0, 0.0, 0.0)
    if options.disk_space_bytes:
        root = Path(options.disk_directory)
        try:
            disk = DiskTier(root, options.disk_space_bytes, layout.block_bytes, host.memory)
            key = load_key(root)
        except DirectoryInUse as error:
            notes.append(f"the disk tier is off: {error.message}")
            _logger.warning("disk_tier.off", extra={"fields": {"why": error.message}})
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        else:
            disk_costs = measure_disk(root / "trial", layout.block_bytes)
            notes += _describe_disk(root, disk, layout)
    return LowerTiers(host, disk, key, TransferCosts(*measure_host(cache, host), *disk_costs), notes)


def _describe(where: str, num_blocks: int, layout: KVCacheLayout) -> str:
    size = num_blocks * layout.block_bytes / 2**20
    return f"{where} keeps {num_blocks:,} blocks more = {num_blocks * layout.block_size:,} tokens ({size:,.0f} MiB)"


def _describe_disk(root: Path, disk: DiskTier, layout: KVCacheLayout) -> list[str]:
    kept = f", {disk.num_used:,} from before" if disk.num_used else ""
    notes = [f"{_describe(str(root), disk.num_blocks, layout)}{kept}"]
    free = shutil.disk_usage(root).free
    wanted = (disk.num_blocks - disk.num_used) * file_bytes(layout.block_bytes)
    if wanted > free:
        notes.append(
            f"of the {wanted / 2**20:,.0f} MiB that these blocks may still take only {free / 2**20:,.0f} MiB are free"
        )
    return notes

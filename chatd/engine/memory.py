"""How large the block pool is, and how long a context it can hold. No torch: numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass

from chatd.engine.cgroup import MemoryRoom
from chatd.errors import ConfigError, EnvironmentProblem

DEFAULT_SHARE = 0.25
"""Part of the memory limit that the pool takes at most where its size is not given."""

DEFAULT_CONTEXTS = 16
"""Full contexts that the pool holds at most where its size is not given."""

RESERVE_BYTES = 384 * 2**20
"""Left free beside the pool: activations and logits of a step, the ids of leases, the allocator's slack."""

STAGING_SLOTS = 64
"""Blocks that the host's buffer holds at least where there is a disk behind it."""

MIN_MODEL_LEN = 256
"""A pool that holds no context of this many tokens is refused."""

# A context's last block may be a copy of a shared one, which is held until the copy is made.
_SPARE_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What start-up decided.

    Attributes:
        num_blocks: Blocks of the pool.
        kv_bytes: Their size.
        max_model_len: Tokens of a context; not more than the pool holds.
        notes: For the person at the terminal.
    """

    num_blocks: int
    kv_bytes: int
    max_model_len: int
    notes: list[str]


def size_host(
    *, block_bytes: int, host_memory_bytes: int, needs_staging: bool, room: MemoryRoom
) -> tuple[int, MemoryRoom]:
    """Choose how many blocks the host's buffer holds, and return that with the room which it leaves.

    Args:
        block_bytes: One block, all layers.
        host_memory_bytes: The size that was asked for; 0 is none.
        needs_staging: What is read from the disk, and written to it, passes through the buffer.
        room: Memory that is left once the weights are loaded.

    Raises:
        EnvironmentProblem: `no_room_for_host`.
        ConfigError: Not one block fits.
    """
    num_slots = host_memory_bytes // block_bytes
    if needs_staging:
        num_slots = max(num_slots, STAGING_SLOTS)
    elif host_memory_bytes and not num_slots:
        raise ConfigError(
            f"{host_memory_bytes} bytes hold no block, which takes {block_bytes} (host_memory)",
            param="engine.host_memory",
        )
    size = num_slots * block_bytes
    free = max(0, room.available - RESERVE_BYTES)
    if size > free:
        raise EnvironmentProblem(
            f"{_mib(size)} for KV outside the pool do not fit: {_mib(room.available)} of {_mib(room.limit)} are free, "
            f"and {_mib(RESERVE_BYTES)} stay free for the rest (host_memory)",
            code="no_room_for_host",
            param="engine.host_memory",
            hint="ask for less with --host-memory" if host_memory_bytes else "turn it off with --disk-space 0",
        )
    return num_slots, MemoryRoom(room.limit, room.available - size)


def size_pool(
    *, block_bytes: int, block_size: int, max_model_len: int, kv_memory_bytes: int | None, room: MemoryRoom
) -> PoolSize:
    """Choose the pool's size, and lower the context to what fits.

    Args:
        block_bytes: One block, all layers.
        block_size: Tokens of a block.
        max_model_len: Tokens of a context that the model and the settings allow.
        kv_memory_bytes: The size that was asked for; chosen where None.
        room: Memory that is left once the weights are loaded.

    Raises:
        EnvironmentProblem: `no_room_for_pool`; says how much there is, how much is needed, and what mends it.
    """
    context_blocks = -(-max_model_len // block_size) + _SPARE_BLOCKS
    least_blocks = min(context_blocks, -(-MIN_MODEL_LEN // block_size) + _SPARE_BLOCKS)
    free = max(0, room.available - RESERVE_BYTES)
    if kv_memory_bytes is None:
        budget = min(int(room.limit * DEFAULT_SHARE), DEFAULT_CONTEXTS * context_blocks * block_bytes, free)
    else:
        budget = kv_memory_bytes
        if budget > free:
            raise EnvironmentProblem(
                f"{_mib(budget)} for the KV pool do not fit: {_mib(room.available)} of {_mib(room.limit)} are free, "
                f"and {_mib(RESERVE_BYTES)} stay free for the rest (kv_memory)",
                code="no_room_for_pool",
                param="engine.kv_memory",
                hint=f"ask for less: --kv-memory {max(free, 0) // 2**20}MiB, or stop what uses the memory",
            )
    num_blocks = budget // block_bytes
    if num_blocks < least_blocks:
        needed = least_blocks * block_bytes
        by_request = kv_memory_bytes is not None
        raise EnvironmentProblem(
            f"{_mib(budget)} for the KV pool hold {num_blocks} blocks; a context of {MIN_MODEL_LEN} tokens needs "
            f"{least_blocks} blocks, that is {_mib(needed)} ({_mib(room.available)} of {_mib(room.limit)} are free)",
            code="no_room_for_pool",
            param="engine.kv_memory",
            hint=f"ask for more: --kv-memory {-(-needed // 2**20)}MiB"
            if by_request
            else f"free {_mib(needed + RESERVE_BYTES)}, or use a smaller model",
        )
    fitting = min(max_model_len, (num_blocks - _SPARE_BLOCKS) * block_size)
    notes = []
    if fitting < max_model_len:
        notes.append(
            f"contexts are cut to {fitting:,} of {max_model_len:,} tokens, which is what {_mib(budget)} of KV hold "
            f"(--kv-memory {-(-context_blocks * block_bytes // 2**20)}MiB holds them in full)"
        )
    notes.append(_describe(num_blocks, block_size, fitting))
    return PoolSize(num_blocks, num_blocks * block_bytes, fitting, notes)


def _describe(num_blocks: int, block_size: int, max_model_len: int) -> str:
    tokens = num_blocks * block_size
    chats = tokens // max_model_len
    return f"{num_blocks} blocks = {tokens:,} tokens = {chats} full-length chat{'s' if chats != 1 else ''}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"

"""How large the block pool is, and how long a context it can hold. No torch: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Callable
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
    context_blocks = _context_blocks(max_model_len, block_size)
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
    return _pool(
        budget,
        block_bytes,
        block_size,
        max_model_len,
        f"{_mib(room.available)} of {_mib(room.limit)} are free",
        lambda needed: (
            f"ask for more: --kv-memory {-(-needed // 2**20)}MiB"
            if kv_memory_bytes is not None
            else f"free {_mib(needed + RESERVE_BYTES)}, or use a smaller model"
        ),
    )


def size_gpu_pool(
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    kv_memory_bytes: int | None,
    utilization: float,
    total_bytes: int,
    free_bytes: int,
    step_bytes: int,
    graph_bytes: int,
) -> PoolSize:
    """Choose the size of a pool on a GPU: what the largest step and the graphs leave of the memory that may be used.

    Args:
        block_bytes: One block, all layers.
        block_size: Tokens of a block.
        max_model_len: Tokens of a context that the model and the settings allow.
        kv_memory_bytes: The size that was asked for; chosen where None.
        utilization: Part of the device's memory that may be used, all processes together, where no size is given.
        total_bytes: The device's memory.
        free_bytes: What is left of it once weights and buffers are there.
        step_bytes: What the largest step took of that.
        graph_bytes: What captured graphs will take.

    Raises:
        EnvironmentProblem: `no_room_for_pool`.
    """
    kept = step_bytes + graph_bytes
    budget = max(0, int(total_bytes * utilization) - (total_bytes - free_bytes) - kept)
    found = (
        f"{_mib(free_bytes)} of the GPU's {_mib(total_bytes)} are free, steps and graphs take {_mib(kept)} of them, and"
        f" {utilization:.0%} of the whole may be used"
    )
    if kv_memory_bytes is not None:
        budget = kv_memory_bytes
        if budget > free_bytes - kept:
            raise EnvironmentProblem(
                f"{_mib(budget)} for the KV pool do not fit: {_mib(free_bytes)} of the GPU's {_mib(total_bytes)} are "
                f"free, and steps and graphs take {_mib(kept)} of them (kv_memory)",
                code="no_room_for_pool",
                param="engine.kv_memory",
                hint=f"ask for less: --kv-memory {max(0, free_bytes - kept) // 2**20}MiB",
            )

    def hint(needed: int) -> str:
        if kv_memory_bytes is not None:
            return f"ask for more: --kv-memory {-(-needed // 2**20)}MiB"
        return (
            "use more of it (--gpu-memory-utilization), smaller steps (--max-num-batched-tokens, --max-num-seqs), KV in"
            " 8 bits (--kv-dtype fp8), or a smaller model"
        )

    return _pool(budget, block_bytes, block_size, max_model_len, found, hint)


def _context_blocks(max_model_len: int, block_size: int) -> int:
    return -(-max_model_len // block_size) + _SPARE_BLOCKS


def _pool(
    budget: int, block_bytes: int, block_size: int, max_model_len: int, found: str, hint: Callable[[int], str]
) -> PoolSize:
    """Return the pool that so many bytes hold, with the context cut to what fits.

    Args:
        budget: Bytes.
        block_bytes: One block, all layers.
        block_size: Tokens of a block.
        max_model_len: Tokens of a context that the model and the settings allow.
        found: What memory there is, for the message.
        hint: What mends it, by the bytes that the shortest context needs.

    Raises:
        EnvironmentProblem: `no_room_for_pool`.
    """
    context_blocks = _context_blocks(max_model_len, block_size)
    least_blocks = min(context_blocks, _context_blocks(MIN_MODEL_LEN, block_size))
    num_blocks = budget // block_bytes
    if num_blocks < least_blocks:
        needed = least_blocks * block_bytes
        raise EnvironmentProblem(
            f"{_mib(budget)} for the KV pool hold {num_blocks} blocks; a context of {MIN_MODEL_LEN} tokens needs "
            f"{least_blocks} blocks, that is {_mib(needed)} ({found})",
            code="no_room_for_pool",
            param="engine.kv_memory",
            hint=hint(needed),
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

import pytest

from chatd.engine.cgroup import MemoryRoom
from chatd.engine.memory import RESERVE_BYTES, size_gpu_pool, size_pool
from chatd.errors import EnvironmentProblem

GIB = 2**30
MIB = 2**20
BLOCK = 368_640  # SmolLM2-135M in 16 bits: 30 layers, K and V, 3 heads, 16 tokens, 64 dimensions


def pool(limit=24 * GIB, available=None, max_model_len=8192, kv_memory_bytes=None, block_bytes=BLOCK):
    return size_pool(
        block_bytes=block_bytes,
        block_size=16,
        max_model_len=max_model_len,
        kv_memory_bytes=kv_memory_bytes,
        room=MemoryRoom(limit, limit if available is None else available),
    )


def test_with_memory_to_spare_the_pool_holds_sixteen_full_contexts():
    size = pool()
    assert size.num_blocks == 16 * 513
    assert size.kv_bytes == 16 * 513 * BLOCK
    assert size.max_model_len == 8192
    assert size.notes == ["8208 blocks = 131,328 tokens = 16 full-length chats"]


def test_it_takes_a_quarter_of_the_limit_at_most():
    size = pool(limit=4 * GIB)
    assert size.num_blocks == GIB // BLOCK
    assert size.notes == ["2912 blocks = 46,592 tokens = 5 full-length chats"]


def test_it_leaves_the_reserve_free():
    size = pool(limit=24 * GIB, available=RESERVE_BYTES + 1000 * BLOCK)
    assert size.num_blocks == 1000


def test_a_context_that_does_not_fit_is_cut_and_said():
    size = pool(limit=24 * GIB, available=RESERVE_BYTES + 101 * BLOCK)
    assert size.max_model_len == 1600
    assert size.notes == [
        "contexts are cut to 1,600 of 8,192 tokens, which is what 36 MiB of KV hold "
        "(--kv-memory 181MiB holds them in full)",
        "101 blocks = 1,616 tokens = 1 full-length chat",
    ]


def test_a_size_that_was_asked_for_is_taken():
    assert pool(kv_memory_bytes=100 * BLOCK + 7).num_blocks == 100


def test_a_size_that_is_not_free_is_refused_with_the_numbers_and_the_flag():
    with pytest.raises(EnvironmentProblem) as caught:
        pool(limit=8 * GIB, available=2 * GIB, kv_memory_bytes=3 * GIB)
    assert caught.value.error_code == "no_room_for_pool"
    assert caught.value.message == (
        "3,072 MiB for the KV pool do not fit: 2,048 MiB of 8,192 MiB are free, and 384 MiB stay free for the rest "
        "(kv_memory)"
    )
    assert caught.value.hint == "ask for less: --kv-memory 1664MiB, or stop what uses the memory"


def test_a_pool_too_small_for_a_short_chat_is_refused():
    with pytest.raises(EnvironmentProblem, match="hold 10 blocks; a context of 256 tokens needs 17 blocks"):
        pool(kv_memory_bytes=10 * BLOCK)
    with pytest.raises(EnvironmentProblem, match="0 MiB for the KV pool hold 0 blocks"):
        pool(limit=GIB, available=100 * MIB)


def test_a_model_with_a_short_context_needs_no_more_than_that():
    assert pool(max_model_len=64, kv_memory_bytes=5 * BLOCK).max_model_len == 64


def gpu_pool(**fields):
    values = {
        "block_bytes": BLOCK,
        "block_size": 16,
        "max_model_len": 8192,
        "kv_memory_bytes": None,
        "utilization": 0.9,
        "total_bytes": 80 * GIB,
        "free_bytes": 60 * GIB,
        "step_bytes": 2 * GIB,
        "graph_bytes": GIB,
    }
    return size_gpu_pool(**(values | fields))


def test_a_pool_on_a_gpu_is_what_weights_steps_and_graphs_leave_of_the_part_that_may_be_used():
    assert gpu_pool().num_blocks == (72 - 20 - 3) * GIB // BLOCK
    assert gpu_pool(utilization=0.5).num_blocks == 17 * GIB // BLOCK


def test_a_size_that_was_asked_for_may_pass_the_part_but_not_what_is_free():
    assert gpu_pool(kv_memory_bytes=57 * GIB).kv_bytes == 57 * GIB // BLOCK * BLOCK
    with pytest.raises(EnvironmentProblem) as caught:
        gpu_pool(kv_memory_bytes=58 * GIB)
    assert caught.value.message == (
        "59,392 MiB for the KV pool do not fit: 61,440 MiB of the GPU's 81,920 MiB are free, "
        "and steps and graphs take 3,072 MiB of them (kv_memory)"
    )
    assert caught.value.hint == "ask for less: --kv-memory 58368MiB"


def test_a_gpu_with_no_room_for_a_short_context_is_refused():
    with pytest.raises(EnvironmentProblem) as caught:
        gpu_pool(free_bytes=10 * GIB)
    assert caught.value.error_code == "no_room_for_pool"
    assert caught.value.message == (
        "0 MiB for the KV pool hold 0 blocks; a context of 256 tokens needs 17 blocks, that is 6 MiB "
        "(10,240 MiB of the GPU's 81,920 MiB are free, steps and graphs take 3,072 MiB of them, "
        "and 90% of the whole may be used)"
    )
    assert "--gpu-memory-utilization" in caught.value.hint


def test_a_context_that_the_gpus_pool_does_not_hold_is_cut():
    assert gpu_pool(kv_memory_bytes=101 * BLOCK).max_model_len == 1600

import random

import pytest
import torch

from chatd_kernels import swap_blocks
from chatd_kernels.kv_cache import KVCache, allocate_kv_cache
from chatd_kernels.swap_blocks import load_blocks, reference, store_blocks


def make(num_blocks=12, num_slots=7, dtype=torch.float16):
    """A cache and a host's buffer of random content."""
    cache = allocate_kv_cache(num_blocks, 2, 3, 16, 32, dtype)
    cache.data.copy_(torch.randn(cache.data.shape))
    return cache, torch.randn((num_slots, *cache.data.shape[1:])).to(dtype)


def copies(cache, host):
    return KVCache(cache.data.clone(), cache.layout), host.clone()


MOVES = {
    "none": [],
    "one": [(5, 2)],
    "the first and the last": [(0, 6), (11, 0)],
    "neighbors": [(3, 1), (4, 2), (5, 3)],
    "neighbors in another order": [(5, 3), (3, 1), (4, 2)],
    "neighbors on one side only": [(3, 1), (4, 3), (5, 5)],
    "the wrong way round": [(3, 3), (4, 2), (5, 1)],
    "all": [(block + 4, block) for block in range(7)],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("moves", MOVES.values(), ids=list(MOVES))
@pytest.mark.parametrize("name", ["store_blocks", "load_blocks"])
def test_moves_are_those_of_the_reference_bit_for_bit(name, moves, dtype):
    cache, host = make(dtype=dtype)
    expected_cache, expected_host = copies(cache, host)
    getattr(reference, name)(expected_cache, expected_host, moves)
    getattr(swap_blocks, name)(cache, host, moves)
    assert torch.equal(cache.data, expected_cache.data)
    assert torch.equal(host, expected_host)


def test_random_moves_there_and_back_leave_all_else_alone():
    rng = random.Random(0)
    for _ in range(50):
        cache, host = make()
        count = rng.randrange(8)
        moves = list(zip(rng.sample(range(12), count), rng.sample(range(7), count), strict=True))
        before_cache, before_host = copies(cache, host)
        store_blocks(cache, host, moves)
        assert torch.equal(cache.data, before_cache.data)
        moved = dict(moves)
        cache.data[list(moved)] = float("nan")
        load_blocks(cache, host, moves)
        assert torch.equal(cache.data, before_cache.data)
        kept = [slot for slot in range(7) if slot not in moved.values()]
        assert torch.equal(host[kept], before_host[kept])


def test_what_is_no_number_moves_bit_for_bit():
    cache, host = make()
    bits = torch.arange(cache.data[0].numel(), dtype=torch.int16)
    cache.data[4] = bits.view(torch.float16).view(cache.data[4].shape)
    store_blocks(cache, host, [(4, 1)])
    assert torch.equal(host[1].view(torch.int16).flatten(), bits)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ((12, 0), "block 12 is not in the cache of 12 blocks"),
        ((-1, 0), "block -1 is not in the cache"),
        ((0, 7), "slot 7 is not in the host's 7"),
        ((0, -1), "slot -1 is not in"),
    ],
)
def test_a_move_outside_is_refused_before_anything_moves(move, message):
    cache, host = make()
    before_cache, before_host = copies(cache, host)
    for function in (store_blocks, load_blocks):
        with pytest.raises(ValueError, match=message):
            function(cache, host, [(1, 1), move])
    assert torch.equal(cache.data, before_cache.data)
    assert torch.equal(host, before_host)


def test_a_buffer_for_other_blocks_is_refused():
    cache, host = make()
    others = [host.float(), host[:, :1].contiguous(), host.transpose(2, 3).contiguous().transpose(2, 3)]
    for other in others:
        with pytest.raises(ValueError, match="are not blocks of"):
            store_blocks(cache, other, [(0, 0)])


def test_neighbors_move_in_one_copy(monkeypatch):
    seen = []
    monkeypatch.setattr(swap_blocks, "launcher", lambda *_: lambda cache, host, runs: seen.append(runs))
    cache, host = make()
    store_blocks(cache, host, [(9, 0), (3, 1), (4, 2), (5, 3), (6, 5)])
    assert seen == [[(3, 1, 3), (6, 5, 1), (9, 0, 1)]]

"""The intrusive queue of blocks."""

import pytest

from chatd.kvcache.block import BlockQueue, KVCacheBlock


def queue_of(*blocks):
    queue = BlockQueue()
    for block in blocks:
        queue.append(block)
    return queue


def ids(queue):
    return [block.block_id for block in queue]


def test_blocks_leave_at_the_head_in_the_order_they_came():
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = queue_of(*blocks)
    assert [queue.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert len(queue) == 0


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_block_can_be_taken_out_wherever_it_stands(place):
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = queue_of(*blocks)
    queue.remove(blocks[place])
    assert ids(queue) == [i for i in range(4) if i != place]
    assert (blocks[place].prev, blocks[place].next) == (None, None)
    queue.append(blocks[place])
    assert ids(queue)[-1] == place


def test_a_block_put_at_the_head_is_the_next_to_leave():
    queue = queue_of(KVCacheBlock(0))
    queue.appendleft(KVCacheBlock(1))
    assert queue.head.block_id == 1
    assert ids(queue) == [1, 0]


def test_a_block_cannot_be_in_two_places():
    block = KVCacheBlock(0)
    queue_of(block)
    with pytest.raises(AssertionError, match="in a queue already"):
        queue_of(block)


def test_a_block_in_no_queue_cannot_be_removed():
    with pytest.raises(AssertionError, match="in no queue"):
        BlockQueue().remove(KVCacheBlock(0))


def test_an_empty_queue_has_no_head():
    with pytest.raises(AssertionError, match="no head"):
        _ = BlockQueue().head

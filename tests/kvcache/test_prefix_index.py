"""The index of registered blocks: what is a hit and what is not, under a good hash and under a constant one."""

from array import array

import pytest
import xxhash

from chatd.kvcache.block import BlockId
from chatd.kvcache.prefix_index import Namespace, PrefixIndex
from chatd.testing.constant_hash import constant_hash

BASE = ("weights", "fp16", "float16", 1, None)


def tokens(*ids):
    return array("i", ids).tobytes()


@pytest.fixture(params=[xxhash.xxh3_128_digest, constant_hash], ids=["xxh3", "constant"])
def index(request):
    return PrefixIndex(request.param)


@pytest.fixture
def acme(index):
    return index.namespace_id(Namespace(*BASE, "acme"))


def test_an_entry_is_found_by_its_content_under_its_parent(index, acme):
    first = index.add(acme, None, tokens(1, 2), BlockId(0))
    second = index.add(acme, first, tokens(3, 4), BlockId(1))
    assert index.find(acme, None, tokens(1, 2)) is first
    assert index.find(acme, first, tokens(3, 4)) is second
    assert len(index) == 2


def test_other_tokens_another_parent_or_another_namespace_is_no_hit(index, acme):
    blue = index.namespace_id(Namespace(*BASE, "blue"))
    first = index.add(acme, None, tokens(1, 2), BlockId(0))
    index.add(acme, first, tokens(3, 4), BlockId(1))
    assert index.find(acme, None, tokens(1, 3)) is None
    assert index.find(acme, None, tokens(3, 4)) is None
    assert index.find(blue, None, tokens(1, 2)) is None
    assert index.find(blue, first, tokens(3, 4)) is None


def test_a_parent_that_was_registered_again_is_another_parent(index, acme):
    first = index.add(acme, None, tokens(1, 2), BlockId(0))
    child = index.add(acme, first, tokens(3, 4), BlockId(1))
    index.remove(child)
    index.remove(first)
    again = index.add(acme, None, tokens(1, 2), BlockId(0))
    assert again.serial != first.serial
    assert again.key == first.key
    assert index.find(acme, again, tokens(3, 4)) is None
    assert index.add(acme, again, tokens(3, 4), BlockId(1)).serial not in {first.serial, child.serial}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((*BASE, "org_12345"), (*BASE[:4], "org_1", "2345")),
        (("w", "fp16", "float16", 1, "X", None), ("w", "fp16", "float16", 1, None, "X")),
        (("w", "fp16", "float16", 1, None, "acme"), ("w2", "fp16", "float16", 1, None, "acme")),
        (("w", "fp16", "float16", 1, None, "acme"), ("w", "int8", "float16", 1, None, "acme")),
        (("w", "fp16", "float16", 1, None, "acme"), ("w", "fp16", "float32", 1, None, "acme")),
        (("w", "fp16", "float16", 1, None, "acme"), ("w", "fp16", "float16", 11, None, "acme")),
        (("w", "fp16", "float16", 1, None, ""), ("w", "fp16", "float16", 1, None, None)),
        (("wf", "p16", "float16", 1, None, "acme"), ("w", "fp16", "float16", 1, None, "acme")),
        (("w", "fp16", "float16", 1, "n", "acme"), ("w", "fp16", "float16", 1, None, "acme")),
    ],
)
def test_two_namespaces_never_share_an_entry(index, one, other):
    first = index.namespace_id(Namespace(*one))
    second = index.namespace_id(Namespace(*other))
    index.add(first, None, tokens(1, 2), BlockId(0))
    assert index.find(first, None, tokens(1, 2)) is not None
    assert index.find(second, None, tokens(1, 2)) is None
    assert Namespace(*one).frame() != Namespace(*other).frame()


def test_equal_namespaces_are_one():
    index = PrefixIndex()
    assert index.namespace_id(Namespace(*BASE, "acme")) == index.namespace_id(Namespace(*BASE, "acme"))


@pytest.mark.default_hash
def test_the_ninth_content_of_one_key_is_not_registered():
    index = PrefixIndex(constant_hash)
    acme = index.namespace_id(Namespace(*BASE, "acme"))
    entries = [index.add(acme, None, tokens(i, 0), BlockId(i)) for i in range(9)]
    assert entries[8] is None
    assert [index.find(acme, None, tokens(i, 0)) for i in range(9)] == entries
    index.remove(entries[3])
    assert index.add(acme, None, tokens(8, 0), BlockId(8)) is not None
    assert index.find(acme, None, tokens(3, 0)) is None


@pytest.mark.default_hash
def test_one_content_in_many_namespaces_leaves_room_for_each():
    # Of one key there are eight entries at most; tenants with the same system prompt must not share one.
    index = PrefixIndex()
    tenants = [index.namespace_id(Namespace(*BASE, f"tenant {number}")) for number in range(20)]
    entries = [index.add(tenant, None, tokens(1, 2), BlockId(i)) for i, tenant in enumerate(tenants)]
    assert None not in entries
    assert [index.find(tenant, None, tokens(1, 2)) for tenant in tenants] == entries


def test_two_contents_that_collide_stay_apart_and_both_stay():
    index = PrefixIndex(lambda data: data[-1:])
    acme = index.namespace_id(Namespace(*BASE, "acme"))
    one = index.add(acme, None, tokens(1, 0), BlockId(0))
    two = index.add(acme, None, tokens(2, 0), BlockId(1))
    assert one.key == two.key
    assert index.find(acme, None, tokens(1, 0)).block_id == 0
    assert index.find(acme, None, tokens(2, 0)).block_id == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_entries_leave_in_any_order_and_the_rest_stays_linked(index, acme, order):
    root = index.add(acme, None, tokens(0, 0), BlockId(9))
    children = [index.add(acme, root, tokens(1, i), BlockId(i)) for i in range(3)]
    left = set(children)
    for place in order:
        index.remove(children[place])
        left.remove(children[place])
        assert set(root.subtree()) == left | {root}
        assert {entry for entry in index if entry is not root} == left
    index.remove(root)
    assert len(index) == 0
    assert list(index) == []


def test_an_entry_with_children_cannot_be_removed_alone(index, acme):
    root = index.add(acme, None, tokens(0, 0), BlockId(0))
    index.add(acme, root, tokens(1, 1), BlockId(1))
    with pytest.raises(AssertionError, match="still has children"):
        index.remove(root)

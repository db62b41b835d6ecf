"""What was evicted is remembered without its tokens, for a while, and followed along its sequence."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.kvcache.block import BlockId
from chatd.kvcache.prefix_index import NamespaceId, PrefixEntry
from chatd.kvcache.recently_evicted import RecentlyEvicted

ACME, BETA = NamespaceId(1), NamespaceId(2)


def chain(length: int, namespace: NamespaceId = ACME, first_serial: int = 1) -> list[PrefixEntry]:
    entries: list[PrefixEntry] = []
    for place in range(length):
        parent = entries[-1] if entries else None
        tokens = array("i", [place]).tobytes()
        entries.append(PrefixEntry(first_serial + place, namespace, parent, tokens, BlockId(place), b"k"))
    return entries


def take(evicted: RecentlyEvicted, namespace: NamespaceId, parent_serial: int, tokens: bytes) -> int | None:
    """Forget one block; return the serial that it had."""
    num_found, serial = evicted.follow(namespace, parent_serial, [tokens])
    return serial if num_found else None


def test_a_sequence_is_followed_from_block_to_block_and_each_is_taken_once():
    evicted = RecentlyEvicted()
    for entry in reversed(chain(3)):
        evicted.add(entry)
    serial = 0
    for place in range(3):
        serial = take(evicted, ACME, serial, array("i", [place]).tobytes())
        assert serial == place + 1
    assert take(evicted, ACME, 0, array("i", [0]).tobytes()) is None
    assert len(evicted) == 0


def test_other_namespaces_parents_and_tokens_are_others():
    evicted = RecentlyEvicted()
    evicted.add(chain(1)[0])
    assert take(evicted, BETA, 0, array("i", [0]).tobytes()) is None
    assert take(evicted, ACME, 7, array("i", [0]).tobytes()) is None
    assert take(evicted, ACME, 0, array("i", [1]).tobytes()) is None
    assert len(evicted) == 1


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 60))
def test_the_oldest_are_forgotten_beyond_the_bound(bound, length):
    evicted = RecentlyEvicted(bound)
    entries = [chain(1, first_serial=serial)[0] for serial in range(1, length + 1)]
    for entry in entries:
        entry.tokens = array("i", [entry.serial]).tobytes()
        evicted.add(entry)
    assert len(evicted) == min(bound, length)
    kept = [entry.serial for entry in entries if take(evicted, ACME, 0, entry.tokens) is not None]
    assert kept == [entry.serial for entry in entries][max(0, length - bound) :]


def test_what_is_evicted_once_more_is_the_last_again():
    evicted = RecentlyEvicted(2)
    first, second, third = (chain(1, namespace=NamespaceId(number))[0] for number in (1, 2, 3))
    for entry in (first, second, first, third):
        evicted.add(entry)
    assert [take(evicted, entry.namespace, 0, entry.tokens) for entry in (first, second, third)] == [1, None, 1]


def test_a_sequence_is_followed_up_to_what_is_not_remembered_and_may_be_kept():
    evicted = RecentlyEvicted()
    for entry in chain(3):
        evicted.add(entry)
    wanted = [array("i", [place]).tobytes() for place in (0, 1, 9, 2)]
    assert evicted.follow(ACME, 0, wanted, forget=False) == (2, 2)
    assert evicted.follow(ACME, 0, wanted) == (2, 2)
    assert evicted.follow(ACME, 0, wanted) == (0, 0)
    assert len(evicted) == 1

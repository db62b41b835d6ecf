"""Which blocks of an account were evicted last, to tell whether one of them is wanted again.

Keeps a number for each that is keyed by the process's own randomness: no tokens, and nothing to guess them by.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from chatd.kvcache.prefix_index import NamespaceId, PrefixEntry

MAX_REMEMBERED = 4096
"""Blocks that are remembered of each account; what was evicted longer ago than that is no news when it is wanted."""


class RecentlyEvicted:
    """The last blocks of one account that were evicted, each with the serial that its entry had.

    The blocks of a sequence hang together by serials, so that the whole of what was lost can be followed from the first
    block that is missing.

    Args:
        max_remembered: The oldest are forgotten beyond this many.
    """

    __slots__ = ("_max_remembered", "_serials")

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._serials: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._serials)

    def add(self, entry: PrefixEntry) -> None:
        """Remember an entry that is taken out of the index to make room."""
        parent, serials = entry.parent, self._serials
        name = hash((entry.namespace, 0 if parent is None else parent.serial, entry.tokens))
        serials[name] = entry.serial
        serials.move_to_end(name)  # It may have been remembered from an earlier time.
        if len(serials) > self._max_remembered:
            serials.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._serials.clear()

    def follow(
        self, namespace: NamespaceId, parent_serial: int, blocks: Iterable[bytes], *, forget: bool = True
    ) -> tuple[int, int]:
        """Look which blocks of a sequence are remembered, up to the first that is not.

        Args:
            namespace: Of the blocks.
            parent_serial: Of the entry of the block before them; 0 at the start of a sequence.
            blocks: The tokens of each.
            forget: Whether those that are found are remembered no more.

        Returns:
            How many they are, and the serial that the last of them had.
        """
        find = self._serials.pop if forget else self._serials.get
        num_found, serial = 0, parent_serial
        for tokens in blocks:
            found = find(hash((namespace, serial, tokens)), None)
            if found is None:
                break
            num_found, serial = num_found + 1, found
        return num_found, serial

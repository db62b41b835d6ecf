"""Which registered block holds given tokens after a given prefix, in a given namespace.

The hash finds candidates and proves nothing: a hit needs the same namespace, the same parent entry and equal tokens.
The index knows entries, not holders: what may be evicted is the pool's business.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import NewType

import xxhash

from chatd.kvcache.block import BlockId

NamespaceId = NewType("NamespaceId", int)
HashFunction = Callable[[bytes], bytes]

MAX_ENTRIES_PER_KEY = 8
_pack_parent = struct.Struct("<QQ").pack


@dataclass(frozen=True, slots=True)
class Namespace:
    """The identity under which a block may be reused.

    Attributes:
        weights_digest: Of the weights that computed the KV.
        weight_format: What they run in, as "fp16" or "int8".
        kv_format: Of the pool, as "fp16".
        layout_version: Of rotary embedding and block layout.
        adapter: The adapter's digest, or None.
        tenant: Whose it is; None is "public".
    """

    weights_digest: str
    weight_format: str
    kv_format: str
    layout_version: int
    adapter: str | None
    tenant: str | None

    def of(self, tenant: str | None) -> Namespace:
        """Return the same namespace for another tenant; None is "public"."""
        return replace(self, tenant=tenant)

    def frame(self) -> bytes:
        """Return the fields as typed, length-framed bytes: no two different namespaces give the same."""
        values = (
            self.weights_digest,
            self.weight_format,
            self.kv_format,
            self.layout_version,
            self.adapter,
            self.tenant,
        )
        return b"".join(_frame(value) for value in values)


def tenant_of_frame(frame: bytes) -> str | None:
    """Return the tenant that `Namespace.frame` has as its last field; None for "public", or where it is no frame."""
    *_, (tag, body) = [(b"n", b""), *_fields(frame)]
    return body.decode(errors="replace") if tag == b"s" else None


def namespace_of_frame(frame: bytes) -> Namespace | None:
    """Return the namespace whose `frame` this is; None where it is none's."""
    values: list[str | int | None] = []
    for tag, body in _fields(frame):
        text = body.decode(errors="replace")
        values.append(text if tag == b"s" else int(text) if tag == b"i" and text.isdecimal() else None)
    if len(values) != len(fields(Namespace)):
        return None
    namespace = Namespace(*values)  # type: ignore[arg-type]
    return namespace if namespace.frame() == frame else None


def _fields(frame: bytes) -> Iterator[tuple[bytes, bytes]]:
    while len(frame) >= 5:
        length = int.from_bytes(frame[1:5], "big")
        yield frame[:1], frame[5 : 5 + length]
        frame = frame[5 + length :]


def _frame(field: str | int | None) -> bytes:
    tag, body = b"n", b""
    if isinstance(field, str):
        tag, body = b"s", field.encode()
    elif isinstance(field, int):
        tag, body = b"i", str(field).encode()
    return tag + len(body).to_bytes(4, "big") + body


class PrefixEntry:
    """One registered full block, in the tree of entries.

    Attributes:
        serial: Never reused, so that a key that names a parent cannot come to mean another one.
        namespace: The interned namespace.
        parent: The entry of the block before it; None at the start of a sequence.
        tokens: Its tokens, four bytes each.
        place: How many blocks of its sequence come before it.
        block_id: Where its KV is.
        key: What it is found under.
    """

    __slots__ = (
        "block_id",
        "first_child",
        "key",
        "namespace",
        "next_in_key",
        "next_sibling",
        "parent",
        "place",
        "previous_sibling",
        "serial",
        "tokens",
    )

    def __init__(
        self,
        serial: int,
        namespace: NamespaceId,
        parent: PrefixEntry | None,
        tokens: bytes,
        block_id: BlockId,
        key: bytes,
    ) -> None:
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.place: int = 0 if parent is None else parent.place + 1
        self.block_id = block_id
        self.key = key
        self.next_in_key: PrefixEntry | None = None
        self.first_child: PrefixEntry | None = None
        self.next_sibling: PrefixEntry | None = None
        self.previous_sibling: PrefixEntry | None = None

    def subtree(self) -> Iterator[PrefixEntry]:
        """Yield this entry and everything that hangs on it, parents first; the tree must not change meanwhile."""
        stack = [self]
        while stack:
            entry = stack.pop()
            yield entry
            child = entry.first_child
            while child is not None:
                stack.append(child)
                child = child.next_sibling


class PrefixIndex:
    """Entries by `hash(namespace ‖ parent serial ‖ tokens)`.

    Args:
        hash_function: Of bytes to a key; any function is right, a good one is fast.
        max_entries_per_key: A content whose key has this many entries is not registered.
    """

    def __init__(
        self, hash_function: HashFunction = xxhash.xxh3_128_digest, max_entries_per_key: int = MAX_ENTRIES_PER_KEY
    ) -> None:
        self.hash_function = hash_function
        self.max_entries_per_key = max_entries_per_key
        self._by_key: dict[bytes, PrefixEntry] = {}
        self._namespaces: dict[bytes, NamespaceId] = {}
        self._next_serial = 1
        self.num_entries = 0

    def __len__(self) -> int:
        return self.num_entries

    def __iter__(self) -> Iterator[PrefixEntry]:
        for head in self._by_key.values():
            entry: PrefixEntry | None = head
            while entry is not None:
                yield entry
                entry = entry.next_in_key

    def namespace_id(self, namespace: Namespace) -> NamespaceId:
        """Intern a namespace by its framed bytes."""
        return self._namespaces.setdefault(namespace.frame(), NamespaceId(len(self._namespaces) + 1))

    def find(self, namespace: NamespaceId, parent: PrefixEntry | None, tokens: bytes) -> PrefixEntry | None:
        """Return the entry of this very content under this very parent, or None."""
        entry = self._by_key.get(self._key(namespace, parent, tokens))
        while entry is not None and not (
            entry.namespace == namespace and entry.parent is parent and entry.tokens == tokens
        ):
            entry = entry.next_in_key
        return entry

    def add(
        self, namespace: NamespaceId, parent: PrefixEntry | None, tokens: bytes, block_id: BlockId
    ) -> PrefixEntry | None:
        """Register content that `find` does not know; None where its key is full."""
        key = self._key(namespace, parent, tokens)
        head = self._by_key.get(key)
        if head is not None and self._chain_length(head) >= self.max_entries_per_key:
            return None
        entry = PrefixEntry(self._next_serial, namespace, parent, tokens, block_id, key)
        self._next_serial += 1
        entry.next_in_key = head
        self._by_key[key] = entry
        self.num_entries += 1
        if parent is not None:
            entry.next_sibling = parent.first_child
            if parent.first_child is not None:
                parent.first_child.previous_sibling = entry
            parent.first_child = entry
        return entry

    def remove(self, entry: PrefixEntry) -> None:
        """Forget an entry that has no children."""
        assert entry.first_child is None, f"entry {entry.serial} still has children"
        head = self._by_key[entry.key]
        if head is entry:
            if entry.next_in_key is None:
                del self._by_key[entry.key]
            else:
                self._by_key[entry.key] = entry.next_in_key
        else:
            before = head
            while before.next_in_key is not entry:
                assert before.next_in_key is not None, f"entry {entry.serial} is not under its key"
                before = before.next_in_key
            before.next_in_key = entry.next_in_key
        if entry.previous_sibling is not None:
            entry.previous_sibling.next_sibling = entry.next_sibling
        elif entry.parent is not None:
            entry.parent.first_child = entry.next_sibling
        if entry.next_sibling is not None:
            entry.next_sibling.previous_sibling = entry.previous_sibling
        self.num_entries -= 1

    def _key(self, namespace: NamespaceId, parent: PrefixEntry | None, tokens: bytes) -> bytes:
        return self.hash_function(_pack_parent(namespace, 0 if parent is None else parent.serial) + tokens)

    @staticmethod
    def _chain_length(head: PrefixEntry) -> int:
        length, entry = 0, head.next_in_key
        while entry is not None:
            length, entry = length + 1, entry.next_in_key
        return length + 1

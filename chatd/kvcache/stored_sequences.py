"""Removes from a disk tier that nobody uses what was computed of given sequences, whatever weights computed it.

An engine that runs does it by itself, for its own weights. Here the files say in which namespaces a tenant has blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from chatd.errors import EnvironmentProblem
from chatd.kvcache.block_directory import BlockDirectory, load_key
from chatd.kvcache.digests import Digester
from chatd.kvcache.manager import ID_TYPECODE
from chatd.kvcache.prefix_index import Namespace, namespace_of_frame

_ID_BYTES = array(ID_TYPECODE).itemsize


class StoredSequences:
    """The blocks of a disk tier, by tenant and sequence; until it is closed no other process has them.

    Args:
        root: Of the disk tier, which is there.

    Raises:
        DirectoryInUse: A daemon uses it.
        EnvironmentProblem: It cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = BlockDirectory(root)
        self._kinds: dict[str, list[tuple[Namespace, int]]] = {}
        """By tenant: the namespaces in which it has blocks, and how many tokens a block of theirs has."""
        try:
            self._look()
        except OSError as error:
            self._directory.close()
            raise self._told(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._directory.close()

    def remove(self, tenant: str, token_ids: Sequence[int]) -> int:
        """Remove the files of all blocks of a tenant that a sequence consists of; return how many there were.

        What another sequence of the tenant begins with too is computed again when that one is used.

        Raises:
            EnvironmentProblem: They cannot be removed.
        """
        num_removed = 0
        for namespace, block_size in self._kinds.get(tenant, ()):
            try:
                digester = Digester(load_key(self._root), namespace, block_size)
                chain: list[bytes] = []
                digester.extend(chain, array(ID_TYPECODE, token_ids), len(token_ids) // block_size)
                for link in chain:
                    digest = digester.digest(tenant, link)
                    num_removed += self._directory.path(digest).exists()
                    self._directory.remove(digest)
            except OverflowError:
                continue  # No such id was ever computed.
            except OSError as error:
                raise self._told(error) from None
        return num_removed

    def _look(self) -> None:
        frames: set[tuple[bytes, int]] = set()
        for _, origin in self._directory.origins():
            if origin is not None:
                frames.add((origin.namespace, len(origin.tokens) // _ID_BYTES))
        for frame, block_size in sorted(frames):
            namespace = namespace_of_frame(frame)
            if namespace is not None and namespace.tenant is not None and block_size:
                self._kinds.setdefault(namespace.tenant, []).append((namespace, block_size))

    def _told(self, error: OSError) -> EnvironmentProblem:
        return EnvironmentProblem(f"{self._root} cannot be cleared: {error.strerror or error}")

"""What is asked of the disk behind the host's buffer, and its answers. `disk_tier` is that disk; tests have others."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_file import Origin


class DiskResult(NamedTuple):
    """What came of a `write` or a `read`; each that was taken gets exactly one.

    Attributes:
        verb: "written": the slot may change again. "read": the slot holds the block. "failed": neither.
        digest: Of the block.
        slot: As it was given.
        why: Of "failed", in a few words: "gone", "forgotten", "checksum", "other content", an error of the system.
    """

    verb: Literal["written", "read", "failed"]
    digest: bytes
    slot: HostSlot
    why: str = ""


class Disk(Protocol):
    """What is needed of the disk; `DiskTier` says what each of these means."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it can hold."""
        ...

    @property
    def num_stored(self) -> int:
        """Blocks written since start."""
        ...

    @property
    def num_loaded(self) -> int:
        """Blocks read since start."""
        ...

    @property
    def num_refused(self) -> int:
        """Blocks found damaged or of another content since start."""
        ...

    @property
    def num_used(self) -> int:
        """Blocks that it holds."""
        ...

    def __contains__(self, digest: object) -> bool:
        """Whether a `read` would be tried."""
        ...

    def write(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """Queue a slot to be written; False: not now, and no result."""
        ...

    def read(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """Queue a slot to be filled; False: not now, and no result."""
        ...

    def forget(self, digest: bytes) -> None:
        """Serve a block no more."""
        ...

    def clear(self) -> None:
        """Serve nothing any more of what is stored."""
        ...

    def close(self) -> None:
        """Finish what is queued, or give it up."""
        ...

    def poll(self) -> list[DiskResult]:
        """Return the results that there are."""
        ...

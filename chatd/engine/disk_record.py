"""What a core hears from the disk tier, recorded and told again; the disk is an input like the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, cast

import msgspec

from chatd.kvcache.block import HostSlot
from chatd.kvcache.block_file import Origin
from chatd.kvcache.disk import Disk, DiskResult

Verb = Literal["written", "read", "failed"]


class DiskAnswer(msgspec.Struct, array_like=True, frozen=True):
    """One question to the disk and what it answered. Digests are left out: they are secret, and nobody looks.

    Attributes:
        asked: The method or attribute.
        slot: That was given; -1 where none is.
        answer: A truth, a number, or the (verb, slot, why) of each result.
    """

    asked: str
    slot: int
    answer: bool | int | list[tuple[Verb, HostSlot, str]]


class RecordedDisk:
    """Passes everything on to a disk, and notes what it answers.

    Args:
        disk: Behind it.
        note: Told of each answer.
    """

    def __init__(self, disk: Disk, note: Callable[[DiskAnswer], None]) -> None:
        self._disk = disk
        self._note = note

    @property
    def num_blocks(self) -> int:
        """As `Disk`."""
        return self._number("num_blocks", self._disk.num_blocks)

    @property
    def num_used(self) -> int:
        """As `Disk`."""
        return self._number("num_used", self._disk.num_used)

    @property
    def num_stored(self) -> int:
        """As `Disk`."""
        return self._number("num_stored", self._disk.num_stored)

    @property
    def num_loaded(self) -> int:
        """As `Disk`."""
        return self._number("num_loaded", self._disk.num_loaded)

    @property
    def num_refused(self) -> int:
        """As `Disk`."""
        return self._number("num_refused", self._disk.num_refused)

    def __contains__(self, digest: object) -> bool:
        """As `Disk`."""
        return self._truth("contains", -1, digest in self._disk)

    def write(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """As `Disk`."""
        return self._truth("write", slot, self._disk.write(digest, origin, slot))

    def read(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """As `Disk`."""
        return self._truth("read", slot, self._disk.read(digest, origin, slot))

    def forget(self, digest: bytes) -> None:
        """As `Disk`."""
        self._disk.forget(digest)

    def clear(self) -> None:
        """As `Disk`."""
        self._disk.clear()

    def close(self) -> None:
        """As `Disk`."""
        self._disk.close()

    def poll(self) -> list[DiskResult]:
        """As `Disk`."""
        results = self._disk.poll()
        self._note(DiskAnswer("poll", -1, [(result.verb, result.slot, result.why) for result in results]))
        return results

    def _number(self, asked: str, answer: int) -> int:
        self._note(DiskAnswer(asked, -1, answer))
        return answer

    def _truth(self, asked: str, slot: int, answer: bool) -> bool:
        self._note(DiskAnswer(asked, slot, answer))
        return answer


class ReplayedDisk:
    """Answers as was recorded.

    Args:
        next_answer: Returns the next answer, or None where nothing more was asked.
        differ: Told of a question that was not asked then; raises.
    """

    def __init__(self, next_answer: Callable[[], DiskAnswer | None], differ: Callable[[str, str], NoReturn]) -> None:
        self._next_answer = next_answer
        self._differ = differ

    @property
    def num_blocks(self) -> int:
        """As `Disk`."""
        return cast(int, self._answer("num_blocks"))

    @property
    def num_used(self) -> int:
        """As `Disk`."""
        return cast(int, self._answer("num_used"))

    @property
    def num_stored(self) -> int:
        """As `Disk`."""
        return cast(int, self._answer("num_stored"))

    @property
    def num_loaded(self) -> int:
        """As `Disk`."""
        return cast(int, self._answer("num_loaded"))

    @property
    def num_refused(self) -> int:
        """As `Disk`."""
        return cast(int, self._answer("num_refused"))

    def __contains__(self, digest: object) -> bool:
        """As `Disk`."""
        return bool(self._answer("contains"))

    def write(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """As `Disk`."""
        return bool(self._answer("write", slot))

    def read(self, digest: bytes, origin: Origin, slot: HostSlot) -> bool:
        """As `Disk`."""
        return bool(self._answer("read", slot))

    def forget(self, digest: bytes) -> None:
        """As `Disk`; nothing is answered."""

    def clear(self) -> None:
        """As `Disk`; nothing is answered."""

    def close(self) -> None:
        """As `Disk`; there is nothing to finish."""

    def poll(self) -> list[DiskResult]:
        """As `Disk`."""
        answer = self._answer("poll")
        assert isinstance(answer, list), f"poll was answered with {answer}"
        return [DiskResult(verb, b"", slot, why) for verb, slot, why in answer]

    def _answer(self, asked: str, slot: int = -1) -> bool | int | list[tuple[Verb, HostSlot, str]]:
        recorded = self._next_answer()
        if recorded is None or (recorded.asked, recorded.slot) != (asked, slot):
            expected = "no question" if recorded is None else f"{recorded.asked}, slot {recorded.slot}"
            self._differ(expected, f"{asked}, slot {slot}")
        return recorded.answer

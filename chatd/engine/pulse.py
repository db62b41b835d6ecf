"""A page of memory on which the engine says what it is doing, and the front sees it without asking. No torch.

Neither a stuck kernel nor a held interpreter lock can keep the front from reading it: the engine writes before it
begins something. One side writes three numbers and the other polls them, so a read in the middle of a write is of no
account: a verdict takes several reads that are all alike, and which suspect was alone is read when nobody writes more.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

_PAGE_BYTES = mmap.PAGESIZE
_FIELDS = struct.Struct("=Qdq")
_STEP = struct.Struct("=dq")
_STEP_AT = 8

NOT_KNOWN = -1
"""Any request may be what the engine is at."""

NO_SUSPECT = -2
"""Several requests are computed, and no suspect is among them."""


class Reading(NamedTuple):
    """What an engine does.

    Attributes:
        num_turns: Turns of its loop that have begun; 0 where it has not said anything.
        expected_s: What the step of the current turn should take; 0 before it is planned, and between steps.
        alone: The suspect that is computed alone, or `NO_SUSPECT`, or `NOT_KNOWN`.
    """

    num_turns: int
    expected_s: float
    alone: int = NOT_KNOWN


class Pulse:
    """The page, mapped from a descriptor which stays open and is the caller's.

    Args:
        descriptor: As `create_page` returned it, in this process or in another one.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, _PAGE_BYTES)
        self._num_turns = 0

    def begin_turn(self) -> None:
        """Say that the loop goes round once more."""
        self._num_turns += 1
        _FIELDS.pack_into(self._page, 0, self._num_turns, 0.0, NOT_KNOWN)

    def expect(self, seconds: float, alone: int = NOT_KNOWN) -> None:
        """Say how long the step that begins now should take, and what suspect is computed in it."""
        _STEP.pack_into(self._page, _STEP_AT, seconds, alone)

    def read(self) -> Reading:
        """Return what was last said."""
        return Reading(*_FIELDS.unpack_from(self._page, 0))

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def create_page() -> int:
    """Return the descriptor of an empty page that lives as long as somebody has it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("chatd-pulse")
    else:
        descriptor, path = tempfile.mkstemp(prefix="chatd-pulse-")
        os.unlink(path)
    os.truncate(descriptor, _PAGE_BYTES)
    return descriptor

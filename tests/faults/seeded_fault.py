"""What a seeded fault is: an edit of the product's own source, and the tests that notice it."""

from __future__ import annotations

from dataclasses import dataclass

SIMULATION = "tests/engine/test_simulation.py::test_every_invariant_holds_after_every_step"


@dataclass(frozen=True)
class Edit:
    """Text of one file that is replaced; `old` occurs in it exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One thing that could be wrong.

    Attributes:
        name: What the product would do.
        why: What would come of it.
        edits: That make it so.
        tests: Each a pytest node; at least one must fail.
        says: A regular expression that the failure's text must match; "" is any assertion.
    """

    name: str
    why: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    says: str = ""


def fault(name: str, why: str, file: str, old: str, new: str, *tests: str, says: str = "") -> Fault:
    """Return a fault of one edit."""
    return Fault(name, why, (Edit(file, old, new),), tests, says)

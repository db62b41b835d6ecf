"""Parts of the GPU's benchmark, each of which starts only if its time fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chatd_kernels.stream import Stream

Row = dict[str, Any]


@dataclass(slots=True)
class Bench:
    """What parts share.

    Attributes:
        stream: Where they run.
        copy_bandwidth: Bytes read and written each second by a large copy, once that was measured.
    """

    stream: Stream
    copy_bandwidth: float | None = None

    @property
    def device(self) -> torch.device:
        """Where their tensors are."""
        return self.stream.device


@dataclass(frozen=True, slots=True)
class Part:
    """One table.

    Attributes:
        name: On the command line and in the JSON.
        title: Over the table.
        seconds: About how long it takes, compilation included.
        run: Gives the table's rows, all of the same keys; what was given counts even if it raises after that.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Bench], Iterator[Row]]


@dataclass(slots=True)
class Outcome:
    """What became of a part: its rows, and why there are no more."""

    part: Part
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str | None = None
    error: str | None = None


def run_parts(parts: Sequence[Part], bench: Bench, budget_s: float, clock: Callable[[], float]) -> Iterator[Outcome]:
    """Run the parts in order and yield what became of each; one that fails does not keep the others from running."""
    start = clock()
    for part in parts:
        outcome = Outcome(part)
        began = clock()
        left = budget_s - (began - start)
        if part.seconds > left:
            outcome.skipped = f"takes about {part.seconds:.0f} s, {left:.0f} s are left"
        else:
            try:
                for row in part.run(bench):
                    outcome.rows.append(row)
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}"
            outcome.seconds = clock() - began
        yield outcome


def table(rows: Sequence[Row]) -> str:
    """Return rows as text with aligned columns."""
    if not rows:
        return ""
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

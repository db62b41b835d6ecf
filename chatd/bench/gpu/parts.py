"""Parts of the GPU's benchmark, each of which starts only if its time fits."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from chatd_kernels.stream import Stream

Row = dict[str, Any]
Rows = Generator[Row, None, None]


@dataclass(slots=True)
class Bench:
    """What parts share.

    Attributes:
        stream: Where they run.
        copy_bandwidth: Bytes read and written each second by a large copy, once that was measured.
        product_flops: Operations each second of a large product of 16-bit numbers, likewise.
        step_s: By model and batch, seconds of a plain decode step, once that was measured.
    """

    stream: Stream
    copy_bandwidth: float | None = None
    product_flops: float | None = None
    step_s: dict[tuple[str, int], float] = field(default_factory=dict)

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
    run: Callable[[Bench], Rows]


@dataclass(slots=True)
class Outcome:
    """What became of a part: its rows, and why there are no more; of an error also where it was raised."""

    part: Part
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str | None = None
    error: str | None = None
    trace: str | None = None


class NotHere(Exception):
    """A part cannot be measured on this machine, and why."""


class NoRoom(NotHere):
    """A device has too little memory for what was to be measured."""


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
                free_memory(bench.stream)
                with closing(part.run(bench)) as rows:
                    for row in rows:
                        outcome.rows.append(row)
                        if clock() - start >= budget_s:
                            outcome.skipped = "the rest of it: no time is left"
                            break
            except NotHere as reason:
                outcome.skipped = str(reason)
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}"
                outcome.trace = traceback.format_exc()
            outcome.seconds = clock() - began
        yield outcome


def free_memory(stream: Stream) -> None:
    """Give a device back what dead objects hold of its memory: an engine's refer to each other in circles."""
    gc.collect()
    stream.memory()


def table(rows: Sequence[Row]) -> str:
    """Return rows as text with aligned columns."""
    if not rows:
        return ""
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

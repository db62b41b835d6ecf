"""Tables and pictures from the JSON that benchmarks wrote: `python -m chatd.bench report`.

A page marks a table's place with `<!-- figures: NAME -->` and `<!-- end -->`; what stands between is replaced.
A picture NAME.svg is drawn beside NAME.json. No figure is typed by hand, and a test fails where a page or a picture is
not of its figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chatd.bench import tables
from chatd.bench.ahead import ahead_table
from chatd.bench.journal import journal_table
from chatd.bench.step import step_table
from chatd.bench.terminal import terminal_table

ROOT = Path(__file__).parent.parent.parent
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
_PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)

SECTIONS: dict[str, Callable[[Any], str]] = {
    "chat": tables.chat_table,
    "chat-neighbor": tables.chat_table,
    "step": step_table,
    "step-neighbor": step_table,
    "memory": tables.memory_table,
    "waste": tables.waste_table,
    "trace": tables.trace_table,
    "fork": tables.fork_table,
    "samples": tables.samples_table,
    "prefix": tables.prefix_table,
    "turn": tables.turn_table,
    "preemption": tables.preemption_table,
    "tiers": tables.tiers_table,
    "join": tables.join_table,
    "journal": journal_table,
    "neighbor": tables.neighbor_table,
    "probe": tables.probe_table,
    "pool": tables.pool_table,
    "kernels": tables.kernels_table,
    "ahead": ahead_table,
    "front": tables.front_table,
    "terminal": terminal_table,
}
"""By the name of the JSON in docs/figures and of its place in a page."""


def load_figures(name: str) -> Any:
    """Return what a benchmark has written to docs/figures."""
    return json.loads((FIGURES / f"{name}.json").read_text())


def rendered(page: str) -> str:
    """Return a page's text with its tables made anew."""

    def replaced(place: re.Match[str]) -> str:
        return f"{place[1]}{SECTIONS[place[2]](load_figures(place[2]))}\n{place[3]}"

    return _PLACE.sub(replaced, page)


def main(arguments: Sequence[str]) -> int:
    """Write the tables into their pages, and draw the pictures."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench report", description=__doc__)
    parser.parse_args(arguments)
    # Here and not above: matplotlib is one of the tools for development.
    from chatd.bench.pictures import PICTURES, digest_of, render_svg

    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    for name in PICTURES:
        digest = digest_of(FIGURES / f"{name}.json")
        (FIGURES / f"{name}.svg").write_text(render_svg(name, load_figures(name), digest))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

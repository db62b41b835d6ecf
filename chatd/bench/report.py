"""Tables of README and docs from the JSON that benchmarks wrote: `python -m chatd.bench report`.

A page marks a table's place with `<!-- figures: NAME -->` and `<!-- end -->`; what stands between is replaced. No
figure is typed by hand, and a test fails where a page and its figures differ.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chatd.bench.step import step_table

ROOT = Path(__file__).parent.parent.parent
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
_PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chat_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the chat load's table: a row for each weight format and number of sessions, medians over repeats."""
    heads = ["weights", "sessions", "output tok/s", "TTFT, turn 1", "TTFT, later turns", "ITL p50", "history cached"]
    rows = []
    for quantization, sessions in dict.fromkeys((run["quantization"], run["sessions"]) for run in runs):
        same = [run for run in runs if (run["quantization"], run["sessions"]) == (quantization, sessions)]
        middle = {
            name: statistics.median(run[name] for run in same) for name, value in same[0].items() if _is_number(value)
        }
        rows.append(
            [
                quantization,
                str(sessions),
                f"{middle['output_tok_s']:.0f}",
                f"{middle['ttft_first_p50_s']:.2f} s",
                f"{middle['ttft_later_p50_s']:.2f} s",
                f"{middle['itl_p50_s'] * 1e3:.0f} ms",
                f"{min(run['history_cached'] for run in same):.1%}",
            ]
        )
    return markdown_table(heads, rows)


def start_line(runs: Sequence[dict[str, Any]]) -> str:
    """Return a sentence with the cold start of each weight format."""
    starts = {run["quantization"]: run["start_to_token_s"] for run in runs}
    each = ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in starts.items())
    return f"From `chatd serve` to the first token of the first answer, model and kernels in the cache: {each}."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _load(name: str) -> Any:
    return json.loads((FIGURES / f"{name}.json").read_text())


def _chat(name: str) -> str:
    runs = _load(name)["runs"]
    return f"{chat_table(runs)}\n\n{start_line(runs)}"


SECTIONS: dict[str, Callable[[], str]] = {
    "chat": lambda: _chat("chat"),
    "chat-neighbor": lambda: _chat("chat-neighbor"),
    "step": lambda: step_table(_load("step")),
    "step-neighbor": lambda: step_table(_load("step-neighbor")),
}


def rendered(page: str) -> str:
    """Return a page's text with its tables made anew."""

    def replaced(place: re.Match[str]) -> str:
        return f"{place[1]}{SECTIONS[place[2]]()}\n{place[3]}"

    return _PLACE.sub(replaced, page)


def main(arguments: Sequence[str]) -> int:
    """Write the tables into their pages."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench report", description=__doc__)
    parser.parse_args(arguments)
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

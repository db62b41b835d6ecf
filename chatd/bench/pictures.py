"""Pictures of the figures as SVG: `python -m chatd.bench report` draws them from docs/figures.

Each carries the digest of the JSON that it was drawn from, so that a picture that is older than its figures is noticed.
The background is white, and text is drawn as outlines: they look the same on any page and with any fonts.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chatd.bench.record import machine_line

# Okabe and Ito's colors can be told apart with any kind of color vision.
BLUE, ORANGE, GREEN, RED, GRAY, LIGHT = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7F7F7F", "#D9D9D9"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "chatd",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "legend.frameon": False,
}
_KIND_COLORS = {"tokens": BLUE, "reserved": ORANGE, "internal": RED, "external": LIGHT}
_KIND_LABELS = {
    "tokens": "holds a token",
    "reserved": "reserved for later tokens",
    "internal": "internal: reserved, never used",
    "external": "external: free, and yet requests wait",
}


def draw_memory(figures: dict[str, Any]) -> Figure:
    """Draw stacked bars, one for each server."""
    figure, axes = _figure(8.0, 3.2)
    servers = figures["servers"]
    names = [f"{row['server']}\n{row['running']:.1f} sequences at once" for row in servers]
    left = [0.0] * len(servers)
    for kind, color in _KIND_COLORS.items():
        shares = [100 * row[kind] for row in servers]
        bars = axes.barh(names, shares, left=left, color=color, label=_KIND_LABELS[kind], height=0.62)
        labels = [f"{share:.1f}%" if share >= 4 else "" for share in shares]
        dark = kind in ("tokens", "internal")
        axes.bar_label(bars, labels, label_type="center", color="white" if dark else "black", fontsize=9)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of KV memory, mean over time while requests wait")
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=9)
    return figure


def draw_trace(figures: dict[str, Any]) -> Figure:
    """Draw the hit rate by pool size, and the ideal as a line."""
    figure, axes = _figure(8.0, 3.8)
    pools = figures["pools"]
    tokens = [row["tokens"] / 1e6 for row in pools]
    ideal = 100 * figures["ideal"]
    axes.axhline(ideal, color=GRAY, linestyle="--", linewidth=1.2)
    axes.annotate(f"a cache without end: {ideal:.1f}%", (tokens[0], ideal), (0, 4), textcoords="offset points")
    axes.plot(tokens, [100 * row["plain_lru"] for row in pools], "s:", color=ORANGE, label="plain LRU, prompts only")
    axes.plot(
        tokens, [100 * row["hit_rate"] for row in pools], "o-", color=BLUE, label="chatd's pool, running requests in it"
    )
    axes.set_xscale("log")
    axes.set_xticks(tokens, [f"{value:.3g}" for value in tokens], minor=False)
    axes.xaxis.minorticks_off()
    axes.set_ylim(0, 1.15 * ideal)
    axes.set_xlabel("pool size, million tokens")
    axes.set_ylabel("prompt tokens found, %")
    axes.grid(axis="y", color=LIGHT, linewidth=0.6)
    axes.legend(loc="lower right")
    return figure


def draw_preemption(figures: dict[str, Any]) -> Figure:
    """Draw copies and recomputation by block size, as figure 19 of the PagedAttention paper."""
    figure, axes = _figure(8.0, 4.2)
    crossing = figures["crossing"]
    rows = crossing["sizes"]
    sizes = [row["block_size"] for row in rows]
    lines = (
        ("computed again", ("recompute_s",), "s-", RED),
        ("files, out and in", ("disk_out_s", "disk_in_s"), "D-", ORANGE),
        ("host, out and in", ("out_s", "in_s"), "o-", BLUE),
        ("host, out", ("out_s",), "^:", GREEN),
        ("host, in", ("in_s",), "v:", GRAY),
    )
    for label, parts, marks, color in lines:
        axes.plot(sizes, [1e3 * sum(row[part] for part in parts) for row in rows], marks, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel(f"ms for {crossing['tokens']:,} tokens")
    axes.grid(axis="y", color=LIGHT, linewidth=0.6)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, fontsize=9)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "memory": draw_memory,
    "preemption": draw_preemption,
    "trace": draw_trace,
}
"""By the name of the JSON in docs/figures that each is drawn from."""


def draw(name: str, figures: dict[str, Any]) -> Figure:
    """Draw one picture, with the machine and the date below it."""
    with mpl.rc_context(_STYLE):
        figure = PICTURES[name](figures)
        figure.text(0.995, 0.008, machine_line(figures["machine"]), ha="right", va="bottom", fontsize=7, color=GRAY)
        return figure


def render_svg(name: str, figures: dict[str, Any], digest: str) -> str:
    """Return a picture as SVG; the same figures always give the same bytes."""
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        metadata = {"Date": None, "Creator": "chatd.bench", "Description": f"drawn from figures {digest}"}
        draw(name, figures).savefig(buffer, format="svg", metadata=metadata, facecolor="white")
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def digest_of(json_path: Path) -> str:
    """Return what a picture of these figures carries."""
    return hashlib.sha256(json_path.read_bytes()).hexdigest()[:16]


def drawn_from(svg: str) -> str:
    """Return the digest that a picture carries, or ""."""
    found = re.search(r"drawn from figures ([0-9a-f]{16})", svg)
    return found[1] if found else ""


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure, in inches; no window, no global state."""
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", rect=(0, 0.05, 1, 0.95))
    return figure, figure.add_subplot()

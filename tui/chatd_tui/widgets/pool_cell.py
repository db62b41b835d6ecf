"""What is in one cell of the map: a line for each block, from a frozen snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from chatd.clean import clean_line
from chatd.protocol import CELL_STATES, CellBlock, CellHolder, PoolInspected
from chatd_tui.widgets.pool_map import GLYPHS, VARIABLES, Counts
from chatd_tui.widgets.pool_tables import short_time

LIVE_ONLY = "what is in a block is known of now only"
NOT_TOLD = "this daemon does not tell what is in a cell"
ASKING = "asking"
FREE = "free: nothing is in it, and nobody holds it"
CHANGED = "there is nothing to tell: a step in progress holds it, or it has just become free"


@dataclass(frozen=True)
class CellView:
    """What the panel draws.

    Attributes:
        cell: Its number on the map.
        blocks_per_cell: As the map has it.
        counts: Its blocks by state, at the moment that is drawn.
        facts: What the daemon says of them now; None where it says nothing.
        note: Why there are no facts.
    """

    cell: int
    blocks_per_cell: int
    counts: Counts
    facts: PoolInspected | None = None
    note: str = ""

    @property
    def title(self) -> str:
        """Name the cell and its blocks."""
        first = self.cell * self.blocks_per_cell
        last = first + max(1, sum(self.counts)) - 1
        blocks = f"block {first}" if first == last else f"blocks {first} to {last}"
        return f"cell {self.cell}: {blocks}"


def cell_text(view: CellView, block_size: int, width: int) -> Content:
    """Return the panel's lines."""
    counted = [
        Content.assemble((GLYPHS[state], f"${VARIABLES[state]}"), f" {number} {state}")
        for state, number in zip(CELL_STATES, view.counts, strict=True)
        if number
    ]
    lines = [Content("   ").join(counted) if counted else Content("")]
    facts = view.facts
    if facts is None:
        lines.append(Content.styled(clean_line(view.note, 200), "$muted"))
        return Content("\n").join(lines)
    if facts.blocks:
        lines.append(Content.styled(_head(width), "$muted"))
        lines += [block_line(block, block_size, width) for block in facts.blocks]
    elif not facts.left_out:
        is_free = not any(view.counts[1:])
        lines.append(Content.styled(FREE if is_free else CHANGED, "$muted"))
    if facts.left_out:
        lines.append(Content.styled(f"… and {facts.left_out} more of which nothing is asked", "$muted"))
    return Content("\n").join(lines)


WITH_HIT = 72
WITH_AGE = 60
"""Below that many columns a block's last hit, and below these its age, are left out, so that its owner can be read."""


def _head(width: int) -> str:
    age = f"{'age':>7}" if width >= WITH_AGE else ""
    hit = f"{'last hit':>10}" if width >= WITH_HIT else ""
    return f"  block  state   refs  {'tokens':<14}{age}{hit}  of"


def block_line(block: CellBlock, block_size: int, width: int) -> Content:
    """Return one block: its state, references, tokens with their place, age, last hit, and whose it is."""
    state = block.state if block.state in GLYPHS else "active"
    if block.place is None:
        tokens = str(block.tokens)
    else:
        first = block.place * block_size
        tokens = f"{first}–{first + max(1, block.tokens) - 1} ({block.tokens})"
    age = f"{short_time(block.age_s):>7}" if width >= WITH_AGE else ""
    hit = "never" if block.hit_age_s is None else f"{short_time(block.hit_age_s)} ago"
    hit = f"{hit:>10}" if width >= WITH_HIT else ""
    owner = owner_words(block)
    line = Content.assemble(
        (GLYPHS[state], f"${VARIABLES[state]}"),
        f"{block.block:>6}  {clean_line(block.state, 6):<6}{block.references:>6}  {tokens:<14}{age}{hit}  ",
    )
    room = max(8, width - line.cell_length)
    return Content.assemble(line, Content(owner).truncate(room, ellipsis=True))


def owner_words(block: CellBlock) -> str:
    """Say whose a block is: one's own sessions by title, others as far as they may be named, and how many more."""
    words = [_holder_words(holder) for holder in block.holders]
    if block.public:
        words.insert(0, "a public prompt")
    if block.others:
        words.append(_others_words(block.others, is_more=bool(block.holders)))
    if not words:
        tenant = clean_line(block.tenant or "", 40)
        found = "can be found" if block.registered else "cannot be found"
        return f"{tenant}: nobody holds it, {found}" if tenant else f"nobody holds it, {found}"
    return ", ".join(words)


def _holder_words(holder: CellHolder) -> str:
    if holder.own:
        return clean_line(holder.title, 60) or "an untitled one of yours"
    tenant = clean_line(holder.tenant or "", 40)
    session = clean_line(holder.session, 64)
    return f"{tenant}/{session}" if tenant else session


def _others_words(number: int, *, is_more: bool) -> str:
    if is_more:
        return f"{number} more"
    return "another's" if number == 1 else f"{number} others'"


def cell_at(counts: Sequence[Counts], cell: int) -> Counts:
    """Return the counts of a cell; none of a cell that the map does not have."""
    return counts[cell] if 0 <= cell < len(counts) else (0, 0, 0, 0)

"""One reading of the block pool, for scripts and for a terminal without screens: `chatd top --once`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from chatd.clean import clean_line
from chatd.client import Client, PoolState
from chatd.protocol import Hello, SessionBlocks

TITLE_LENGTH = 36
"""A longer title is cut in a table; the JSON has all of it."""

LEAST_TITLE = 12
TITLE = "title"
BESIDE = 2
"""Blanks that a column takes beside its text."""
WORDS = ("tier", "lease", TITLE)
"""Columns that are no numbers, beside the names of rows."""


async def read_pool(url: str, key: str | None) -> tuple[Hello, PoolState]:
    """Return what a daemon is and the state of its pool now, sessions included.

    Raises:
        ChatdError: It does not answer, or refuses.
    """
    async with Client(url, key=key) as client:
        states = client.pool(detail="sessions")
        try:
            return client.hello, await anext(states)
        finally:
            await states.aclose()  # type: ignore[attr-defined]


def as_builtins(hello: Hello, state: PoolState) -> dict[str, Any]:
    """Return a reading as what JSON can say; the fields are the protocol's, with what follows from them.

    Of a session `exclusive` is the blocks that nobody else holds, and `lease` what its blocks are kept by: "answering",
    "queued", "attached" or "idle" (its claim between turns), or "none" where it holds none. `bills` says whose the
    active blocks are; None where the daemon does not tell it.
    """
    return {
        "server": hello.server,
        "model": msgspec.to_builtins(hello.model),
        "step": state.step,
        "totals": msgspec.to_builtins(state.totals),
        "tiers": [msgspec.to_builtins(tier) for tier in state.tiers],
        "tenants": [msgspec.to_builtins(tenant) for tenant in state.tenants],
        "bills": bills(state),
        "sessions": [
            msgspec.to_builtins(row) | {"exclusive": row.held - row.shared, "lease": lease(row)}
            for row in _most_first(state)
        ],
    }


def bills(state: PoolState) -> dict[str, float] | None:
    """Return to whom the active blocks are: the sessions' bills, public prompts, and what is in none of the two.

    The three are together the active blocks. The last is what steps in progress hold, and other users' sessions where
    these are not told.
    """
    rows, public = state.sessions or (), state.totals.public
    told = [row.bill for row in rows if row.bill is not None]
    if public is None or len(told) < len(rows):
        return None
    of_sessions = round(math.fsum(told), 3)
    rest = round(state.totals.active - public - of_sessions, 3)
    return {"sessions": of_sessions, "public": public, "others": max(0.0, rest)}


def lease(row: SessionBlocks) -> str:
    """Return what keeps a session's blocks; a daemon that does not tell is answered for by what it does."""
    if row.active:
        return row.lease or "answering"
    return (row.lease or "idle") if row.held else "none"


def as_tables(hello: Hello, state: PoolState, width: int | None = None) -> RenderableType:
    """Return a reading as lines and tables, for a terminal of `width` columns or for whatever takes long lines."""
    totals = state.totals
    part = totals.active / max(1, totals.blocks)
    percent = "<1%" if 0 < part < 0.01 else f"{part:.0%}"
    lines = [
        f"{clean_line(hello.model.id)}: {totals.blocks} blocks of {hello.model.block_size} tokens, step {state.step}",
        f"free {totals.free}  cached {totals.cached}  active {totals.active} ({percent})  shared {totals.shared}"
        f"  evictions {totals.evictions}{_again(totals.wanted_again)}",
        f"hit rate {totals.hit_rate:.0%}  {totals.tok_s:.1f} tok/s  {totals.running} running  {totals.waiting} waiting",
    ]
    lines += [f"{clean_line(tier.tier, 20)} {tier.used} of {tier.blocks} blocks" for tier in state.tiers]
    billed = bills(state)
    if billed is not None:
        lines.append(
            f"of the active: bills {billed['sessions']:.1f}  public {billed['public']}  others {billed['others']:.1f}"
        )
    tenants = [
        {
            "tenant": clean_line(tenant.tenant, 60),
            "active": _number(tenant.active),
            "share": _number(None if tenant.share is None else round(tenant.share)),
            "floor": _number(tenant.floor),
            "cached": _number(tenant.cached),
            "running": _number(tenant.running),
            "waiting": _number(tenant.waiting),
            "lost": _number(tenant.evicted),
            "again": _number(tenant.wanted_again),
        }
        for tenant in state.tenants
    ]
    sessions = [
        {
            "session": clean_line(row.session, 64),
            "held": _number(row.held),
            "shared": _number(row.shared),
            "own": _number(row.held - row.shared),
            "bill": _number(None if row.bill is None else f"{row.bill:.1f}"),
            "tokens": _number(row.tokens),
            "tier": clean_line(row.tier, 20),
            "lease": clean_line(lease(row), 20),
            "title": clean_line(row.title, TITLE_LENGTH),
        }
        for row in _most_first(state)
    ]
    return Group(
        *map(escape, lines),
        _table(tenants, ("again", "lost", "waiting", "running", "cached", "floor", "share"), width),
        _table(sessions, ("tokens", "own", "tier", "lease", "bill", "shared", TITLE), width),
    )


def _again(number: int | None) -> str:
    return "" if number is None else f"  wanted again {number}"


def _number(value: int | str | None) -> str:
    return "–" if value is None else str(value)


def _table(rows: Sequence[Mapping[str, str]], least_first: Sequence[str], width: int | None) -> Table:
    """Return rows as a table in which names are whole; of the rest what does not fit is left out, and titles are cut.

    Args:
        rows: The text of each column by its name, cleaned; all have the same columns, the first one names the row.
        least_first: The columns that may be left out, the least wanted first.
        width: Of the terminal; None is as much as is needed.
    """
    names = list(rows[0]) if rows else []
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in names}
    whole_title = widths.get(TITLE, 0)
    if width is not None and TITLE in widths:
        widths[TITLE] = min(whole_title, LEAST_TITLE)
    for name in least_first:
        if width is not None and sum(widths.values()) + BESIDE * len(widths) > width:
            widths.pop(name, None)
    if width is not None and TITLE in widths:
        widths[TITLE] = min(whole_title, widths[TITLE] + max(0, width - sum(widths.values()) - BESIDE * len(widths)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in widths:
        is_number = name not in (*names[:1], *WORDS)
        # A name that is wider than the terminal goes on in the next line.
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name not in names[:1], overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cut(row[name], widths[name])) for name in widths))
    return table


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"


def _most_first(state: PoolState) -> list[SessionBlocks]:
    return sorted(state.sessions or (), key=lambda row: (-row.held, -row.tokens, row.session))

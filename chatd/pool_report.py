"""One reading of the block pool, for scripts and for a terminal without screens: `chatd top --once`."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from chatd.clean import clean_line
from chatd.client import Client, PoolState
from chatd.protocol import Hello, SessionBlocks


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
    "idle" (its claim between turns), or "none" where it holds none.
    """
    return {
        "server": hello.server,
        "model": msgspec.to_builtins(hello.model),
        "step": state.step,
        "totals": msgspec.to_builtins(state.totals),
        "tiers": [msgspec.to_builtins(tier) for tier in state.tiers],
        "tenants": [msgspec.to_builtins(tenant) for tenant in state.tenants],
        "sessions": [
            msgspec.to_builtins(row) | {"exclusive": row.held - row.shared, "lease": lease(row)}
            for row in _most_first(state)
        ],
    }


def lease(row: SessionBlocks) -> str:
    """Return what keeps a session's blocks."""
    return "answering" if row.active else "idle" if row.held else "none"


def as_tables(hello: Hello, state: PoolState) -> RenderableType:
    """Return a reading as lines and tables."""
    totals = state.totals
    part = totals.active / max(1, totals.blocks)
    lines = [
        f"{clean_line(hello.model.id)}: {totals.blocks} blocks of {hello.model.block_size} tokens, step {state.step}",
        f"free {totals.free}  cached {totals.cached}  active {totals.active} ({part:.0%})  shared {totals.shared}"
        f"  evictions {totals.evictions}",
        f"hit rate {totals.hit_rate:.0%}  {totals.tok_s:.1f} tok/s  {totals.running} running  {totals.waiting} waiting",
    ]
    lines += [f"{clean_line(tier.tier, 20)} {tier.used} of {tier.blocks} blocks" for tier in state.tiers]
    tenants = _table("tenant", "active", "cached", "running", "waiting")
    for tenant in state.tenants:
        counts = (tenant.active, tenant.cached, tenant.running, tenant.waiting)
        tenants.add_row(escape(clean_line(tenant.tenant, 60)), *map(str, counts))
    sessions = _table("session", "held", "shared", "exclusive", "tokens")
    sessions.add_column("tier")
    sessions.add_column("lease")
    sessions.add_column("title", overflow="ellipsis")
    for row in _most_first(state):
        counts = (row.held, row.shared, row.held - row.shared, row.tokens)
        words = (clean_line(row.tier, 20), lease(row), clean_line(row.title, 80))
        sessions.add_row(escape(clean_line(row.session, 64)), *map(str, counts), *map(escape, words))
    return Group(*map(escape, lines), tenants, sessions)


def _table(name: str, *numbers: str) -> Table:
    return Table(Column(name, overflow="fold"), *(Column(number, justify="right") for number in numbers))


def _most_first(state: PoolState) -> list[SessionBlocks]:
    return sorted(state.sessions or (), key=lambda row: (-row.held, -row.tokens, row.session))

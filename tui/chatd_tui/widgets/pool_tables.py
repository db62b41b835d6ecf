"""What the pool page says in lines and tables: totals, sessions with their bills, tenants with their shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from textual.content import Content

from chatd.clean import clean_line
from chatd.client import PoolState
from chatd.protocol import PoolTotals, SessionBlocks, TenantBlocks, TierBlocks
from chatd_tui.views import percent, short_number

MIN_NAME = 12
UNKNOWN = "–"
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        name: Its head.
        width: In cells, the gap before it included.
        rank: Columns with the highest go first where there is no room.
        text: Of a row.
        is_number: Whether it is aligned to the right.
    """

    name: str
    width: int
    rank: int
    text: Callable[[Row], str]
    is_number: bool = True


def short_time(seconds: float) -> str:
    """Return a time in one unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def lease_words(row: SessionBlocks) -> str:
    """Return what keeps a session's blocks, and for how long: what is left where that is by time, else how long it is.

    A daemon that does not tell is answered for by what it does.
    """
    if row.lease is None:
        return "answering" if row.active else "idle" if row.held else UNKNOWN
    if row.lease in ("answering", "queued"):
        return row.lease
    if not row.held:
        return "none"
    if row.release_s is not None:
        return f"{short_time(row.release_s)} left"
    word = "watched" if row.lease == "attached" else "idle"
    return word if row.idle_s is None else f"{word} {short_time(row.idle_s)}"


def bill_words(bill: float | None) -> str:
    """Return a number of blocks with one decimal, where it is known."""
    return UNKNOWN if bill is None else f"{bill:.1f}" if bill < 1000 else short_number(round(bill))


def aged(rows: Sequence[SessionBlocks], seconds: float) -> list[SessionBlocks]:
    """Return the rows as they are some seconds after they were told, where nothing happened since."""
    return [
        msgspec.structs.replace(
            row,
            idle_s=None if row.idle_s is None else row.idle_s + seconds,
            release_s=None if row.release_s is None else max(0.0, row.release_s - seconds),
        )
        for row in rows
    ]


SESSION_COLUMNS: tuple[Column[SessionBlocks], ...] = (
    Column("held", 6, 1, lambda row: short_number(row.held)),
    Column("shared", 7, 2, lambda row: short_number(row.shared)),
    Column("own", 6, 6, lambda row: short_number(row.held - row.shared)),
    Column("bill", 7, 3, lambda row: bill_words(row.bill)),
    Column("tokens", 7, 7, lambda row: short_number(row.tokens)),
    Column("tier", 8, 5, lambda row: " " + clean_line(row.tier, 7), is_number=False),
    Column("lease", 13, 4, lambda row: " " + clean_line(lease_words(row), 12), is_number=False),
)
TENANT_COLUMNS: tuple[Column[TenantBlocks], ...] = (
    Column("holds", 7, 1, lambda row: short_number(row.active)),
    Column("share", 8, 2, lambda row: share_words(row)),
    Column("floor", 7, 3, lambda row: UNKNOWN if row.floor is None else short_number(row.floor)),
    Column("cached", 8, 6, lambda row: short_number(row.cached)),
    Column("weight", 8, 7, lambda row: UNKNOWN if row.weight is None else f"{row.weight:g}"),
    Column("run", 5, 4, lambda row: short_number(row.running)),
    Column("wait", 6, 5, lambda row: short_number(row.waiting)),
    Column("lost", 7, 9, lambda row: UNKNOWN if row.evicted is None else short_number(row.evicted)),
    Column("again", 7, 8, lambda row: UNKNOWN if row.wanted_again is None else short_number(row.wanted_again)),
)


def share_words(row: TenantBlocks) -> str:
    """Return a tenant's share in blocks; an arrow tells that it has more than that now."""
    if row.share is None:
        return UNKNOWN
    mark = "▲" if row.active + row.cached > row.share else " "
    return mark + short_number(round(row.share))


def chosen_columns(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    """Return the columns that fit beside a name of `MIN_NAME`, in their order: the most wanted ones."""
    room = width - MIN_NAME - 2
    chosen = set()
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width > room:
            break
        chosen.add(column.name)
        room -= column.width
    return [column for column in columns if column.name in chosen]


def table(
    name: str,
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    width: int,
    title: Callable[[Row], Content],
    mark: Callable[[Row], tuple[str, str]] = lambda _: ("  ", ""),
) -> list[Content]:
    """Return a head and a line for each row, aligned."""
    chosen = chosen_columns(columns, width)
    title_width = max(MIN_NAME, width - 2 - sum(column.width for column in chosen))

    def cell(column: Column[Row], text: str) -> str:
        # In cells: a daemon's word may be of wide characters.
        fitted = Content(text).truncate(column.width)
        blank = " " * (column.width - fitted.cell_length)
        return f"{blank}{fitted.plain}" if column.is_number else f"{fitted.plain}{blank}"

    heads = "".join(cell(column, column.name if column.is_number else f" {column.name}") for column in chosen)
    lines = [Content.styled(f"  {name.ljust(title_width)}{heads}", "$muted")]
    for row in rows:
        text = title(row).truncate(title_width - 1, ellipsis=True)
        cells = "".join(cell(column, column.text(row)) for column in chosen)
        lines.append(Content.assemble(mark(row), text, " " * (title_width - text.cell_length), cells))
    return lines


def session_title(row: SessionBlocks) -> Content:
    """Return a session's title, or of other people's the tenant and the id."""
    if row.title:
        return Content(clean_line(row.title, 80))
    if row.tenant is not None:
        return Content.styled(clean_line(f"{row.tenant}/{row.session}", 100), "$muted")
    return Content("untitled")


def session_table(rows: Sequence[SessionBlocks], width: int) -> Content:
    """Return what each session holds, most first, as aligned text."""
    ordered = sorted(rows, key=lambda row: (-row.held, -row.tokens, row.session))
    lines = table(
        "session",
        SESSION_COLUMNS,
        ordered,
        width,
        session_title,
        lambda row: ("● ", "$success") if row.active else ("  ", ""),
    )
    if not rows:
        lines.append(Content.styled("  no session holds anything", "$muted"))
    return Content("\n").join(lines)


def bill_line(state: PoolState) -> Content | None:
    """Return what the bills are together, and what of the active blocks is in none; None where bills are not told."""
    rows, public = state.sessions, state.totals.public
    if rows is None or public is None or any(row.bill is None for row in rows):
        return None
    bills = sum(row.bill or 0.0 for row in rows)
    rest = max(0.0, state.totals.active - public - bills)
    parts = [f"bills {bill_words(bills)}"]
    if public:
        parts.append(f"public prompts {public}")
    if rest >= 0.05:
        parts.append(f"others {bill_words(rest)}")
    return Content.styled(f"  {' + '.join(parts)} = active {state.totals.active}", "$muted")


def tenant_table(rows: Sequence[TenantBlocks], width: int) -> Content | None:
    """Return the tenants' shares and floors; None where there is one tenant, and nothing is promised to it."""
    if len(rows) < 2 and not any(row.floor for row in rows):
        return None
    ordered = sorted(rows, key=lambda row: (-row.active, row.tenant))
    lines = table("tenant", TENANT_COLUMNS, ordered, width, lambda row: Content(clean_line(row.tenant, 60)))
    return Content("\n").join(lines)


def totals_line(totals: PoolTotals, tiers: Sequence[TierBlocks] = ()) -> Content:
    """Return the counts of the pool, and what the tiers below it keep of what they can."""
    again = () if totals.wanted_again is None else (("wanted again", short_number(totals.wanted_again)),)
    parts = [
        ("active", f"{short_number(totals.active)} ({percent(totals.active / max(1, totals.blocks))})"),
        ("shared", short_number(totals.shared)),
        ("cached", short_number(totals.cached)),
        ("free", short_number(totals.free)),
        ("evictions", short_number(totals.evictions)),
        *again,
        ("hit", percent(totals.hit_rate)),
        *((clean_line(row.tier, 8), f"{short_number(row.used)}/{short_number(row.blocks)}") for row in tiers),
    ]
    return Content("  ").join([Content.assemble((f"{name} ", "$muted"), (value, "bold")) for name, value in parts])

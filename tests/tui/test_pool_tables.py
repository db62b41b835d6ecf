"""What the page says in tables and of a cell: aligned, cleaned, and told apart without color."""

from hypothesis import given, settings
from hypothesis import strategies as st

from chatd import protocol as p
from chatd.client import PoolState
from chatd_tui.widgets.pool_cell import CellView, cell_at, cell_text, owner_words
from chatd_tui.widgets.pool_tables import (
    SESSION_COLUMNS,
    aged,
    bill_line,
    chosen_columns,
    lease_words,
    session_table,
    short_time,
    tenant_table,
    totals_line,
)

TOTALS = p.PoolTotals(
    blocks=256, free=100, cached=60, active=96, shared=16, evictions=3, hit_rate=0.5, tok_s=9.0, running=1, waiting=0
)


def session(**changes) -> p.SessionBlocks:
    fields = {"session": "s", "title": "t", "held": 2, "shared": 0, "tokens": 30, "tier": "device", "active": False}
    return p.SessionBlocks(**{**fields, **changes})


def block(**changes) -> p.CellBlock:
    fields = {
        "block": 7,
        "state": "active",
        "references": 1,
        "public": False,
        "registered": True,
        "tokens": 16,
        "age_s": 94.0,
        "holders": [],
        "others": 0,
    }
    return p.CellBlock(**{**fields, **changes})


def state(**fields) -> PoolState:
    return PoolState(**{"step": 1, "totals": TOTALS, "tenants": (), **fields})


def test_the_table_lists_sessions_by_what_they_hold_in_aligned_columns() -> None:
    rows = [
        session(session="a", title="small", bill=1.5, lease="idle", idle_s=300.0),
        session(
            session="b",
            title="large, with a very long title",
            held=70,
            shared=4,
            tokens=1120,
            tier="host",
            active=True,
            bill=67.3333,
            lease="answering",
            idle_s=0.0,
        ),
    ]
    lines = session_table(rows, 60).plain.split("\n")
    assert [len(line) for line in lines] == [60, 60, 60]
    assert lines[1].startswith("● large")
    assert lines[2].startswith("  small")
    assert session_table([], 50).plain.split("\n")[1] == "  no session holds anything"


@settings(deadline=None)
@given(st.integers(20, 140))
def test_a_table_is_as_wide_as_its_room_and_drops_the_least_wanted_columns(width) -> None:
    lines = session_table([session(title="a" * 100)], width).plain.split("\n")
    assert {len(line) for line in lines} == {width}
    names = [column.name for column in chosen_columns(SESSION_COLUMNS, width)]
    ranks = sorted(column.rank for column in SESSION_COLUMNS if column.name in names)
    assert ranks == list(range(1, len(names) + 1))


def test_what_keeps_a_session_s_blocks_and_for_how_long() -> None:
    rows = [
        session(lease="answering", idle_s=0.0),
        session(lease="queued"),
        session(lease="idle", idle_s=42.0),
        session(lease="attached", idle_s=7200.0),
        session(lease="idle", idle_s=10.0, release_s=1500.0),
        session(lease="idle", held=0),
        session(active=True),
        session(),
        session(held=0),
    ]
    assert [lease_words(row) for row in rows] == [
        "answering",
        "queued",
        "idle 42s",
        "watched 2h",
        "25m left",
        "none",
        "answering",
        "idle",
        "–",
    ]


def test_a_row_grows_older_while_nothing_comes() -> None:
    idle, kept, older = aged(
        [session(lease="idle", idle_s=10.0), session(lease="idle", idle_s=1.0, release_s=3.0), session()], 5.0
    )
    assert (idle.idle_s, idle.release_s) == (15.0, None)
    assert (kept.idle_s, kept.release_s) == (6.0, 0.0)
    assert (older.idle_s, older.release_s) == (None, None)


def test_times_are_told_in_one_unit() -> None:
    assert [short_time(s) for s in (-1, 0, 59.4, 60, 3600, 90_000)] == ["0s", "0s", "59s", "1m", "1h", "1d"]


def test_other_people_s_sessions_are_named_by_tenant_and_id() -> None:
    lines = session_table([session(title="", tenant="be\x1bta", session="ses_9")], 60).plain
    assert "be␛ta/ses_9" in lines
    assert "untitled" in session_table([session(title="")], 60).plain


def test_the_bills_and_what_is_nobody_s_are_the_active_blocks() -> None:
    rows = (session(bill=60.5), session(bill=30.5))
    line = bill_line(state(sessions=rows, totals=totals(public=4)))
    assert line is not None
    assert line.plain == "  bills 91.0 + public prompts 4 + others 1.0 = active 96"
    assert bill_line(state(sessions=rows)) is None
    assert bill_line(state(sessions=(session(),), totals=totals(public=0))) is None
    assert bill_line(state(totals=totals(public=0))) is None


def totals(**changes) -> p.PoolTotals:
    return p.PoolTotals(**{**{name: getattr(TOTALS, name) for name in TOTALS.__struct_fields__}, **changes})


def test_tenants_have_a_table_where_there_are_several_or_something_is_promised() -> None:
    acme = p.TenantBlocks(
        tenant="acme",
        active=70,
        cached=20,
        running=2,
        waiting=1,
        weight=3.0,
        share=64.0,
        floor=16,
        evicted=9,
        wanted_again=4,
    )
    beta = p.TenantBlocks(tenant="beta", active=3, cached=0, running=0, waiting=0, weight=1.0, share=192.0, floor=0)
    text = tenant_table([beta, acme], 90)
    assert text is not None
    head, first, second = text.plain.split("\n")
    assert head.split() == ["tenant", "holds", "share", "floor", "cached", "weight", "run", "wait", "lost", "again"]
    assert first.split() == ["acme", "70", "▲64", "16", "20", "3", "2", "1", "9", "4"]
    assert second.split() == ["beta", "3", "192", "0", "0", "1", "0", "0", "–", "–"]
    assert tenant_table([beta], 90) is None
    assert tenant_table([acme], 90) is not None
    assert tenant_table([], 90) is None


def test_totals_tell_what_was_wanted_again_where_the_daemon_does() -> None:
    assert "wanted again" not in totals_line(TOTALS).plain
    assert "evictions 3  wanted again 2  hit" in totals_line(totals(wanted_again=2)).plain


def test_a_cell_tells_each_of_its_blocks() -> None:
    holder = p.CellHolder(session="ses_1", title="Capitals", own=True, tenant="local", tokens=16)
    facts = p.PoolInspected(
        cell=7,
        blocks_per_cell=2,
        blocks=[
            block(
                block=14, state="shared", references=2, place=2, holders=[holder], others=1, hit_age_s=12.0, tenant="t"
            ),
            block(block=15, state="cached", references=0, place=3, tokens=16),
        ],
    )
    view = CellView(7, 2, (0, 1, 0, 1), facts)
    lines = cell_text(view, 16, 100).plain.split("\n")
    assert view.title == "cell 7: blocks 14 to 15"
    assert lines[0] == "░ 1 cached   █ 1 shared"
    assert lines[1].split() == ["block", "state", "refs", "tokens", "age", "last", "hit", "of"]
    assert lines[2].split() == ["█", "14", "shared", "2", "32–47", "(16)", "2m", "12s", "ago", "Capitals,", "1", "more"]
    assert lines[3].split()[:8] == ["░", "15", "cached", "0", "48–63", "(16)", "2m", "never"]


def test_whose_a_block_is() -> None:
    own = p.CellHolder(session="ses_1", title="Mine\x1b[31m [bold]", own=True, tokens=16)
    theirs = p.CellHolder(session="ses_2", title="", own=False, tenant="beta", tokens=16)
    colleague = p.CellHolder(session="ses_3", title="", own=False, tokens=16)
    words = [
        owner_words(block(holders=[own])),
        owner_words(block(holders=[own, theirs], others=2)),
        owner_words(block(holders=[colleague])),
        owner_words(block(others=1)),
        owner_words(block(others=3)),
        owner_words(block(public=True, others=2)),
        owner_words(block(tenant="beta", references=0)),
        owner_words(block(references=0, registered=False)),
    ]
    assert words == [
        "Mine␛[31m [bold]",
        "Mine␛[31m [bold], beta/ses_2, 2 more",
        "ses_3",
        "another's",
        "3 others'",
        "a public prompt, 2 others'",
        "beta: nobody holds it, can be found",
        "nobody holds it, cannot be found",
    ]


def test_a_cell_without_facts_says_why_and_a_free_one_that_nothing_is_in_it() -> None:
    assert cell_text(CellView(0, 1, (0, 0, 1, 0), None, "why"), 16, 80).plain == "▒ 1 active\nwhy"
    nothing = p.PoolInspected(cell=0, blocks_per_cell=1, blocks=[])
    assert cell_text(CellView(0, 1, (1, 0, 0, 0), nothing), 16, 80).plain.split("\n")[1].startswith("free:")
    gone = cell_text(CellView(0, 1, (0, 0, 1, 0), nothing), 16, 80).plain
    assert gone.split("\n")[1].startswith("there is nothing to tell")
    large = p.PoolInspected(cell=0, blocks_per_cell=100, blocks=[], left_out=36)
    assert "36 more" in cell_text(CellView(0, 100, (0, 100, 0, 0), large), 16, 80).plain
    assert cell_at([(1, 0, 0, 0)], 5) == (0, 0, 0, 0)


def test_a_narrow_cell_leaves_out_hits_and_ages_so_that_its_owners_can_be_read() -> None:
    holder = p.CellHolder(session="ses_1", title="Capitals of Europe", own=True, tenant="local", tokens=16)
    facts = p.PoolInspected(cell=1, blocks_per_cell=1, blocks=[block(block=1, place=2, holders=[holder])])
    view = CellView(1, 1, (0, 0, 1, 0), facts)
    for width, left_out in ((72, ()), (71, ("last hit",)), (60, ("last hit",)), (52, ("last hit", "age"))):
        _, head, line = cell_text(view, 16, width).plain.split("\n")
        assert [name for name in ("last hit", "age") if name not in head] == list(left_out)
        assert len(line) <= width
        assert line[head.index("of") :].startswith("Capitals")

import random

import pytest

from chatd import protocol as p
from chatd.client.pool import PoolState, apply_frame
from chatd_tui.widgets.pool_map import GLYPHS, MapLayout, cell_state, cells_for, map_layout, map_rows
from chatd_tui.widgets.pool_tables import totals_line
from chatd_tui.widgets.sparkline import fitted, spark

TOTALS = p.PoolTotals(
    blocks=256, free=100, cached=60, active=96, shared=16, evictions=3, hit_rate=0.5, tok_s=9.0, running=1, waiting=0
)


@pytest.mark.parametrize(
    ("counts", "state"),
    [
        ((4, 0, 0, 0), "free"),
        ((1, 3, 0, 0), "cached"),
        ((0, 1, 3, 0), "active"),
        ((0, 1, 1, 2), "shared"),
        ((2, 2, 0, 0), "cached"),
        ((1, 1, 1, 1), "shared"),
        ((0, 0, 0, 0), "free"),
    ],
)
def test_a_cell_shows_what_most_of_its_blocks_are(counts: tuple[int, int, int, int], state: str) -> None:
    assert cell_state(counts) == state


def test_the_four_states_have_four_glyphs() -> None:
    assert len(set(GLYPHS.values())) == 4
    assert all(len(glyph) == 1 for glyph in GLYPHS.values())


@pytest.mark.parametrize(
    ("cells", "width", "height", "layout"),
    [
        (256, 76, 6, MapLayout(72, 4, 1)),
        (256, 64, 28, MapLayout(16, 16, 3)),
        (256, 64, 12, MapLayout(32, 8, 2)),
        (4096, 76, 6, MapLayout(72, 57, 1)),
        (64, 5, 3, MapLayout(5, 13, 1)),
        (0, 64, 10, MapLayout(16, 0, 3)),
    ],
)
def test_the_layout_fills_the_area(cells: int, width: int, height: int, layout: MapLayout) -> None:
    assert map_layout(cells, width, height) == layout


def test_the_daemon_is_asked_for_as_many_cells_as_fit_within_its_bounds() -> None:
    assert cells_for(76, 6) == 432
    assert cells_for(7, 1) == 64
    assert cells_for(400, 100) == 4096


def test_rows_are_the_glyphs_in_order() -> None:
    states = ["free", "cached", "active", "shared", "free"]
    assert map_rows(states, MapLayout(2, 3)) == ["·░", "▒█", "·"]
    assert map_rows(states, MapLayout(3, 2, 2)) == ["··░░▒▒", "██··"]


def record(num_blocks: int, per_cell: int, steps: int) -> tuple[list[list[int]], list[str]]:
    """States of each block at each step, and the frames that a daemon sends of them."""
    rng = random.Random(7)
    blocks = [0] * num_blocks
    count = -(-num_blocks // per_cell)
    tables, frames, sent = [], [], None
    for step in range(steps):
        for _ in range(rng.randrange(9)):
            blocks[rng.randrange(num_blocks)] = rng.randrange(4)
        tables.append(list(blocks))
        folded = []
        for start in range(0, num_blocks, per_cell):
            cell = blocks[start : start + per_cell]
            folded.append((cell.count(0), cell.count(1), cell.count(2), cell.count(3)))
        index = None if sent is None else [i for i in range(count) if folded[i] != sent[i]]
        data = p.pack_cells(folded if index is None else [folded[i] for i in index])
        cells = p.Cells(count=count, blocks_per_cell=per_cell, data=data, index=index)
        kind = p.PoolSnapshot if sent is None else p.PoolDelta
        frames.append(p.encode(kind(step=step, totals=TOTALS, tenants=[], cells=cells)))
        sent = folded
    return tables, frames


@pytest.mark.parametrize(("num_blocks", "per_cell"), [(256, 1), (250, 4), (1000, 7)])
def test_the_drawn_cells_are_the_blocks_of_the_table_at_every_recorded_step(num_blocks: int, per_cell: int) -> None:
    tables, frames = record(num_blocks, per_cell, 60)
    state: PoolState | None = None
    for table, frame in zip(tables, frames, strict=True):
        event = p.decode_event(frame)
        assert isinstance(event, p.PoolSnapshot | p.PoolDelta)
        state = apply_frame(state, event)
        assert state is not None
        assert state.cells is not None
        assert sum(map(sum, state.cells.counts)) == num_blocks
        drawn = [cell_state(counts) for counts in state.cells.counts]
        for index, name in enumerate(drawn):
            cell = table[index * per_cell : (index + 1) * per_cell]
            most = max(range(4), key=lambda value, cell=cell: (cell.count(value), value))
            assert name == p.CELL_STATES[most]


def test_a_delta_of_another_folding_changes_the_totals_and_not_the_map() -> None:
    first = p.PoolSnapshot(
        step=1,
        totals=TOTALS,
        tenants=[],
        cells=p.Cells(count=2, blocks_per_cell=4, data=p.pack_cells([(4, 0, 0, 0)] * 2)),
    )
    stale = p.PoolDelta(
        step=2,
        totals=TOTALS,
        tenants=[],
        cells=p.Cells(count=4, blocks_per_cell=2, data=p.pack_cells([(0, 2, 0, 0)]), index=[3]),
    )
    assert apply_frame(None, stale) is None
    before = apply_frame(None, first)
    after = apply_frame(before, stale)
    assert before is not None
    assert after is not None
    assert after.cells == before.cells
    assert after.step == 2


def test_bars_are_scaled_and_right_aligned() -> None:
    assert spark([0, 1, 2, 4, 8], 8) == "    ▁▂▄█"
    assert spark([0.001, 0.5, 1.0], 3, 1.0) == "▁▄█"
    assert spark([1, 2, 3], 2) == "▆█"
    assert spark([], 3) == "   "
    assert spark([5], 0) == ""


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [([1, 5, 2, 3], 2, [5, 3]), ([1, 5, 2], 2, [1, 5]), ([1, 2], 9, [1, 2]), ([1, 2], 0, []), ([], 3, [])],
)
def test_a_past_is_fitted_into_fewer_columns_by_its_peaks(values, width, shown) -> None:
    assert fitted(values, width) == shown


def test_totals_fit_a_narrow_terminal() -> None:
    assert totals_line(TOTALS).plain == "active 96 (38%)  shared 16  cached 60  free 100  evictions 3  hit 50%"
    tiers = [p.TierBlocks(tier="host", blocks=64, used=16), p.TierBlocks(tier="disk\x1b", blocks=2880, used=17)]
    assert totals_line(TOTALS, tiers).plain == totals_line(TOTALS).plain + "  host 16/64  disk␛ 17/2.9k"

"""The cells on the screen are the engine's own table, through the server's folding, the wire and the client."""

import random

import pytest

from chatd import protocol as p
from chatd.client import PoolState
from chatd.client.pool import apply_frame
from chatd.engine.messages import Release, WatchPool
from chatd.kvcache.block_pool import BlockPool
from chatd.server.auth import Principal
from chatd.server.pool_view import PoolStep, PoolSubscription
from chatd.testing.engine import EngineHarness, FakeClock, engine_config, sampling_params
from chatd_tui.widgets.pool_map import GLYPHS, cell_state, map_layout, map_rows

NUM_BLOCKS = 120
OPERATOR = Principal("k", "acme", "ann", True, ())


def state_of(pool: BlockPool, block_id: int) -> str:
    """Say what a block is by its references and its entry, not by what the pool reports."""
    block = pool.blocks[block_id]
    if block.ref_count == 0:
        return "free" if block.entry is None else "cached"
    return "active" if block.ref_count == 1 else "shared"


@pytest.mark.parametrize("cells", [64, 128])
def test_the_drawn_cells_are_the_engine_s_own_table_at_every_step(cells: int) -> None:
    engine = EngineHarness(engine_config(num_blocks=NUM_BLOCKS))
    engine.send(WatchPool(0.001, with_map=True, with_leases=True))
    clock = FakeClock()
    command = p.PoolSubscribe(hz=10.0, detail="map", cells=cells)
    subscription = PoolSubscription(OPERATOR, command, sees_all=lambda: True, clock=clock)
    rng, shown, seen = random.Random(3), None, set()
    prefix = list(range(1, 49))
    for step in range(120):
        if step % 9 == 0:
            ids = prefix + [rng.randrange(1, 90) for _ in range(rng.randrange(1, 60))]
            engine.submit(step, ids, params=sampling_params(max_tokens=rng.randrange(1, 30)))
        if step > 40 and step % 18 == 0:
            engine.send(Release(step - 36))
        engine.step()
        clock.now += 1.0
        engine.clock.now += 1.0
        subscription.offer(PoolStep(engine.core.pool_frame(engine.clock.now), {}))
        event = p.decode_event(p.encode(subscription.take()))
        assert isinstance(event, p.PoolSnapshot if shown is None else p.PoolDelta)
        shown = apply_frame(shown, event)
        seen |= check(shown, engine.core.scheduler.kv.pool)
    assert seen == set(p.CELL_STATES), "the workload did not show every state"


def check(shown: PoolState | None, pool: BlockPool) -> set[str]:
    assert shown is not None
    assert shown.cells is not None
    table = [state_of(pool, block.block_id) for block in pool.blocks]
    size = shown.cells.blocks_per_cell
    folded = [table[start : start + size] for start in range(0, len(table), size)]
    assert list(shown.cells.counts) == [tuple(map(cell.count, p.CELL_STATES)) for cell in folded]
    assert shown.totals.free + shown.totals.cached + shown.totals.active == len(table)
    drawn = "".join(map_rows([cell_state(counts) for counts in shown.cells.counts], map_layout(len(folded), 80, 20)))
    if size == 1:
        assert drawn.replace(" ", "") == "".join(GLYPHS[state] * (len(drawn) // len(table)) for state in table)
    return set(table)

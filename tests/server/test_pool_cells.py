"""A cell of the map as callers may see it: everything, or one's own and nothing that depends on others."""

import asyncio
import random

import pytest

from chatd.engine.client import EngineDied
from chatd.engine.messages import BlockFacts, BlockHolder, InspectBlocks, Inspected, LeaseId, Release
from chatd.errors import RateLimited
from chatd.protocol import CELL_STATES, CellBlock, CellHolder, Error, Ping, PoolInspect, PoolInspected, encode
from chatd.server.auth import Principal
from chatd.server.pool_cells import CellPointer, cell_block
from chatd.sessions.conversation import Owner
from chatd.sessions.engine_events import LeaseHolder
from chatd.testing.engine import EngineHarness, FakeClock, engine_config, sampling_params

from .conftest import eventually

OPERATOR = Principal("k", "acme", "ann", True, ())
BOB = Principal("k", "acme", "bob", False, ())
EVE = Principal("k", "beta", "eve", False, ())
SESSIONS = {
    LeaseId(1): LeaseHolder(Owner("acme", "ann"), "ses_ann", "ann's", False),
    LeaseId(2): LeaseHolder(Owner("acme", "bob"), "ses_bob", "bob's", False),
    LeaseId(3): LeaseHolder(Owner("beta", "eve"), "ses_eve", "canary", False),
}


def facts(*leases: int, tenant: str = "acme", ref_count: int | None = None, **fields) -> BlockFacts:
    holders = [BlockHolder(LeaseId(lease), 3, 16) for lease in leases]
    values = {
        "number": 7,
        "state": 3 if len(leases) > 1 else 2,
        "tenant": tenant,
        "ref_count": len(leases) if ref_count is None else ref_count,
        "is_registered": True,
        "place": 3,
        "num_tokens": 16,
        "age_s": 40.0,
        "hit_age_s": 2.5,
        "holders": holders,
    }
    return BlockFacts(**{**values, **fields})


def test_the_operator_is_told_whose_a_block_is_and_no_titles_but_its_own() -> None:
    seen = cell_block(facts(1, 2), SESSIONS, OPERATOR, sees_all=True)
    assert seen == CellBlock(
        block=7,
        state="shared",
        references=2,
        tenant="acme",
        public=False,
        registered=True,
        place=3,
        tokens=16,
        age_s=40.0,
        hit_age_s=2.5,
        holders=[
            CellHolder(session="ses_ann", title="ann's", own=True, tenant="acme", tokens=16),
            CellHolder(session="ses_bob", title="", own=False, tenant="acme", tokens=16),
        ],
        others=0,
    )
    foreign = cell_block(facts(3, tenant="beta"), SESSIONS, OPERATOR, sees_all=True)
    assert [(holder.tenant, holder.session, holder.title) for holder in foreign.holders] == [("beta", "ses_eve", "")]


def test_a_user_is_told_its_own_sessions_and_how_many_others_hold_the_block() -> None:
    seen = cell_block(facts(1, 2, ref_count=4), SESSIONS, BOB, sees_all=False)
    assert [(holder.session, holder.title, holder.tenant) for holder in seen.holders] == [("ses_bob", "bob's", None)]
    assert (seen.others, seen.tenant) == (3, None)
    assert "ann" not in encode(PoolInspected(cell=0, blocks_per_cell=1, blocks=[seen]))


def test_a_public_block_is_charged_to_nobody_and_a_cached_one_is_held_by_nobody() -> None:
    public = cell_block(facts(1, tenant=""), SESSIONS, OPERATOR, sees_all=True)
    assert (public.public, public.tenant) == (True, None)
    cached = cell_block(facts(state=1, place=-1, hit_age_s=None), SESSIONS, BOB, sees_all=False)
    assert (cached.state, cached.holders, cached.others, cached.place, cached.hit_age_s) == (
        "cached",
        [],
        0,
        None,
        None,
    )


async def test_a_tenant_s_answers_are_the_same_bytes_whatever_others_do() -> None:
    """S4 for cells: beta floods in one world and idles in the other; what acme's bob gets of each cell is equal."""

    async def watched(is_flooding: bool) -> list[str]:
        engine = EngineHarness(engine_config(num_blocks=128))
        clock = FakeClock()

        async def inspect(first: int, num_blocks: int, tenant: str | None) -> Inspected:
            (answer,) = engine.send(InspectBlocks(1, first, num_blocks, tenant))
            return answer

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)

        pointer = CellPointer(BOB, clock, sleep)
        rng, noise = random.Random(5), random.Random(6)
        sent = []
        for turn in range(8):
            if is_flooding:
                for extra in range(3):
                    ids = [noise.randrange(1, 90) for _ in range(noise.randrange(5, 60))]
                    request = 1000 + 10 * turn + extra
                    engine.generate(request, ids, tenant="beta", params=sampling_params(2), keep_lease=extra == 0)
                if turn % 3 == 2:
                    engine.send(Release(1000 + 10 * turn))
            ids = [7, 8, 9, 10, 11, 12, 13, 14, *(rng.randrange(1, 90) for _ in range(rng.randrange(1, 20)))]
            engine.generate(turn, ids, params=sampling_params(2), keep_lease=turn % 4 != 3)
            engine.clock.now = float(turn + 1)
            for cell in range(12):
                command = PoolInspect(id="c", cell=cell, blocks_per_cell=3)
                pointer.begin()
                sent.append(encode(await pointer.answer(command, inspect, SESSIONS, lambda: False, 128)))
        return sent

    quiet = await watched(is_flooding=False)
    assert quiet == await watched(is_flooding=True)
    assert all(f'"{state}"' in "".join(quiet) for state in CELL_STATES[1:]), "the workload did not show every state"


async def test_a_tenant_asks_once_a_second_and_the_operator_ten_times() -> None:
    for sees_all, wanted in ((False, [1.0, 1.0]), (True, [0.1, 0.1])):
        clock, slept = FakeClock(), []

        async def sleep(seconds: float, slept=slept, clock=clock) -> None:
            slept.append(round(seconds, 6))
            clock.advance(seconds)

        async def inspect(first: int, num_blocks: int, tenant: str | None) -> Inspected:
            return Inspected(1, 1, [])

        pointer = CellPointer(EVE, clock, sleep)
        for _ in range(3):
            pointer.begin()
            await pointer.answer(PoolInspect(cell=0), inspect, {}, lambda sees_all=sees_all: sees_all, 128)
        assert slept == wanted


async def test_one_question_at_a_time_is_taken() -> None:
    pointer = CellPointer(EVE, FakeClock())
    pointer.begin()
    with pytest.raises(RateLimited) as refused:
        pointer.begin()
    assert refused.value.error_code == "busy"


async def test_the_blocks_of_a_large_cell_beyond_the_bound_are_counted_as_left_out() -> None:
    asked = []

    async def inspect(first: int, num_blocks: int, tenant: str | None) -> Inspected:
        asked.append((first, num_blocks, tenant))
        return Inspected(1, 1, [])

    async def left_out(cell: int) -> int:
        clock = FakeClock()
        command = PoolInspect(cell=cell, blocks_per_cell=100)
        answer = await CellPointer(EVE, clock).answer(command, inspect, {}, lambda: False, 480)
        assert answer.blocks == []
        return answer.left_out

    assert await left_out(3) == 36
    assert asked == [(300, 100, "beta")]
    # The last cell has 80 blocks, and one that the map does not have has none.
    assert [await left_out(cell) for cell in (4, 5, 2**31)] == [16, 0, 0]


async def test_two_tenants_look_at_the_same_blocks_and_each_sees_its_own(start) -> None:
    async with start() as running, running.chat(running.keys["ann"]) as ann, running.chat(running.keys["eve"]) as eve:
        assert "pool.inspect" in eve.hello.caps
        running.engine.blocks = [facts(99, tenant="acme")]
        answer = await ann.ask(PoolInspect(id="a", cell=7))
        assert [(row.tenant, row.holders, row.others) for row in answer.blocks] == [("acme", [], 1)]
        assert InspectBlocks(1, 7, 1, None) in running.engine.sent
        await eve.ask(PoolInspect(id="e", cell=7))
        assert InspectBlocks(2, 7, 1, "beta") in running.engine.sent


async def test_a_question_holds_up_no_other_command_and_a_second_one_is_refused(start) -> None:
    async with start() as running, running.chat(running.keys["eve"]) as eve:
        running.engine.held = True
        await eve.send(PoolInspect(id="first", cell=0))
        await eventually(lambda: any(isinstance(sent, InspectBlocks) for sent in running.engine.sent))
        refused = await eve.ask(PoolInspect(id="second", cell=0))
        assert isinstance(refused, Error)
        assert (refused.error.code, refused.error.retry_after_ms) == ("busy", 1000)
        assert (await eve.ask(Ping(id="p", t=1.0))).t == 1.0
        running.engine.held = False
        assert (await eve.next()).re == "first"


async def test_an_engine_that_ends_meanwhile_is_told(start) -> None:
    async with start() as running, running.chat(running.keys["eve"]) as eve:
        running.engine.held = True
        await eve.send(PoolInspect(id="q", cell=0))
        await eventually(lambda: any(isinstance(sent, InspectBlocks) for sent in running.engine.sent))
        running.manager.on_engine_messages([EngineDied("killed", -9)])
        refused = await eve.next()
        assert (refused.re, refused.error.code) == ("q", "engine_unavailable")


async def test_an_answer_that_nobody_waits_for_any_more_changes_nothing(start) -> None:
    async with start() as running:
        asking = asyncio.create_task(running.manager.inspect_blocks(0, 1, None))
        await eventually(lambda: bool(running.engine.sent))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        running.manager.on_engine_messages([Inspected(1, 1, []), Inspected(77, 1, [])])

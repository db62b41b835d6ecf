"""The pool as callers may see it: all of it, or one's own and nothing that depends on others."""

import asyncio
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.client.pool import apply_frame
from chatd.engine.messages import Fork, LeaseId, LeasePool, LeaseUse, PoolFrame, TenantPool, Tier, TierPool, WatchPool
from chatd.protocol import PoolDelta, PoolSnapshot, PoolSubscribe, PoolUnsubscribe, decode_event, encode, pack_cells
from chatd.server.auth import Principal
from chatd.server.pool_hub import PoolHub
from chatd.server.pool_view import PoolStep, PoolSubscription, blocks_per_cell, fold_states, pack_counts
from chatd.sessions.conversation import Owner
from chatd.sessions.manager import LeaseHolder
from chatd.testing.engine import EngineHarness, FakeClock, engine_config, sampling_params

from .conftest import eventually

NO_ONE = 65535
ANN = Principal("k", "acme", "ann", True, ())
EVE = Principal("k", "beta", "eve", False, ())


def frame(states: list[int], owners: list[int], tenants: tuple[str, ...] = ("acme", "beta"), step: int = 7, **fields):
    """A frame whose totals are those of its map."""
    rows = []
    for index, name in enumerate(tenants):
        own = [state for state, owner in zip(states, owners, strict=True) if owner == index]
        rows.append(
            TenantPool(
                name,
                num_active=sum(state >= 2 for state in own),
                num_cached=own.count(1),
                num_running=1,
                num_waiting=2,
                prompt_tokens=100 * (index + 1),
                cached_tokens=50,
                output_tokens=10,
            )
        )
    values = {
        "step": step,
        "num_blocks": len(states),
        "num_free": states.count(0),
        "num_cached": states.count(1),
        "num_active": sum(state >= 2 for state in states),
        "num_shared": states.count(3),
        "num_evictions": 4,
        "output_tokens_per_s": 12.5,
        "num_running": 2,
        "num_waiting": 4,
        "tenants": rows,
        "states": bytes(states),
        "owners": np.array(owners, dtype="<u2").tobytes(),
        **fields,
    }
    return PoolFrame(**values)


def look(principal=ANN, *, sees_all=True, clock=None, **command) -> PoolSubscription:
    command = {"detail": "map", "cells": 64, "hz": 10.0, **command}
    return PoolSubscription(principal, PoolSubscribe(**command), sees_all=lambda: sees_all, clock=clock or FakeClock())


def take(subscription: PoolSubscription, pool_frame: PoolFrame, sessions=None):
    assert subscription.offer(PoolStep(pool_frame, sessions or {})) == 0.0
    return subscription.take()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300), st.integers(1, 100))
def test_folding_counts_every_block_once(states, cells) -> None:
    per_cell = blocks_per_cell(len(states), cells)
    counts = fold_states(np.array(states, dtype=np.uint8), per_cell)
    assert len(counts) <= cells
    wanted = [
        tuple(states[i : i + per_cell].count(state) for state in range(4)) for i in range(0, len(states), per_cell)
    ]
    assert [tuple(row) for row in counts.tolist()] == wanted
    assert pack_counts(counts) == pack_cells(wanted)


def test_counts_that_do_not_fit_are_capped() -> None:
    counts = np.array([[70_000, 1, 2, 3]])
    assert pack_counts(counts) == pack_cells([(70_000, 1, 2, 3)])


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([64, 100, 256]))
def test_the_clients_map_is_the_engines_after_every_frame(seed, cells) -> None:
    rng = random.Random(seed)
    clock = FakeClock()
    subscription = look(clock=clock, cells=cells)
    states, owners = [0] * 300, [NO_ONE] * 300
    state = None
    for step in range(8):
        for _ in range(rng.randrange(20)):
            block = rng.randrange(300)
            states[block] = rng.randrange(4)
            owners[block] = rng.randrange(2) if states[block] else NO_ONE
        event = take(subscription, frame(states, owners, step=step))
        assert isinstance(event, PoolSnapshot if step == 0 else PoolDelta)
        state = apply_frame(state, event)
        per_cell = blocks_per_cell(300, cells)
        assert state.cells.counts == tuple(
            tuple(states[i : i + per_cell].count(kind) for kind in range(4)) for i in range(0, 300, per_cell)
        )
        clock.advance(1.0)


def test_a_delta_has_only_the_cells_that_changed() -> None:
    clock = FakeClock()
    subscription = look(clock=clock)
    states = [0] * 128
    take(subscription, frame(states, [NO_ONE] * 128))
    clock.advance(1)
    states[5], states[100] = 2, 1
    event = take(subscription, frame(states, [0] * 128))
    assert event.cells.index == [2, 50]
    assert event.cells.data == pack_cells([(1, 0, 1, 0), (1, 1, 0, 0)])


def test_the_operator_sees_everybody_and_nobodys_titles_but_its_own() -> None:
    sessions = {
        LeaseId(1): LeaseHolder(Owner("acme", "ann"), "ses_1", "mine", False),
        LeaseId(2): LeaseHolder(Owner("beta", "eve"), "ses_2", "canary", False),
    }
    leases = [
        LeasePool(LeaseId(1), "acme", 2, 1, 30, Tier.DEVICE, True),
        LeasePool(LeaseId(2), "beta", 3, 0, 40, Tier.TOKENS, False),
        LeasePool(LeaseId(3), "beta", 1, 0, 4, Tier.DEVICE, False),
    ]
    event = take(look(), frame([2, 2, 3, 1, 0], [0, 0, 1, 1, NO_ONE], leases=leases), sessions)
    assert [(row.session, row.title, row.held) for row in event.sessions] == [("ses_1", "mine", 2), ("ses_2", "", 3)]
    assert [row.tenant for row in event.tenants] == ["acme", "beta"]
    assert (event.totals.blocks, event.totals.active, event.totals.evictions) == (5, 3, 4)
    assert event.totals.hit_rate == round(100 / 300, 4)
    assert "canary" not in encode(event)


def test_the_operator_sees_what_each_tenant_is_entitled_to_and_what_it_lost() -> None:
    rows = [
        TenantPool("acme", 3, 1, 1, 0, 0, 0, 0, weight=3.0, floor=8, num_evicted=5, num_wanted_again=4),
        TenantPool("beta", 1, 0, 0, 2, 0, 0, 0),
    ]
    values = {"tenants": rows, "num_public": 2, "num_wanted_again": 6}
    event = take(
        look(), msgspec.structs.replace(frame([2, 2, 2, 2, 1, 0, 0, 0], [0, 0, 0, 1, 0] + [NO_ONE] * 3), **values)
    )
    acme, beta = event.tenants
    assert (acme.weight, acme.share, acme.floor, acme.evicted, acme.wanted_again) == (3.0, 6.0, 8, 5, 4)
    assert (beta.weight, beta.share, beta.floor) == (1.0, 2.0, 0)
    assert (event.totals.public, event.totals.wanted_again) == (2, 6)


def test_a_tenant_sees_its_own_floor_and_losses_and_no_share_that_tells_who_else_is_there() -> None:
    rows = [
        TenantPool("acme", 3, 1, 1, 0, 0, 0, 0, num_evicted=50, num_wanted_again=40),
        TenantPool("beta", 1, 0, 0, 2, 0, 0, 0, weight=2.0, floor=8, num_evicted=5, num_wanted_again=4),
    ]
    values = {"tenants": rows, "num_public": 2, "num_wanted_again": 44}
    event = take(
        look(EVE, sees_all=False),
        msgspec.structs.replace(frame([2, 2, 2, 2, 1, 0], [0, 0, 0, 1, 0, NO_ONE]), **values),
    )
    (beta,) = event.tenants
    assert (beta.weight, beta.share, beta.floor, beta.evicted, beta.wanted_again) == (2.0, None, 8, 5, 4)
    assert (event.totals.public, event.totals.evictions, event.totals.wanted_again) == (0, 5, 4)


def test_a_session_tells_its_bill_and_for_how_long_its_blocks_are_kept() -> None:
    sessions = {
        LeaseId(1): LeaseHolder(Owner("acme", "ann"), "ses_1", "mine", False, 12.34),
        LeaseId(2): LeaseHolder(Owner("beta", "eve"), "ses_2", "hers", False, 99.0),
    }
    leases = [
        LeasePool(LeaseId(1), "acme", 2, 1, 30, Tier.DEVICE, False, 1.5, LeaseUse.ATTACHED, 7.5),
        LeasePool(LeaseId(2), "beta", 3, 0, 40, Tier.DEVICE, True, 3.0, LeaseUse.ANSWERING, 0.0),
    ]
    event = take(look(), frame([2, 2, 3, 1, 0], [0, 0, 1, 1, NO_ONE], leases=leases), sessions)
    assert [(row.tenant, row.bill, row.lease, row.idle_s, row.release_s) for row in event.sessions] == [
        ("acme", 1.5, "attached", 7.5, 12.3),
        ("beta", 3.0, "answering", 0.0, None),
    ]
    (own,) = take(look(EVE, sees_all=False), frame([2], [1], leases=leases), sessions).sessions
    assert (own.session, own.tenant) == ("ses_2", None)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31))
def test_the_bills_of_all_sessions_and_the_public_blocks_are_the_active_ones(seed) -> None:
    """Through the engine, the frame and the wire: forks, shared prefixes and a public prompt, of two tenants."""
    rng = random.Random(seed)
    engine = EngineHarness(engine_config(num_blocks=120))
    engine.send(WatchPool(1.0, with_map=True, with_leases=True))
    engine.generate(1, list(range(1, 13)), tenant="", params=sampling_params(1), compute_only=True)
    owners = {}
    for number in range(2, 12):
        tenant = rng.choice(("acme", "beta"))
        ids = list(range(1, 13)) + [rng.randrange(1, 4) for _ in range(rng.randrange(1, 20))]
        engine.generate(number, ids, tenant=tenant, params=sampling_params(rng.randrange(1, 6)))
        owners[LeaseId(number)] = LeaseHolder(Owner(tenant, "u"), f"ses_{number}", "", False)
        if rng.random() < 0.4:
            engine.send(Fork(LeaseId(number), LeaseId(100 + number), rng.randrange(1, len(ids))))
            owners[LeaseId(100 + number)] = LeaseHolder(Owner(tenant, "u"), f"ses_{100 + number}", "", False)
    event = take(look(), engine.core.pool_frame(engine.clock.now), owners)
    event = decode_event(encode(event))
    assert sum(row.bill for row in event.sessions) + event.totals.public == pytest.approx(event.totals.active, abs=1e-4)
    for tenant in event.tenants:
        own = Principal("k", tenant.tenant, "u", False, ())
        alone = take(look(own, sees_all=False), engine.core.pool_frame(engine.clock.now), owners)
        assert sum(row.bill for row in alone.sessions) == pytest.approx(alone.totals.active, abs=1e-4)


def test_the_operator_sees_how_full_the_tiers_below_the_pool_are() -> None:
    tiers = [TierPool(Tier.HOST, 64, 16, 20, 5, 0), TierPool(Tier.DISK, 2880, 17, 20, 5, 1)]
    clock = FakeClock()
    subscription = look(clock=clock)
    for kind in (PoolSnapshot, PoolDelta):
        event = take(subscription, frame([2], [0], tiers=tiers))
        assert isinstance(event, kind)
        assert [(row.tier, row.blocks, row.used) for row in event.tiers] == [("host", 64, 16), ("disk", 2880, 17)]
        clock.advance(1.0)


def test_a_tenant_sees_its_own_blocks_packed_and_its_own_sessions() -> None:
    sessions = {
        LeaseId(1): LeaseHolder(Owner("acme", "ann"), "ses_1", "canary", False),
        LeaseId(2): LeaseHolder(Owner("beta", "eve"), "ses_2", "mine", False),
        LeaseId(3): LeaseHolder(Owner("beta", "zoe"), "ses_3", "canary", False),
    }
    leases = [LeasePool(LeaseId(i), "t", 1, 0, 4, Tier.DEVICE, False) for i in (1, 2, 3)]
    states, owners = [2, 0, 3, 1, 2, 3] + [0] * 58, [0, NO_ONE, 1, 1, 1, 0] + [NO_ONE] * 58
    event = take(look(EVE, sees_all=False), frame(states, owners, leases=leases), sessions)
    assert [(row.session, row.title) for row in event.sessions] == [("ses_2", "mine")]
    assert [row.tenant for row in event.tenants] == ["beta"]
    totals = event.totals
    assert (totals.blocks, totals.free, totals.cached, totals.active, totals.shared) == (64, 61, 1, 2, 1)
    assert (totals.evictions, totals.running, totals.waiting) == (0, 1, 2)
    packed = [(0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0)] + [(1, 0, 0, 0)] * 61
    assert event.cells.data == pack_cells(packed)
    assert "canary" not in encode(event)


@pytest.mark.parametrize("detail", ["summary", "sessions", "map"])
def test_a_tenants_frames_are_the_same_bytes_whatever_others_do(detail) -> None:
    """S4: B floods in one world and idles in the other; A's blocks lie elsewhere, and its frames are equal."""

    def watched(flooding: bool) -> list[str]:
        rng = random.Random(11)
        clock = FakeClock()
        subscription = look(EVE, sees_all=False, clock=clock, detail=detail)
        sent = []
        own_states: list[int] = []
        for step in range(12):
            own_states = [rng.randrange(1, 4) for _ in range(min(step, 10))]
            foreign = [rng.choice((1, 2, 3)) for _ in range(80)]
            others = foreign if flooding else []
            states = [*others, *own_states] + [0] * (100 - len(others) - len(own_states))
            owners = [0] * len(others) + [1] * len(own_states) + [NO_ONE] * (100 - len(others) - len(own_states))
            if flooding:
                order = rng.sample(range(100), 100)
                states, owners = [states[i] for i in order], [owners[i] for i in order]
            else:
                rng.sample(range(100), 100)
            pool_frame = frame(
                states,
                owners,
                step=step * (5 if flooding else 1),
                num_evictions=1000 if flooding else 0,
                output_tokens_per_s=900.0 if flooding else 0.0,
                num_running=9 if flooding else 1,
                tiers=[TierPool(Tier.DISK, 100, 9 if flooding else 1, 9 * flooding, 0, 0)],
            )
            sent.append(encode(take(subscription, pool_frame)))
            clock.advance(1.0)
        return sent

    assert watched(flooding=True) == watched(flooding=False)


def test_a_tenant_that_is_no_longer_alone_sees_its_own_from_then_on() -> None:
    clock = FakeClock()
    alone = [True]
    command = PoolSubscribe(detail="summary", hz=10.0)
    subscription = PoolSubscription(EVE, command, sees_all=lambda: alone[0], clock=clock)
    pool_frame = frame([2, 2, 1, 0], [0, 1, 0, NO_ONE])
    assert take(subscription, pool_frame).totals.active == 2
    alone[0] = False
    clock.advance(1.0)
    event = take(subscription, pool_frame)
    assert (event.totals.active, [row.tenant for row in event.tenants]) == (1, ["beta"])
    assert subscription.interval_s == 1.0


def test_a_tenant_is_shown_one_frame_a_second() -> None:
    clock = FakeClock()
    subscription = look(EVE, sees_all=False, clock=clock, hz=10.0)
    assert subscription.interval_s == 1.0
    step = PoolStep(frame([0] * 64, [NO_ONE] * 64), {})
    assert subscription.offer(step) == 0.0
    assert subscription.offer(step) == 1.0
    clock.advance(0.95)
    assert subscription.offer(step) == 0.0


def test_a_frame_without_the_map_is_not_for_who_wants_it() -> None:
    subscription = look()
    assert subscription.offer(PoolStep(msgspec.structs.replace(frame([0], [NO_ONE]), states=b""), {})) is None


def test_the_engine_is_asked_for_what_is_looked_at() -> None:
    asked = []
    hub = PoolHub(lambda *wish: asked.append(wish), FakeClock())
    hub.start()
    hub.subscribe("a", look(detail="summary", hz=2.0), lambda _source: None)
    hub.subscribe("b", look(detail="map", hz=10.0), lambda _source: None)
    hub.subscribe("b", look(detail="sessions", hz=5.0), lambda _source: None)
    hub.unsubscribe("b")
    hub.unsubscribe("b")
    hub.unsubscribe("a")
    assert asked == [
        (1.0, False, False),
        (0.5, False, False),
        (0.1, True, True),
        (0.2, False, True),
        (0.5, False, False),
        (1.0, False, False),
    ]


async def test_a_frame_that_comes_too_early_is_shown_when_it_is_time() -> None:
    loop = asyncio.get_running_loop()
    hub = PoolHub(lambda *_wish: None, loop.time)
    shown: asyncio.Queue = asyncio.Queue()
    hub.subscribe("a", look(detail="summary", hz=10.0, clock=loop.time), lambda source: shown.put_nowait(source()))
    for step in (1, 2, 3):
        hub.on_frame(frame([0] * 64, [NO_ONE] * 64, step=step), {})
    async with asyncio.timeout(5):
        assert [(await shown.get()).step for _ in range(2)] == [1, 3]
    hub.close()


async def test_a_connection_looks_at_the_pool_and_looks_away(start) -> None:
    async with start() as running, running.chat(running.keys["ann"]) as talk:
        pool_frame = frame([2, 1, 0, 3] * 32, [0, 1, NO_ONE, 0] * 32)
        await talk.send(PoolSubscribe(id="w", detail="map", cells=64))
        await eventually(lambda: WatchPool(1.0, True, True) in running.engine.sent)
        running.engine.say(pool_frame)
        snapshot = await talk.next()
        assert isinstance(snapshot, PoolSnapshot)
        assert snapshot.re == "w"
        assert snapshot.cells.count == 64
        done = await talk.ask(PoolUnsubscribe(id="u"))
        assert done.re == "u"

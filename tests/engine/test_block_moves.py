"""Sessions that come back from below the pool: the same answer, and no more computed than has to be."""

import dataclasses

import pytest

from chatd.engine.core import TenantLimits
from chatd.engine.cost_model import CostParameters
from chatd.engine.messages import Cancel, FinishReason, LeaseTier, Preempted, Tier, Waiting, WaitReason, WatchPool
from chatd.engine.transfer_costs import TransferCosts
from chatd.kvcache.tiers import MAX_READ_S
from chatd.testing.disk import FakeDisk
from chatd.testing.engine import EngineHarness, engine_config, sampling_params

SIZE = 4
CHEAP = TransferCosts(1e-6, 1e-6, 1e-6)
DEAR = TransferCosts(10.0, 10.0, 10.0)


def prompt(number, length):
    return [(7 * number + 3 * i) % 90 for i in range(length)]


def engine(*, disk=None, runner_options=None, **config):
    values = {"num_blocks": 16, "host_slots": 40, "max_model_len": 60, "transfer_costs": CHEAP}
    return EngineHarness(engine_config(**(values | config)), make_disk=disk, runner_options=runner_options or {})


def tiers_told(harness, lease):
    return [m.tier for m in harness.messages if isinstance(m, LeaseTier) and m.lease == lease]


def fill(harness, request, tokens=44):
    """Let another session want the whole pool."""
    harness.generate(request, prompt(request, tokens), lease=request)
    harness.settle()


def expected_answer(history):
    """What an engine answers that never kept anything."""
    fresh = engine(host_slots=0, num_blocks=100)
    return fresh.generate(1, history)


def come_back(harness, lease, request=99):
    """Go on with a session, and return what was computed and loaded for it."""
    history = [*harness.core.leases.get(lease).token_ids, 5, 6]
    rows, loaded = harness.runner.num_rows, harness.runner.num_loaded
    answer = harness.generate(request, [5, 6], lease=lease, base_len=len(history) - 2)
    assert answer == expected_answer(history)
    done = harness.done[request]
    assert done.num_cached_tokens + done.timings.num_prefill_tokens == len(history)
    return done.timings.num_prefill_tokens, harness.runner.num_loaded - loaded, harness.runner.num_rows - rows


def test_a_session_comes_back_from_the_host_and_only_what_is_no_full_block_is_computed():
    e = engine()
    e.generate(1, prompt(1, 21))
    e.settle()
    # 28 of the 29 tokens have KV: the last one drawn was never computed.
    assert e.runner.num_stored == 7
    fill(e, 2)
    assert tiers_told(e, 1)[-1] is Tier.HOST
    held = e.core.leases.get(1).table.num_computed_tokens
    computed, loaded, _ = come_back(e, 1)
    assert loaded == 7 - held // SIZE
    assert computed == 29 + 2 - 28


def test_the_time_of_moves_is_told_apart_from_the_models():
    e = engine(runner_options={"cost": CostParameters(0.25, 0.0, 0.0), "move_s": 0.5})
    e.generate(1, prompt(1, 21))
    e.settle()
    fill(e, 2)
    steps, before = e.core.stats().steps, e.core.stats().move_s
    _, loaded, _ = come_back(e, 1)
    stats = e.core.stats()
    assert loaded > 0
    assert stats.move_s - before >= 0.5 * loaded
    assert stats.model_s == pytest.approx(0.25 * stats.steps)
    assert stats.step_s == pytest.approx(stats.model_s + stats.move_s)
    assert stats.steps > steps


def test_where_nothing_is_kept_below_everything_is_computed_again():
    e = engine(host_slots=0)
    e.generate(1, prompt(1, 21))
    e.settle()
    fill(e, 2, 50)
    assert tiers_told(e, 1)[-1] is Tier.TOKENS
    computed, loaded, _ = come_back(e, 1)
    assert loaded == 0
    assert computed > 20
    assert e.core.pool_frame(0.0).tiers == []


def test_what_is_copied_down_ahead_makes_reclaiming_a_drop():
    e = engine()
    e.generate(1, prompt(1, 21))
    e.settle()
    stored = e.runner.num_stored
    assert stored == 7
    plans = []
    execute = e.runner.execute
    e.runner.execute = lambda plan: plans.append(plan) or execute(plan)
    e.submit(2, prompt(2, 44))
    while 2 not in e.done:
        e.step()
        if e.core.leases.shrunk or plans[-1].stores:
            assert not plans[-1].stores
    assert e.runner.num_stored == stored


def test_nothing_is_copied_twice_and_a_later_turn_copies_only_what_is_new():
    e = engine(num_blocks=64)
    e.generate(1, prompt(1, 21))
    e.settle()
    assert e.runner.num_stored == 7
    e.generate(2, [1, 2, 3, 4], lease=1, base_len=29)
    e.settle()
    assert e.runner.num_stored == (29 + 4 + 8 - 1) // SIZE
    e.settle()
    assert e.core.is_checked


def test_busy_steps_copy_down_too_but_little():
    e = engine(num_blocks=64, max_num_seqs=2, transfer_costs=TransferCosts(0.0, 1e-4, 1e-4))
    e.runner._cost = e.config.cost
    e.generate(1, prompt(1, 21))
    e.submit(2, prompt(2, 9), params=sampling_params(40))
    stored = []
    execute = e.runner.execute
    e.runner.execute = lambda plan: stored.append(len(plan.stores)) or execute(plan)
    e.run()
    assert sum(stored) == 7
    # A fiftieth of the steps' time does not pay for all of it at once.
    assert 1 <= max(stored) < 7


def test_a_stored_block_is_not_found_before_its_plan_is_committed():
    e = engine()
    e.generate(1, prompt(1, 21))
    e.runner.raise_next = True
    failures = e.core.stats().num_failed_steps
    e.core.idle(0.0)
    assert e.core.stats().num_failed_steps == failures + 1
    assert e.core.tiers.is_empty
    e.core.check_invariants()
    e.settle()


def test_a_step_that_fails_while_it_loads_computes_instead():
    e = engine()
    e.generate(1, prompt(1, 21))
    e.settle()
    fill(e, 2, 50)
    history = [*e.core.leases.get(1).token_ids, 5]
    e.submit(3, [5], lease=1, base_len=len(history) - 1)
    e.runner.raise_next = True
    e.run()
    assert e.outputs[3] == expected_answer(history)
    assert e.runner.num_loaded > 0
    assert e.done[3].timings.num_prefill_tokens > 20


def test_a_turn_in_another_tenants_name_finds_nothing():
    e = engine(num_blocks=32)
    e.generate(1, prompt(1, 21))
    e.settle()
    e.generate(2, [*prompt(1, 21), 1], tenant="blue")
    assert e.runner.num_loaded == 0
    assert e.done[2].num_cached_tokens == 0


def test_a_prompt_that_comes_back_without_its_session_is_loaded_too():
    e = engine()
    e.generate(1, prompt(1, 21), keep_lease=True)
    e.settle()
    fill(e, 2, 50)
    e.generate(3, [*prompt(1, 21), 1])
    assert e.done[3].num_cached_tokens == 20
    assert e.runner.num_loaded > 0


def test_loading_does_not_stall_those_who_are_answered():
    cost = engine_config().cost
    per_block_s = cost.step_s(1, 20) / 4
    e = engine(
        num_blocks=28,
        max_model_len=120,
        target_step_s=0.0,
        itl_ratio=1.5,
        transfer_costs=TransferCosts(0.0, 1e-6, per_block_s),
        runner_options={"cost": cost},
    )
    e.generate(1, prompt(1, 81))
    e.settle()
    fill(e, 2, 100)
    e.submit(3, prompt(3, 9), params=sampling_params(60))
    e.step(3)
    loads = []
    execute = e.runner.execute
    e.runner.execute = lambda plan: loads.append(len(plan.loads)) or execute(plan)
    e.submit(4, [5], lease=1, base_len=89)
    while 3 not in e.done:
        e.step()
    # Half of a decode step is left, and a block takes a quarter.
    assert sum(loads) > 10
    assert max(loads) <= 2


# The disk.


def with_disk(**options):
    made = []

    def make(runner):
        made.append(FakeDisk(runner, **options))
        return made[-1]

    return engine(disk=make, host_slots=12), made[0]


def on_disk():
    """An engine with a session whose KV is on the disk only."""
    e, disk = with_disk()
    e.generate(1, prompt(1, 21))
    e.settle()
    assert disk.num_stored == 7
    fill(e, 2)
    fill(e, 3)
    assert tiers_told(e, 1)[-1] is Tier.DISK
    return e, disk


def test_a_session_comes_back_from_the_disk():
    e, disk = on_disk()
    held = e.core.leases.get(1).table.num_computed_tokens // SIZE
    computed, loaded, _ = come_back(e, 1)
    assert loaded == 7 - held
    assert disk.num_loaded > 0
    assert computed == 3


def test_while_the_disk_reads_the_request_holds_nothing_and_says_why_it_waits():
    e, disk = on_disk()
    disk.latency = 5
    lease = e.core.leases.get(1)
    held = list(lease.table.block_ids)
    e.submit(4, [5], lease=1, base_len=29)
    e.step(2)
    assert not e.core.scheduler.running
    assert lease.table.block_ids == held
    waiting = [m for m in e.messages if isinstance(m, Waiting) and m.request == 4]
    assert waiting[-1].why is WaitReason.RESTORE
    e.run()
    assert e.done[4].num_cached_tokens == 28


@pytest.mark.parametrize("tenant", ["acme", "blue"])
def test_others_are_answered_while_the_disk_reads(tenant):
    e, disk = on_disk()
    disk.latency = 5
    e.submit(4, [5], lease=1, base_len=29)
    e.submit(5, prompt(5, 6), tenant=tenant)
    e.step(3)
    assert e.outputs[5]
    assert 4 not in e.outputs
    e.run()


def test_a_request_that_is_cancelled_while_the_disk_reads_leaves_nothing_behind():
    e, disk = on_disk()
    disk.latency = 5
    e.submit(4, [5], lease=1, base_len=29)
    e.step()
    e.send(Cancel(4))
    e.settle()
    assert e.core.scheduler.moves.num_restoring == 0
    computed, loaded, _ = come_back(e, 1)
    assert loaded > 0
    assert computed <= 4


def test_a_disk_that_never_answers_is_waited_for_no_longer_than_a_while_and_asked_no_more():
    e, disk = on_disk()
    disk.latency = 10**9
    history = [*e.core.leases.get(1).token_ids, 5, 6]
    e.submit(99, [5, 6], lease=1, base_len=len(history) - 2)
    e.step()
    assert disk.reads
    num_asked = len(disk.reads)
    e.clock.advance(MAX_READ_S - 0.5)
    e.step()
    assert 99 not in e.outputs
    e.clock.advance(1.0)
    e.run()
    assert e.outputs[99] == expected_answer(history)
    assert e.generate(100, prompt(3, 9)) == expected_answer(prompt(3, 9))
    assert len(disk.reads) == num_asked
    # A late answer is no hit, and frees its slot.
    disk.latency = 0
    for job in disk._jobs:
        job.due = 0
    e.step()
    e.settle()
    assert not e.core.tiers.is_stuck
    assert not e.core.tiers.is_reading
    e.core.check_invariants()


def test_what_the_disk_reads_slower_than_it_is_computed_is_computed():
    e, disk = on_disk()
    slow = TransferCosts(1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 10.0)
    e.core.scheduler.moves._config = dataclasses.replace(e.config, transfer_costs=slow)
    _, loaded, _ = come_back(e, 1)
    assert loaded == 0
    assert disk.reads == []


@pytest.mark.parametrize("fault", ["damaged", "fails_reads"])
def test_what_the_disk_cannot_give_back_is_computed(fault):
    e, disk = on_disk()
    history = [*e.core.leases.get(1).token_ids, 5]
    if fault == "damaged":
        disk.damaged.update(disk.digests)
    else:
        disk.fails_reads = True
    e.submit(4, [5], lease=1, base_len=29)
    e.run()
    assert e.outputs[4] == expected_answer(history)
    assert e.done[4].num_cached_tokens < 28


def test_one_damaged_block_costs_its_own_tokens_only():
    e, disk = on_disk()
    lease = e.core.leases.get(1)
    missing = range(lease.table.num_computed_tokens // SIZE, 7)
    disk.damaged.add(lease.digests[missing[1]])
    computed, loaded, _ = come_back(e, 1)
    assert loaded == len(missing) - 1
    assert computed == 3 + SIZE
    assert disk.num_refused == 1


def test_a_disk_that_takes_nothing_and_a_disk_that_is_full_cost_nothing_but_time():
    e, disk = with_disk()
    disk.is_paused = True
    e.generate(1, prompt(1, 21))
    e.settle()
    fill(e, 2)
    fill(e, 3)
    come_back(e, 1)
    e, disk = with_disk(num_blocks=3)
    e.generate(1, prompt(1, 21))
    fill(e, 2)
    fill(e, 3)
    come_back(e, 1)
    assert disk.num_used == 3


def test_a_session_longer_than_the_hosts_buffer_comes_back_from_the_disk():
    made = []
    e = engine(disk=lambda runner: made.append(FakeDisk(runner)) or made[0], host_slots=3, num_blocks=40)
    e.generate(1, prompt(1, 41))
    e.settle()
    assert made[0].num_stored == 12
    assert made[0].num_used == 12
    for number in (2, 3, 4):
        fill(e, number, 50)
    assert e.core.leases.get(1).table.num_computed_tokens == 0
    computed, loaded, _ = come_back(e, 1)
    assert (computed, loaded) == (3, 12)


# Preemption.


def two_that_do_not_fit(**config):
    e = engine(num_blocks=12, max_model_len=44, **config)
    for number in (1, 2):
        e.submit(number, prompt(number, 13), params=sampling_params(20))
    e.run()
    for number in (1, 2):
        fresh = engine(host_slots=0, num_blocks=100)
        assert e.outputs[number] == fresh.generate(1, prompt(number, 13), params=sampling_params(20))
    return e


def preemptions(e):
    return [(m.request, m.resumed) for m in e.messages if isinstance(m, Preempted)]


def test_a_victim_is_swapped_where_copying_costs_less():
    e = two_that_do_not_fit()
    assert e.core.stats().num_swapped == e.core.stats().num_preemptions > 0
    assert e.runner.num_loaded > 0
    assert preemptions(e)[:2] == [(2, False), (2, True)]


def test_a_victim_says_where_its_blocks_are():
    assert tiers_told(two_that_do_not_fit(), 2)[0] is Tier.HOST
    assert tiers_told(two_that_do_not_fit(transfer_costs=DEAR), 2)[0] is Tier.TOKENS


def test_a_victim_is_computed_again_where_copying_costs_more():
    e = two_that_do_not_fit(transfer_costs=DEAR)
    assert e.core.stats().num_swapped == 0
    assert e.core.stats().num_preemptions > 0
    assert e.runner.num_loaded == 0


@pytest.mark.parametrize(("mode", "costs"), [("swap", DEAR), ("recompute", CHEAP)])
def test_the_other_way_can_be_forced(mode, costs):
    e = two_that_do_not_fit(transfer_costs=costs, preemption=mode)
    assert (e.core.stats().num_swapped > 0) == (mode == "swap")
    assert (e.runner.num_loaded > 0) == (mode == "swap")


def one_that_gives_way_for_its_slot(**config):
    """Two requests of one tenant have both slots; another tenant's arrives."""
    e = engine(max_num_seqs=2, **config)
    e.submit(1, prompt(1, 5), params=sampling_params(40))
    e.submit(2, prompt(2, 17), params=sampling_params(30))
    e.step(4)
    e.submit(3, prompt(3, 3), tenant="blue", params=sampling_params(2))
    e.step()
    assert e.core.stats().num_preemptions == 1
    return e


@pytest.mark.parametrize(("num_blocks", "is_saved"), [(40, False), (12, True)])
def test_blocks_of_who_lost_its_slot_are_saved_only_where_they_would_not_stay_cached(num_blocks, is_saved):
    e = one_that_gives_way_for_its_slot(num_blocks=num_blocks)
    assert (e.core.stats().num_swapped == 1) == is_saved
    assert (e.runner.num_stored > 0) == is_saved
    e.run()
    assert e.outputs[2] == engine(host_slots=0, num_blocks=100).generate(1, prompt(2, 17), params=sampling_params(30))


def test_forcing_a_swap_saves_also_what_would_stay_cached():
    e = one_that_gives_way_for_its_slot(num_blocks=40, preemption="swap")
    assert e.core.stats().num_swapped == 1
    assert e.runner.num_stored == 5  # Of 20 computed tokens.


def test_a_swapped_request_computes_less_again_than_one_that_is_not():
    swapped = two_that_do_not_fit(preemption="swap")
    recomputed = two_that_do_not_fit(preemption="recompute")
    assert swapped.runner.num_rows < recomputed.runner.num_rows


def test_no_room_in_the_host_means_computing_again():
    e = two_that_do_not_fit(host_slots=0, preemption="swap")
    assert e.core.stats().num_preemptions > 0
    assert e.core.stats().num_swapped == 0


def test_swapping_does_not_let_two_requests_take_turns_for_ever():
    e = two_that_do_not_fit(preemption="swap")
    assert e.core.stats().num_preemptions <= 3


# What is told.


def test_frames_show_the_tiers_and_where_each_lease_is():
    e, disk = on_disk()
    e.send(WatchPool(1.0, with_leases=True))
    frame = e.core.pool_frame(0.0)
    host, below = frame.tiers
    assert (host.tier, host.num_blocks, host.num_used) == (Tier.HOST, 12, 12)
    assert (below.tier, below.num_used, below.num_stored) == (Tier.DISK, disk.num_used, disk.num_stored)
    assert {row.lease: row.tier for row in frame.leases}[1] is Tier.DISK


def test_a_lease_says_when_it_is_back_on_the_device():
    e, _ = on_disk()
    come_back(e, 1)
    told = [m for m in e.messages if isinstance(m, LeaseTier) and m.lease == 1]
    assert (told[-1].tier, told[-1].why) == (Tier.DEVICE, "used")


def test_who_finds_the_disk_busy_waits_for_its_turn(monkeypatch):
    monkeypatch.setattr("chatd.kvcache.tiers.MAX_READS", 2)
    e, disk = on_disk()
    e.generate(6, prompt(6, 21), lease=6, tenant="blue")
    e.settle()
    fill(e, 7)
    fill(e, 8)
    disk.latency = 3
    e.submit(4, [5], lease=1, base_len=29)
    e.submit(9, [5], lease=6, base_len=29, tenant="blue")
    e.run()
    assert e.done[4].num_cached_tokens == e.done[9].num_cached_tokens == 28


def test_a_public_prompt_that_fell_to_the_host_is_loaded_for_every_tenant():
    e = engine(num_blocks=14)
    e.generate(1, prompt(1, 20), tenant="", params=sampling_params(1))
    e.settle()
    fill(e, 2, 47)
    fill(e, 3, 47)
    assert e.core.leases.get(1).table.num_computed_tokens == 0
    for request, tenant in ((4, "acme"), (5, "blue")):
        history = [*prompt(1, 20), 80 + request]
        assert e.generate(request, history, tenant=tenant) == expected_answer(history)
        assert e.done[request].num_cached_tokens == 20
    assert e.runner.num_loaded >= 5


def test_what_others_floors_protect_is_not_dropped_because_it_is_kept_below():
    limits = {"acme": TenantLimits(1.0, 7)}
    e = engine(num_blocks=20, tenants=limits)
    e.generate(1, prompt(1, 21), tenant="acme")
    e.settle()
    e.generate(2, prompt(2, 40), tenant="blue")
    assert e.core.leases.get(1).table.num_computed_tokens == 28


def test_the_last_token_is_computed_although_its_block_could_be_loaded():
    e = engine()
    e.generate(1, prompt(1, 21))
    e.settle()
    fill(e, 2, 50)
    answer = e.generate(3, prompt(1, 20))
    assert answer == expected_answer(prompt(1, 20))
    assert e.done[3].num_cached_tokens == 16


def test_what_may_hold_nan_is_forgotten_below_the_pool_too():
    e, disk = with_disk()
    e.generate(1, prompt(1, 21))
    e.settle()
    digests = list(e.core.leases.get(1).digests)
    assert all(digest in disk for digest in digests)
    e.submit(2, [5], lease=1, base_len=29)
    e.runner.not_finite.add(2)
    e.run()
    e.settle()
    assert e.done[2].reason is FinishReason.FAILED
    assert not any(e.core.tiers.is_below(digest) for digest in digests)


def test_what_is_loaded_and_what_is_new_take_one_step():
    e = engine()
    e.generate(1, prompt(1, 21))
    e.settle()
    fill(e, 2)
    plans = e.runner.plans
    e.submit(3, [5], lease=1, base_len=29)
    e.step()
    assert e.runner.plans == plans + 1
    assert e.runner.num_loaded > 0
    assert len(e.outputs[3]) == 1

"""What is erased is in no tier any more; what another lease begins with stays."""

from array import array

import pytest

from chatd.engine.erasure import common_length
from chatd.engine.messages import Cancel, Erase, Erased, EraseTenant, Fork, Release, RequestClass, Retain, Trim
from chatd.kvcache.lease import LeaseState
from chatd.testing.disk import FakeDisk
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


def prompt(length, start=0):
    return [(start * 11 + i) % 97 for i in range(length)]


def with_tiers(**overrides):
    disks = []

    def make_disk(runner):
        disks.append(FakeDisk(runner))
        return disks[0]

    engine = EngineHarness(engine_config(host_slots=64, **overrides), make_disk=make_disk)
    return engine, disks[0]


def log(engine, lease):
    return list(engine.core.leases.get(lease).token_ids)


def erase(engine, lease, ids, tenant="acme"):
    said = engine.send(Erase(lease, tenant, ids))
    engine.core.check_invariants()
    return next(message for message in said if isinstance(message, Erased))


def cached(engine, ids, tenant="acme"):
    """Return how many blocks of a sequence a fresh request of the tenant would find in the pool."""
    table = engine.core.kv.open_table(tenant)
    return len(engine.core.kv.get_computed_blocks(table, array("i", ids), last_too=True))


def below(engine, disk, ids, tenant="acme"):
    names = engine.core.scheduler.moves.below.names.of_sequence(tenant, array("i", ids))
    return sum(name in disk.digests or engine.core.tiers.is_in_host(name) for name in names)


def test_nothing_of_a_sequence_is_left_in_any_tier():
    engine, disk = with_tiers()
    engine.generate(1, prompt(20), params=sampling_params(8))
    engine.settle()
    ids = log(engine, 1)
    assert (cached(engine, ids), below(engine, disk, ids)) == (6, 6)
    assert erase(engine, 1, ids) == Erased(1, 7, 6, 6)
    assert (cached(engine, ids), below(engine, disk, ids)) == (0, 0)
    assert engine.core.leases.get(1) is None
    assert len(engine.core.pool.empty) == engine.config.num_blocks
    assert engine.core.tiers.num_used == 0
    assert disk.num_used == 0


def test_what_another_lease_begins_with_stays():
    engine, disk = with_tiers()
    engine.generate(1, prompt(20), params=sampling_params(8))
    ids = log(engine, 1)
    engine.send(Fork(1, 2, 18))
    engine.settle()
    erased = erase(engine, 1, ids)
    assert (erased.num_host_blocks, erased.num_disk_blocks) == (2, 2)
    assert (cached(engine, ids), below(engine, disk, ids)) == (4, 4)
    assert engine.generate(3, [5], lease=2, base_len=18)
    assert engine.done[3].num_cached_tokens == 18


def test_a_neighbor_with_the_same_text_keeps_it_and_its_own_namespace():
    engine, _ = with_tiers()
    for request, tenant in ((1, "acme"), (2, "blue")):
        engine.generate(request, prompt(20), tenant=tenant, params=sampling_params(8))
    ids = log(engine, 1)
    erase(engine, 2, ids, tenant="acme")  # A lease of somebody else's is as unknown as none.
    assert engine.core.leases.get(2) is not None
    assert (cached(engine, ids), cached(engine, ids, "blue")) == (6, 6)
    erase(engine, 1, ids, tenant="acme")
    assert (cached(engine, ids), cached(engine, ids, "blue")) == (0, 6)


def test_public_blocks_stay():
    engine, _ = with_tiers()
    engine.generate(1, prompt(12), tenant="", params=sampling_params(1))
    engine.generate(2, [*prompt(12), *prompt(8, 3)], params=sampling_params(4))
    ids = log(engine, 2)
    before = cached(engine, ids)
    erased = erase(engine, 2, ids)
    assert erased.num_blocks == before - 3 + 1, "and the last one, which is partly full"
    assert cached(engine, ids) == 3


def test_a_request_on_the_lease_is_cancelled_first():
    engine, _ = with_tiers()
    engine.submit(1, prompt(20), params=sampling_params(50))
    engine.step(4)
    ids = log(engine, 1)
    erased = erase(engine, 1, ids)
    assert erased.num_blocks == 6
    assert str(engine.done[1].reason) == "cancelled"
    assert cached(engine, ids) == 0


def test_a_closed_lease_is_forgotten_by_its_ids():
    engine, disk = with_tiers()
    engine.generate(1, prompt(20), params=sampling_params(8))
    ids = log(engine, 1)
    engine.settle()
    engine.send(Release(1))
    assert erase(engine, 1, ids) == Erased(1, 6, 6, 6)
    assert below(engine, disk, ids) == 0


def test_ids_that_no_block_can_have_erase_nothing():
    engine, _ = with_tiers()
    engine.generate(1, prompt(20), params=sampling_params(8))
    assert erase(engine, 9, [2**40]) == Erased(9, 0, 0, 0)
    assert erase(engine, 9, []) == Erased(9, 0, 0, 0)
    assert erase(engine, -1, prompt(3)) == Erased(-1, 0, 0, 0)


def test_a_trimmed_draft_leaves_nothing_behind():
    engine, disk = with_tiers()
    engine.generate(1, prompt(20), params=sampling_params(8))
    base = log(engine, 1)
    draft = prompt(30, 5)
    engine.submit(
        2, draft, lease=1, base_len=27, request_class=RequestClass.PREFILL_AHEAD, params=sampling_params(1),
        compute_only=True,
    )  # fmt: skip
    engine.run()
    engine.settle()
    whole = [*base[:27], *draft]
    assert cached(engine, whole) == 14
    assert below(engine, disk, whole) == 14
    engine.send(Trim(1, 27, forget=True))
    engine.core.check_invariants()
    assert (cached(engine, whole), below(engine, disk, whole)) == (6, 6)
    assert cached(engine, base) == 6, "what was there before is what was to stay"
    assert engine.generate(3, [7], lease=1, base_len=27)
    engine.settle()


def test_what_a_fork_has_of_a_trimmed_draft_stays():
    engine, _ = with_tiers()
    engine.generate(1, prompt(40), params=sampling_params(8))
    ids = log(engine, 1)
    engine.send(Fork(1, 2, 40))
    engine.send(Trim(1, 10, forget=True))
    engine.core.check_invariants()
    assert cached(engine, ids) == 10
    assert engine.length(1) == 10
    assert engine.length(2) == 40


def test_a_trim_waits_for_the_request_on_its_lease():
    engine, _ = with_tiers()
    engine.submit(1, prompt(20), params=sampling_params(50))
    engine.step(3)
    engine.send(Trim(1, 8, forget=True))
    engine.send(Cancel(1))
    assert engine.length(1) == 8


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1], [2], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 2, 4], 2),
        ([5] * 9, [5] * 9, 9),
    ],
)
def test_common_length_is_that_of_the_common_beginning(a, b, length):
    assert common_length(array("i", a), array("i", b)) == length


def test_nothing_of_a_tenant_is_left_in_any_tier_and_its_neighbors_keep_theirs():
    engine, disk = with_tiers()
    for request, tenant in ((1, "acme"), (2, "acme"), (3, "blue"), (4, "")):
        engine.generate(request, prompt(20, start=request), tenant=tenant, params=sampling_params(8))
    engine.settle()
    logs = {lease: log(engine, lease) for lease in (1, 2, 3, 4)}
    engine.send(Release(2))
    engine.submit(5, prompt(20, start=5), params=sampling_params(50))
    engine.submit(6, prompt(20, start=6), params=sampling_params(50))
    engine.step(3)
    on_disk = [d for d in disk.digests if d not in names_of(engine, logs[3], "blue") + names_of(engine, logs[4], None)]
    first = erase_tenant(engine, [])
    second = erase_tenant(engine, on_disk)
    assert [str(engine.done[request].reason) for request in (5, 6)] == ["cancelled"] * 2
    assert [lease.lease_id for lease in engine.core.leases] == [3, 4]
    assert first.num_host_blocks >= 12
    assert first.num_disk_blocks + second.num_disk_blocks == 12
    assert [cached(engine, logs[lease]) for lease in (1, 2)] == [0, 0]
    assert [below(engine, disk, logs[lease]) for lease in (1, 2)] == [0, 0]
    assert (cached(engine, logs[3], "blue"), below(engine, disk, logs[3], "blue")) == (6, 6)
    assert cached(engine, logs[4], "") == 6
    assert erase_tenant(engine, on_disk) == Erased(99, 0, 0, 0)


def test_a_tenant_for_whom_nothing_was_computed_has_no_row_in_the_pool_after_an_erasure():
    engine, _ = with_tiers()
    engine.generate(1, prompt(20), tenant="blue", params=sampling_params(8))
    assert engine.send(Erase(5, "acme", prompt(20)))[-1] == Erased(5, 0, 0, 0)
    assert erase_tenant(engine, []) == Erased(99, 0, 0, 0)
    assert [account.tenant for account in engine.core.pool.accounts] == ["blue"]


def test_who_looked_at_an_erased_tenants_sessions_counts_no_more():
    engine = EngineHarness(engine_config(max_leases=2))
    engine.send(Retain(7, True))
    engine.generate(1, prompt(9))
    engine.send(Retain(1, True))
    erase_tenant(engine, [])
    # No more are remembered than there may be leases.
    engine.send(Retain(8, True))
    engine.generate(2, prompt(9), lease=7, tenant="blue")
    assert engine.core.leases.get(7).state is LeaseState.ATTACHED


@pytest.mark.parametrize("gone", [Release(7), Erase(7, "acme", prompt(9))], ids=["released", "erased"])
def test_who_looked_at_a_session_whose_lease_was_lost_counts_no_more_when_it_goes(gone):
    engine = EngineHarness(engine_config())
    engine.send(Retain(7, True))
    engine.send(gone)
    engine.generate(1, prompt(9), lease=7)
    assert engine.core.leases.get(7).state is LeaseState.IDLE


def test_an_erasure_of_somebody_elses_lease_leaves_those_who_look_at_it():
    engine = EngineHarness(engine_config())
    engine.send(Retain(7, True))
    engine.generate(1, prompt(9), lease=7, tenant="blue")
    engine.send(Erase(7, "acme", prompt(9)))
    assert engine.core.leases.get(7).state is LeaseState.ATTACHED


def names_of(engine, ids, tenant):
    return engine.core.scheduler.moves.below.names.of_sequence(tenant, array("i", ids))


def erase_tenant(engine, digests):
    said = engine.send(EraseTenant(99, "acme", digests))
    engine.core.check_invariants()
    return next(message for message in said if isinstance(message, Erased))

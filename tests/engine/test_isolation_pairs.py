"""What one tenant has cached, another can neither find nor notice: in pairs, and by whole decision logs."""

import random

import pytest

from chatd.engine.core import TenantLimits
from chatd.engine.messages import RequestClass, Retain, Started, Waiting
from chatd.testing.constant_hash import constant_hash
from chatd.testing.engine import EngineHarness, engine_config, sampling_params

PAIRS = 10_000
ROUND = 50
SIZE = 4
TENANTS = ("acme", "acme ", "Acme", "acme\x00", "acm", "me", "e", "public", "None", "äcme", "acme\n")
"""Names that differ by little, or look like what they are not."""


def random_prompt(rng, number):
    """Return a prompt of a length around whole blocks that no other number's begins with."""
    length = max(SIZE + 1, rng.choice((2, 3, 5)) * SIZE + rng.choice((-1, 0, 1)))
    return [number % 97, number // 97 % 97, number // 9409 % 97, *(rng.randrange(97) for _ in range(length - 3))]


class Pairs:
    """An engine whose requests are run to their end without looking at each step."""

    def __init__(self, **options):
        config = engine_config(num_blocks=4096, max_num_batched_tokens=512, max_num_seqs=128)
        self.engine = EngineHarness(config, **options)
        self.last = 0

    def cached(self, asked):
        """Submit (tenant, prompt, compute_only) triples at once, and return how much of each was found."""
        first = self.last + 1
        for tenant, ids, compute_only in asked:
            self.last += 1
            self.engine.submit(
                self.last,
                ids,
                tenant=tenant,
                params=sampling_params(1),
                keep_lease=False,
                compute_only=compute_only,
            )
        while self.engine.core.has_work:
            self.engine._keep(self.engine.core.step(self.engine.clock.now))
        assert self.engine.runner.violation is None
        found = [self.engine.done[number].num_cached_tokens for number in range(first, self.last + 1)]
        self.engine.messages.clear()
        return found


def test_ten_thousand_pairs_find_their_own_and_nothing_of_others():
    rng = random.Random(11)
    pairs = Pairs()
    for start in range(0, PAIRS, ROUND):
        prompts = [random_prompt(rng, number) for number in range(start, start + ROUND)]
        owners = [rng.choice(TENANTS) for _ in prompts]
        others = [rng.choice([name for name in TENANTS if name != owner]) for owner in owners]
        only = [rng.random() < 0.2 for _ in prompts]
        first = pairs.cached(list(zip(owners, prompts, only, strict=True)))
        assert first == [0] * ROUND
        # A pair at once and in any order: whoever owns the content finds it, the other one does not.
        asked = []
        for owner, other, ids in zip(owners, others, prompts, strict=True):
            asked += [(owner, ids), (other, ids)]
        order = rng.sample(range(2 * ROUND), 2 * ROUND)
        found = dict(zip(order, pairs.cached([(*asked[place], False) for place in order]), strict=True))
        for place in range(0, 2 * ROUND, 2):
            ids = asked[place][1]
            assert found[place] == (len(ids) - 1) // SIZE * SIZE > 0, f"{asked[place]} did not find its own"
            assert found[place + 1] == 0, f"{asked[place + 1]} found what {asked[place][0]!r} had computed"
    pairs.engine.core.check_invariants()


def test_pairs_are_apart_where_every_key_is_the_same():
    rng = random.Random(12)
    pairs = Pairs(core_options={"hash_function": constant_hash, "max_entries_per_key": 10**9})
    for number in range(60):
        ids = random_prompt(rng, number)
        owner, other = rng.sample(TENANTS, 2)
        assert pairs.cached([(owner, ids, False)]) == [0]
        own, foreign = pairs.cached([(owner, ids, False), (other, ids, False)])
        assert own > 0
        assert foreign == 0


def test_what_a_system_request_computed_is_found_by_all_and_what_follows_it_by_its_owner_only():
    rng = random.Random(13)
    pairs = Pairs()
    for number in range(300):
        system, rest = random_prompt(rng, number), random_prompt(rng, 10_000 + number)
        shared = len(system) // SIZE * SIZE
        owner, other = rng.sample(TENANTS, 2)
        pairs.cached([("", system, True)])
        assert pairs.cached([(owner, system + rest, False)]) == [shared]
        own, foreign = pairs.cached([(owner, system + rest, False), (other, system + rest, False)])
        assert own == (len(system + rest) - 1) // SIZE * SIZE
        assert foreign == shared
    core = pairs.engine.core
    assert core.pool.public.num_resident > 0
    assert {name for name in core.scheduler.ledger.counts if name is not None} <= set(TENANTS)


def test_a_system_request_finds_nothing_private_and_costs_no_tenant():
    pairs = Pairs()
    ids = random_prompt(random.Random(1), 1)
    pairs.cached([("acme", ids, False)])
    before = pairs.engine.core.scheduler.counters.counter("acme")
    resident = pairs.engine.core.pool.account("acme").num_resident
    assert pairs.cached([("", ids, True)]) == [0]
    assert pairs.engine.core.scheduler.counters.counter("acme") == before
    assert pairs.engine.core.pool.account("acme").num_resident == resident


@pytest.mark.parametrize("keep_lease", [False, True])
def test_public_blocks_go_last(keep_lease):
    engine = EngineHarness(engine_config(num_blocks=24, max_model_len=64))
    system = [5] * 16
    engine.send(Retain(1, attached=True))
    engine.generate(1, system, tenant="", compute_only=True, keep_lease=keep_lease)
    for request in range(2, 30):
        # Others' idle sessions go before a public lease, and others' cache before a public one.
        tenant = ("acme", "blue")[request % 2]
        engine.generate(request, [request] * 40, tenant=tenant, params=sampling_params(1), keep_lease=keep_lease)
        engine.send(Retain(request, attached=True))
    assert engine.core.pool.public.num_resident == 4
    engine.generate(30, [*system, 1], tenant="acme", params=sampling_params(1))
    assert engine.done[30].num_cached_tokens == 16


def run_beside(content, pool_blocks):
    """Run fixed requests of acme beside blue's, whose lengths are fixed and whose ids are what `content` gives."""
    log = []
    config = engine_config(
        num_blocks=pool_blocks,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        waiting_interval_s=0.0,
        tenants={"acme": TenantLimits(2.0, 6), "blue": TenantLimits(1.0, 0)},
    )
    engine = EngineHarness(config, core_options={"log": log.append})
    rng = random.Random(21)
    for turn in range(40):
        for place in range(2):
            length = rng.choice((5, 8, 9, 13, 24, 25))
            name = rng.choice(list(RequestClass))
            max_tokens = rng.choice((1, 4, 9))
            ids = [turn % 7, place, *([3] * (length - 2))]
            engine.submit(
                1000 * turn + place,
                content(turn, place, ids),
                tenant="blue",
                params=sampling_params(max_tokens, ignore_eos=True),
                request_class=name,
            )
            engine.submit(
                1000 * turn + 10 + place,
                ids,
                tenant="acme",
                params=sampling_params(max_tokens, ignore_eos=True),
                request_class=name,
            )
        engine.step(rng.randrange(1, 12))
    engine.run()
    mine = [line for line in log if line.request_id % 1000 >= 10]
    said = [m for m in engine.messages if isinstance(m, Started | Waiting) and m.request % 1000 >= 10]
    return mine, said, {number: ids for number, ids in engine.outputs.items() if number % 1000 >= 10}


@pytest.mark.parametrize("pool_blocks", [40, 64, 400])
def test_plans_of_one_tenant_are_the_same_whatever_another_has_cached(pool_blocks):
    def the_same(_turn, _place, ids):
        return ids

    def shifted(_turn, _place, ids):
        # Other tokens that repeat as the others' do, so that blue finds as much of its own.
        return [96 - token for token in ids]

    ours, said, answers = run_beside(the_same, pool_blocks)
    others, said_beside_others, answers_beside_others = run_beside(shifted, pool_blocks)
    assert ours == others
    assert said == said_beside_others
    assert answers == answers_beside_others
    assert any(line.verb == "admit" and line.detail[0] > 0 for line in ours), "acme found nothing of its own"

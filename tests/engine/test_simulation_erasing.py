"""Erasure under everything at once: sessions are erased, and drafts forgotten, in seeded runs with every invariant.

Whatever runs, loads, stores or is in flight at that moment: what no other lease of the tenant begins with is found in
no tier any more, and everything else goes on as if nothing had been.
"""

import logging
import random
from array import array
from collections import Counter
from dataclasses import replace

import pytest

from chatd.engine.erasure import common_length
from chatd.engine.messages import Erase, EraseTenant, LeaseId, Trim
from chatd.kvcache.prefix_index import tenant_of_frame
from chatd.testing.simulation import SHAPES, Simulation

STEPS = 500


class Erasing(Simulation):
    """A simulation that erases half of what it would release, and forgets half of what it would trim.

    Now and then it is all of a tenant that is erased, with its sessions that run or wait.
    """

    def __init__(self, seed, shape):
        super().__init__(seed, shape)
        self.dice = random.Random(seed)  # Of its own, so that the run is otherwise the one of its seed.

    def release(self, session):
        if not session.tenant or self.dice.random() < 0.5:
            super().release(session)
            return
        if session.tenant in self.shape.tenants and self.dice.random() < 0.3:
            self.erase_tenant(session.tenant)
            return
        self.sessions.remove(session)
        for _ in range(2):
            self.send(Erase(session.lease, session.tenant, session.token_ids))
            self._check_gone(session.tenant, session.token_ids)
        self.counts["erased"] += 1

    def trim(self, session, length):
        is_open = self.core.leases.get(session.lease) is not None
        if not session.tenant or not is_open or session.job is not None or self.dice.random() < 0.5:
            super().trim(session, length)
            return
        before = list(session.token_ids)
        session.cut(length)
        self.send(Trim(session.lease, length, forget=True))
        self._check_gone(session.tenant, before)
        self.counts["forgotten"] += length < len(before)

    def erase_tenant(self, tenant):
        own = [session for session in self.sessions if session.tenant == tenant]
        self.counts["erased with its turn"] += sum(session.job is not None for session in own)
        for session in own:
            self.sessions.remove(session)
        below = [block for block in self.core.tiers._blocks.values() if block.tenant == tenant]
        self.counts["erased below"] += len(below)
        self.counts["erased on the disk"] += len(self._on_disk(tenant))
        self.send(EraseTenant(LeaseId(0), tenant, []))
        self.core.check_invariants()
        self.send(EraseTenant(LeaseId(0), tenant, self._on_disk(tenant)))
        self.counts["tenants erased"] += 1
        core = self.core
        core.check_invariants()
        assert tenant not in {lease.tenant for lease in core.leases}
        assert tenant not in {request.tenant for request in core.scheduler.requests.values()}
        account = core.pool.account(tenant)
        found = [entry.block_id for entry in core.pool.index if core.pool.blocks[entry.block_id].account is account]
        assert not found, f"blocks {found} of a tenant that is erased can be found"
        assert len(account.cached) == len(account.evicted) == 0
        assert tenant not in {block.tenant for block in core.tiers._blocks.values()}
        assert not self._on_disk(tenant)

    def _on_disk(self, tenant):
        disk = self.core.tiers.disk
        stored = {} if disk is None else disk._stored
        return [digest for digest, (origin, _) in stored.items() if tenant_of_frame(origin.namespace) == tenant]

    def _protected(self):
        """What was erased while a plan stored it is empty once that has ended: nobody takes it."""
        blocks = self.core.pool.blocks
        leaving = [blocks[block_id].account for block_ids in self.core.kv.limbo for block_id in block_ids]
        return [row for row in super()._protected() if row[0] not in leaving]

    def _check_gone(self, tenant, token_ids):
        core, size = self.core, self.shape.block_size
        core.check_invariants()
        ids = array("i", token_ids)
        shared = max((common_length(e.token_ids, ids) for e in core.leases if e.tenant == tenant), default=0)
        first = -(-shared // size)
        table = core.kv.open_table(tenant)
        found = core.kv.get_computed_blocks(table, ids, last_too=True)
        own = [block_id for block_id in found[first:] if core.pool.blocks[block_id].account is not core.pool.public]
        assert not own, f"blocks {own} of what is erased can be found"
        if core.scheduler.moves.is_on:
            names = core.scheduler.moves.below.names.of_sequence(tenant, ids)
            assert not any(map(core.tiers.is_below, names[first:])), "what is erased is in a tier below the pool"


@pytest.fixture(autouse=True)
def quiet():
    """Failed steps are logged with their traceback."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("ahead", [{}, {"steps_in_flight": 2}, {"steps_in_flight": 2, "is_eager": True}])
def test_what_is_erased_is_gone_whatever_happens_meanwhile(ahead):
    counts = Counter()
    for number, shape in enumerate(SHAPES):
        run = Erasing(9000 + number, replace(shape, **ahead))
        run.run(STEPS)
        run.drain()
        run.count_engine()
        counts += run.counts
    for what in (
        "tenants erased",
        "erased with its turn",
        "erased below",
        "erased on the disk",
        "erased",
        "forgotten",
        "stored",
        "loaded",
        "from disk",
        "evicted",
        "preempted",
    ):
        assert counts[what] > 10, f"{what} hardly happened: {counts}"

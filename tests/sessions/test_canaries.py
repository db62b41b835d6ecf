"""S6: no output, event, list, metric or error carries another tenant's bytes, through the real engine core.

The runner's answers are made of what stands in the KV slots that it is given: a block of another tenant's, read by any
mistake, would be said aloud. Each tenant's messages carry its canary, and whatever a tenant hears is searched for the
others'.
"""

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from chatd import protocol
from chatd.engine.core import EngineCore
from chatd.engine.plan import Chunk
from chatd.errors import ChatdError
from chatd.kvcache.prefix_index import PrefixEntry, PrefixIndex
from chatd.protocol import Message, MessageEdit, Params, ResponseRegenerate, SessionCreate, SessionList, UserMessage
from chatd.sessions.manager import CompletionRequest, Owner, Session, SessionLimits
from chatd.testing.engine import ProvenanceRunner
from chatd.testing.sessions import ASSISTANT, TURN_END, USER, VOCAB_SIZE, CoreEngine, make_manager

TENANTS = 5
OWNERS = [Owner(f"t{number}", user) for number in range(TENANTS) for user in ("ann", "bob")]
SHARED = "the same first words for everybody, which a shared index would find. "
ECHO = 11
"""Tokens of an answer, and the control id before it: the canary and a digit."""

CANARIES = {owner: f"<{owner.tenant}{owner.user}>" for owner in OWNERS}


class EchoRunner(ProvenanceRunner):
    """Answers with the last message of the user, as its slots have it."""

    def _attend(self, chunk: Chunk) -> int:
        size, slots = self.block_size, self.token_ids
        ids: list[int] = []
        for block_id in chunk.block_ids:
            ids += slots[block_id * size : (block_id + 1) * size]
        del ids[chunk.start + chunk.num_tokens :]
        ids.reverse()
        num_answer = ids.index(ASSISTANT) if ASSISTANT in ids else 0
        start = ids.index(USER) if USER in ids else 0
        said = ids[num_answer + 1 : start][:ECHO][::-1]
        return said[num_answer] if num_answer < len(said) else TURN_END

    def next_token(self, chain: int) -> int:
        return chain


class EchoEngine(CoreEngine):
    def _start(self) -> tuple[ProvenanceRunner, EngineCore]:
        runner = EchoRunner(self.config.num_blocks, self.config.block_size, VOCAB_SIZE, clock=self.clock)
        return runner, EngineCore(self.config, runner, self.clock)

    def step(self) -> None:
        """As `CoreEngine.step`, with the invariants checked now and then only."""
        self.clock.advance(0.01)
        self._deliver()
        self._outbox += self.core.step(self.clock())
        self._deliver()


class Listener:
    """A connection of one owner's, which hears nothing of the others'."""

    def __init__(self, owner: Owner, number: int) -> None:
        self.connection_id = f"con_{number}"
        self.owner = owner
        self.num_own = 0
        self._foreign = [canary.encode() for other, canary in CANARIES.items() if other.tenant != owner.tenant]
        self._own = CANARIES[owner].encode()

    def deliver(self, event: protocol.Event) -> None:
        self.hear(event)

    def hear(self, told: Any) -> None:
        data = told if isinstance(told, bytes) else msgspec.json.encode(told)
        for canary in self._foreign:
            assert canary not in data, f"{self.owner} is told {data!r}"
        self.num_own += self._own in data


@pytest.fixture(autouse=True)
def encode_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode messages on the loop: a hop to a thread for each turn would be most of the time."""

    async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    monkeypatch.setattr("asyncio.to_thread", call)


async def talk(seed: int, num_turns: int, caplog: pytest.LogCaptureFixture) -> EchoEngine:
    rng = random.Random(seed)
    engine = EchoEngine(num_blocks=60, max_num_seqs=6, max_model_len=800, max_leases=24)
    limits = SessionLimits(max_stateless_sessions=6, max_known_messages=30)
    manager = make_manager(engine, max_tokens=120, context=800, limits=limits)
    listeners = {owner: Listener(owner, number) for number, owner in enumerate(OWNERS)}
    sessions: dict[Owner, list[Session]] = {owner: [] for owner in OWNERS}
    turns = 0

    async def open_session(owner: Owner) -> None:
        session = await manager.create(owner, SessionCreate(system=SHARED if rng.random() < 0.5 else None))
        manager.created(session, listeners[owner])
        manager.start(session, listeners[owner])
        sessions[owner].append(session)

    async def act(owner: Owner) -> None:
        nonlocal turns
        if len(sessions[owner]) < 2:
            await open_session(owner)
        session = rng.choice(sessions[owner])
        text = f"{SHARED if rng.random() < 0.3 else ''}{CANARIES[owner]} {turns % 10}"
        dice = rng.random()
        if dice < 0.55:
            await manager.user_message(session, UserMessage(session=session.id, content=text))
            turns += 1
        elif dice < 0.65:
            said = [Message(role="user", content="same"), Message(role="assistant", content="same")]
            request = CompletionRequest(messages=[*said, Message(role="user", content=text)], params=Params())
            completion = await manager.complete(owner, request)
            turns += 1
            if rng.random() < 0.3:
                completion.cancel()
            else:
                engine.run()
                listeners[owner].hear((await completion.text()).encode())
        elif dice < 0.72:
            await manager.cancel(session)
        elif dice < 0.78 and (items := [item for item in manager.items(session) if item.role == "user"]):
            await manager.edit(session, MessageEdit(session=session.id, item=rng.choice(items).id, content=text))
            turns += 1
        elif dice < 0.82 and session.conversation.head is not None:
            await manager.regenerate(session, ResponseRegenerate(session=session.id, params=Params()))
            turns += 1
        elif dice < 0.84 or session.conversation.num_tokens > 500:
            if session.turn is None:
                sessions[owner].remove(session)
                await manager.close(session)
        elif dice < 0.86:
            foreign = rng.choice(
                [other for other in OWNERS if other.tenant != owner.tenant and sessions[other]] or OWNERS
            )
            if sessions[foreign]:
                await manager.resolve(owner, rng.choice(sessions[foreign]).id)

    while turns < num_turns:
        owner = rng.choice(OWNERS)
        try:
            await act(owner)
        except ChatdError as error:
            listeners[owner].hear(protocol.ErrorBody.of(error))
        for _ in range(rng.randrange(4)):
            engine.step()
        if turns % 50 == 0:
            engine.core.check_invariants()
            listeners[owner].hear(await manager.list(owner, SessionList()))
            for session in sessions[owner]:
                listeners[owner].hear(manager.items(session))
    engine.run()
    engine.core.check_invariants()
    assert engine.core.stats().num_failed_steps == 0
    assert all(listener.num_own > num_turns / 100 for listener in listeners.values())
    assert not any(canary in caplog.text for canary in CANARIES.values())
    counters = repr([getattr(manager.stats, name) for name in manager.stats.__slots__])
    assert not any(canary in counters for canary in CANARIES.values())
    return engine


def evictions(engines: Sequence[EchoEngine]) -> tuple[int, int, int]:
    counts = [(e.core.scheduler.num_preemptions, e.core.pool.num_evictions) for e in engines]
    cached = sum(c.cached_tokens for e in engines for c in e.core.scheduler.ledger.counts.values())
    return sum(c[0] for c in counts), sum(c[1] for c in counts), cached


async def test_ten_thousand_turns_carry_no_foreign_canary(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        engine = await talk(1, 10_000, caplog)
    preempted, evicted, cached = evictions([engine])
    assert preempted > 100
    assert evicted > 1000
    assert cached > 10_000


async def test_a_block_of_another_tenants_would_be_heard(caplog: pytest.LogCaptureFixture) -> None:
    """With an index that compares neither tokens nor namespaces the canaries are found: the test above can fail."""

    def find(index: PrefixIndex, namespace: object, parent: PrefixEntry | None, tokens: bytes) -> PrefixEntry | None:
        return next((entry for entry in index if entry.parent is parent), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixIndex, "find", find)
        with pytest.raises(AssertionError, match="is told"):
            await talk(1, 2000, caplog)

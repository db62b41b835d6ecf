"""System prompts that an operator shares: found by every tenant at its first turn, and nothing after them is."""

from datetime import UTC, datetime

import pytest

from chatd.engine.messages import FinishReason, LeaseId, LeaseTier, Release, RequestClass, Submit, Tier
from chatd.errors import ConfigError
from chatd.protocol import Message, Params, ResponseCompleted, ResponseIncomplete, SessionCreate, UserMessage
from chatd.sessions.manager import CompletionRequest, Owner, PublicPrompt, SessionManager
from chatd.testing.sessions import (
    SYSTEM,
    TURN_END,
    USER,
    ByteChatEncoder,
    CoreEngine,
    RecordingSubscriber,
    ScriptedEngine,
    encode_text,
    make_manager,
)

ANN, EVE = Owner("acme", "ann"), Owner("zeta", "eve")
PROMPT = "You help the customers of a shop. " * 5
COMMON = [SYSTEM, *encode_text(PROMPT), TURN_END, USER]
NUM_BLOCKS = len(COMMON) // 16


async def sharing(engine: CoreEngine | ScriptedEngine, text: str = PROMPT, **options) -> SessionManager:
    manager = make_manager(engine, **options)
    await manager.share_prompts([PublicPrompt("shop", text)])
    engine.run()
    return manager


async def first_turn(
    engine: CoreEngine, manager: SessionManager, owner: Owner, said: str, system: str | None = PROMPT
) -> int:
    """Return the prompt tokens that the first turn of a new session finds."""
    session = await manager.create(owner, SessionCreate(system=system, params=Params(max_tokens=8)))
    connection = RecordingSubscriber(session.id)
    manager.created(session, connection)
    manager.start(session, connection)
    await manager.user_message(session, UserMessage(session=session.id, content=said))
    engine.run()
    ends = ResponseCompleted | ResponseIncomplete
    return next(event.usage.cached_tokens for event in connection.events if isinstance(event, ends))


async def test_every_tenant_finds_the_prompts_full_blocks_at_its_first_turn() -> None:
    engine = CoreEngine()
    manager = await sharing(engine)
    for owner in (ANN, EVE):
        assert await first_turn(engine, manager, owner, f"hello from {owner.tenant}") == NUM_BLOCKS * 16
    assert await first_turn(engine, manager, EVE, "hello", system=PROMPT.replace("shop", "club")) < 32
    assert await first_turn(engine, manager, EVE, "hello", system=None) == 0
    assert engine.core.stats().num_failed_steps == 0


async def test_what_follows_a_public_prompt_is_private() -> None:
    engine = CoreEngine()
    manager = await sharing(engine)
    secret = "the number of the order is 12345678, and the name is Ann " * 2
    assert await first_turn(engine, manager, ANN, secret) == NUM_BLOCKS * 16
    # The same tenant finds its own words, another one does not.
    assert await first_turn(engine, manager, EVE, secret) == NUM_BLOCKS * 16
    assert await first_turn(engine, manager, ANN, secret) >= (len(COMMON) + len(secret)) // 16 * 16


async def test_requests_of_the_stateless_door_find_it_too() -> None:
    engine = CoreEngine()
    manager = await sharing(engine)
    messages = [Message(role="system", content=PROMPT), Message(role="user", content="hello")]
    completion = await manager.complete(EVE, CompletionRequest(messages=messages, params=Params(max_tokens=4)))
    engine.run()
    await completion.text()
    assert completion.usage.cached_tokens == NUM_BLOCKS * 16


async def test_it_is_charged_to_nobody_and_yields_to_everybody() -> None:
    engine = CoreEngine()
    manager = await sharing(engine)
    (submit,) = [message for message in engine.sent if isinstance(message, Submit)]
    assert (submit.tenant, submit.request_class, submit.compute_only) == ("", RequestClass.PREFILL_AHEAD, True)
    assert submit.new_ids == COMMON[: NUM_BLOCKS * 16]
    assert (manager.stats.turns_started, manager.stats.prompt_tokens, manager.num_in_flight) == (0, 0, 0)
    frame = engine.core.pool_frame(engine.clock())
    assert (frame.num_active, frame.tenants) == (NUM_BLOCKS, [])
    public = manager.public_prompts
    assert (len(public), public.num_computed, public.num_tokens) == (1, 1, NUM_BLOCKS * 16)


async def test_a_new_engine_computes_it_again() -> None:
    engine = ScriptedEngine(lambda _log: [TURN_END])
    manager = await sharing(engine)
    engine.die()
    assert manager.public_prompts.num_computed == 0
    engine.restart()
    engine.say(engine.ready)  # Said again, it is the same engine.
    first, second = engine.submits
    assert first.new_ids == second.new_ids
    assert manager.public_prompts.num_computed == 0
    engine.run()
    assert manager.public_prompts.num_computed == 1


async def test_what_pressure_took_is_computed_again_later() -> None:
    now = 50.0
    engine = ScriptedEngine(lambda _log: [TURN_END])
    manager = await sharing(engine, monotonic=lambda: now)
    lease = engine.submits[0].lease
    for tier, num_kept, num_computed in (
        (Tier.HOST, 0, 1),
        (Tier.DEVICE, len(engine.submits[0].new_ids) - 16, 0),
        (Tier.DEVICE, len(engine.submits[0].new_ids), 1),
        (Tier.TOKENS, 0, 0),
    ):
        engine.say(LeaseTier(lease, tier, "pressure", num_kept))
        assert manager.public_prompts.num_computed == num_computed
    await manager.public_prompts.renew()
    assert len(engine.submits) == 1
    now += 400.0
    await manager.public_prompts.renew()
    engine.run()
    assert [submit.lease for submit in engine.submits] == [lease, lease]
    assert manager.public_prompts.num_computed == 1
    # A refusal is tried again as well.
    engine.say(LeaseTier(lease, Tier.TOKENS, "pressure", 0))
    now += 400.0
    await manager.public_prompts.renew()
    engine.end(engine.submits[-1].request, FinishReason.FAILED, "unavailable", "not now")
    assert manager.public_prompts.num_computed == 0
    now += 400.0
    await manager.public_prompts.renew()
    engine.run()
    assert manager.public_prompts.num_computed == 1


class DatedEncoder(ByteChatEncoder):
    """Writes the date before the system prompt."""

    def begin(self, system, messages, *, date):
        return [*encode_text(str(date)), *super().begin(system, messages, date=date)]


async def test_a_template_that_writes_the_date_has_todays_prompt() -> None:
    now = datetime(2026, 11, 29, 23, 59, tzinfo=UTC).timestamp()
    engine = CoreEngine()
    manager = await sharing(engine, encoder=DatedEncoder(), clock=lambda: now)
    num_tokens = (len(COMMON) + len("2026-11-29")) // 16 * 16
    assert await first_turn(engine, manager, EVE, "hello") == num_tokens
    await manager.public_prompts.renew()
    assert not [message for message in engine.sent if isinstance(message, Release)]
    now += 120.0
    assert await first_turn(engine, manager, ANN, "hello") == 0
    await manager.public_prompts.renew()
    engine.run()
    assert [type(message) for message in engine.sent].count(Release) == 1
    assert await first_turn(engine, manager, EVE, "hi") == num_tokens
    assert len(manager.public_prompts) == 1


async def test_what_cannot_be_shared_is_refused_by_name() -> None:
    engine = CoreEngine(num_blocks=64)
    manager = make_manager(engine)
    with pytest.raises(ConfigError, match=r"public prompt long has 4123 tokens, the limit is 1023") as refused:
        await manager.share_prompts([PublicPrompt("long", "x" * 4120)])
    assert refused.value.param == "public_prompts.long"
    with pytest.raises(ConfigError, match=r"cannot be shared: prompt has at least"):
        await manager.share_prompts([PublicPrompt("huge", "x" * 10**6)])
    with pytest.raises(ConfigError, match=r"33 blocks, the limit is half of the pool of 64"):
        await manager.share_prompts([PublicPrompt("half", "x" * 16 * 33)])
    manager = make_manager(engine)
    assert await manager.share_prompts([PublicPrompt("short", "hi")]) == [
        "public prompt short has no full block to share"
    ]
    assert len(manager.public_prompts) == 0


async def test_the_sum_of_what_is_shared_is_said() -> None:
    engine = CoreEngine()
    manager = make_manager(engine)
    prompts = [PublicPrompt("one", PROMPT), PublicPrompt("two", "x" * 40)]
    notes = await manager.share_prompts(prompts)
    assert notes == [f"2 public prompts of {NUM_BLOCKS * 16 + 32} tokens in {NUM_BLOCKS + 2} blocks"]


async def test_the_lease_of_a_prompt_is_none_of_a_session() -> None:
    engine = CoreEngine()
    manager = await sharing(engine)
    session = await manager.create(ANN, SessionCreate())
    (submit,) = [message for message in engine.sent if isinstance(message, Submit)]
    assert session.lease.id != submit.lease
    assert LeaseId(submit.lease) not in manager.lease_sessions

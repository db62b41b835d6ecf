"""Owners cannot see one another: not in events, not in lists, not in errors, not in the engine."""

import asyncio
import random

import msgspec
import pytest

from chatd import protocol
from chatd.engine.messages import Fork
from chatd.errors import NotFound
from chatd.protocol import Message, SessionAttach, SessionCreate, SessionList, UserMessage
from chatd.sessions.manager import CompletionRequest, Owner
from chatd.testing.sessions import TURN_END, USER, RecordingSubscriber, ScriptedEngine, encode_text, make_manager

OWNERS = (Owner("acme", "ann"), Owner("acme", "bob"), Owner("zeta", "ann"))


def echo(log: list[int]) -> list[int]:
    start = len(log) - 1 - log[::-1].index(USER)
    return [*encode_text("you said: "), *log[start + 1 : -2], TURN_END]


@pytest.mark.parametrize("seed", range(8))
async def test_a_canary_is_only_ever_seen_by_its_owner(seed: int) -> None:
    rng = random.Random(seed)
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    canaries = {owner: f"canary-{owner.tenant}-{owner.user}" for owner in OWNERS}
    sessions, seen = {}, {owner: [] for owner in OWNERS}
    for number, owner in enumerate(OWNERS):
        session = await manager.create(owner, SessionCreate())
        connection = RecordingSubscriber(f"con_{number}", events=seen[owner])
        manager.created(session, connection)
        manager.start(session, connection)
        sessions[owner] = session
    for turn in range(30):
        owner = rng.choice(OWNERS)
        text = f"{canaries[owner]} {turn}"
        if rng.random() < 0.5 and sessions[owner].turn is None:
            await manager.user_message(sessions[owner], UserMessage(session=sessions[owner].id, content=text))
        else:
            # The same first words for everybody: a shared index would find another owner's history.
            said = [Message(role="user", content="same"), Message(role="assistant", content="you said: same")]
            await manager.complete(owner, CompletionRequest(messages=said[:1]))
            engine.run()
            request = CompletionRequest(messages=[*said, Message(role="user", content=text)])
            completion = await manager.complete(owner, request)
            engine.run()
            assert await completion.text() == f"you said: {text}"
        engine.step(rng.randrange(4))
    engine.run()
    tenant_of = {submit.lease: submit.tenant for submit in engine.submits}
    for message in engine.sent:
        if isinstance(message, Fork):
            assert tenant_of[message.lease] == tenant_of[message.new_lease]
    for submit in engine.submits:
        text = bytes(i for i in submit.new_ids if i < 256).decode()
        assert all(canary not in text for owner, canary in canaries.items() if owner.tenant != submit.tenant)
    for owner in OWNERS:
        told = b"".join(msgspec.json.encode(event) for event in seen[owner]).decode()
        told += msgspec.json.encode(await manager.list(owner, SessionList())).decode()
        told += msgspec.json.encode(manager.items(sessions[owner])).decode()
        assert canaries[owner] in told
        for other in OWNERS:
            if other != owner:
                assert canaries[other] not in told
                assert sessions[other].id not in told


async def test_a_foreign_session_and_an_unknown_one_are_refused_in_the_same_words() -> None:
    manager = make_manager(ScriptedEngine(echo))
    session = await manager.create(OWNERS[0], SessionCreate())
    hidden = await manager.complete(OWNERS[0], CompletionRequest(messages=[Message(role="user", content="x")]))
    assert hidden.id
    stateless = next(holder for holder in manager.lease_sessions.values() if holder.hidden).session_id
    refusals = set()
    for owner, session_id in [
        *((owner, session.id) for owner in OWNERS[1:]),
        *((owner, stateless) for owner in OWNERS),
        (OWNERS[0], "ses_unknown"),
        (Owner("none", "none"), session.id),
    ]:
        with pytest.raises(NotFound) as refused:
            await manager.resolve(owner, session_id)
        body = protocol.ErrorBody.of(refused.value)
        refusals.add(msgspec.structs.replace(body, message=body.message.replace(session_id, "ID")))
    assert refusals == {
        protocol.ErrorBody(
            type="not_found_error", code="not_found", message="session 'ID' is not known", param="session"
        )
    }


async def test_one_owners_failure_leaves_the_others_streams_alone() -> None:
    engine = ScriptedEngine(echo)
    manager = make_manager(engine)
    connections = []
    for number, owner in enumerate(OWNERS):
        session = await manager.create(owner, SessionCreate(title="t"))
        connection = RecordingSubscriber(f"con_{number}")
        manager.attach(session, connection, SessionAttach(session=session.id))
        manager.start(session, connection)
        await manager.user_message(session, UserMessage(session=session.id, content="hi"))
        connections.append(connection)
    engine.step()

    def broken(event: protocol.Event) -> None:
        raise RuntimeError("a connection that breaks its promise")

    connections[0].deliver = broken
    engine.run()
    await asyncio.sleep(0)
    for connection in connections[1:]:
        assert isinstance(connection.events[-2], protocol.ResponseCompleted)
        assert connection.events[-2].item.content == "you said: hi"

"""Sessions over the real engine core, whose runner compares every slot with what the session holds (I25)."""

import asyncio
import random
from itertools import pairwise

import pytest

from chatd import protocol
from chatd.engine.messages import Fork, Release
from chatd.errors import ChatdError
from chatd.protocol import (
    BranchSelect,
    Message,
    MessageEdit,
    Params,
    ResponseRegenerate,
    SessionAttach,
    SessionCreate,
    SessionFork,
    UserMessage,
)
from chatd.sessions.manager import CompletionRequest, Owner, Session, SessionLimits, SessionManager
from chatd.testing.sessions import CoreEngine, RecordingSubscriber, make_manager

OWNERS = (Owner("acme", "ann"), Owner("acme", "bob"), Owner("zeta", "ann"))
ENDS = protocol.ResponseCompleted | protocol.ResponseIncomplete
TEXTS = ("hello there, how are you?", "short", "a longer message, " * 6, "naïve 東京 🙂")


async def test_a_later_turn_finds_everything_before_it_computed() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=24)
    session = await manager.create(OWNERS[0], SessionCreate(system="be brief " * 10))
    connection = RecordingSubscriber()
    manager.created(session, connection)
    manager.start(session, connection)
    ends = []
    for text in TEXTS:
        before = session.conversation.num_tokens
        await manager.user_message(session, UserMessage(session=session.id, content=text))
        engine.run()
        events = connection.take()
        end = next(event for event in events if isinstance(event, ENDS))
        # Only the last token of the answer before may have no KV yet.
        assert end.usage.cached_tokens >= before - 1
        assert end.usage.output_tokens == len(session.conversation.head.ids)
        ends.append(end)
        usage = [event for event in events if isinstance(event, protocol.SessionUsage)][-1]
        lease = engine.core.leases.get(session.lease.id)
        assert (usage.blocks_held, usage.blocks_shared) == (len(lease.table.block_ids), 0)
    lease = engine.core.leases.get(session.lease.id)
    log = list(session.conversation.log())
    assert list(lease.token_ids)[: len(log)] == log
    assert all(a.usage.input_tokens < b.usage.input_tokens for a, b in pairwise(ends))


async def test_stateless_history_hits_its_own_cache() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=24)
    histories = [[Message(role="system", content="You are helpful. " * 12)] for _ in range(4)]
    before = [0] * 4
    for turn in range(4):
        completions = []
        for number, history in enumerate(histories):
            history.append(Message(role="user", content=f"chat {number} turn {turn}: {TEXTS[turn]}"))
            request = CompletionRequest(messages=history, params=Params(ignore_eos=True))
            completions.append(await manager.complete(OWNERS[0], request))
        engine.run()
        for number, (history, completion) in enumerate(zip(histories, completions, strict=True)):
            history.append(Message(role="assistant", content=await completion.text()))
            assert completion.error is None
            if turn:
                assert completion.usage.cached_tokens >= 0.95 * before[number]
            before[number] = completion.usage.input_tokens + completion.usage.output_tokens
    assert manager.stats.known_misses == 0


async def test_a_stateless_history_that_was_edited_shares_all_before_the_edit() -> None:
    engine = CoreEngine()
    manager = make_manager(engine, max_tokens=24)
    owner = OWNERS[0]

    async def answered(*said: str) -> tuple[str, protocol.Usage]:
        history = [Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(said)]
        completion = await manager.complete(owner, CompletionRequest(messages=history, params=Params(ignore_eos=True)))
        engine.run()
        return await completion.text(), completion.usage

    first, usage = await answered(TEXTS[2])
    num_common = usage.input_tokens + usage.output_tokens
    second, _ = await answered(TEXTS[2], first, TEXTS[0])
    # The client's user changed the second message, and later goes on with the first version.
    _, edited = await answered(TEXTS[2], first, "something else altogether")
    assert num_common - 1 <= edited.cached_tokens <= num_common
    _, again = await answered(TEXTS[2], first, TEXTS[0], second, "go on")
    assert again.cached_tokens > edited.cached_tokens
    assert any(isinstance(message, Fork) for message in engine.sent)
    assert (manager.stats.known_misses, engine.core.stats().num_failed_steps) == (0, 0)


@pytest.mark.parametrize("seed", range(12))
async def test_any_mix_of_turns_branches_cancels_closes_and_stateless_requests_keeps_ids_and_kv_together(
    seed: int,
) -> None:
    rng = random.Random(seed)
    engine = CoreEngine(num_blocks=40 if seed % 2 else 200, max_num_seqs=4, max_leases=14 if seed % 3 else 64)
    manager = make_manager(engine, max_tokens=20, limits=SessionLimits(max_stateless_sessions=6, max_known_messages=30))
    sessions = [await manager.create(owner, SessionCreate()) for owner in OWNERS for _ in range(2)]
    watchers = []
    for number, session in enumerate(sessions):
        watcher = RecordingSubscriber(f"con_{number}")
        manager.created(session, watcher)
        manager.start(session, watcher)
        watchers.append(watcher)
    histories: list[tuple[Owner, list[Message]]] = [(owner, []) for owner in OWNERS]
    running = []
    refusals = set()
    params = (
        Params(),
        Params(max_tokens=3),
        Params(stop=("e",)),
        Params(ignore_eos=True),
        Params(stop_token_ids=(65,)),
    )
    for _ in range(160):
        action = rng.randrange(20)
        session = rng.choice(sessions)
        try:
            if action < 3:
                await manager.user_message(
                    session,
                    UserMessage(session=session.id, content=rng.choice(TEXTS), params=rng.choice(params)),
                )
            elif action == 3:
                await manager.cancel(session)
            elif action == 4:
                owner, history = rng.choice(histories)
                said = [*history, Message(role="user", content=rng.choice(TEXTS))]
                request = CompletionRequest(
                    messages=said, params=rng.choice(params), conversation_id=rng.choice((None, "one", "two"))
                )
                running.append((owner, said, await manager.complete(owner, request)))
            elif action == 5 and running:
                rng.choice(running)[2].cancel()
            elif action == 6 and (items := manager.items(session)):
                message = UserMessage(session=session.id, content=rng.choice(TEXTS), parent=rng.choice(items).id)
                await manager.user_message(session, message)
            elif action == 7:
                message = UserMessage(session=session.id, content=rng.choice(TEXTS), respond=False)
                await manager.user_message(session, message)
            elif action == 8:
                given_up = asyncio.create_task(
                    manager.user_message(session, UserMessage(session=session.id, content=rng.choice(TEXTS)))
                )
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
            elif action == 9 and rng.random() < 0.3:
                await close_and_come_back(engine, manager, session, watchers[sessions.index(session)])
            elif action == 10 and session.turn is None:
                engine.core.handle(Release(session.lease.id), engine.clock())  # lost, and the front does not know
            elif action == 11 and (items := manager.items(session)):
                edit = MessageEdit(session=session.id, item=rng.choice(items).id, content=rng.choice(TEXTS))
                await manager.edit(session, edit)
            elif action == 12 and session.conversation.head is not None:
                await manager.regenerate(session, ResponseRegenerate(session=session.id, params=rng.choice(params)))
            elif action == 13 and (nodes := list(session.conversation)):
                await manager.select_branch(session, BranchSelect(session=session.id, leaf=rng.choice(nodes).id))
            elif action == 14 and len(sessions) < 10:
                made = await fork(engine, manager, session, rng)
                watcher = RecordingSubscriber(f"con_{len(sessions)}")
                manager.created(made, watcher)
                manager.start(made, watcher)
                sessions.append(made)
                watchers.append(watcher)
            else:
                for _ in range(rng.randrange(1, 12)):
                    engine.step()
        except ChatdError as error:
            refusals.add(error.error_code)
        for owner, said, completion in [entry for entry in running if entry[2].finish_reason is not None]:
            running.remove((owner, said, completion))
            text = await completion.text()
            if completion.error is None and len(said) < 8:
                histories.append((owner, [*said, Message(role="assistant", content=text)]))
    engine.run()
    assert manager.num_in_flight == 0
    # A slot that is not what the session holds fails its step, and with it a turn.
    assert engine.core.stats().num_failed_steps == 0
    assert manager.stats.turns_ended["failed"] == 0
    assert refusals <= {"session_busy", "not_responding", "context_length_exceeded", "invalid_request"}
    for session, watcher in zip(sessions, watchers, strict=True):
        assert session.turn is None
        check_transcript(watcher.events, manager.items(session))


async def fork(engine: CoreEngine, manager: SessionManager, session: Session, rng: random.Random) -> Session:
    items = manager.items(session)
    at = rng.choice(items).id if items and rng.random() < 0.7 else None
    forking = asyncio.create_task(manager.fork(session, SessionFork(session=session.id, at=at)))
    await asyncio.sleep(0)
    if not forking.done():
        engine.step()
    made, forked = await forking
    lease = engine.core.leases.get(made.lease.id)
    assert forked.num_tokens == (0 if lease is None else lease.table.num_computed_tokens)
    return made


async def close_and_come_back(
    engine: CoreEngine, manager: SessionManager, session: Session, watcher: RecordingSubscriber
) -> None:
    closing = asyncio.create_task(manager.close(session))
    while not closing.done():
        engine.step()
        await asyncio.sleep(0)
    await closing
    last_seq = max((event.seq for event in watcher.events if isinstance(event, protocol.TranscriptEvent)), default=0)
    attached = manager.attach(
        session, watcher, SessionAttach(session=session.id, after_seq=last_seq, boot=manager.boot)
    )
    assert attached.replay == "exact"
    manager.start(session, watcher)


def check_transcript(events: list[protocol.Event], items: list[protocol.Item]) -> None:
    """I17: no gap, the deltas are the text, the usage is what was kept, one end each."""
    seq = 0
    texts: dict[str, str] = {}
    open_item: str | None = None
    final: dict[str, protocol.Item] = {}
    for event in events:
        if not isinstance(event, protocol.TranscriptEvent):
            continue
        seq += 1
        assert event.seq == seq
        if isinstance(event, protocol.ResponseCreated):
            assert open_item is None
            open_item = event.item.id
            texts[open_item] = ""
        elif isinstance(event, protocol.ItemAdded | protocol.BranchSelected):
            assert open_item is None
            items_of = [event.item] if isinstance(event, protocol.ItemAdded) else event.items
            final.update({item.id: item for item in items_of})
        elif isinstance(event, protocol.OutputTextDelta):
            assert event.item_id == open_item
            texts[open_item] += event.delta
        elif isinstance(event, ENDS):
            assert event.item.id == open_item
            assert event.item.content == texts[open_item]
            final[open_item] = event.item
            open_item = None
        elif isinstance(event, protocol.ResponseFailed):
            assert event.item_id == open_item
            open_item = None
    assert open_item is None
    for item in items:
        if item.role == "assistant":
            assert final[item.id] == item

"""What is told is durable before it is told, and a daemon that starts again has all of it."""

import asyncio

import msgspec
import pytest

from chatd import protocol
from chatd.engine.messages import FinishReason
from chatd.errors import NotFound, StorageError
from chatd.journal.records import CountUsage, SaveAnswer, SaveSession
from chatd.protocol import (
    BranchSelect,
    ItemAdded,
    Message,
    MessageEdit,
    Params,
    Passage,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseRegenerate,
    SessionCreate,
    SessionFork,
    SessionList,
    SessionUpdate,
)
from chatd.sessions.manager import CompletionRequest, Owner, Receipt, Session, SessionLimits, SessionManager
from chatd.testing.restarts import ANN, RestartingDaemon
from chatd.testing.sessions import TURN_END, USER, encode_text


def shown(manager: SessionManager, session: Session) -> list:
    return [(i.id, i.role, i.content, i.status, i.parent, i.reason, i.usage) for i in manager.items(session)]


def kinds(events) -> list[str]:
    return [event.__struct_config__.tag for event in events]


async def test_a_conversation_is_there_after_a_restart_and_goes_on_with_the_same_ids() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open(system="be brief", title="t", metadata={"a": "b"}, params=Params(top_k=3))
    await daemon.say(session, "one")
    await daemon.run()
    before, info = shown(daemon.manager, session), session.info()
    log = list(session.conversation.log())
    await daemon.start()
    assert daemon.restored.num_sessions == 1
    again = await daemon.get(session)
    assert again is not session
    assert shown(daemon.manager, again) == before
    assert msgspec.structs.replace(again.info(), tier=info.tier, writers=1) == info
    assert list(again.conversation.log()) == log
    await daemon.say(again, "two")
    assert daemon.engine.submits[-1].new_ids[: len(log)] == log
    await daemon.run()
    assert [item.content for item in daemon.manager.items(again)] == ["one", "hello", "two", "hello"]


async def test_lists_and_searches_have_sessions_whose_messages_are_not_in_memory() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "about the pool")
    await daemon.run()
    other, _ = await daemon.open(title="another")
    info, said = session.info(), daemon.manager.items(session)[0]
    await daemon.start()
    listed = (await daemon.manager.list(ANN, SessionList())).sessions
    assert sorted(row.id for row in listed) == sorted([session.id, other.id])
    searched = await daemon.manager.list(ANN, SessionList(query="the pool"))
    (row,) = searched.sessions
    assert searched.passages == [Passage(session=session.id, item=said.id, text="about the pool")]
    assert (row.id, row.title, row.num_items, row.context_used) == (
        session.id,
        "about the pool",
        info.num_items,
        info.context_used,
    )
    assert (await daemon.manager.list(Owner("acme", "bob"), SessionList())).sessions == []
    with pytest.raises(NotFound):
        await daemon.manager.resolve(Owner("acme", "bob"), session.id)


async def test_branches_forks_and_states_are_there_after_a_restart() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "one")
    await daemon.run()
    first = daemon.manager.items(session)[0].id
    await daemon.manager.regenerate(session, ResponseRegenerate(session=session.id))
    await daemon.run()
    await daemon.manager.edit(session, MessageEdit(session=session.id, item=first, content="other", respond=False))
    fork_of = asyncio.create_task(daemon.manager.fork(session, SessionFork(session=session.id, title="f")))
    await daemon.settle()
    fork, _ = await fork_of
    leaf = next(node.id for node in session.conversation if node.role == "assistant")
    await daemon.manager.select_branch(session, BranchSelect(session=session.id, leaf=leaf))
    await daemon.manager.update(session, SessionUpdate(session=session.id, title="named", archived=True, pinned=True))
    await daemon.manager.close(fork)
    before, fork_before = shown(daemon.manager, session), shown(daemon.manager, fork)
    siblings = [item.siblings for item in daemon.manager.items(session)]
    await daemon.start()
    again, fork_again = await daemon.get(session), await daemon.get(fork)
    assert shown(daemon.manager, again) == before
    assert shown(daemon.manager, fork_again) == fork_before
    assert [item.siblings for item in daemon.manager.items(again)] == siblings
    assert (again.title, again.archived, again.pinned, fork_again.closed, fork_again.title) == (
        "named",
        True,
        True,
        True,
        "f",
    )
    assert len(again.conversation) == 4


async def test_nothing_is_told_before_it_is_durable() -> None:
    daemon = await RestartingDaemon().start()
    session, connection = await daemon.open()
    connection.take()
    gate = asyncio.Event()
    commit = daemon.journal.commit

    async def slow(changes) -> None:
        await gate.wait()
        await commit(changes)

    daemon.journal.commit = slow
    saying = asyncio.create_task(daemon.say(session, "one"))
    await asyncio.sleep(0.05)
    await daemon.settle()
    assert (connection.take(), daemon.engine.submits, daemon.manager.items(session)) == ([], [], [])
    gate.set()
    await saying
    assert kinds(connection.take()) == ["item.added", "session.updated", "response.created"]
    gate.clear()
    await daemon.run()
    told = connection.take()
    assert "response.output_text.delta" in kinds(told)
    assert "response.completed" not in kinds(told)
    assert session.snapshot("full").session.busy
    gate.set()
    await daemon.settle()
    assert kinds(connection.take())[0] == "response.completed"


@pytest.mark.parametrize("num_tokens", range(7))
@pytest.mark.parametrize("stop", [(), ("ll",)])
async def test_an_answer_goes_on_after_the_daemon_was_killed(num_tokens: int, stop: tuple[str, ...]) -> None:
    daemon = await RestartingDaemon("hé llo").start()
    session, _ = await daemon.open(params=Params(stop=stop))
    await daemon.say(session, "one", key_id="key_1")
    await daemon.run()
    whole, usage = shown(daemon.manager, session)[-1][2:4], session.conversation.head.usage
    await daemon.say(session, "two", key_id="key_1")
    daemon.engine.step(num_tokens=num_tokens)
    answer = session.turn.answer.id
    response = session.turn.response
    seed = session.turn.answer.sampling
    await daemon.start()
    (turn,) = daemon.restored.turns
    again = await daemon.get(session)
    assert (again.turn, turn.answer.id, turn.response, turn.answer.sampling) == (turn, answer, response, seed)
    connection = daemon.listen(again)
    assert again.snapshot("full").response == response
    await daemon.run()
    assert shown(daemon.manager, again)[-1][2:4] == whole
    assert turn.answer.usage.output_tokens == usage.output_tokens
    assert [type(event) for event in connection.events if isinstance(event, ResponseCompleted)] == [ResponseCompleted]
    assert [usage.key_id for usage in daemon.journal.usage] == ["key_1"] * 2
    await daemon.start()
    assert daemon.restored.turns == []
    assert shown(daemon.manager, await daemon.get(session))[-1][2:4] == whole


async def test_a_cancelled_answer_does_not_go_on() -> None:
    daemon = await RestartingDaemon().start()
    session, connection = await daemon.open()
    await daemon.say(session, "one")
    daemon.engine.step(num_tokens=2)
    await daemon.manager.cancel(session)
    await daemon.run()
    assert [type(event) for event in connection.events if isinstance(event, ResponseIncomplete)]
    await daemon.start()
    assert daemon.restored.turns == []
    assert [item.content for item in daemon.manager.items(await daemon.get(session))] == ["one", "he"]


async def test_a_turn_that_failed_is_not_in_the_journal() -> None:
    daemon = await RestartingDaemon().start()
    session, connection = await daemon.open()
    await daemon.say(session, "one")
    daemon.engine.step()
    daemon.engine.end(next(iter(daemon.engine.running)), FinishReason.FAILED, "engine_error", "no")
    await daemon.settle()
    assert [type(event) for event in connection.events if isinstance(event, ResponseFailed)]
    await daemon.start()
    again = await daemon.get(session)
    assert (daemon.manager.items(again), again.title) == ([], "")


async def test_what_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    daemon = await RestartingDaemon().start()
    session, connection = await daemon.open(title="t")
    await daemon.say(session, "one")
    await daemon.run()
    before, seq = shown(daemon.manager, session), session.ring.head_seq
    connection.take()
    daemon.journal.error = StorageError("no room")
    first = before[0][0]
    for attempt in (
        daemon.say(session, "two"),
        daemon.say(session, "two", respond=False),
        daemon.manager.edit(session, MessageEdit(session=session.id, item=first, content="x")),
        daemon.manager.regenerate(session, ResponseRegenerate(session=session.id)),
        daemon.manager.select_branch(session, BranchSelect(session=session.id, leaf=first)),
        daemon.manager.update(session, SessionUpdate(session=session.id, title="x")),
        daemon.manager.close(session),
        daemon.manager.create(ANN, SessionCreate(title="x")),
    ):
        with pytest.raises(StorageError):
            await attempt
    forking = asyncio.create_task(daemon.manager.fork(session, SessionFork(session=session.id)))
    await daemon.settle()
    with pytest.raises(StorageError):
        await forking
    assert (shown(daemon.manager, session), session.ring.head_seq, connection.take()) == (before, seq, [])
    assert (session.turn, session.title, session.closed) == (None, "t", False)
    assert len((await daemon.manager.list(ANN, SessionList())).sessions) == 1
    daemon.journal.error = None
    await daemon.say(session, "two")
    await daemon.run()
    assert [item.content for item in daemon.manager.items(session)] == ["one", "hello", "two", "hello"]
    await daemon.start()
    assert [item.content for item in daemon.manager.items(await daemon.get(session))] == [
        *("one", "hello", "two", "hello")
    ]


async def test_an_end_that_cannot_be_kept_fails_the_turn_alone_and_the_journal_agrees_later() -> None:
    daemon = await RestartingDaemon().start()
    session, connection = await daemon.open()
    other, _ = await daemon.open()
    await daemon.say(session, "one")
    daemon.engine.step()
    daemon.journal.error = StorageError("no room")
    await daemon.run()
    (failed,) = [event for event in connection.events if isinstance(event, ResponseFailed)]
    assert (failed.error.code, failed.error.type) == ("storage_error", "server_error")
    assert (daemon.manager.items(session), session.turn) == ([], None)
    daemon.journal.error = None
    await daemon.say(other, "two")
    await daemon.run()
    await daemon.start()
    assert daemon.restored.turns == []
    assert daemon.manager.items(await daemon.get(session)) == []
    assert [item.content for item in daemon.manager.items(await daemon.get(other))] == ["two", "hello"]


async def test_an_answer_to_a_command_is_kept_with_its_effect() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "one", id="c1", receipt=Receipt("c1", b"digest"))
    (commit,) = [commit for commit in daemon.journal.commits if any(isinstance(c, SaveAnswer) for c in commit)]
    assert any(isinstance(change, SaveSession) for change in commit)
    await daemon.start()
    (kept,) = daemon.restored.answers
    assert (kept.tenant, kept.user, kept.command, kept.body) == ("acme", "ann", "c1", b"digest")
    event = protocol.decode_event(kept.event)
    assert isinstance(event, ItemAdded)
    assert (event.item.content, event.re, event.seq) == ("one", "c1", 0)


async def test_usage_is_counted_once_for_each_turn_of_either_door() -> None:
    daemon = await RestartingDaemon("ok").start()
    session, _ = await daemon.open()
    await daemon.say(session, "one", key_id="key_1")
    await daemon.run()
    request = CompletionRequest(messages=[Message(role="user", content="hi")], key_id="key_2", num_choices=2)
    choices = await daemon.manager.choose(ANN, request)
    await daemon.run()
    assert [completion.finish_reason for completion in choices.completions] == ["stop", "stop"]
    await daemon.manager.settle()
    day = daemon.journal.usage[0].day
    prompt = len([USER, *encode_text("one"), TURN_END]) + 1
    assert daemon.journal.usage == [
        CountUsage("acme", "key_1", day, prompt, 0, 3),
        CountUsage("acme", "key_2", day, prompt - 1, 0, 3 + 3, requests=2),
    ]
    assert await daemon.journal.sessions() != []
    assert len(await daemon.journal.sessions()) == 1


async def test_messages_leave_memory_when_nobody_uses_them_and_come_back() -> None:
    now = [1000.0]
    daemon = await RestartingDaemon(clock=lambda: now[0], limits=SessionLimits(max_text_bytes_per_user=40_000)).start()
    sessions = []
    for number in range(4):
        session = await daemon.manager.create(ANN, SessionCreate())
        now[0] += 1
        await daemon.say(session, f"{number}" * 3000)
        await daemon.run()
        sessions.append(session)
    assert [session.is_loaded for session in sessions] == [False, False, True, True]
    log = list(sessions[3].conversation.log())
    for number, session in enumerate(sessions):
        assert (await daemon.get(session)) is session
        assert [item.content for item in daemon.manager.items(session)] == [f"{number}" * 3000, "hello"]
    now[0] += 1000
    daemon.manager.sweep()
    assert not any(session.is_loaded for session in sessions)
    assert sessions[3].info().context_used == len(log)
    await daemon.say(sessions[3], "more")
    assert daemon.engine.submits[-1].base_len == len(log)
    await daemon.run()


async def test_ids_of_another_vocabulary_are_dropped_and_the_text_is_encoded_again() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open(system="be brief")
    await daemon.say(session, "one")
    await daemon.run()
    await daemon.say(session, "two")
    daemon.engine.step()
    await daemon.start(vocabulary="another")
    assert daemon.restored.turns == []
    again = await daemon.get(session)
    assert [item.content for item in daemon.manager.items(again)] == ["one", "hello", "two"]
    assert again.conversation.num_tokens == 0
    connection = daemon.listen(again)
    await daemon.manager.regenerate(again, ResponseRegenerate(session=again.id))
    assert "session.tier" in kinds(connection.events)
    submit = daemon.engine.submits[-1]
    assert (submit.base_len, submit.num_answered) == (0, 0)
    await daemon.run()
    log = list(again.conversation.log())
    assert log[: len(submit.new_ids)] == submit.new_ids
    await daemon.start(vocabulary="another")
    once_more = await daemon.get(session)
    assert list(once_more.conversation.log()) == log
    assert [item.content for item in daemon.manager.items(once_more)] == ["one", "hello", "two", "hello"]


async def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing_in_between() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    gate = asyncio.Event()
    commit = daemon.journal.commit

    async def slow(changes) -> None:
        await gate.wait()
        await commit(changes)

    daemon.journal.commit = slow
    saying = asyncio.create_task(daemon.say(session, "one"))
    await asyncio.sleep(0.05)
    saying.cancel()
    await daemon.settle()
    gate.set()
    await asyncio.wait([saying])
    await daemon.run()
    assert [item.content for item in daemon.manager.items(session)] == ["one", "hello"]
    await daemon.start()
    assert [item.content for item in daemon.manager.items(await daemon.get(session))] == ["one", "hello"]

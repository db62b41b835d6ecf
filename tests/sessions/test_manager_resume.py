"""Any schedule of disconnects gives every client the same transcript: no gap, no duplicate."""

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd import protocol
from chatd.engine.messages import FinishReason
from chatd.errors import ChatdError
from chatd.protocol import (
    BranchSelect,
    MessageEdit,
    ResponseRegenerate,
    SessionAttach,
    SessionCreate,
    UserMessage,
)
from chatd.sessions.manager import Owner, Session, SessionLimits, SessionManager
from chatd.testing.sessions import TURN_END, RecordingSubscriber, ScriptedEngine, encode_text, make_manager
from chatd.testing.transcripts import TranscriptClient

ANN = Owner("acme", "ann")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("connect"), st.integers(0, 2)),
        st.tuples(st.just("disconnect"), st.integers(0, 2)),
        st.tuples(st.just("read"), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.just(0)),
        st.tuples(st.just("fail"), st.just(0)),
        st.tuples(st.just("die"), st.just(0)),
        st.tuples(st.just("note"), st.just(0)),
        st.tuples(st.just("edit"), st.integers(0, 7)),
        st.tuples(st.just("rewrite"), st.integers(0, 7)),
        st.tuples(st.just("regenerate"), st.integers(0, 7)),
        st.tuples(st.just("select"), st.integers(0, 7)),
    ),
    max_size=60,
)
SAYINGS = ("hello", "é🙂", "a STOP b", "")


@settings(max_examples=250, deadline=None)
@given(ACTIONS, st.sampled_from([2, 5, 1000]), st.booleans())
def test_any_schedule_of_disconnects_gives_the_same_transcript(actions: list, ring: int, with_stop: bool) -> None:
    asyncio.run(run_schedule(actions, ring, with_stop))


async def run_schedule(actions: list, ring: int, with_stop: bool) -> None:
    engine = ScriptedEngine(lambda log: [*encode_text(SAYINGS[len(log) % 4] + "!"), TURN_END])
    manager = make_manager(engine, limits=SessionLimits(replay_events=ring))
    params = protocol.Params(stop=("STOP",) if with_stop else ())
    session = await manager.create(ANN, SessionCreate(params=params))
    clients = [TranscriptClient(f"con_{number}") for number in range(3)]
    always = TranscriptClient("always")
    always.connect(manager, session)
    for kind, value in actions:
        client = clients[value % 3]
        try:
            match kind:
                case "say" | "note":
                    command = UserMessage(session=session.id, content=SAYINGS[value], respond=kind == "say")
                    await manager.user_message(session, command)
                case "edit" | "rewrite" if items := list(session.conversation):
                    item = items[value % len(items)].id
                    edit = MessageEdit(session=session.id, item=item, content=SAYINGS[value % 4])
                    await manager.edit(session, msgspec.structs.replace(edit, respond=kind == "edit"))
                case "regenerate":
                    items = [node.id for node in session.conversation]
                    item = items[value % len(items)] if items and value else None
                    await manager.regenerate(session, ResponseRegenerate(session=session.id, item=item))
                case "select" if items := list(session.conversation):
                    leaf = items[value % len(items)].id
                    await manager.select_branch(session, BranchSelect(session=session.id, leaf=leaf))
                case "step":
                    engine.step(value)
                case "connect" if client.connection is None:
                    client.connect(manager, session)
                case "disconnect":
                    client.disconnect(manager)
                case "read":
                    client.read()
                case "cancel":
                    await manager.cancel(session)
                case "fail" if engine.running:
                    engine.end(next(iter(engine.running)), FinishReason.FAILED, "engine_error", "no")
                case "die":
                    engine.die()
                    engine.restart()
        except ChatdError:
            pass
        always.read()
        assert always.items == manager.items(session)
    engine.run()
    assert session.turn is None
    for client in (always, *clients):
        if client.connection is None:
            client.connect(manager, session)
        client.read()
        assert client.items == manager.items(session)
        assert client.last_seq == session.ring.head_seq
    assert always.num_snapshots == 1


async def started(ring: int = 100) -> tuple[ScriptedEngine, SessionManager, Session]:
    engine = ScriptedEngine(lambda _log: [*encode_text("abcdef"), TURN_END])
    manager = make_manager(engine, limits=SessionLimits(replay_events=ring))
    session = await manager.create(ANN, SessionCreate(title="t"))
    await manager.user_message(session, UserMessage(session=session.id, content="hi"))
    engine.step(2)
    return engine, manager, session


async def test_the_same_boot_and_a_known_seq_replay_exactly() -> None:
    engine, manager, session = await started()
    connection = RecordingSubscriber()
    command = SessionAttach(session=session.id, after_seq=1, boot="boot_1", id="c1")
    frame = manager.attach(session, connection, command)
    assert (frame.replay, frame.snapshot, frame.head_seq, frame.re) == ("exact", None, 3, "c1")
    engine.step()
    assert connection.events == []
    manager.start(session, connection)
    assert [event.seq for event in connection.events if hasattr(event, "seq")] == [2, 3, 4]


async def test_another_boot_or_no_seq_gives_a_snapshot_with_the_partial_answer() -> None:
    engine, manager, session = await started()
    for command in (
        SessionAttach(session=session.id, after_seq=1, boot="boot_0"),
        SessionAttach(session=session.id, after_seq=1),
        SessionAttach(session=session.id, boot="boot_1"),
        SessionAttach(session=session.id, after_seq=99, boot="boot_1"),
    ):
        frame = manager.attach(session, RecordingSubscriber(), command)
        assert (frame.replay, frame.head_seq) == ("snapshot", 3)
        assert [(item.content, item.status) for item in frame.snapshot.items] == [
            ("hi", "completed"),
            ("ab", "in_progress"),
        ]
        assert frame.snapshot.response == session.turn.response
    engine.run()
    after = manager.attach(session, RecordingSubscriber(), SessionAttach(session=session.id)).snapshot
    assert (after.response, after.session.busy, after.items[-1].content) == (None, False, "abcdef")


async def test_history_can_be_left_out_but_not_the_answer_in_progress() -> None:
    engine, manager, session = await started()
    none = SessionAttach(session=session.id, history="none")
    frame = manager.attach(session, RecordingSubscriber(), none)
    assert [item.content for item in frame.snapshot.items] == ["ab"]
    engine.run()
    assert manager.attach(session, RecordingSubscriber(), none).snapshot.items == []
    for _ in range(15):
        await manager.user_message(session, UserMessage(session=session.id, content="again"))
        engine.run()
    tail = manager.attach(session, RecordingSubscriber(), SessionAttach(session=session.id, history="tail"))
    assert len(tail.snapshot.items) == 20
    assert tail.snapshot.items == manager.items(session)[-20:]


async def test_a_disconnect_does_not_stop_a_generation() -> None:
    engine, manager, session = await started()
    connection = RecordingSubscriber()
    manager.attach(session, connection, SessionAttach(session=session.id))
    manager.start(session, connection)
    manager.detach_all(connection)
    seen = len(connection.events)
    engine.run()
    assert len(connection.events) == seen
    assert manager.items(session)[-1].content == "abcdef"


async def test_comings_and_goings_are_told_to_the_others() -> None:
    _, manager, session = await started()
    one, two = RecordingSubscriber("one"), RecordingSubscriber("two")
    manager.attach(session, one, SessionAttach(session=session.id))
    manager.start(session, one)
    manager.attach(session, two, SessionAttach(session=session.id, role="observer"))
    manager.start(session, two)
    manager.detach(session, two)
    manager.detach(session, two)
    assert one.events == [
        protocol.ClientAttached(session=session.id, connection="two", role="observer"),
        protocol.ClientLeft(session=session.id, connection="two"),
    ]
    assert two.events == []


async def test_attaching_again_starts_anew_without_duplicates() -> None:
    engine, manager, session = await started()
    connection = RecordingSubscriber()
    for _ in range(2):
        manager.attach(session, connection, SessionAttach(session=session.id, after_seq=3, boot="boot_1"))
        manager.start(session, connection)
    engine.step()
    assert [event.seq for event in connection.events if hasattr(event, "seq")] == [4]

"""The native door, by a websocket client that is not ours."""

import asyncio
import json

import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from chatd import protocol
from chatd.engine.messages import Cancel, RequestClass
from chatd.protocol import (
    Error,
    ItemAdded,
    OutputTextDelta,
    Params,
    Ping,
    Pong,
    ResponseCancel,
    ResponseCompleted,
    ResponseCreated,
    ResponseIncomplete,
    ServerDraining,
    SessionAttach,
    SessionAttached,
    SessionClose,
    SessionClosed,
    SessionCreate,
    SessionCreated,
    SessionDetach,
    SessionDetached,
    SessionGet,
    SessionGot,
    SessionList,
    SessionListed,
    SessionUpdate,
    SessionUpdated,
    UserMessage,
    decode_event,
    encode,
)
from chatd.server import daemon as daemon_module
from chatd.sessions.model_profile import NEUTRAL
from chatd.tenants.keys import create_key, parse, revoke_key
from chatd.testing.sessions import encode_text

from .conftest import Talk, eventually


def text_of(events) -> str:
    return "".join(event.delta for event in events if isinstance(event, OutputTextDelta))


def seqs_of(events) -> list[int]:
    """The sequence numbers that the events cover, merged deltas spelled out."""
    numbers = []
    for event in events:
        if isinstance(event, protocol.TranscriptEvent):
            first = getattr(event, "seq_from", None) or event.seq
            numbers += range(first, event.seq + 1)
    return numbers


async def create(talk, **fields) -> SessionCreated:
    created = await talk.ask(SessionCreate(id="create", **fields))
    assert isinstance(created, SessionCreated), created
    return created


async def test_the_server_says_hello_first(start) -> None:
    async with start() as running, running.chat() as talk:
        hello = talk.hello
        assert hello.protocol == "chatd.v1"
        assert (hello.tenant, hello.user) == ("acme", "bob")
        assert hello.boot == running.daemon.boot
        params = msgspec.structs.replace(NEUTRAL, max_tokens=64)
        assert hello.model == protocol.ModelInfo(id="bytes", context=4096, block_size=16, blocks=4096, params=params)
        assert hello.limits.frame_bytes == 262144
        assert talk.socket.subprotocol == "chatd.v1"


async def test_a_turn_streams_its_answer(start) -> None:
    async with start() as running, running.chat() as talk:
        created = await create(talk, system="be brief")
        await talk.send(UserMessage(id="m1", session=created.session.id, content="hi"))
        events = await talk.until(ResponseCompleted)
        added = next(event for event in events if isinstance(event, ItemAdded))
        assert (added.re, added.item.role, added.item.content) == ("m1", "user", "hi")
        assert any(isinstance(event, ResponseCreated) for event in events)
        assert text_of(events) == "hello"
        assert seqs_of(events) == list(range(1, seqs_of(events)[-1] + 1))
        end = events[-1]
        assert end.item.content == "hello"
        assert end.usage.output_tokens == 6


async def test_sessions_are_listed_read_changed_and_closed(start) -> None:
    async with start() as running, running.chat() as talk:
        created = await create(talk, title="one")
        session = created.session.id
        listed = await talk.ask(SessionList(id="l"))
        assert isinstance(listed, SessionListed)
        assert [info.id for info in listed.sessions] == [session]
        updated = await talk.ask(SessionUpdate(id="u", session=session, title="two", pinned=True))
        assert isinstance(updated, SessionUpdated)
        assert (updated.info.title, updated.info.pinned) == ("two", True)
        got = await talk.ask(SessionGet(id="g", session=session))
        assert isinstance(got, SessionGot)
        assert got.session.title == "two"
        closed = await talk.ask(SessionClose(id="c", session=session))
        assert closed == SessionClosed(session=session, re="c")


async def test_a_search_says_which_message_has_the_text_and_who_has_the_session_open(start) -> None:
    async with start() as running, running.chat() as talk, running.chat() as other:
        session = (await create(talk, title="one")).session.id
        await talk.send(UserMessage(id="m", session=session, content="where is the needle?"))
        events = await talk.until(ResponseCompleted)
        said = next(event.item for event in events if isinstance(event, ItemAdded))
        await other.ask(SessionAttach(id="a", session=session, role="observer"))
        found = await talk.ask(SessionList(id="l", query="NEEDLE"))
        assert isinstance(found, SessionListed)
        assert found.passages == [protocol.Passage(session=session, item=said.id, text="where is the needle?")]
        assert [(info.writers, info.observers) for info in found.sessions] == [(1, 1)]


async def test_a_second_connection_sees_the_answer_and_one_that_left_does_not(start) -> None:
    async with start() as running, running.chat() as writer, running.chat() as reader:
        running.engine.held = True
        session = (await create(writer)).session.id
        attached = await reader.ask(SessionAttach(id="a", session=session, role="observer"))
        assert isinstance(attached, SessionAttached)
        assert attached.replay == "snapshot"
        assert (attached.snapshot.session.writers, attached.snapshot.session.observers) == (1, 1)
        await writer.send(UserMessage(session=session, content="hi"))
        await writer.until(ResponseCreated)
        refused = await reader.ask(UserMessage(id="m", session=session, content="no"))
        assert refused.error.code == "observer"
        running.engine.held = False
        assert text_of(await reader.until(ResponseCompleted)) == "hello"
        detached = await reader.ask(SessionDetach(id="d", session=session))
        assert detached == SessionDetached(session=session, re="d")
        await writer.until(ResponseCompleted)
        await writer.send(UserMessage(session=session, content="again"))
        await writer.until(ResponseCompleted)
        assert isinstance(await reader.ask(Ping(id="p", t=1)), Pong)


async def test_a_disconnect_does_not_stop_an_answer_and_resuming_has_no_gap(start) -> None:
    async with start() as running:
        running.engine.held = True
        async with running.chat() as talk:
            session = (await create(talk)).session.id
            await talk.send(UserMessage(session=session, content="hi"))
            seen = await talk.until(ResponseCreated)
            boot = talk.hello.boot
        last = seqs_of(seen)[-1]
        running.engine.held = False
        async with running.chat() as talk:
            attached = await talk.ask(SessionAttach(id="a", session=session, after_seq=last, boot=boot))
            assert attached.replay == "exact"
            events = await talk.until(ResponseCompleted)
            assert seqs_of(events)[0] == last + 1
            assert text_of(events) == "hello"


async def test_a_message_sent_just_before_leaving_is_answered(start) -> None:
    async with start() as running:
        async with running.chat() as talk:
            session = (await create(talk)).session.id
            await talk.send(UserMessage(session=session, content="hi"))
        async with running.chat() as talk, asyncio.timeout(10):
            while True:
                got = await talk.ask(SessionGet(id="g", session=session))
                if got.items and got.items[-1].status == "completed" and got.items[-1].role == "assistant":
                    break
            assert [item.content for item in got.items] == ["hi", "hello"]


async def test_a_cancelled_answer_keeps_what_there_is(start) -> None:
    async with start(lambda _log: encode_text("x")) as running, running.chat() as talk:
        running.engine.held = True
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="hi"))
        await talk.until(ResponseCreated)
        running.engine.step(3)
        await talk.until(OutputTextDelta)
        await talk.send(ResponseCancel(session=session))
        await eventually(lambda: any(isinstance(message, Cancel) for message in running.engine.sent))
        running.engine.held = False
        end = (await talk.until(ResponseIncomplete))[-1]
        assert end.reason == "cancelled"
        assert end.item.content == "xxx"


async def test_a_second_turn_while_one_runs_is_refused_and_the_first_goes_on(start) -> None:
    async with start() as running, running.chat() as talk:
        running.engine.held = True
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="one"))
        await talk.until(ResponseCreated)
        refused = await talk.ask(UserMessage(id="two", session=session, content="two"))
        assert isinstance(refused, Error)
        assert (refused.error.code, refused.session) == ("session_busy", session)
        running.engine.held = False
        assert text_of(await talk.until(ResponseCompleted)) == "hello"


async def test_a_command_that_comes_twice_is_carried_out_once(start) -> None:
    async with start() as running, running.chat() as talk:
        first = await create(talk)
        again = await talk.ask(SessionCreate(id="create"))
        assert again.session.id == first.session.id
        message = UserMessage(id="m", session=first.session.id, content="hi")
        await talk.send(message)
        events = await talk.until(ResponseCompleted)
        repeated = await talk.ask(message)
        assert repeated == next(event for event in events if isinstance(event, ItemAdded))
        other = await talk.ask(UserMessage(id="m", session=first.session.id, content="other"))
        assert other.error.code == "id_reused"
        assert len(running.engine.submits) == 1


async def test_a_command_that_was_refused_may_be_sent_again(start) -> None:
    async with start() as running, running.chat() as talk:
        running.engine.held = True
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="one"))
        await talk.until(ResponseCreated)
        two = UserMessage(id="two", session=session, content="two")
        assert (await talk.ask(two)).error.code == "session_busy"
        running.engine.held = False
        await talk.until(ResponseCompleted)
        assert isinstance(await talk.ask(two), ItemAdded)


@pytest.mark.parametrize(("context", "limit"), [(4096, 262_144), (65_536, 524_288)])
async def test_a_frame_at_the_limit_is_read_and_one_byte_more_closes_the_connection(start, context, limit) -> None:
    async with start(context=context) as running:
        assert protocol.frame_limit_bytes(context) == limit
        frame = '{"type":"nonsense","x":"%s"}'
        fill = limit - len(frame % "")
        async with running.chat() as talk:
            await talk.socket.send(frame % ("a" * fill))
            assert (await talk.next()).error.code == "unknown_type"
            await talk.socket.send(frame % ("a" * (fill + 1)))
            assert await talk.closed() == 1009


async def test_a_connection_that_says_nothing_is_closed(start) -> None:
    async with start(server={"first_frame_timeout_s": 0.05}) as running, running.chat() as talk:
        assert await talk.closed() == 4408


async def test_a_binary_frame_closes_its_connection(start) -> None:
    async with start() as running, running.chat() as talk:
        await talk.socket.send(b'{"type":"ping","t":1}')
        assert await talk.closed() == 4400


async def test_a_list_leaves_out_what_may_be_large(start) -> None:
    async with start() as running, running.chat() as talk:
        system, metadata, params = "s" * 200_000, {"k" * 64: "v" * 512}, Params(stop=("x" * 256,))
        for number in range(5):
            command = SessionCreate(id=f"c{number}", system=system, metadata=metadata, params=params)
            await talk.ask(command)
        await talk.send(SessionList(id="l"))
        text = await talk.socket.recv()
        assert len(text) < 5 * 1024
        listed = decode_event(text)
        assert [(row.system, row.metadata, row.params) for row in listed.sessions] == [(None, {}, Params())] * 5
        got = await talk.ask(SessionGet(id="g", session=listed.sessions[0].id))
        assert (got.session.system, got.session.metadata, got.session.params) == (system, metadata, params)


async def test_a_message_is_answered_in_the_class_of_its_key(start, tmp_path) -> None:
    batch = create_key(tmp_path / "keys.json", tenant="acme", user="nightly", key_class="batch")
    other = create_key(tmp_path / "keys.json", tenant="acme", user="ann")
    async with start() as running, running.chat(batch) as slow, running.chat(other) as fast:
        for talk in (slow, fast):
            await talk.send(UserMessage(session=(await create(talk)).session.id, content="hi"))
            await talk.until(ResponseCompleted)
        assert [submit.request_class for submit in running.engine.submits] == [
            RequestClass.BATCH,
            RequestClass.INTERACTIVE,
        ]


async def test_nothing_is_served_while_loading(start) -> None:
    async with start(is_open=False) as running:
        with pytest.raises(InvalidStatus) as refused:
            await connect(
                f"ws://127.0.0.1:{running.port}/v1/chat/ws", additional_headers=running.headers(), proxy=None
            ).__aenter__()
        assert refused.value.response.status_code == 503
        assert json.loads(refused.value.response.body)["error"]["code"] == "loading"
        running.backend.gate.set()


async def test_a_foreign_subprotocol_is_refused(start) -> None:
    async with start() as running:
        with pytest.raises(InvalidStatus) as refused:
            async with running.chat(subprotocols=["graphql-ws"]):
                pass
        assert refused.value.response.status_code == 400
        assert json.loads(refused.value.response.body)["error"]["code"] == "bad_subprotocol"


async def test_a_reader_that_stops_reading_is_closed_and_nobody_else_notices(start) -> None:
    endless = lambda _log: encode_text("x")  # noqa: E731
    options = {"send_buffer_bytes": 2**16, "send_timeout_s": 0.2}
    async with start(endless, server=options) as running, running.chat() as witness:
        running.engine.tokens_per_step = 4
        session = (await create(witness)).session.id
        big = (await witness.ask(SessionCreate(id="big"))).session.id
        for i in range(3):
            filler = UserMessage(id=f"fill{i}", session=big, content="y" * 200_000, respond=False)
            assert isinstance(await witness.ask(filler), ItemAdded)
        async with connect(
            f"ws://127.0.0.1:{running.port}/v1/chat/ws",
            additional_headers=running.headers(),
            compression=None,
            proxy=None,
            max_queue=1,
        ) as deaf:
            for i in range(64):
                await deaf.send(encode(SessionGet(id=f"g{i}", session=big)))
            await witness.send(UserMessage(session=session, content="hi"))
            assert text_of(await witness.until(ResponseIncomplete)) == "x" * 64
            await eventually(lambda: len(running.daemon.connections) == 1)
            assert await Talk(deaf).closed() == 1013


async def test_a_revoked_keys_sockets_close(start, tmp_path) -> None:
    async with start() as running, running.chat() as talk, running.chat(running.keys["ann"]) as other:
        revoke_key(tmp_path / "keys.json", parse(running.key))
        running.daemon.refresh_keys()
        assert await talk.closed() == 4401
        assert isinstance(await other.ask(Ping(id="p", t=1)), Pong)


async def test_a_revoked_keys_answers_end_and_nobody_elses(start, tmp_path) -> None:
    async with start() as running:
        second = create_key(tmp_path / "keys.json", tenant="acme", user="bob")
        running.daemon.refresh_keys()
        running.engine.held = True
        async with running.chat() as talk, running.chat(second) as other:
            sessions = []
            for chat in (talk, other):
                created = await chat.ask(SessionCreate(id=f"create_{len(sessions)}"))
                sessions.append(created.session.id)
                await chat.send(UserMessage(session=sessions[-1], content="hi"))
                await chat.until(ResponseCreated)
            await other.ask(SessionAttach(id="a", session=sessions[0]))
            revoke_key(tmp_path / "keys.json", parse(running.key))
            running.daemon.refresh_keys()
            assert await talk.closed() == 4401
            running.engine.held = False
            ended = {}
            while len(ended) < 2:
                event = await other.next()
                if isinstance(event, ResponseCompleted | ResponseIncomplete):
                    ended[event.session] = event.reason
            assert ended == {sessions[0]: "cancelled", sessions[1]: "stop"}


async def test_a_key_that_changes_and_stays_its_owners_keeps_its_answers(start, tmp_path) -> None:
    path = tmp_path / "keys.json"
    async with start() as running, running.chat() as talk:
        running.engine.held = True
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="hi"))
        await talk.until(ResponseCreated)
        file = json.loads(path.read_text())
        (own,) = [key for key in file["keys"] if key["id"] == parse(running.key)]
        own["class"] = "batch"
        path.write_text(json.dumps(file))
        running.daemon.refresh_keys()
        assert await talk.closed() == 4401
        assert running.manager.answering_keys() == {own["id"]}
        own["user"] = "carol"
        path.write_text(json.dumps(file))
        running.daemon.refresh_keys()
        running.engine.held = False
        await eventually(lambda: running.manager.num_in_flight == 0)
        assert any(isinstance(message, Cancel) for message in running.engine.sent)


async def test_the_keys_file_is_watched(start, tmp_path, monkeypatch) -> None:
    assert daemon_module.KEYS_POLL_S <= 5
    monkeypatch.setattr(daemon_module, "KEYS_POLL_S", 0.01)
    async with start() as running, running.chat() as talk:
        revoke_key(tmp_path / "keys.json", parse(running.key))
        assert await talk.closed() == 4401
        with pytest.raises(InvalidStatus) as refused:
            async with running.chat():
                pass
        assert refused.value.response.status_code == 401


async def test_a_stopping_daemon_lets_answers_end_and_closes_for_a_restart(start) -> None:
    async with start() as running, running.chat() as talk:
        running.engine.held = True
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="hi"))
        await talk.until(ResponseCreated)
        running.stop.set()
        await talk.until(ServerDraining)
        refused = await talk.ask(SessionCreate(id="late"))
        assert refused.error.code == "draining"
        running.engine.held = False
        assert text_of(await talk.until(ResponseCompleted)) == "hello"
        assert await talk.closed() == 1012


async def test_connections_of_one_key_are_counted(start) -> None:
    async with start(server={"max_connections_per_key": 1}) as running, running.chat():
        with pytest.raises(InvalidStatus) as refused:
            async with running.chat():
                pass
        assert refused.value.response.status_code == 429
        error = json.loads(refused.value.response.body)["error"]
        assert (error["code"], error["retry_after_ms"]) == ("too_many_connections", 5000)
        async with running.chat(running.keys["eve"]):
            pass


async def test_a_key_that_used_up_its_requests_is_told_when_to_come_back(start) -> None:
    async with start(quotas={"requests_per_minute": 2}) as running, running.chat() as talk:
        session = (await create(talk)).session.id
        await talk.send(UserMessage(id="one", session=session, content="hi"))
        events = await talk.until(ResponseCompleted)
        told = [event.limits[0]["remaining"] for event in events if isinstance(event, protocol.RateLimitsUpdated)]
        assert told[-1] == 0
        refused = await talk.ask(UserMessage(id="two", session=session, content="again"))
        assert refused.error.code == "rate_limit_exceeded"
        assert 0 < refused.error.retry_after_ms <= 60_000


async def test_an_answer_charges_what_it_computed(start) -> None:
    async with start(quotas={"tokens_per_minute": 1000}) as running, running.chat() as talk:
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="hi"))
        end = (await talk.until(ResponseCompleted))[-1]
        quota = running.daemon.quotas.of(next(iter(running.daemon.connections)).principal.key_id)
        await eventually(lambda: quota.num_inflight == 0)
        used = 1000 - quota.state()[0]["remaining"]
        assert 0 <= end.usage.input_tokens + end.usage.output_tokens - used <= 1

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chatd import protocol as p
from chatd.client import Client, ConnectionPhase, ConnectionState, Turn, websocket_url
from chatd.client.errors import error_from
from chatd.client.queue import EventQueue
from chatd.errors import (
    AuthenticationError,
    ChatdError,
    Conflict,
    EngineError,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unavailable,
)
from chatd.testing.scripted_daemon import Script, ScriptedDaemon, merged

WORDS = [f"word{n} " for n in range(12)]


async def wait_until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with ScriptedDaemon([Script(deltas=WORDS)]) as running:
        yield running


@pytest.fixture
async def manual() -> AsyncIterator[ScriptedDaemon]:
    async with ScriptedDaemon([Script(deltas=WORDS, manual=True)]) as running:
        yield running


def connect(daemon: ScriptedDaemon, **options: object) -> Client:
    return Client.connect(daemon.url, backoff=lambda _: 0.0, **options)


def seqs(events: list[p.Event]) -> list[tuple[int, int]]:
    """(first, last) of each transcript event."""
    found = [event for event in events if hasattr(event, "seq")]
    return [(getattr(event, "seq_from", None) or event.seq, event.seq) for event in found]


async def collect(turn: Turn, into: list[p.Event]) -> None:
    async for event in turn:
        into.append(event)


async def test_a_turn_streams_its_text_and_ends_with_usage_and_timings(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        session = await client.create_session(system="Be brief.")
        turn = session.say("hi")
        kinds = [type(event).__name__ async for event in turn]
        assert kinds[:2] == ["ItemAdded", "ResponseCreated"]
        assert kinds[2:14] == ["OutputTextDelta"] * 12
        assert kinds[14] == "ResponseCompleted"
        assert turn.text == "".join(WORDS)
        assert turn.usage is not None
        assert turn.usage.cached_tokens == 48
        assert turn.timings is not None
        assert turn.reason == "stop"


async def test_stream_yields_text_and_turns_follow_one_another(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        session = await client.create_session()
        assert "".join([text async for text in session.stream("one")]) == "".join(WORDS)
        assert "".join([text async for text in session.stream("two")]) == "".join(WORDS)
        assert [item.role for item in daemon.sessions[session.id].items] == ["user", "assistant"] * 2


async def test_several_sessions_share_one_socket_without_mixing(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        sessions = [await client.create_session() for _ in range(5)]

        async def talk(index: int) -> str:
            return "".join([text async for text in sessions[index].stream(f"to {index}")])

        assert await asyncio.gather(*[talk(index) for index in range(5)]) == ["".join(WORDS)] * 5
        assert daemon.num_connections == 1
        assert len({session.id for session in sessions}) == 5


@pytest.mark.parametrize("cut_after", [0, 1, 5, 11])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_an_answer_goes_on_after_a_lost_connection_without_gap_or_duplicate(
    manual: ScriptedDaemon, cut_after: int, how: str
) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        manual.release(cut_after)
        await wait_until(lambda: len(seqs(events)) == 2 + cut_after)
        if how == "close":
            await manual.drop()
        else:
            manual.abort()
        manual.release(13 - cut_after)
        await reading
        assert turn.text == "".join(WORDS)
        assert seqs(events) == [(n, n) for n in range(1, 16)]
        assert manual.num_connections == 2


async def test_a_connection_lost_many_times_gives_the_same_transcript(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        for n in range(13):
            manual.release()
            if n % 2:
                manual.abort()
            await wait_until(lambda n=n: len(seqs(events)) >= min(3 + n, 14))
        await reading
        assert seqs(events) == [(n, n) for n in range(1, 16)]
        assert turn.text == "".join(WORDS)


async def test_after_a_restart_the_snapshot_supplies_the_rest_of_the_answer(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        manual.release(3)
        await wait_until(lambda: len(seqs(events)) == 5)
        manual.forget()
        await manual.drop(p.CLOSE_RESTART)
        manual.release(10)
        await reading
        deltas = [event.delta for event in events if isinstance(event, p.OutputTextDelta)]
        assert "".join(deltas) == turn.text == "".join(WORDS)
        assert isinstance(events[-1], p.ResponseCompleted)


async def test_an_answer_that_ended_while_the_connection_was_lost_ends_the_turn(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        manual.release(2)
        await wait_until(lambda: len(seqs(events)) == 4)
        manual.refuse = (HTTPStatus.SERVICE_UNAVAILABLE, b"loading")
        await manual.drop()
        manual.release(11)
        await wait_until(lambda: manual.sessions[session.id].response is None)
        manual.forget()
        manual.refuse = None
        await reading
        assert turn.text == "".join(WORDS)
        assert turn.reason == "stop"
        assert turn.usage is not None
        assert turn.usage.output_tokens == 12


async def test_a_restart_that_lost_a_part_of_the_answer_is_said_to_a_text_stream(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        stream = session.stream("hi")
        manual.release(3)
        assert [await anext(stream) for _ in range(3)] == WORDS[:3]
        manual.forget()
        items = manual.sessions[session.id].items
        items[-1] = p.Item(id=items[-1].id, role="assistant", content="other", status="in_progress")
        await manual.drop()
        with pytest.raises(EngineError) as caught:
            await anext(stream)
        assert caught.value.error_code == "answer_replaced"


@pytest.mark.parametrize("pieces", [("rd1 wo", "rd2 word3"), ("r", "d1 ", "word", "2 word", "3"), ("rd1 word2 word3",)])
async def test_text_that_comes_again_after_a_restart_is_shown_once(
    manual: ScriptedDaemon, pieces: tuple[str, ...]
) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        stream = session.stream("hi")
        manual.release(3)
        assert [await anext(stream) for _ in range(3)] == WORDS[:3]
        turn = session.say("never sent")
        turn._answer_id, turn._parts = "a1", ["word0 word1 word2 "]
        assert session.info is not None
        item = p.Item(id="a1", role="assistant", content="word0 wo", status="in_progress")
        shot = p.Snapshot(session=session.info, items=[item], response="resp_1", state=p.LatestState())
        snapshot = p.SessionAttached(session=session.id, head_seq=4, replay="snapshot", snapshot=shot)
        assert list(turn._after_snapshot(snapshot)) == []
        shown = []
        for piece in pieces:
            delta = p.OutputTextDelta(session=session.id, seq=5, ts=0.0, item_id="a1", delta=piece, n_tokens=1)
            shown += [event.delta for event in turn._once(delta)]
        assert ("".join(shown), turn.text) == ("word3", "word0 word1 word2 word3")
        turn._parts = ["word0 word1 word2 "]
        list(turn._after_snapshot(snapshot))
        delta = p.OutputTextDelta(session=session.id, seq=5, ts=0.0, item_id="a1", delta="rd1 other", n_tokens=1)
        (replaced,) = turn._once(delta)
        assert replaced.snapshot.items[0].content == turn.text == "word0 word1 other"
        await stream.aclose()


async def test_a_restart_that_lost_the_turn_ends_it_with_a_typed_error(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        stream = session.stream("hi")
        manual.release()
        await anext(stream)
        manual.forget()
        manual.sessions[session.id].items.clear()
        await manual.drop()
        with pytest.raises(EngineError) as caught:
            await anext(stream)
        assert caught.value.error_code == "turn_lost"


async def test_a_session_that_a_restart_lost_gives_not_found_and_others_go_on(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        lost, kept = await client.create_session(), await client.create_session()
        lost_turn = asyncio.create_task(collect(lost.say("a"), []))
        await wait_until(lambda: manual.sessions[lost.id].response is not None)
        kept_turn = asyncio.create_task(collect(kept.say("b"), []))
        await wait_until(lambda: manual.sessions[kept.id].response is not None)
        del manual.sessions[lost.id]
        await manual.drop()
        with pytest.raises(NotFound):
            await lost_turn
        manual.release(40)
        await kept_turn


async def test_a_command_without_an_answer_is_sent_again_under_its_id_and_done_once(daemon: ScriptedDaemon) -> None:
    async def cut_once(command: p.Command) -> bool:
        if isinstance(command, p.UserMessage) and daemon.num_connections == 1:
            daemon.abort()
            await daemon._user_message(command)
            return True
        return False

    daemon.on_command = cut_once
    async with connect(daemon) as client:
        session = await client.create_session()
        assert "".join([text async for text in session.stream("once")]) == "".join(WORDS)
        sent = [command.id for command in daemon.commands if isinstance(command, p.UserMessage)]
        assert len(sent) == 2
        assert len(set(sent)) == 1
        assert len(daemon.sessions[session.id].items) == 2


async def test_merged_deltas_are_taken_and_an_overlap_or_a_gap_is_repaired(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        manual.release(2)
        await wait_until(lambda: len(seqs(events)) == 4)
        script = manual.sessions[session.id]
        deltas = [
            p.OutputTextDelta(
                session=session.id, seq=5 + n, ts=0.0, item_id=script.items[-1].id, delta=WORDS[2 + n], n_tokens=1
            )
            for n in range(3)
        ]
        await manual.send_everywhere(p.encode(merged(deltas)))
        await wait_until(lambda: len(seqs(events)) == 5)
        # The daemon's own live events 5 to 7 are duplicates of the merged one and are dropped.
        manual.release(4)
        await wait_until(lambda: len(seqs(events)) == 6)
        overlapping = p.OutputTextDelta(
            session=session.id, seq=9, ts=0.0, item_id=script.items[-1].id, delta="x", n_tokens=1, seq_from=8
        )
        await manual.send_everywhere(p.encode(overlapping))
        beyond = p.OutputTextDelta(session=session.id, seq=40, ts=0.0, item_id="i", delta="x", n_tokens=1)
        await manual.send_everywhere(p.encode(beyond))
        await client.ping()
        manual.release(7)
        await reading
        assert turn.text == "".join(WORDS)
        assert seqs(events)[4] == (5, 7)


async def test_unknown_events_and_unknown_values_leave_no_gap_and_no_error(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        await wait_until(lambda: len(seqs(events)) == 2)
        await manual.send_everywhere(json.dumps({"type": "weather.changed", "sky": "blue"}))
        await manual.send_everywhere(json.dumps({"type": "response.queued", "session": session.id, "position": "?"}))
        await manual.send_everywhere("not json")
        script = manual.sessions[session.id]
        script.seq += 1
        thought = {"type": "response.reasoning_text.delta", "session": session.id, "seq": 3, "ts": 0.0, "delta": "hm"}
        await manual.send_everywhere(json.dumps(thought))
        manual.release(13)
        await reading
        assert turn.text == "".join(WORDS)
        assert seqs(events) == [(1, 1), (2, 2), *[(n, n) for n in range(4, 17)]]


async def test_an_end_with_a_reason_of_a_newer_daemon_still_ends_the_turn(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn = session.say("hi")
        reading = asyncio.create_task(collect(turn, []))
        manual.release(12)
        await wait_until(lambda: turn.text == "".join(WORDS))
        script = manual.sessions[session.id]
        assert script.task is not None
        script.task.cancel()
        script.response, script.seq = None, script.seq + 1
        usage = p.Usage.of(1, 0, 12)
        script.items[-1] = p.Item(
            id=script.items[-1].id, role="assistant", content=turn.text, status="completed", reason="bored", usage=usage
        )
        ended = {"type": "response.completed", "session": session.id, "seq": script.seq, "reason": "bored"}
        await manual.send_everywhere(json.dumps(ended))
        await reading
        assert turn.reason == "bored"


async def test_cancel_returns_when_the_answer_has_ended_and_keeps_its_text(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn, events = session.say("hi"), list[p.Event]()
        reading = asyncio.create_task(collect(turn, events))
        manual.release(2)
        await wait_until(lambda: turn.text == "".join(WORDS[:2]))
        await turn.cancel()
        await reading
        assert isinstance(events[-1], p.ResponseIncomplete)
        assert turn.reason == "cancelled"
        assert turn.item is not None
        assert turn.item.content == "".join(WORDS[:2])


async def test_cancel_with_nothing_in_progress_is_a_typed_error(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        session = await client.create_session()
        with pytest.raises(ChatdError) as caught:
            await session.cancel()
        assert caught.value.error_code == "nothing_to_cancel"


async def test_cancel_survives_a_lost_connection(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        reading = asyncio.create_task(collect(session.say("hi"), []))
        manual.release(2)
        await wait_until(lambda: session.seq == 4)
        manual.abort()
        await session.cancel()
        await reading


async def test_a_second_turn_is_a_conflict_and_the_first_goes_on(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        turn = session.say("hi")
        reading = asyncio.create_task(collect(turn, []))
        await wait_until(lambda: session.seq == 2)
        with pytest.raises(Conflict) as caught:
            await collect(session.say("again"), [])
        assert caught.value.error_code == "turn_in_progress"
        manual.release(13)
        await reading
        assert turn.text == "".join(WORDS)


async def test_a_failed_turn_raises_its_typed_error_and_the_next_one_works() -> None:
    failing = Script(deltas=["a"], fail=EngineError("the engine died", code="engine_died"))
    async with ScriptedDaemon([failing, Script()]) as daemon, connect(daemon) as client:
        session = await client.create_session()
        with pytest.raises(EngineError) as caught:
            await collect(session.say("hi"), [])
        assert caught.value.error_code == "engine_died"
        assert "".join([text async for text in session.stream("hi")]) == "Hello."


async def test_leaving_a_turn_early_leaves_the_answer_going_and_frees_its_queue(manual: ScriptedDaemon) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        manual.release(1)
        async for _ in session.stream("hi"):
            break
        await wait_until(lambda: not session._queues)
        assert manual.sessions[session.id].response is not None
        manual.release(12)
        await wait_until(lambda: manual.sessions[session.id].response is None)


async def test_follow_gives_the_snapshot_first_then_what_another_client_says(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as writer, connect(daemon) as reader:
        session = await writer.create_session(title="shared")
        assert "".join([text async for text in session.stream("one")])
        events = reader.follow(session.id)
        first = await anext(events)
        assert isinstance(first, p.SessionAttached)
        assert first.snapshot is not None
        assert [item.content for item in first.snapshot.items] == ["one", "".join(WORDS)]
        assert "".join([text async for text in session.stream("two")])
        second = [await anext(events) for _ in range(16)]
        assert isinstance(second[0], p.SessionUsage | p.ItemAdded)
        await events.aclose()


async def test_follow_of_an_unknown_session_is_not_found(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        with pytest.raises(NotFound):
            await anext(client.follow("ses_nobody"))
        with pytest.raises(NotFound):
            await client.attach("ses_nobody")
        assert await client.ping() < 5


async def test_lists_page_until_the_limit(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        for n in range(5):
            await client.create_session(title=f"s{n}")
        assert len(await client.list_sessions(limit=3)) == 3
        assert len(await client.list_sessions()) == 5
        renamed = await client.update_session(next(iter(daemon.sessions)), title="new")
        assert renamed.title == "new"


async def test_the_pool_applies_deltas_and_equals_the_daemons_cells_at_each_step(daemon: ScriptedDaemon) -> None:
    daemon.cells = [(4, 0, 0, 0)] * 64
    async with connect(daemon) as client:
        states = client.pool(hz=10, detail="map", cells=64)
        state = await anext(states)
        assert state.cells is not None
        assert state.cells.counts == tuple(daemon.cells)
        for n in range(20):
            cells = list(daemon.cells)
            cells[(7 * n) % 64] = (0, n % 4, 4 - n % 4, 0)
            cells[(11 * n) % 64] = (1, 1, 1, 1)
            await daemon.show_pool(cells)
            state = await anext(states)
            assert state.cells is not None
            assert state.cells.counts == tuple(cells)
        await states.aclose()
        await wait_until(lambda: isinstance(daemon.commands[-1], p.PoolUnsubscribe))


async def test_two_pool_readers_share_the_finer_subscription_and_survive_a_reconnect(daemon: ScriptedDaemon) -> None:
    daemon.cells = [(4, 0, 0, 0)] * 64
    async with connect(daemon) as client:
        meter, page = client.pool(), client.pool(hz=8, detail="map", cells=128)
        await anext(meter)
        await anext(page)
        wishes = [command for command in daemon.commands if isinstance(command, p.PoolSubscribe)]
        assert (wishes[-1].hz, wishes[-1].detail, wishes[-1].cells) == (8, "map", 128)
        daemon.abort()
        state = await anext(page)
        assert state.cells is not None
        await page.aclose()
        await wait_until(lambda: len(daemon.commands) > 3 and getattr(daemon.commands[-1], "detail", "") == "summary")
        await meter.aclose()


async def test_a_wrong_key_is_an_authentication_error_at_once() -> None:
    async with ScriptedDaemon(key="right") as daemon:
        with pytest.raises(AuthenticationError) as caught:
            async with connect(daemon, key="wrong", wait_s=60):
                pass
        assert caught.value.error_code == "invalid_api_key"
        async with connect(daemon, key="right") as client:
            assert client.hello.model.id == "smollm2-135m"


async def test_nobody_listening_is_unreachable_and_says_what_to_do() -> None:
    async with ScriptedDaemon() as daemon:
        url = daemon.url
    with pytest.raises(Unavailable) as caught:
        async with Client.connect(url):
            pass
    assert caught.value.error_code == "unreachable"
    assert caught.value.hint == f"start one with `chatd serve --port {urlsplit(url).port}`"


async def test_waiting_at_first_goes_on_until_the_daemon_is_loaded() -> None:
    states: list[ConnectionState] = []
    async with ScriptedDaemon() as daemon:
        body = {"error": {"type": "server_error", "code": "loading", "message": "reading the model"}}
        daemon.refuse = (HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(body).encode())

        def note(state: ConnectionState) -> None:
            states.append(state)
            if state.attempt == 3:
                daemon.refuse = None

        async with connect(daemon, wait_s=60, on_state=note) as client:
            assert client.state.phase is ConnectionPhase.CONNECTED
    waits = [state for state in states if state.phase is ConnectionPhase.WAITING]
    assert [state.error.error_code for state in waits if state.error] == ["loading", "loading"]
    assert states[-1].phase is ConnectionPhase.CLOSED


async def test_a_daemon_that_loads_is_asked_again_soon() -> None:
    async with ScriptedDaemon() as daemon:
        body = {"error": {"type": "server_error", "code": "loading", "message": "m", "retry_after_ms": 5000}}
        daemon.refuse = (HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(body).encode())
        waits: list[float] = []

        def note(state: ConnectionState) -> None:
            if state.phase is ConnectionPhase.WAITING:
                waits.append(state.retry_in_s)
                daemon.refuse = None
                asyncio.get_running_loop().call_soon(client.retry_now)

        client = Client.connect(daemon.url, wait_s=60, on_state=note, backoff=lambda _: 9.0)
        async with client:
            assert waits == [1.0]


@pytest.mark.parametrize(
    ("code", "kind"), [(p.CLOSE_UNAUTHENTICATED, AuthenticationError), (p.CLOSE_PROTOCOL, InvalidRequest)]
)
async def test_a_close_code_that_refuses_for_good_ends_everything_that_waits(
    manual: ScriptedDaemon, code: int, kind: type[ChatdError]
) -> None:
    async with connect(manual) as client:
        session = await client.create_session()
        reading = asyncio.create_task(collect(session.say("hi"), []))
        await wait_until(lambda: session.seq == 2)
        await manual.drop(code)
        with pytest.raises(kind):
            await reading
        with pytest.raises(kind):
            await client.ping()
        assert client.state.phase is ConnectionPhase.CLOSED


@pytest.mark.parametrize("code", [1001, p.CLOSE_RESTART, p.CLOSE_OVERLOAD, p.CLOSE_NO_FIRST_FRAME])
async def test_other_close_codes_are_followed_by_another_connection(daemon: ScriptedDaemon, code: int) -> None:
    async with connect(daemon) as client:
        await daemon.drop(code)
        await wait_until(lambda: daemon.num_connections == 2)
        assert await client.ping() < 5


async def test_a_rate_close_waits_as_long_as_it_says(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        await daemon.drop(p.CLOSE_RATE)
        await wait_until(lambda: client.state.phase is ConnectionPhase.WAITING)
        assert isinstance(client.state.error, RateLimited)
        assert client.state.retry_in_s == 2.0
        client.retry_now()
        assert await client.ping() < 2


async def test_closing_ends_what_waits_and_leaves_no_task(manual: ScriptedDaemon) -> None:
    before = asyncio.all_tasks()
    client = connect(manual)
    async with client:
        session = await client.create_session()
        reading = asyncio.create_task(collect(session.say("hi"), []))
        await wait_until(lambda: session.seq == 2)
    with pytest.raises(Unavailable) as caught:
        await reading
    assert caught.value.error_code == "client_closed"
    await manual.stop()
    leftover = {task for task in asyncio.all_tasks() - before if task.get_name() == "chatd client"}
    assert leftover == set()


async def test_text_larger_than_the_daemons_frame_is_refused_here_with_both_numbers(daemon: ScriptedDaemon) -> None:
    async with connect(daemon) as client:
        session = await client.create_session()
        with pytest.raises(InvalidRequest) as caught:
            await collect(session.say("é" * p.MIN_FRAME_BYTES), [])
        assert str(p.MIN_FRAME_BYTES) in caught.value.message
        assert await client.ping() < 5


async def test_draining_and_errors_of_nobody_are_noticed(daemon: ScriptedDaemon) -> None:
    noticed: list[p.Event] = []
    async with connect(daemon, on_notice=noticed.append) as client:
        await daemon.send_everywhere(p.encode(p.ServerDraining(deadline_s=5.0)))
        body = p.ErrorBody(type="server_error", code="x", message="y")
        await daemon.send_everywhere(p.encode(p.Error(error=body)))
        await client.ping()
    assert [type(event) for event in noticed] == [p.ServerDraining, p.Error]


def test_a_backlog_merges_deltas_keeps_the_latest_state_and_loses_no_text() -> None:
    queue = EventQueue(limit=16, high_water=4)
    queue.put(p.ResponseQueued(session="s", position=9, why="slots"))
    for n in range(100):
        queue.put(p.OutputTextDelta(session="s", seq=n + 1, ts=0.0, item_id="i", delta=f"{n},", n_tokens=1))
        queue.put(p.ResponseQueued(session="s", position=n, why="slots"))
    assert len(queue) <= 16
    events = [asyncio.run(queue.get()) for _ in range(len(queue))]
    text = "".join(event.delta for event in events if isinstance(event, p.OutputTextDelta))
    assert text == "".join(f"{n}," for n in range(100))
    assert [event.position for event in events if isinstance(event, p.ResponseQueued)][-1] == 99


async def test_a_backlog_that_cannot_merge_ends_that_reader_only() -> None:
    queue = EventQueue(limit=4, high_water=2)
    for n in range(5):
        queue.put(p.ClientLeft(session="s", connection=str(n)))
    assert [(await queue.get()).connection for _ in range(4)] == ["0", "1", "2", "3"]
    with pytest.raises(Unavailable) as caught:
        await queue.get()
    assert caught.value.error_code == "reader_too_slow"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8790", "ws://127.0.0.1:8790/v1/chat/ws"),
        ("http://box:8790/", "ws://box:8790/v1/chat/ws"),
        ("https://box", "wss://box/v1/chat/ws"),
        ("wss://box/chat/ws", "wss://box/chat/ws"),
        ("http://[::1]:8790", "ws://[::1]:8790/v1/chat/ws"),
    ],
)
def test_addresses_become_the_sockets_address(url: str, expected: str) -> None:
    assert websocket_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://box", "http://", "http://k@box", "http://box?key=k", "http://box:99999999", "http://box:x"),
        *("http://[box", "http://[::1", "two words", "http://box\x7f"),
    ],
)
def test_an_address_that_is_none_or_holds_a_key_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        websocket_url(url)


async def test_the_readmes_example_runs() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    async with ScriptedDaemon([Script(deltas=["Par", "is", "."])], key="k") as daemon:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", example),
            env={**os.environ, "CHATD_URL": daemon.url, "CHATD_KEY": "k"},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert output == b"Paris."


def test_the_client_needs_neither_torch_nor_textual_nor_pydantic() -> None:
    heavy = "'torch', 'textual', 'transformers', 'numpy', 'pydantic', 'pydantic_settings'"
    code = f"import sys, chatd.client; print([name for name in ({heavy}) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_error_class_comes_back_as_itself() -> None:
    for kind in (InvalidRequest, AuthenticationError, NotFound, Conflict, RateLimited, Unavailable, EngineError):
        error = kind("text", param="p", hint="h", retry_after_ms=5)
        again = error_from(p.ErrorBody.of(error))
        assert type(again) is kind
        assert (again.message, again.param, again.hint, again.retry_after_ms) == ("text", "p", "h", 5)
    unknown = error_from(p.ErrorBody(type="conflict_error", code="brand_new", message="m"))
    assert type(unknown) is Conflict
    assert unknown.error_code == "brand_new"


async def test_a_daemon_that_dies_in_the_handshake_is_tried_again() -> None:
    async with ScriptedDaemon() as daemon:
        num_cut = 0

        async def cut_or_pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_cut
            await reader.readuntil(b"\r\n\r\n")
            num_cut += 1
            if num_cut == 3:
                door.close()
            writer.close()

        async with Client(daemon.url, backoff=lambda _attempt: 0.01) as client:
            session = await client.create_session()
            port = int(daemon.url.rsplit(":", 1)[1])
            await daemon.stop()
            # Somebody else has the port for a while, and hangs up on everybody who has asked.
            door = await asyncio.start_server(cut_or_pass, "127.0.0.1", port)
            async with asyncio.timeout(10):
                while num_cut < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await door.wait_closed()
            await daemon.start()
            assert (await client.get_session(session.id))[0].id == session.id

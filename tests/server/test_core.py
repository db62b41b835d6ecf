"""Both doors over the real engine core, whose fake runner checks every slot that is read."""

import asyncio
import contextlib
import random

import httpx

from chatd.client.pool import apply_frame
from chatd.protocol import (
    OutputTextDelta,
    Params,
    PoolDelta,
    PoolSnapshot,
    PoolSubscribe,
    ResponseCancel,
    ResponseCompleted,
    ResponseIncomplete,
    SessionCreate,
    UserMessage,
)
from chatd.server import openai
from chatd.testing.sessions import encode_text
from chatd.testing.ticking_core import TickingCore

from .conftest import eventually
from .test_websocket import create, seqs_of, text_of

END = (ResponseCompleted, ResponseIncomplete)


async def say(talk, session: str, text: str, **params) -> list:
    await talk.send(UserMessage(session=session, content=text, params=Params(**params)))
    events = [await talk.next()]
    while not isinstance(events[-1], END):
        events.append(await talk.next())
    return events


async def test_many_conversations_on_both_doors_at_once(start) -> None:
    engine = TickingCore(num_blocks=512)
    async with start(engine=engine, quotas={"max_inflight": 64}) as running:

        async def native(number: int) -> int:
            num_cached = 0
            async with running.chat() as talk:
                session = (await create(talk, system="be brief")).session.id
                for turn in range(4):
                    events = await say(talk, session, f"turn {turn} of {number}", max_tokens=12)
                    transcript = seqs_of(events)
                    assert transcript == list(range(transcript[0], transcript[-1] + 1))
                    assert text_of(events) == events[-1].item.content
                    num_cached = events[-1].usage.cached_tokens
            return num_cached

        async def stateless(number: int) -> int:
            history = [{"role": "system", "content": "be brief"}]
            async with httpx.AsyncClient(base_url=running.url, headers=running.headers(), trust_env=False) as http:
                for turn in range(4):
                    history.append({"role": "user", "content": f"turn {turn} of {number}"})
                    body = {"model": "bytes", "messages": history, "max_tokens": 12}
                    answer = (await http.post("/v1/chat/completions", json=body)).json()
                    history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        async with asyncio.timeout(60):
            cached = await asyncio.gather(*(door(i) for i in range(4) for door in (native, stateless)))
        assert all(number > 60 for number in cached), cached
        engine.core.check_invariants()


async def test_the_pool_that_is_shown_is_the_engines(start) -> None:
    engine = TickingCore(num_blocks=128)
    async with start(engine=engine) as running, running.chat(running.keys["ann"]) as watcher, running.chat() as talk:
        await watcher.send(PoolSubscribe(id="w", hz=10, detail="map", cells=128))
        session = (await create(talk)).session.id
        await say(talk, session, "x" * 100, max_tokens=8)
        state = None
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.5):
                    event = await watcher.next()
                if isinstance(event, PoolSnapshot | PoolDelta):
                    state = apply_frame(state, event)
        pool = engine.core.scheduler.kv.pool
        shown = [counts.index(1) for counts in state.cells.counts]
        assert shown == list(bytes(pool.states))
        assert [(row.session, row.held) for row in state.sessions] == [(session, sum(kind >= 2 for kind in shown))]
        assert state.totals.active == state.sessions[0].held


async def test_a_cancelled_answer_gives_its_place_back(start) -> None:
    engine = TickingCore(num_blocks=128)
    async with start(engine=engine) as running, running.chat() as talk:
        session = (await create(talk)).session.id
        await talk.send(UserMessage(session=session, content="hi", params=Params(max_tokens=1000, ignore_eos=True)))
        await talk.until(OutputTextDelta)
        await talk.send(ResponseCancel(session=session))
        assert (await talk.until(ResponseIncomplete))[-1].reason == "cancelled"
        await eventually(lambda: not engine.core.has_work)
        assert isinstance((await say(talk, session, "again", max_tokens=3))[-1], END)


async def test_no_frame_carries_anothers_words(start) -> None:
    """S6: two tenants and two users of one, interleaved turns with cancels; every frame is searched for canaries."""

    def echo(log: list[int]) -> list[int]:
        said = bytes(token for token in log if token < 256)[-24:]
        return [*encode_text("echo "), *said, 256 + 3]

    async with start(echo) as running:
        people = {"ann": "CANARY-ANN", "bob": "CANARY-BOB", "eve": "CANARY-EVE"}
        rng = random.Random(3)

        async def talk_on(name: str, canary: str) -> int:
            num_turns = 0
            others = [word for person, word in people.items() if person != name]
            async with running.chat(running.keys[name]) as talk:

                async def clean(until) -> None:
                    while True:
                        raw = await talk.socket.recv()
                        assert not any(word in raw for word in others), raw
                        if any(f'"type":"{kind}"' in raw for kind in until):
                            return

                for i in range(4):
                    create_it = SessionCreate(id=f"create{i}", title=f"{canary} {i}", system=canary)
                    session = (await talk.ask(create_it)).session.id
                    for _ in range(25):
                        await talk.send(UserMessage(session=session, content=f"{canary} {rng.random()}"))
                        if rng.random() < 0.2:
                            await clean(["response.created"])
                            await talk.send(ResponseCancel(session=session))
                        await clean(["response.completed", "response.incomplete"])
                        num_turns += 1
            return num_turns

        async with asyncio.timeout(60):
            counts = await asyncio.gather(*(talk_on(name, word) for name, word in people.items()))
        assert counts == [100, 100, 100]
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
            metrics = await http.get("/metrics", headers=running.headers(running.keys["ann"]))
        assert "CANARY" not in metrics.text


async def test_a_stream_that_nobody_reads_ends_and_is_cancelled(start, monkeypatch) -> None:
    """S17 on the OpenAI door: the send waits for a while, then the connection goes and the generation with it."""
    monkeypatch.setattr(openai, "SEND_TIMEOUT_S", 0.2)
    wide = lambda _log: encode_text("x" * 50)  # noqa: E731
    async with start(wide, max_tokens=None) as running, running.chat(running.keys["eve"]) as witness:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        body = b'{"model":"bytes","messages":[{"role":"user","content":"hi"}],"stream":true,"ignore_eos":true}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {running.key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        writer.transport.pause_reading()
        await eventually(lambda: len(running.daemon.streams) == 1)
        session = (await create(witness)).session.id
        assert text_of(await say(witness, session, "hi", max_tokens=10)) == "x" * 10
        await eventually(lambda: not running.daemon.streams)
        writer.transport.abort()

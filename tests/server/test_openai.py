"""The OpenAI-compatible door, by the official client and by hand."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from chatd.engine.messages import FinishReason, RequestClass
from chatd.tenants.keys import create_key, parse, revoke_key
from chatd.testing.sessions import encode_text

from .conftest import Running, eventually

HELLO = [{"role": "user", "content": "hi"}]
DOOR = "/v1/chat/completions"


def official(running: Running, key: str | None = None) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key=key or running.key,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    )


def by_hand(running: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=running.url, headers=running.headers(), trust_env=False)


async def test_the_official_client_gets_an_answer(start) -> None:
    async with start() as running, official(running) as client:
        answer = await client.chat.completions.create(model="bytes", messages=HELLO)
        assert answer.object == "chat.completion"
        assert answer.model == "bytes"
        assert answer.id.startswith("chatcmpl-")
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 6
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_the_official_client_streams(start) -> None:
    async with start() as running, official(running) as client:
        running.engine.tokens_per_step = 2
        stream = await client.chat.completions.create(
            model="bytes", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "hello"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 6
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_ends_with_done_and_has_no_usage_unless_asked(start) -> None:
    async with start() as running, by_hand(running) as http:
        answer = await http.post(DOOR, json={"model": "bytes", "messages": HELLO, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in answer.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        assert "usage" not in answer.text


async def test_history_that_comes_back_is_found_computed(start) -> None:
    async with start() as running, official(running) as client:
        first = await client.chat.completions.create(model="bytes", messages=HELLO)
        history = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
        second = await client.chat.completions.create(model="bytes", messages=history)
        assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens


async def test_parameters_reach_the_engine(start) -> None:
    async with start(lambda _log: encode_text("abc")) as running, official(running) as client:
        answer = await client.chat.completions.create(
            model="bytes",
            messages=[{"role": "developer", "content": "be brief"}, *HELLO],
            max_completion_tokens=3,
            temperature=0.5,
            top_p=0.9,
            seed=11,
            presence_penalty=0.25,
            frequency_penalty=0.5,
            logit_bias={"7": 1},
            logprobs=True,
            top_logprobs=1,
            stop=["zz", "yy"],
            extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 1, "repetition_penalty": 1.1},
        )
        params = running.engine.submits[0].params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
        assert (params.seed, params.max_tokens, params.min_tokens) == (11, 3, 1)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.25, 0.5, 1.1)
        assert (params.logit_bias, params.ignore_eos, params.logprobs) == (((7, 1.0),), True, 1)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "abc"
        entries = answer.choices[0].logprobs.content
        assert [entry.token for entry in entries] == ["a", "b", "c"]
        assert [entry.bytes for entry in entries] == [[97], [98], [99]]
        assert entries[0].top_logprobs[0].logprob == -0.5


async def test_a_stop_string_ends_an_answer_and_is_not_in_it(start) -> None:
    async with start(lambda _log: encode_text("one two three")) as running, official(running) as client:
        answer = await client.chat.completions.create(model="bytes", messages=HELLO, stop=" two")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one", "stop")


async def test_content_may_come_in_parts(start) -> None:
    async with start() as running, official(running) as client:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": parts}])
        assert bytes(id for id in running.engine.submits[0].new_ids if id < 256) == b"ab"


async def test_models_are_listed(start) -> None:
    async with start() as running, official(running) as client:
        assert [model.id async for model in client.models.list()] == ["bytes"]
        assert (await client.models.retrieve("bytes")).owned_by == "chatd"
        with pytest.raises(openai.NotFoundError) as refused:
            await client.models.retrieve("gpt-4o")
        assert refused.value.code == "model_not_found"


async def test_an_unknown_model_is_not_found(start) -> None:
    async with start() as running, official(running) as client:
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model="gpt-4o", messages=HELLO)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert refused.value.status_code == 404


async def test_too_long_a_prompt_is_refused_with_the_numbers(start) -> None:
    async with start() as running, official(running) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": "x" * 5000}])
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert "4095" in refused.value.message
        assert "session" not in refused.value.message


async def test_a_disconnect_cancels_a_streamed_answer(start) -> None:
    async with start(lambda _log: encode_text("x")) as running, by_hand(running) as http:
        running.engine.held = True
        body = {"model": "bytes", "messages": HELLO, "stream": True, "max_tokens": 60}
        async with http.stream("POST", DOOR, json=body) as answer:
            async for _ in answer.aiter_lines():
                break
            assert len(running.engine.running) == 1
        await eventually(lambda: not running.engine.running)
        running.engine.held = False
        await eventually(lambda: running.daemon.num_inflight == 0)
        # A generation is charged once it is over, which may be a moment after its stream has ended.
        await eventually(lambda: running.daemon.quotas.of(parse(running.key)).num_inflight == 0)


async def test_a_disconnect_cancels_an_answer_that_is_not_streamed(start) -> None:
    async with start(lambda _log: encode_text("x")) as running, by_hand(running) as http:
        running.engine.held = True
        asking = asyncio.create_task(http.post(DOOR, json={"model": "bytes", "messages": HELLO}))
        await eventually(lambda: len(running.engine.running) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: not running.engine.running)
        running.engine.held = False
        await eventually(lambda: running.daemon.num_inflight == 0)


def fail_the_one_that_runs(running: Running) -> None:
    running.engine.end(next(iter(running.engine.running)), FinishReason.FAILED, "engine_error", "no")


async def test_an_answer_that_fails_midway_says_so_in_the_stream(start) -> None:
    async with start() as running, official(running) as client:
        running.engine.held = True
        stream = await client.chat.completions.create(model="bytes", messages=HELLO, stream=True)
        running.engine.step(2)
        fail_the_one_that_runs(running)
        with pytest.raises(openai.APIError) as failed:
            async for _ in stream:
                pass
        assert failed.value.code == "engine_error"
        running.engine.held = False
        answer = await client.chat.completions.create(model="bytes", messages=HELLO)
        assert answer.choices[0].message.content == "hello"


async def test_a_stream_goes_on_when_the_engine_under_it_is_replaced(start) -> None:
    async with start() as running, official(running) as client:
        running.engine.held = True
        stream = await client.chat.completions.create(model="bytes", messages=HELLO, stream=True)
        running.engine.step(2)
        running.engine.die()
        running.engine.restart()
        running.engine.held = False
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(texts) == "hello"


async def test_an_answer_that_fails_is_an_error(start) -> None:
    async with start() as running, official(running) as client:
        running.engine.held = True
        asking = asyncio.create_task(client.chat.completions.create(model="bytes", messages=HELLO))
        await eventually(lambda: len(running.engine.running) == 1)
        fail_the_one_that_runs(running)
        with pytest.raises(openai.InternalServerError) as failed:
            await asking
        assert failed.value.code == "engine_error"


async def test_an_engine_that_restarts_is_unavailable_and_says_when_to_come_back(start) -> None:
    async with start() as running, by_hand(running) as http:
        running.engine.die()
        answer = await http.post(DOOR, json={"model": "bytes", "messages": HELLO})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["retry-after-ms"] == "1000"


async def test_a_revoked_key_ends_its_streams(start, tmp_path: Path) -> None:
    async with start(lambda _log: encode_text("x")) as running, by_hand(running) as http:
        running.engine.held = True
        async with http.stream("POST", DOOR, json={"model": "bytes", "messages": HELLO, "stream": True}) as answer:
            revoke_key(tmp_path / "keys.json", parse(running.key))
            running.daemon.refresh_keys()
            await eventually(lambda: not running.engine.running)
            *_, error, done, _ = (await answer.aread()).decode().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
            assert done == "data: [DONE]"


async def test_a_revoked_key_ends_its_answers_that_are_not_streamed(start, tmp_path: Path, log) -> None:
    async with start(lambda _log: encode_text("x")) as running, by_hand(running) as http:
        running.engine.held = True
        asking = asyncio.create_task(http.post(DOOR, json={"model": "bytes", "messages": HELLO}))
        await eventually(lambda: bool(running.engine.running))
        revoke_key(tmp_path / "keys.json", parse(running.key))
        running.daemon.refresh_keys()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        await eventually(lambda: not running.engine.running)
    assert '"level": "error"' not in log.getvalue()


async def test_half_a_character_is_said_to_be_one(start) -> None:
    async with start() as running, by_hand(running) as http:
        body = r'{"model": "bytes", "messages": [{"role": "user", "content": "\ud800"}]}'
        error = (await http.post(DOOR, content=body)).json()["error"]
        assert (error["code"], "half a character" in error["message"]) == ("invalid_json", True)


async def test_an_answer_that_the_daemon_ended_to_stop_is_not_passed_off_as_complete(start) -> None:
    async with start(server={"drain_timeout_s": 0.05}) as running, by_hand(running) as http:
        running.engine.held = True
        body = {"model": "bytes", "messages": HELLO}
        whole = asyncio.create_task(http.post(DOOR, json=body))
        streamed = asyncio.create_task(http.post(DOOR, json={**body, "stream": True}))
        await eventually(lambda: len(running.engine.running) == 2)
        running.stop.set()
        await eventually(lambda: running.daemon.draining)
        assert (await http.post(DOOR, json=body)).json()["error"]["code"] == "draining"
        await eventually(lambda: not running.engine.running)
        running.engine.held = False
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert '"code":"draining"' in (await streamed).text


async def test_too_many_answers_at_once_are_refused(start) -> None:
    async with start(quotas={"max_inflight": 1}) as running, by_hand(running) as http:
        running.engine.held = True
        body = {"model": "bytes", "messages": HELLO}
        first = asyncio.create_task(http.post(DOOR, json=body))
        await eventually(lambda: len(running.engine.running) == 1)
        second = await http.post(DOOR, json=body)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "too_many_inflight")
        running.engine.held = False
        assert (await first).status_code == 200
        assert (await http.post(DOOR, json=body)).status_code == 200


async def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not(start) -> None:
    async with start(server={"max_body_bytes": 2048}) as running, by_hand(running) as http:
        empty = json.dumps({"model": "bytes", "messages": [{"role": "user", "content": ""}]})
        fits = empty.replace('""', json.dumps("x" * (2048 - len(empty))))
        assert len(fits) == 2048
        assert (await http.post(DOOR, content=fits)).status_code == 200
        answer = await http.post(DOOR, content=fits + " ")
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

        async def in_pieces():
            for _ in range(4):
                yield b" " * 1024

        answer = await http.post(DOOR, content=in_pieces())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        answer = await http.post(DOOR, content=fits, headers={"Content-Encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-encoding")


async def test_unknown_paths_and_methods_are_errors_of_the_same_shape(start) -> None:
    async with start() as running, by_hand(running) as http:
        answer = await http.get("/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        answer = await http.get(DOOR)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_key_of_the_batch_class_is_served_as_batch(start, tmp_path: Path) -> None:
    async with start() as running:
        batch = create_key(tmp_path / "keys.json", tenant="acme", user="nightly", key_class="batch")
        running.daemon.refresh_keys()
        async with official(running, batch) as client:
            await client.chat.completions.create(model="bytes", messages=HELLO)
        assert running.engine.submits[0].request_class is RequestClass.BATCH


@pytest.mark.parametrize("names", [{"X-Conversation-Id": "c1"}, {"X-OpenWebUI-Chat-Id": "c1"}, {}])
async def test_a_conversation_can_be_named(start, names) -> None:
    async with start() as running, by_hand(running) as http:
        body = {"model": "bytes", "messages": HELLO} | ({} if names else {"prompt_cache_key": "c1"})
        assert (await http.post(DOOR, json=body, headers=names)).status_code == 200
        assert [holder.title for holder in running.manager.lease_sessions.values()] == ["c1"]


async def test_a_key_that_is_revoked_while_its_body_comes_is_refused(start, tmp_path: Path) -> None:
    async with start(lambda _log: encode_text("x")) as running, by_hand(running) as http:
        running.engine.held = True
        admitted: list[Any] = []
        authenticate = running.daemon.authenticator.authenticate
        running.daemon.authenticator.authenticate = lambda connection: (
            admitted.append(connection) or authenticate(connection)
        )

        async def body():
            yield b'{"model": "bytes", "messages": '
            await eventually(lambda: bool(admitted))
            revoke_key(tmp_path / "keys.json", parse(running.key))
            running.daemon.refresh_keys()
            yield json.dumps(HELLO).encode() + b"}"

        answer = await http.post(DOOR, content=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        await eventually(lambda: not running.engine.running)

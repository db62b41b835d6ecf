"""More than one answer to a request: `n` and beam search, by the official client."""

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from chatd.engine.messages import Cancel, FinishReason
from chatd.engine.sampling import BeamSearch
from chatd.sessions.limits import SessionLimits
from chatd.testing.sessions import TURN_END, encode_text

from .conftest import Running, eventually

HELLO = [{"role": "user", "content": "hi"}]


def official(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{running.url}/v1",
        api_key=running.key,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    )


def one_after_another(*texts: str):
    """Answer the first submission with the first text, and so on."""
    left = list(texts)
    return lambda _log: [*encode_text(left.pop(0)), TURN_END]


async def ask(client: AsyncOpenAI, messages=HELLO, **options):
    return await client.chat.completions.create(model="bytes", messages=messages, **options)


async def test_each_choice_is_an_answer_of_its_own(start) -> None:
    async with start(one_after_another("one", "second", "3")) as running, official(running) as client:
        answer = await ask(client, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.message.content for choice in answer.choices] == ["one", "second", "3"]
        assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
        assert answer.usage.completion_tokens == len("one") + len("second") + len("3") + 3
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        first, *others = running.engine.submits
        assert [other.sample_of for other in others] == [first.request] * 2
        # Each other one has the prompt but for its last id by a fork.
        assert [(other.base_len, len(other.new_ids)) for other in others] == [(len(first.new_ids) - 1, 1)] * 2
        assert answer.usage.prompt_tokens == len(first.new_ids)


async def test_choices_of_a_stream_are_told_apart_by_index(start) -> None:
    texts = ("first", "another one", "x")
    async with start(one_after_another(*texts)) as running, official(running) as client:
        stream = await ask(client, n=3, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        said = dict.fromkeys(range(3), "")
        ends = []
        for chunk in chunks:
            for choice in chunk.choices:
                assert choice.index not in ends, "a choice goes on after its end"
                said[choice.index] += choice.delta.content or ""
                if choice.finish_reason is not None:
                    assert choice.finish_reason == "stop"
                    ends.append(choice.index)
        assert tuple(said.values()) == texts
        assert ends == [2, 0, 1]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == sum(map(len, texts)) + 3
        spoke = [chunk.choices[0].index for chunk in chunks[3:-1]]
        assert spoke.index(1) < len(spoke) - 1 - spoke[::-1].index(0), "choices did not take turns"


async def test_each_choice_draws_by_a_seed_of_its_own(start) -> None:
    async with start() as running, official(running) as client:
        await ask(client, n=3, seed=2**63 - 2, temperature=1.0)
        assert [submit.params.seed for submit in running.engine.submits] == [2**63 - 2, 2**63 - 1, 0]


async def test_each_choice_has_its_logprobs_and_ends_by_its_stop_string(start) -> None:
    reply = one_after_another("a stop b", "no end", "stop")
    async with start(reply) as running, official(running) as client:
        answer = await ask(client, n=3, stop="stop", logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["a ", "no end", ""]
        tokens = ["".join(entry.token for entry in choice.logprobs.content) for choice in answer.choices]
        assert tokens[:2] == ["a ", "no end"]


async def test_a_disconnect_cancels_all_choices(start) -> None:
    async with start(lambda _log: encode_text("x")) as running, official(running) as client:
        running.engine.held = True
        asking = asyncio.create_task(ask(client, n=4, max_tokens=60))
        await eventually(lambda: len(running.engine.submits) == 4)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: sum(isinstance(m, Cancel) for m in running.engine.sent) == 4)
        running.engine.held = False
        await eventually(lambda: running.manager.num_in_flight == 0)
        quota = running.daemon.quotas.of(next(iter(running.daemon.quotas._keys)))
        await eventually(lambda: quota.num_inflight == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_before_the_end_pays_for_what_was_computed(start, stream) -> None:
    quotas = {"tokens_per_minute": 60}  # One comes back in a second: what was charged can still be seen.
    async with start(lambda _log: encode_text("x" * 60), quotas=quotas) as running, official(running) as client:
        asking = asyncio.create_task(ask(client, n=4, max_tokens=60, stream=stream))
        await eventually(lambda: len(running.engine.submits) == 4)
        running.engine.held = True
        prompt = len(running.engine.submits[0].new_ids)
        if stream:
            await (await asking).close()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: sum(isinstance(m, Cancel) for m in running.engine.sent) == 4)
        quota = running.daemon.quotas.of(next(iter(running.daemon.quotas._keys)))
        # What goes on in the engine is in flight, whoever has left.
        assert quota.num_inflight == 4
        running.engine.held = False
        await eventually(lambda: quota.num_inflight == 0)
        (tokens,) = quota.state()
        assert tokens["limit"] - tokens["remaining"] >= prompt


async def test_history_with_any_of_the_choices_is_found(start) -> None:
    texts = ("one", "two", "three")
    async with start(one_after_another(*texts, "a", "b", "c")) as running, official(running) as client:
        first = await ask(client, n=3)
        prompt = first.usage.prompt_tokens
        for text in texts:
            history = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
            later = await ask(client, history)
            assert later.usage.prompt_tokens_details.cached_tokens == prompt + len(text) + 1
        assert running.manager.stats.known_hits == 3


async def test_choices_count_as_answers_in_limits(start) -> None:
    limits = {"quotas": {"max_inflight": 5, "requests_per_minute": 6}}
    async with start(**limits) as running, official(running) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client, n=6)
        assert refused.value.code == "too_many_inflight"
        await ask(client, n=5)
        assert (await ask(client)).choices[0].message.content == "hello"
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client)
        assert refused.value.code == "rate_limit_exceeded"


async def test_choices_count_as_turns_of_their_user(start) -> None:
    async with start(limits=SessionLimits(max_turns_per_user=3)) as running, official(running) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client, n=4)
        assert refused.value.code == "too_many_turns"
        assert running.engine.submits == []
        assert len((await ask(client, n=3)).choices) == 3
        assert running.manager.num_in_flight == 0


async def test_if_one_choice_fails_the_request_does(start) -> None:
    async with start(lambda _log: encode_text("x")) as running, official(running) as client:
        running.engine.held = True
        asking = asyncio.create_task(ask(client, n=3, max_tokens=60))
        await eventually(lambda: len(running.engine.submits) == 3)
        running.engine.end(running.engine.submits[1].request, FinishReason.FAILED, "engine_error", "broken")
        with pytest.raises(openai.InternalServerError):
            await asking
        await eventually(lambda: sum(isinstance(m, Cancel) for m in running.engine.sent) == 2)


async def test_a_search_gives_its_sequences_best_first(start) -> None:
    reply = one_after_another("best", "second best", "w", "later")
    async with start(reply) as running, official(running) as client:
        answer = await ask(
            client,
            n=3,
            max_tokens=20,
            extra_body={"use_beam_search": True, "best_of": 4, "length_penalty": 0.7, "early_stopping": True},
        )
        (submit,) = running.engine.submits
        assert submit.beam == BeamSearch(width=4, num_returned=3, length_penalty=0.7, early_stopping=True)
        assert [choice.message.content for choice in answer.choices] == ["best", "second best", "w"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
        assert answer.usage.completion_tokens == len("bestsecond bestw") + 3
        assert answer.usage.prompt_tokens == len(submit.new_ids)
        history = [*HELLO, {"role": "assistant", "content": "second best"}, {"role": "user", "content": "more"}]
        later = await ask(client, history)
        assert later.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
        assert running.manager.stats.known_hits == 1
        ids = running.engine.submits[1]
        assert ids.base_len + len(ids.new_ids) == later.usage.prompt_tokens


async def test_a_search_pays_for_every_beam(start) -> None:
    quotas = {"tokens_per_minute": 60}  # One comes back in a second: what was charged can still be seen.
    async with start(lambda _log: encode_text("best"), quotas=quotas) as running, official(running) as client:
        answer = await ask(client, max_tokens=20, extra_body={"use_beam_search": True, "best_of": 4})
        quota = running.daemon.quotas.of(next(iter(running.daemon.quotas._keys)))
        await eventually(lambda: quota.num_inflight == 0)
        (tokens,) = quota.state()
        charged = answer.usage.prompt_tokens + 4 * answer.usage.completion_tokens
        assert tokens["limit"] - tokens["remaining"] in (charged, charged - 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stream": True}, "stream"),
        ({"stop": ["x"]}, "stop"),
        ({"length_penalty": 6}, "length_penalty"),
    ],
)
async def test_what_a_search_cannot_do_is_refused_by_name(start, fields, param) -> None:
    async with start() as running, official(running) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, extra_body={"use_beam_search": True, "best_of": 3, **fields})
        assert refused.value.param == param
        assert running.engine.submits == []
        assert running.manager.num_in_flight == 0


async def test_a_cancelled_search_is_over_for_all_its_choices(start) -> None:
    async with start() as running, official(running) as client:
        running.engine.held = True
        asking = asyncio.create_task(ask(client, n=2, extra_body={"use_beam_search": True}))
        await eventually(lambda: len(running.engine.submits) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: any(isinstance(m, Cancel) for m in running.engine.sent))
        running.engine.held = False
        await eventually(lambda: running.manager.num_in_flight == 0 and not running.daemon.streams)

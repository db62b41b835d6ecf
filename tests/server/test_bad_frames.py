"""Hundreds of broken frames: each is refused by the name of what is wrong, and nobody else's answer changes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chatd.protocol import (
    COMMANDS,
    Error,
    Ping,
    Pong,
    ResponseIncomplete,
    SessionCreate,
    SessionList,
    UserMessage,
)
from chatd.sessions.limits import SessionLimits
from chatd.testing.sessions import encode_text

from .test_websocket import create, text_of

GOOD: dict[str, dict[str, Any]] = {
    "session.create": {},
    "session.attach": {"session": "s"},
    "session.list": {},
    "session.get": {"session": "s"},
    "session.update": {"session": "s"},
    "session.detach": {"session": "s"},
    "session.close": {"session": "s"},
    "session.erase": {"session": "s"},
    "user.message": {"session": "s", "content": "c"},
    "session.fork": {"session": "s"},
    "message.edit": {"session": "s", "item": "i", "content": "c"},
    "response.regenerate": {"session": "s"},
    "response.continue": {"session": "s"},
    "branch.select": {"session": "s", "leaf": "i"},
    "response.cancel": {"session": "s"},
    "prefill": {"session": "s"},
    "pool.subscribe": {},
    "pool.unsubscribe": {},
    "pool.inspect": {"cell": 0},
    "ping": {"t": 1},
}
WRONG_TYPES: dict[str, list[Any]] = {
    "text": [1, True, None, [], {}, 1.5],
    "optional text": [1, True, [], {}],
    "bool": [1, "true", None, []],
    "optional bool": [1, "true", []],
    "number": ["1", True, [], None],
    "object": [1, "x", [1], True],
    "optional object": [1, "x", [1], True],
}
FIELDS: dict[str, dict[str, str]] = {
    "session.create": {"system": "optional text", "title": "optional text", "metadata": "object", "params": "object"},
    "session.attach": {"session": "text", "boot": "optional text", "role": "text", "history": "text"},
    "session.list": {"cursor": "optional text", "query": "optional text", "archived": "bool", "limit": "number"},
    "session.get": {"session": "text"},
    "session.update": {
        "session": "text",
        "title": "optional text",
        "system": "optional text",
        "archived": "optional bool",
        "pinned": "optional bool",
        "metadata": "optional object",
        "context_policy": "optional text",
    },
    "session.detach": {"session": "text"},
    "session.close": {"session": "text"},
    "session.erase": {"session": "text"},
    "user.message": {"session": "text", "content": "text", "parent": "optional text", "respond": "bool"},
    "session.fork": {"session": "text", "at": "optional text", "title": "optional text"},
    "message.edit": {"session": "text", "item": "text", "content": "text", "respond": "bool"},
    "response.regenerate": {"session": "text", "item": "optional text"},
    "response.continue": {"session": "text", "item": "optional text"},
    "branch.select": {"session": "text", "leaf": "text"},
    "response.cancel": {"session": "text"},
    "prefill": {"session": "text", "content": "optional text"},
    "pool.subscribe": {"hz": "number", "detail": "text", "cells": "number"},
    "pool.unsubscribe": {},
    "pool.inspect": {"cell": "number", "blocks_per_cell": "number"},
    "ping": {"t": "number"},
}
OUT_OF_RANGE: list[tuple[str, str, Any]] = [
    ("session.create", "title", "t" * 201),
    ("session.create", "metadata", {str(i): "x" for i in range(17)}),
    ("session.create", "messages", [{"role": "user", "content": "x"}] * 4097),
    ("session.create", "context_policy", "drop"),
    ("session.update", "context_policy", "newest"),
    ("session.update", "metadata", {str(i): "x" for i in range(17)}),
    ("session.attach", "after_seq", -1),
    ("session.attach", "role", "owner"),
    ("session.attach", "history", "some"),
    ("session.list", "limit", 0),
    ("session.list", "limit", 201),
    ("session.list", "limit", 1.5),
    ("session.list", "query", "q" * 201),
    ("session.fork", "title", "t" * 201),
    ("session.fork", "at", "../x"),
    ("message.edit", "item", ""),
    ("message.edit", "item", "x" * 65),
    ("response.regenerate", "item", "a b"),
    ("response.continue", "item", "a b"),
    ("response.continue", "max_tokens", 0),
    ("response.continue", "max_tokens", "1"),
    ("response.continue", "max_tokens", True),
    ("branch.select", "leaf", "é"),
    ("pool.subscribe", "hz", 0),
    ("pool.subscribe", "hz", -1),
    ("pool.subscribe", "hz", 10.5),
    ("pool.subscribe", "cells", 63),
    ("pool.subscribe", "cells", 4097),
    ("pool.subscribe", "detail", "all"),
    ("pool.inspect", "cell", -1),
    ("pool.inspect", "cell", 2**31 + 1),
    ("pool.inspect", "cell", 1.5),
    ("pool.inspect", "blocks_per_cell", 0),
]
PARAMS: list[tuple[str, Any]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in ("1", True, [], {})),
    *(
        (name, value)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for value in ("1", True)
    ),
    *(
        (name, value)
        for name in ("top_k", "max_tokens", "min_tokens", "seed", "logprobs")
        for value in ("1", True, 1.5)
    ),
    ("stop", "x"),
    ("stop", [""]),
    ("stop", ["x" * 257]),
    ("stop", ["x"] * 17),
    ("stop", [1]),
    ("stop_token_ids", [1] * 65),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("logit_bias", []),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", {"1": True}),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
    # These are well formed, and no model could do them.
    ("temperature", -0.1),
    ("temperature", 5.1),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("min_p", 2),
    ("top_k", -1),
    ("max_tokens", 0),
    ("seed", -1),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logprobs", 21),
    ("logprobs", -1),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
]
BROKEN_JSON: list[str] = [
    "",
    " ",
    "{",
    "}",
    "[]",
    "null",
    "true",
    "1",
    '"ping"',
    "{'type':'ping'}",
    '{"type":"ping","t":NaN}',
    '{"type":"ping","t":Infinity}',
    '{"type":"ping","t":-Infinity}',
    '{"type":"ping","t":01}',
    '{"type":"ping","t":1,}',
    '{"type":"ping" "t":1}',
    '{"type":"ping","t":1}}',
    '{"type":"ping","t":1}{}',
    '{"type":"ping","t":"\\x"}',
    '{"type":"ping","t":1e999}',
    '{"type":' + "[" * 100_000,
    '{"type":"ping","t":' + "[" * 2000 + "]" * 2000 + "}",
    '{"x":' * 20_000 + "1" + "}" * 20_000,
    "\x00",
    '{"type":"ping","t":"\x01"}',
]
BAD_TYPES: list[Any] = [
    None,
    1,
    True,
    [],
    {},
    "",
    "PING",
    "ping ",
    "session",
    "session.erase_all",
    "x" * 10_000,
    "hello",
]
BAD_IDS: list[Any] = [1, True, [], {}, "", "a b", "x" * 65, "é", "a\n", "a/b", "\x00", "‮", "a.b"]


def frames() -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (text, the parameter that is named, the code); None where any will do."""
    for command, good in GOOD.items():
        base = {"type": command, **good}
        for name in good:
            yield json.dumps({key: value for key, value in base.items() if key != name}), name, None
        for unknown in ("x", "Session", "content_", "__class__", "tenant", "user"):
            if unknown not in base:
                yield json.dumps({**base, unknown: 1}), unknown, None
        for name, kind in FIELDS[command].items():
            for value in WRONG_TYPES[kind]:
                yield json.dumps({**base, name: value}), name, None
        for value in BAD_IDS:
            yield json.dumps({**base, "id": value}), "id", None
        if "session" in good:
            for value in ("", "x" * 65, "../x", "a b", "é", "\x00"):
                yield json.dumps({**base, "session": value}), "session", None
    for command, name, value in OUT_OF_RANGE:
        yield json.dumps({"type": command, **GOOD[command], name: value}), name, None
    for name, value in PARAMS:
        yield json.dumps({"type": "session.create", "params": {name: value}}), name, None
    for command in ("message.edit", "response.regenerate"):
        for value in (1, "x", [1], True, {"oops": 1}):
            named = "oops" if isinstance(value, dict) else "params"
            yield json.dumps({"type": command, **GOOD[command], "params": value}), named, None
    for text in BROKEN_JSON:
        yield text, None, None
    for value in BAD_TYPES:
        yield json.dumps({"type": value, "t": 1}), "type", None
    for message in (
        {},
        {"role": "user"},
        {"content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": 1},
    ):
        yield json.dumps({"type": "session.create", "messages": [message]}), "messages", None


def test_the_table_covers_every_command_and_is_long() -> None:
    assert set(GOOD) == {str(command.__struct_config__.tag) for command in COMMANDS}
    assert len(list(frames())) >= 300


async def test_every_bad_frame_is_refused_by_name_while_an_answer_streams(start) -> None:
    table = list(frames())
    async with start(lambda _log: encode_text("x")) as running, running.chat() as witness, running.chat() as bad:
        running.engine.held = True
        session = (await create(witness)).session.id
        await witness.send(UserMessage(session=session, content="hi"))
        for i, (text, param, _code) in enumerate(table):
            if i % (len(table) // 60) == 0 and running.engine.running:
                running.engine.step()
            await bad.socket.send(text)
            answer = await bad.next()
            assert isinstance(answer, Error), (text[:200], answer)
            assert answer.error.type == "invalid_request_error", (text[:200], answer)
            assert answer.error.message
            if param is not None:
                named = (answer.error.param or "").replace("[", ".").split(".")
                assert param in named, (text[:200], param, answer)
        running.engine.held = False
        assert text_of(await witness.until(ResponseIncomplete)) == "x" * 64
        assert isinstance(await bad.ask(Ping(id="p", t=1)), Pong)


async def test_an_error_names_the_command_it_answers(start) -> None:
    async with start() as running, running.chat() as talk:
        answer = await talk.ask('{"type":"ping","id":"p7","t":"x"}')
        assert (answer.re, answer.error.param) == ("p7", "t")
        answer = await talk.ask('{"type":"nonsense","id":"p8"}')
        assert (answer.re, answer.error.code) == ("p8", "unknown_type")


async def test_content_above_its_limit_is_refused_with_the_numbers(start) -> None:
    async with start(limits=SessionLimits(max_content_bytes=1024)) as running, running.chat() as talk:
        session = (await create(talk)).session.id
        refused = await talk.ask(UserMessage(id="m", session=session, content="é" * 513))
        assert refused.error.code == "content_too_large"
        assert (refused.error.param, "1024" in refused.error.message) == ("content", True)
        refused = await talk.ask(SessionCreate(id="s", system="x" * 1025))
        assert refused.error.code == "content_too_large"


async def test_half_a_character_is_said_to_be_one_and_answered_by_id(start) -> None:
    async with start() as running, running.chat() as talk:
        answer = await talk.ask(r'{"type":"session.create","id":"s1","title":"\udfff"}')
        assert (answer.re, answer.error.code) == ("s1", "invalid_json")
        assert "half a character" in answer.error.message
        whole = await talk.ask(r'{"type":"session.create","id":"s2","title":"\ud83d\ude00"}')
        assert whole.session.title == "\U0001f600"


async def test_a_bad_id_is_refused_in_words(start) -> None:
    async with start() as running, running.chat() as talk:
        for frame in ('{"type":"ping","id":"a b","t":1}', '{"type":"session.get","session":"a/b"}'):
            await talk.send(frame)
            message = (await talk.next()).error.message
            assert "1 to 64 letters, digits, `_` or `-`" in message
            assert "regex" not in message


@pytest.mark.parametrize("cursor", ["nan~x", "inf~x", "-inf~", "x", ""])
async def test_a_cursor_that_is_none_is_refused(start, cursor) -> None:
    async with start() as running, running.chat() as talk:
        answer = await talk.ask(SessionList(id="l", cursor=cursor))
        assert (answer.error.code, answer.error.param) == ("invalid_request", "cursor")

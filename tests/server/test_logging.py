"""One line per event, escaped, without keys and without what people wrote."""

import io
import json
import logging

import httpx
import pytest

from chatd.protocol import ResponseCompleted, SessionCreate, UserMessage
from chatd.server.logging import configure_logging, get_logger, is_request_id

HOSTILE = "a\r\nb\x1b[31mc\u202ed\u2028e\x00f\x9bg"


def lines(log: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def test_a_request_id_is_echoed_and_in_every_line(start, log) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        headers = {**running.headers(), "X-Request-Id": "req-7.x_Y"}
        body = {"model": "bytes", "messages": [{"role": "user", "content": "canary-prompt"}]}
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "req-7.x_Y"
    line = next(line for line in lines(log) if line.get("request_id") == "req-7.x_Y")
    assert (line["event"], line["route"], line["status"]) == ("http.request", "/v1/chat/completions", 200)
    assert line["tenant"] == "acme"
    assert "canary-prompt" not in log.getvalue()
    assert "hello" not in log.getvalue()


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", 'a"b', "ck_abc", "<script>"])
async def test_a_strange_request_id_is_replaced(start, given) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        answer = await http.get("/health", headers=[(b"X-Request-Id", given.encode())])
        assert answer.headers["x-request-id"].startswith("req_")


def test_which_request_ids_are_taken() -> None:
    assert all(is_request_id(text) for text in ("a", "x" * 128, "A-b_c.d"))
    assert not any(is_request_id(text) for text in ("", "a\n", "a b", "x" * 129, "ck_x_y"))


async def test_a_websockets_lines_have_its_request_id_and_no_text(start, log) -> None:
    async with start() as running, running.chat(headers={"X-Request-Id": "ws-1"}) as talk:
        assert talk.socket.response.headers["x-request-id"] == "ws-1"
        created = await talk.ask(SessionCreate(id="c", title=f"canary {HOSTILE}"))
        await talk.send(UserMessage(session=created.session.id, content="canary"))
        await talk.until(ResponseCompleted)
    said = [line for line in lines(log) if line.get("request_id") == "ws-1"]
    assert {"websocket.opened", "websocket.request"} <= {line["event"] for line in said}
    assert "canary" not in log.getvalue()


def test_what_a_stranger_wrote_cannot_forge_a_line(log) -> None:
    get_logger("chatd.test").info("title.changed", title=HOSTILE, nested={"x": [HOSTILE]})
    text = log.getvalue()
    assert text.count("\n") == 1
    assert text.isascii()
    assert not any(ord(char) < 32 or ord(char) == 127 for char in text.rstrip("\n"))
    [line] = lines(log)
    assert (line["title"], line["nested"]) == (HOSTILE, {"x": [HOSTILE]})


def test_a_key_is_never_written(log) -> None:
    token = "ck_abc123_" + "s" * 49
    try:
        raise ValueError(f"bad {token}")
    except ValueError:
        get_logger("chatd.test").exception("failed", header=f"Bearer {token}", nested=[{"k": token}])
    logging.getLogger("chatd.other").warning("plain %s", token)
    assert "s" * 49 not in log.getvalue()
    assert log.getvalue().count("\n") == 2


def test_the_readable_form_escapes_too(log) -> None:
    stream = io.StringIO()
    configure_logging("info", "console", stream)
    get_logger("chatd.test").info("title.changed", title=HOSTILE)
    text = stream.getvalue()
    assert text.count("\n") == 1
    for char in "\r\x1b\u202e\u2028\x00\x9b":
        assert char not in text


async def test_loading_says_each_phase_and_how_far_it_is(start, log) -> None:
    async with start(is_open=False) as running:
        for progress in (0.0, 0.1, 0.3, 0.4, 0.76, 1.0):
            running.daemon.report("compiling kernels", progress)
        running.backend.gate.set()
    said = [(line["phase"], line["percent"]) for line in lines(log) if line["event"] == "server.loading"]
    kernels = [("compiling kernels", percent) for percent in (0, 30, 76, 100)]
    assert said == [("loading weights", 50), *kernels]


def test_levels_and_uvicorns_own_lines(log) -> None:
    stream = io.StringIO()
    configure_logging("warning", "auto", stream)
    get_logger("chatd.server").info("quiet")
    logging.getLogger("uvicorn.error").info("GET /?key=secret")
    logging.getLogger("uvicorn.access").info("GET /?key=secret")
    get_logger("chatd.server").warning("loud")
    [line] = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("loud", "warning", "chatd.server")

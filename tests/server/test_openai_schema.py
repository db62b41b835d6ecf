"""What the OpenAI door takes, ignores and refuses."""

import json
from typing import Any

import pytest

from chatd.engine.sampling import BeamSearch
from chatd.errors import InvalidRequest
from chatd.protocol import Message, Params
from chatd.server.openai_schema import INFORMATIONAL, beam_search_of, decode_chat_request

GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def decode(**fields: Any):
    return decode_chat_request(json.dumps({**GOOD, **fields}).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        decode(**fields)
    return refused.value


NEUTRAL = [
    ("n", 1),
    ("n", None),
    ("tools", []),
    ("tools", None),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("functions", []),
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("modalities", ["text"]),
    ("audio", None),
    ("reasoning_effort", None),
    ("logit_bias", {}),
    ("logit_bias", None),
    ("stop", None),
    ("stop", []),
    ("presence_penalty", 0),
    ("frequency_penalty", 0),
    ("web_search_options", {}),
    ("parallel_tool_calls", True),
    ("stream", False),
    ("stream", None),
    ("logprobs", False),
    ("made_up", None),
    ("made_up", False),
    ("made_up", []),
    ("made_up", {}),
]
REFUSED = [
    ("n", 9, "invalid_request"),
    ("n", 0, "invalid_request"),
    ("n", True, "invalid_request"),
    ("best_of", 3, "unsupported_parameter"),
    ("beam_width", 3, "unsupported_parameter"),
    ("length_penalty", 2.0, "unsupported_parameter"),
    ("early_stopping", True, "unsupported_parameter"),
    ("early_stopping", "soon", "invalid_request"),
    ("tools", [{"type": "function"}], "unsupported_parameter"),
    ("tool_choice", "required", "unsupported_parameter"),
    ("functions", [{}], "unsupported_parameter"),
    ("response_format", {"type": "json_object"}, "unsupported_parameter"),
    ("modalities", ["text", "audio"], "unsupported_parameter"),
    ("audio", {"voice": "x"}, "unsupported_parameter"),
    ("reasoning_effort", "high", "unsupported_parameter"),
    ("chat_template", "{{ x }}", "unsupported_parameter"),
    ("chat_template_kwargs", {"a": 1}, "unsupported_parameter"),
    ("guided_json", "{}", "unsupported_parameter"),
    ("add_generation_prompt", False, None),
    ("made_up", 1, "unknown_parameter"),
    ("made_up", True, "unknown_parameter"),
    ("tenant", "other", "unknown_parameter"),
]
WRONG = [
    *(("temperature", value) for value in ("1", True, [])),
    *(("max_tokens", value) for value in ("1", True, 1.5)),
    *(("seed", value) for value in ("1", True, 0.5)),
    *(("stream", value) for value in (1, "true")),
    *(("logprobs", value) for value in (1, "true")),
    *(("top_logprobs", value) for value in (21, -1, True)),
    *(("stop", value) for value in (1, [1], [""], "", ["x"] * 17, ["x" * 257])),
    *(("logit_bias", value) for value in ([1], {"1": "x"}, {"1": True})),
    *(("stream_options", value) for value in (1, {"x": 1}, {"include_usage": 1})),
    *(("messages", value) for value in (None, [], {}, "hi", [1], [{}], [{"role": "user"}])),
    *(("model", value) for value in (None, 1, [])),
    *(("top_k", value) for value in ("1", True)),
    *(("prompt_cache_key", value) for value in (1, [])),
    *(("stop_token_ids", value) for value in ([True], ["1"], [1] * 65, 1)),
]


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_a_value_that_asks_for_nothing_changes_nothing(name, value) -> None:
    _, messages, params = decode(**{name: value})
    assert messages == [Message(role="user", content="hi")]
    wanted = {name: 0.0} if name in ("presence_penalty", "frequency_penalty") else {}
    assert params == Params(**wanted)


@pytest.mark.parametrize("name", sorted(INFORMATIONAL))
def test_a_field_that_only_informs_is_taken(name) -> None:
    assert decode(**{name: {"a": 1}})[2] == Params()


@pytest.mark.parametrize(("name", "value", "code"), REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(name, value, code) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert error.error_code == (code or "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_the_fields_name(name, value) -> None:
    param = refusal(**{name: value}).param
    assert param is not None
    assert param.replace("[", ".").split(".")[0] == name


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b"null", b'{"model":"m","messages":[],"temperature":NaN}', b"\xff", b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused(body) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_chat_request(body)
    assert refused.value.error_code == "invalid_json"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "owner", "content": "x"}, "messages[0].role"),
        ({"role": 1, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "name": "ann"}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)
def test_a_message_that_cannot_be_said_is_refused_by_place(message, param) -> None:
    assert refusal(messages=[message]).param == param


def test_what_an_answer_carries_may_come_back() -> None:
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    _, messages, _ = decode(messages=[*GOOD["messages"], answer, *GOOD["messages"]])
    assert [message.role for message in messages] == ["user", "assistant", "user"]


def test_parameters_have_their_native_names() -> None:
    _, _, params = decode(
        max_tokens=9, max_completion_tokens=5, stop="x", logprobs=True, top_logprobs=2, top_k=-1, stop_token_ids=[3]
    )
    assert params == Params(max_tokens=5, stop=("x",), logprobs=2, stop_token_ids=(3,))
    assert decode(logprobs=True)[2].logprobs == 0


def test_fields_that_need_each_other_are_refused_alone() -> None:
    assert refusal(top_logprobs=1).param == "top_logprobs"
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"


def test_a_search_is_asked_for_by_the_names_of_vllm() -> None:
    request, _, _ = decode(use_beam_search=True, n=2, best_of=5, length_penalty=0.5, early_stopping="never")
    search = BeamSearch(width=5, num_returned=2, length_penalty=0.5, early_stopping="never")
    assert beam_search_of(request) == search
    assert beam_search_of(decode(use_beam_search=True, n=3)[0]) == BeamSearch(width=3, num_returned=3)
    assert beam_search_of(decode(use_beam_search=True, beam_width=4)[0]) == BeamSearch(width=4)
    assert beam_search_of(decode(use_beam_search=False, n=3, best_of=3)[0]) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 4, "best_of": 2}, "n"),
        ({"best_of": 11}, "best_of"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 3, "best_of": 4}, "beam_width"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(fields, param) -> None:
    assert refusal(use_beam_search=True, **fields).param == param

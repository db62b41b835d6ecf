"""Sampling parameters as they are typed, and the one table of what they may be."""

import pytest

from chatd import protocol as p
from chatd import typed_params
from chatd.engine.sampling import SamplingParams, check_sampling_params
from chatd.errors import InvalidRequest
from chatd.protocol.ranges import RANGES


def test_parameters_are_read_as_their_types_and_taken_away() -> None:
    base = p.Params(temperature=0.5, seed=3)
    assert typed_params.changed(base, "top_k=40 temperature=") == p.Params(seed=3, top_k=40)
    assert typed_params.changed(base, 'stop=["a b", "c"] ignore_eos=true').stop == ("a b", "c")
    assert typed_params.changed(base, "stop=the end max_tokens=9") == p.Params(
        temperature=0.5, seed=3, stop=("the end",), max_tokens=9
    )
    assert typed_params.changed(base, 'logit_bias={"7": -1}').logit_bias == {"7": -1.0}
    text = typed_params.shown(p.Params(temperature=0.5, stop=("a b",), ignore_eos=True))
    assert typed_params.changed(p.Params(), text) == p.Params(temperature=0.5, stop=("a b",), ignore_eos=True)
    assert typed_params.shown(p.Params()) == ""


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("warmth=1", "'warmth' is not a parameter"),
        ("hot", "'hot' is not NAME=VALUE"),
        ("temperature=hot", "temperature is 'hot', which is no number"),
        ("temperature=nan", "temperature is nan, the range is 0.0 to 5.0"),
        ("max_tokens=0", "max_tokens is 0, the range is 1 to 2147483648"),
        ("max_tokens=3 min_tokens=4", "min_tokens is 4, the range is 0 to 3"),
        ('logit_bias={"1": 200}', "logit_bias is 200.0, the range is -100.0 to 100.0"),
        ("logit_bias=x", "logit_bias: expected `object | null`, got `array`"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(typed: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        typed_params.changed(p.Params(), typed)
    assert caught.value.message == said


@pytest.mark.parametrize("name", RANGES)
def test_the_schema_the_engine_and_what_is_typed_have_the_same_range(name: str) -> None:
    low, high = RANGES[name]
    schema = p.json_schema()["$defs"]["Params"]["properties"][name]
    number = next(kind for kind in schema["anyOf"] if kind["type"] != "null")
    assert (number["minimum"], number["maximum"]) == (low, high)
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidRequest) as typed:
            typed_params.changed(p.Params(), f"{name}={value}")
        with pytest.raises(InvalidRequest) as drawn:
            check_sampling_params(SamplingParams(**{"max_tokens": 8, name: value}), 100)
        assert typed.value.message == drawn.value.message == f"{name} is {value}, the range is {low} to {high}"


def test_a_client_reads_what_a_daemon_with_other_ranges_has() -> None:
    info = b'{"type":"hello","protocol":"chatd.v1","server":"9","boot":"b","connection":"c","tenant":"t","user":"u",'
    info += b'"model":{"id":"m","context":1,"block_size":1,"blocks":1,"params":{"temperature":99}},"caps":[],'
    info += b'"heartbeat_s":1,"limits":{"frame_bytes":1,"sessions":1,"inflight":1,"replay_events":1,"replay_ttl_s":1}}'
    hello = p.decode_event(info)
    assert isinstance(hello, p.Hello)
    assert hello.model.params == p.Params(temperature=99.0)

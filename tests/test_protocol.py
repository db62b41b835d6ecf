"""Frames are a closed schema on the way in, and an open one on the way out."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatd import protocol
from chatd.errors import InvalidRequest, UnknownType

GOOD = {
    "session.create": {},
    "session.attach": {"session": "s"},
    "session.list": {},
    "session.get": {"session": "s"},
    "session.update": {"session": "s"},
    "session.detach": {"session": "s"},
    "session.close": {"session": "s"},
    "user.message": {"session": "s", "content": "hi"},
    "session.fork": {"session": "s"},
    "message.edit": {"session": "s", "item": "i", "content": "c"},
    "response.regenerate": {"session": "s"},
    "response.continue": {"session": "s"},
    "session.erase": {"session": "s"},
    "branch.select": {"session": "s", "leaf": "i"},
    "response.cancel": {"session": "s"},
    "prefill": {"session": "s"},
    "pool.subscribe": {},
    "pool.unsubscribe": {},
    "pool.inspect": {"cell": 0},
    "ping": {"t": 1.5},
}


def test_the_table_of_good_commands_is_whole() -> None:
    assert set(GOOD) == protocol.COMMAND_TYPES


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_a_command_survives_its_own_text(kind: str) -> None:
    command = protocol.decode_command(json.dumps({"type": kind, "id": "01J", **GOOD[kind]}))
    assert command.id == "01J"
    assert protocol.decode_command(protocol.encode(command)) == command


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_an_unknown_field_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        protocol.decode_command(json.dumps({"type": kind, **GOOD[kind], "surprise": 1}))
    assert caught.value.param == "surprise"


@pytest.mark.parametrize(
    ("frame", "param"),
    [
        ('{"type":"ping"}', "t"),
        ('{"type":"ping","t":true}', "t"),
        ('{"type":"ping","t":1e999}', "t"),
        ('{"type":"ping","t":"1"}', "t"),
        ('{"type":1}', "type"),
        ('{"type":"ping","t":1,"id":"a b"}', "id"),
        ('{"type":"user.message","session":"s","content":1}', "content"),
        ('{"type":"user.message","session":"s","content":"x","params":{"temperature":"1"}}', "params.temperature"),
        ('{"type":"user.message","session":"s","content":"x","params":{"stop":[""]}}', "params.stop[0]"),
        ('{"type":"user.message","session":"s","content":"x","params":{"oops":1}}', "params.oops"),
        ('{"type":"session.create","messages":[{"role":"tool","content":"x"}]}', "messages[0].role"),
        ('{"type":"pool.subscribe","hz":0}', "hz"),
        ('{"type":"pool.subscribe","hz":11}', "hz"),
        ('{"type":"pool.subscribe","cells":63}', "cells"),
        ('{"type":"session.list","limit":0}', "limit"),
        ('{"type":"session.attach","session":"s","after_seq":-1}', "after_seq"),
    ],
)
def test_a_bad_value_is_refused_by_its_path(frame: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        protocol.decode_command(frame)
    assert caught.value.param == param


@pytest.mark.parametrize("frame", ["", "{", "nul", "[]", '"x"', '{"type":"ping","t":NaN}', b"\xff", "\ud800"])
def test_what_is_not_a_frame_is_refused(frame: str | bytes) -> None:
    with pytest.raises(InvalidRequest):
        protocol.decode_command(frame)


@given(st.text() | st.binary())
def test_nothing_but_refusals_comes_of_noise(frame: str | bytes) -> None:
    with pytest.raises(InvalidRequest):
        protocol.decode_command(frame)
    protocol.command_id(frame)


def test_an_unknown_command_has_its_own_code() -> None:
    with pytest.raises(UnknownType) as caught:
        protocol.decode_command('{"type":"session.explode"}')
    assert caught.value.error_code == "unknown_type"


def test_the_id_of_a_broken_command_can_be_answered() -> None:
    assert protocol.command_id('{"type":"ping","id":"7"}') == "7"
    assert protocol.command_id('{"type":"ping","id":7}') is None
    assert protocol.command_id("{") is None


def test_clients_ignore_events_and_fields_that_they_do_not_know() -> None:
    assert protocol.decode_event('{"type":"response.sung","x":1}') is None
    assert protocol.decode_event('{"type":"pong","t":1,"later":{"a":1}}') == protocol.Pong(t=1.0)


def test_parameters_lie_over_others() -> None:
    base = protocol.Params(temperature=1.0, top_p=0.5, stop=("a",))
    assert protocol.Params(temperature=0.0).over(base) == protocol.Params(temperature=0.0, top_p=0.5, stop=("a",))


@given(st.lists(st.tuples(*[st.integers(0, 0xFFFF)] * 4)))
def test_cells_survive_packing(counts: list[tuple[int, int, int, int]]) -> None:
    assert protocol.unpack_cells(protocol.pack_cells(counts)) == counts


def test_the_frame_limit_grows_with_the_context_within_bounds() -> None:
    assert protocol.frame_limit_bytes(8192) == 256 * 1024
    assert protocol.frame_limit_bytes(131072) == 1024 * 1024
    assert protocol.frame_limit_bytes(10**7) == 4 * 2**20


def test_the_schema_names_every_frame() -> None:
    definitions = protocol.json_schema()["$defs"]
    for frame in (*protocol.COMMANDS, *protocol.EVENTS):
        assert definitions[frame.__name__]["properties"]["type"]["enum"] == [frame.__struct_config__.tag]


def test_commands_are_closed_in_the_schema_too() -> None:
    definitions = protocol.json_schema()["$defs"]
    assert all(definitions[command.__name__]["additionalProperties"] is False for command in protocol.COMMANDS)


def test_frames_have_no_two_equal_types() -> None:
    assert len(protocol.COMMAND_TYPES) == len(protocol.COMMANDS)
    assert len(protocol.EVENT_TYPES) == len(protocol.EVENTS)


def test_a_command_says_only_what_was_asked_for_since_an_older_daemon_knows_no_later_field() -> None:
    assert protocol.encode(protocol.SessionCreate(id="c")) == '{"type":"session.create","id":"c"}'
    asked = protocol.SessionAttach(id="c", session="s", after_seq=0, role="observer")
    assert json.loads(protocol.encode(asked)) == {
        "type": "session.attach",
        "id": "c",
        "session": "s",
        "after_seq": 0,
        "role": "observer",
    }


def test_absent_optional_fields_decode_to_their_defaults() -> None:
    command = protocol.decode_command('{"type":"pool.subscribe"}')
    assert command == protocol.PoolSubscribe(hz=1.0, detail="summary", cells=1024)
    assert msgspec.structs.asdict(command)["id"] is None

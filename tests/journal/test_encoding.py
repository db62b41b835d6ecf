from __future__ import annotations

from array import array
from datetime import date

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatd.engine.sampling import SamplingParams
from chatd.errors import DamagedRecord
from chatd.journal.encoding import (
    message_record,
    message_row,
    pack_ids,
    session_record,
    session_row,
    unpack_ids,
)
from chatd.journal.records import ID_TYPE, MessageRecord, SessionRecord
from chatd.protocol import Params, Timings, Usage

SESSION = SessionRecord(
    id="ses_1",
    tenant="acme",
    user="ann",
    title="a title",
    system="Be brief.",
    params=Params(temperature=0.25, stop=("x",), logit_bias={"5": 1.5}),
    metadata={"a": "b"},
    created_at=1.5,
    updated_at=2.5,
    date=date(2026, 2, 28),
    archived=True,
    pinned=True,
    closed=True,
    head="m1",
    vocabulary="v1",
    model="small",
    num_items=3,
    num_tokens=40,
    num_bytes=5000,
    context_policy="drop_oldest",
)
MESSAGE = MessageRecord(
    id="m1",
    parent="m0",
    role="assistant",
    content="nul\0 and \ufffd and 🙂",
    status="incomplete",
    created_at=3.5,
    is_answer=True,
    prompt_ids=array(ID_TYPE, [1, 2]),
    ids=array(ID_TYPE, [70000, 3]),
    reason="cancelled",
    usage=Usage.of(2, 1, 2),
    timings=Timings(queue_ms=1.0, ttft_ms=2.0, prefill_tok_s=3.0, decode_tok_s=4.0, preemptions=5),
    sampling=SamplingParams(max_tokens=5, logit_bias=((3, 0.5),), stop_token_ids=(7,), logprobs=2),
    stop_strings=("a", "b"),
    key_id="k",
    request_class="batch",
    num_deaths=1,
    num_crashes=1,
    crashed_at=5,
    is_tried=True,
    num_inherited=2,
    log_system="d",
    context_from="m0",
)


@pytest.mark.parametrize("record", [SESSION, MESSAGE], ids=["session", "message"])
def test_the_records_of_this_test_have_no_field_at_its_default(record: msgspec.Struct) -> None:
    for field in msgspec.structs.fields(record):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        assert getattr(record, field.name) != default, field.name


def test_every_field_comes_back() -> None:
    assert message_record(message_row(MESSAGE)) == MESSAGE
    assert session_record("acme", "ann", session_row(SESSION)) == SESSION


def test_a_session_under_another_owner_is_damaged() -> None:
    with pytest.raises(DamagedRecord, match="session ses_1 is damaged"):
        session_record("acme", "bob", session_row(SESSION))


@pytest.mark.parametrize("column", range(len(message_row(MESSAGE))))
def test_a_change_of_any_column_is_damage(column: int) -> None:
    row = message_row(MESSAGE)
    value = row[column]
    changed = value + b"\0" if isinstance(value, bytes) else f"{value}x" if isinstance(value, str) else value + 1
    with pytest.raises(DamagedRecord):
        message_record(type(row)._make([*row[:column], changed, *row[column + 1 :]]))


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300)))
def test_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert unpack_ids(pack_ids(array(ID_TYPE, ids))).tolist() == ids


@pytest.mark.parametrize(
    ("ids", "num_bytes"), [([], 0), ([255] * 10, 11), ([49151] * 10, 21), ([151935] * 10, 31), ([2**24] * 10, 41)]
)
def test_ids_take_as_many_bytes_as_the_vocabulary_needs(ids: list[int], num_bytes: int) -> None:
    assert len(pack_ids(ids)) == num_bytes


@pytest.mark.parametrize("data", [b"\x00\x01", b"\x05" + bytes(5), b"\x03\x01\x02", b"\xff"])
def test_bytes_that_are_no_ids_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedRecord):
        unpack_ids(data)

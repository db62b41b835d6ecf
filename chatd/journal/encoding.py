"""Records as rows and back: ids as packed bytes, and a checksum with each row that must never come back changed.

SQLite checks what is in its write-ahead log and nothing of what is in its database file, so a bit that flips there
would be another token, quietly.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from datetime import date
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from chatd.engine.sampling import SamplingParams
from chatd.errors import DamagedRecord
from chatd.journal.records import ID_TYPE, MessageRecord, SaveAnswer, SessionRecord
from chatd.protocol import ContextPolicy, ItemStatus, Params, Role, Timings, Usage

CHECKSUM_BYTES = 8
_ID_BYTES = array(ID_TYPE).itemsize
_pack = msgspec.msgpack.Encoder().encode
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_T = TypeVar("_T")


class MessageRow(NamedTuple):
    """A message as the database has it, in the order of the columns."""

    id: str
    parent: str | None
    role: str
    status: str
    created_at: float
    content: str
    is_answer: int
    prompt_ids: bytes
    ids: bytes
    details: bytes
    checksum: bytes


class SessionRow(NamedTuple):
    """A session as the database has it but for its owner's number, in the order of the columns."""

    id: str
    title: str
    updated_at: float
    pinned: int
    head: str | None
    details: bytes
    checksum: bytes


class _MessageDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What of a message no query asks for."""

    reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    sampling: dict[str, Any] | None = None
    stop_strings: tuple[str, ...] = ()
    key_id: str = ""
    request_class: str = "interactive"
    num_deaths: int = 0
    num_crashes: int = 0
    crashed_at: int = 0
    is_tried: bool = False
    num_inherited: int = 0
    log_system: str = ""
    context_from: str | None = None


class _SessionDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What of a session no query asks for."""

    system: str | None
    params: Params
    metadata: dict[str, str]
    created_at: float
    date: date
    archived: bool
    closed: bool
    vocabulary: str
    model: str
    num_items: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    context_policy: ContextPolicy = "refuse"


_message_details = msgspec.msgpack.Decoder(_MessageDetails)
_session_details = msgspec.msgpack.Decoder(_SessionDetails)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return ids with as many bytes each as the largest needs: the width, all first bytes, all second bytes, …"""
    if not ids:
        return b""
    values = ids if isinstance(ids, array) and ids.typecode == ID_TYPE else array(ID_TYPE, ids)
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    raw = values.tobytes()
    width = next((n for n in range(_ID_BYTES, 1, -1) if any(raw[n - 1 :: _ID_BYTES])), 1)
    return bytes((width,)) + b"".join(raw[plane::_ID_BYTES] for plane in range(width))


def unpack_ids(data: bytes) -> array[int]:
    """Return the ids of `pack_ids`.

    Raises:
        DamagedRecord: It is none.
    """
    values: array[int] = array(ID_TYPE)
    if not data:
        return values
    width, num_planes = data[0], len(data) - 1
    if not 1 <= width <= _ID_BYTES or num_planes % width:
        raise DamagedRecord("token ids in the journal are damaged")
    length = num_planes // width
    raw = bytearray(_ID_BYTES * length)
    for plane in range(width):
        raw[plane::_ID_BYTES] = data[1 + plane * length : 1 + (plane + 1) * length]
    values.frombytes(bytes(raw))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def checksum(*values: str | bytes | float | None) -> bytes:
    """Return a checksum of a row's values."""
    return hashlib.blake2b(_pack(values), digest_size=CHECKSUM_BYTES).digest()


def check(row: tuple[Any, ...], what: str, *before: str | bytes | float | None) -> None:
    """Refuse a row whose last column is not the checksum of `before` and its others.

    Raises:
        DamagedRecord: Names `what`.
    """
    if row[-1] != checksum(*before, *row[:-1]):
        raise DamagedRecord(f"{what} is damaged in the journal")


def message_row(message: MessageRecord) -> MessageRow:
    """Return a message's row."""
    sampling = message.sampling
    details = _MessageDetails(
        reason=message.reason,
        usage=message.usage,
        timings=message.timings,
        sampling=None if sampling is None else _changed(sampling),
        stop_strings=message.stop_strings,
        key_id=message.key_id,
        request_class=message.request_class,
        num_deaths=message.num_deaths,
        num_crashes=message.num_crashes,
        crashed_at=message.crashed_at,
        is_tried=message.is_tried,
        num_inherited=message.num_inherited,
        log_system=message.log_system,
        context_from=message.context_from,
    )
    values = (
        message.id,
        message.parent,
        message.role,
        message.status,
        float(message.created_at),
        message.content,
        int(message.is_answer),
        pack_ids(message.prompt_ids),
        pack_ids(message.ids),
        _pack(details),
    )
    return MessageRow(*values, checksum=checksum(*values))


def message_record(row: MessageRow) -> MessageRecord:
    """Return the message of a row.

    Raises:
        DamagedRecord: The row is not what was written.
    """
    what = f"message {row.id}"
    check(row, what)
    details = _decoded(_message_details, row.details, what)
    return MessageRecord(
        id=row.id,
        parent=row.parent,
        role=cast(Role, row.role),
        content=row.content,
        status=cast(ItemStatus, row.status),
        created_at=row.created_at,
        is_answer=bool(row.is_answer),
        prompt_ids=unpack_ids(row.prompt_ids),
        ids=unpack_ids(row.ids),
        reason=details.reason,
        usage=details.usage,
        timings=details.timings,
        sampling=None if details.sampling is None else _sampling(details.sampling, what),
        stop_strings=details.stop_strings,
        key_id=details.key_id,
        request_class=details.request_class,
        num_deaths=details.num_deaths,
        num_crashes=details.num_crashes,
        crashed_at=details.crashed_at,
        is_tried=details.is_tried,
        num_inherited=details.num_inherited,
        log_system=details.log_system,
        context_from=details.context_from,
    )


def session_row(session: SessionRecord) -> SessionRow:
    """Return a session's row; its checksum covers whose it is, too."""
    details = _SessionDetails(
        system=session.system,
        params=session.params,
        metadata=session.metadata,
        created_at=session.created_at,
        date=session.date,
        archived=session.archived,
        closed=session.closed,
        vocabulary=session.vocabulary,
        model=session.model,
        num_items=session.num_items,
        num_tokens=session.num_tokens,
        num_bytes=session.num_bytes,
        context_policy=session.context_policy,
    )
    values = (
        session.id,
        session.title,
        float(session.updated_at),
        int(session.pinned),
        session.head,
        _pack(details),
    )
    return SessionRow(*values, checksum=checksum(session.tenant, session.user, *values))


def session_record(tenant: str, user: str, row: SessionRow) -> SessionRecord:
    """Return the session of a row and its owner.

    Raises:
        DamagedRecord: The row is not what was written.
    """
    what = f"session {row.id}"
    check(row, what, tenant, user)
    details = _decoded(_session_details, row.details, what)
    return SessionRecord(
        id=row.id,
        tenant=tenant,
        user=user,
        title=row.title,
        system=details.system,
        params=details.params,
        metadata=details.metadata,
        created_at=details.created_at,
        updated_at=row.updated_at,
        date=details.date,
        archived=details.archived,
        pinned=bool(row.pinned),
        closed=details.closed,
        head=row.head,
        vocabulary=details.vocabulary,
        model=details.model,
        num_items=details.num_items,
        num_tokens=details.num_tokens,
        num_bytes=details.num_bytes,
        context_policy=details.context_policy,
    )


def answer_checksum(answer: SaveAnswer) -> bytes:
    """Return the checksum of a kept answer to a command."""
    return checksum(answer.tenant, answer.user, answer.command, answer.body, answer.event, float(answer.at))


def _changed(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not the default ones, which are few."""
    values = msgspec.structs.asdict(sampling)
    return {name: value for name, value in values.items() if value != _DEFAULTS.get(name, msgspec.NODEFAULT)}


def _sampling(values: dict[str, Any], what: str) -> SamplingParams:
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise DamagedRecord(f"{what} has parameters that this version does not know: {error}") from None


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes, what: str) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise DamagedRecord(f"{what} has values that this version does not know: {error}") from None

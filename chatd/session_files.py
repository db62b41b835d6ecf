"""The journal's conversations as files: Markdown and HTML to read, as `transcript_file` has them, JSON to take along.

JSON is exact: the whole tree with its token ids, in ASCII. Knows no journal and no terminal.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Callable, Sequence
from sys import getsizeof
from typing import Any

import msgspec

from chatd import transcript_file
from chatd.engine.sampling import SamplingParams
from chatd.errors import InvalidRequest
from chatd.journal.records import ID_TYPE, MessageRecord, SessionRecord
from chatd.protocol import Params
from chatd.protocol.ranges import RANGES, check_range, check_stop_strings
from chatd.sessions.stored import conversation_of, headed
from chatd.transcript_file import Format

FORMAT = "chatd.session"
VERSION = 1
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_OWNER = re.compile(r"[0-9A-Za-z][0-9A-Za-z._@-]{0,63}")
"""As keys name tenants and users."""

_MAX_TIME = 253402300800.0
"""The year 10000, in Unix seconds."""
_IN_PROGRESS = "(the answer is in progress)"


class SessionFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation as JSON has it.

    Attributes:
        format: "chatd.session".
        version: Of this format.
        session: Without its messages.
        messages: The tree, parents before children.
    """

    format: str
    version: int
    session: SessionRecord
    messages: list[MessageRecord]


def path_to_head(session: SessionRecord, messages: Sequence[MessageRecord]) -> list[MessageRecord]:
    """Return the messages that a client shows: those on the way to the head."""
    by_id = {message.id: message for message in messages}
    path = []
    at = session.head
    while at is not None and at in by_id:
        path.append(by_id.pop(at))
        at = path[-1].parent
    return path[::-1]


def as_markdown(session: SessionRecord, messages: Sequence[MessageRecord]) -> str:
    """Return the path to the head as Markdown."""
    return transcript_file.as_markdown(session.title, _said(session, messages))


def as_html(session: SessionRecord, messages: Sequence[MessageRecord]) -> str:
    """Return the path to the head as a page."""
    return transcript_file.as_html(session.title, _said(session, messages))


def as_json(session: SessionRecord, messages: Sequence[MessageRecord]) -> str:
    """Return a conversation exactly, with all branches and token ids; `from_json` reads it."""
    file = SessionFile(format=FORMAT, version=VERSION, session=session, messages=list(messages))
    text = json.dumps(msgspec.to_builtins(file, enc_hook=list), ensure_ascii=True, separators=(",", ":"))
    # The one control character that JSON lets stand in ASCII.
    return text.replace("\x7f", "\\u007f") + "\n"


RENDERERS: dict[Format, Callable[[SessionRecord, Sequence[MessageRecord]], str]] = {
    "md": as_markdown,
    "json": as_json,
    "html": as_html,
}


def from_json(text: str | bytes) -> SessionFile:
    """Return a conversation that `as_json` wrote, without an answer that was in progress.

    How much it has is counted, whatever the file says of that: its owner's bounds hold by it.

    Raises:
        InvalidRequest: It is none, or its messages are no tree.
    """
    try:
        file = msgspec.json.decode(text, type=SessionFile, dec_hook=_ids)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"that is no export of a session: {error}", param="file") from None
    except RecursionError:
        raise InvalidRequest("that is no export of a session: it is nested too deeply", param="file") from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise InvalidRequest(
            f"{file.format[:64]!r} {file.version} is not {FORMAT!r} {VERSION}, which this version reads", param="file"
        )
    _check_tree(file)
    _check_values(file)
    return _counted(_ended(file))


def with_new_ids(file: SessionFile) -> SessionFile:
    """Return the same conversation under ids that nothing else has."""
    names: dict[str | None, str | None] = {None: None}
    for message in file.messages:
        names[message.id] = f"msg_{secrets.token_hex(12)}"
    messages = [
        msgspec.structs.replace(
            message,
            id=names[message.id],
            parent=names[message.parent],
            context_from=names.get(message.context_from),
        )
        for message in file.messages
    ]
    session = msgspec.structs.replace(file.session, id=f"ses_{secrets.token_hex(12)}", head=names[file.session.head])
    return msgspec.structs.replace(file, session=session, messages=messages)


def _said(session: SessionRecord, messages: Sequence[MessageRecord]) -> list[transcript_file.Said]:
    said = [("system", session.system)] if session.system else []
    for message in path_to_head(session, messages):
        said.append((message.role, _IN_PROGRESS if message.status == "in_progress" else message.content))
    return said


def _ids(kind: type, value: Any) -> Any:
    assert kind is array, f"{kind} is not a type of records"
    try:
        return array(ID_TYPE, value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"these are no token ids: {error}") from None


def _check_tree(file: SessionFile) -> None:
    for name in (file.session.id, *(message.id for message in file.messages)):
        if not _ID.fullmatch(name):
            raise InvalidRequest(f"{name[:64]!r} is no id", param="file")
    known: set[str | None] = {None}
    for message in file.messages:
        if message.parent not in known or message.id in known:
            raise InvalidRequest(f"message {message.id[:64]!r} is there twice, or before its parent", param="file")
        known.add(message.id)
    if file.session.head not in known:
        raise InvalidRequest(f"{str(file.session.head)[:64]!r}, the head, is none of the messages", param="file")


def _check_values(file: SessionFile) -> None:
    """Refuse what no journal ever had, and what reads one would stumble over."""
    session = file.session
    for name in (session.tenant, session.user):
        if not _OWNER.fullmatch(name):
            raise InvalidRequest(f"{name[:64]!r} is no name of a tenant or a user", param="file")
    _check_params(session.params)
    for message in file.messages:
        if message.sampling is not None:
            _check_params(message.sampling)
        check_stop_strings(message.stop_strings)
        if message.is_answer and (message.role != "assistant" or message.sampling is None):
            raise InvalidRequest(f"message {message.id[:64]!r} is no answer, or has no parameters", param="file")
    times = [session.created_at, session.updated_at, *(message.created_at for message in file.messages)]
    counts = [session.num_items, session.num_tokens, session.num_bytes]
    counts += [count for message in file.messages for count in _counts(message)]
    if not all(0 <= time < _MAX_TIME for time in times) or not all(0 <= count < 2**31 for count in counts):
        raise InvalidRequest("a time or a count is out of range", param="file")


def _check_params(params: Params | SamplingParams) -> None:
    for name, within in RANGES.items():
        value = getattr(params, name)
        if value is not None:
            check_range(name, value, within)
    if isinstance(params, Params):
        check_stop_strings(params.stop)
    biases = dict(params.logit_bias or ())
    for token_id in (*params.stop_token_ids, *biases):
        if not str(token_id).isdecimal() or int(token_id) >= 2**32:
            raise InvalidRequest(f"{str(token_id)[:64]!r} is no token", param="file")


def _counts(message: MessageRecord) -> tuple[int, ...]:
    return message.num_deaths, message.num_crashes, message.crashed_at, message.num_inherited


def _ended(file: SessionFile) -> SessionFile:
    """Leave out answers in progress: nobody computes them here. Nothing follows one."""
    unfinished = {message.id: message.parent for message in file.messages if message.status == "in_progress"}
    if not unfinished:
        return file
    if any(message.parent in unfinished for message in file.messages):
        raise InvalidRequest("something follows an answer that is in progress", param="file")
    session = msgspec.structs.replace(file.session, head=unfinished.get(file.session.head or "", file.session.head))
    messages = [message for message in file.messages if message.id not in unfinished]
    return msgspec.structs.replace(file, session=session, messages=messages)


def _counted(file: SessionFile) -> SessionFile:
    """Return a conversation with the counts that its messages have."""
    conversation = conversation_of(file.session, file.messages)
    num_bytes = conversation.num_bytes + getsizeof(conversation.system or "")
    session = msgspec.structs.replace(headed(file.session, conversation.head), num_bytes=num_bytes)
    return msgspec.structs.replace(file, session=session)

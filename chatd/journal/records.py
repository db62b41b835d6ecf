"""What the journal keeps, as plain records. Knows no session object, no engine and no database.

A list of changes is committed as a whole or not at all. Token ids are the truth of a conversation (`vocabulary` says
whose ids they are); the text beside them is what was shown.
"""

from __future__ import annotations

from array import array
from datetime import date
from typing import TYPE_CHECKING

import msgspec

from chatd.engine.sampling import SamplingParams
from chatd.protocol import ContextPolicy, ItemStatus, Params, Role, Timings, Usage

ID_TYPE = "I"
"""Of the arrays of token ids."""

ANSWER_TTL_S = 86400.0
"""How long the answer to a command is kept for a client that sends it again."""

MAX_ANSWERS_PER_USER = 1024
MAX_ANSWER_BYTES_PER_USER = 4 * 2**20
"""As much of a user's answers is kept, and in any case the last one."""

if TYPE_CHECKING:
    IdArray = array[int]
else:
    IdArray = array  # msgspec looks at the types of records, and this one has no subscript when it runs.


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its messages.

    Attributes:
        id: Stable.
        tenant: Whose, from the key.
        user: Likewise.
        title: May be empty.
        system: The system prompt.
        params: The session's own.
        metadata: The client's.
        created_at: Unix seconds.
        updated_at: Likewise; orders lists.
        date: What a template that writes the date writes.
        archived: Not in the usual list.
        pinned: Kept longer, shown first.
        closed: Its KV was given up by its owner.
        head: The last message of the path that is shown; None before the first.
        vocabulary: Digest of the tokenizer and the template whose ids the messages have. With others the ids mean
            nothing, and the conversation is encoded again from its text.
        model: The name of the model that last answered.
        num_items: Messages on the path to the head, for lists.
        num_tokens: Ids of that path, likewise.
        num_bytes: Memory of all its messages and its system prompt, about, for its owner's bounds.
        context_policy: What becomes of a turn that does not fit into the context.
    """

    id: str
    tenant: str
    user: str
    title: str
    system: str | None
    params: Params
    metadata: dict[str, str]
    created_at: float
    updated_at: float
    date: date
    archived: bool
    pinned: bool
    closed: bool
    head: str | None
    vocabulary: str
    model: str
    num_items: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    context_policy: ContextPolicy = "refuse"


class MessageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a tree, as `sessions.conversation.Node`; forks share messages.

    Attributes:
        id: Stable, and unique in the journal.
        parent: The message before it.
        role: Who wrote it.
        content: The text; of an answer in flight, empty: its ids tell.
        status: "in_progress" for an answer in flight.
        created_at: Unix seconds.
        is_answer: It was computed here, so it has ids.
        prompt_ids: Of an answer: ids between the answer before and this one.
        ids: Of an answer: its tokens.
        reason: Of an answer that ended.
        usage: Likewise.
        timings: Likewise.
        sampling: Of an answer: resolved parameters with their seed.
        stop_strings: Of an answer.
        key_id: Of an answer: whose key asked for it, for its usage.
        request_class: Of an answer: its place in the schedule.
        num_deaths: Of an answer in flight: engine processes that died while it ran.
        num_crashes: Of an answer in flight: crashes of the daemon that it may have been the reason for.
        crashed_at: Of an answer in flight: how many tokens it had at the last of them.
        is_tried: Of an answer in flight that is suspected of one: it is the only one of those that is gone on with.
        num_inherited: Of an answer that goes on from another one: the ids that it began with.
        log_system: Of an answer that begins a log, as `sessions.conversation.Node`.
        context_from: Likewise.
    """

    id: str
    parent: str | None
    role: Role
    content: str
    status: ItemStatus
    created_at: float
    is_answer: bool = False
    prompt_ids: IdArray = msgspec.field(default_factory=lambda: array(ID_TYPE))
    ids: IdArray = msgspec.field(default_factory=lambda: array(ID_TYPE))
    reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    sampling: SamplingParams | None = None
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


class SaveSession(msgspec.Struct, frozen=True):
    """Write a session's row, new or changed."""

    session: SessionRecord


class SaveMessage(msgspec.Struct, frozen=True):
    """Write a message, new or changed, and make it a message of a session.

    A message that ends takes its tokens in flight with it: `ids` are all of them.
    """

    session: str
    message: MessageRecord


class ShareMessages(msgspec.Struct, frozen=True):
    """Make messages that are there messages of another session too (a fork), in this order."""

    session: str
    messages: tuple[str, ...]


class RemoveMessages(msgspec.Struct, frozen=True):
    """Take messages out of a session (a failed turn); one that no session has any more is gone."""

    session: str
    messages: tuple[str, ...]


class SaveAnswer(msgspec.Struct, frozen=True):
    """Keep the answer to a command, so that a repeat gets it again, also after a restart.

    Attributes:
        tenant: Whose command.
        user: Likewise.
        command: Its id.
        body: SHA-256 of the command.
        event: The answer's frame, JSON.
        at: Unix seconds; after `ANSWER_TTL_S` it is dropped.
    """

    tenant: str
    user: str
    command: str
    body: bytes
    event: bytes
    at: float


class CountUsage(msgspec.Struct, frozen=True):
    """Add the tokens of a turn, or of several, to their tenant's, key's and day's."""

    tenant: str
    key_id: str
    day: date
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    requests: int = 1


class EraseSession(msgspec.Struct, frozen=True):
    """Remove a session and every message that no other session has, also from the full-text index and free pages."""

    session: str


Change = SaveSession | SaveMessage | ShareMessages | RemoveMessages | SaveAnswer | CountUsage | EraseSession

CHANGE_BYTES = 512
"""What any change writes, about."""


def written_bytes(change: Change) -> int:
    """Return about how many bytes a change writes."""
    match change:
        case SaveMessage(message=message):
            # Text is written to the index, too.
            num_ids = len(message.prompt_ids) + len(message.ids)
            return CHANGE_BYTES + 3 * len(message.content) + message.ids.itemsize * num_ids
        case SaveSession(session=session):
            return CHANGE_BYTES + len(session.title) + len(session.system or "")
        case SaveAnswer():
            return CHANGE_BYTES + len(change.event)
        case _:
            return CHANGE_BYTES


class Match(msgspec.Struct, frozen=True):
    """Where a search found its words in a session.

    Attributes:
        session: Which.
        message: The latest message that has them; None where the title has them, and no message was seen to.
        passage: Of that message: where they stand, on one line.
    """

    session: str
    message: str | None = None
    passage: str = ""


class Erased(msgspec.Struct, frozen=True):
    """What an erasure removed from the journal.

    Attributes:
        messages: Messages that are gone.
        shared_messages: Messages that stay since a fork has them too.
        tokens: Ids that are gone.
        num_bytes: Of text and ids that are gone.
    """

    messages: int
    shared_messages: int
    tokens: int
    num_bytes: int


class UsageRow(msgspec.Struct, frozen=True):
    """Tokens of one tenant, key and day (UTC); `requests` counts turns."""

    tenant: str
    key_id: str
    day: date
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int

"""What a client says: a closed schema, in which an unknown field is refused by its name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chatd.protocol.values import Message, Params
from chatd.protocol.vocabulary import (
    AttachRole,
    CommandId,
    ContextPolicy,
    HistoryScope,
    ItemId,
    Metadata,
    SessionId,
    Title,
)


class _Command(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"
):
    """Base of all commands; `id` is echoed as `re`.

    What is not asked for is not sent: an older daemon refuses the fields that it does not know.
    """

    id: CommandId | None = None


class SessionCreate(_Command, frozen=True, kw_only=True, tag="session.create"):
    """Open a session; the connection is attached to it as a writer."""

    system: str | None = None
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=4096)] = ()
    params: Params = Params()
    title: Title | None = None
    metadata: Metadata = {}
    context_policy: ContextPolicy | None = None


class SessionAttach(_Command, frozen=True, kw_only=True, tag="session.attach"):
    """Receive a session's events after `after_seq`, exactly where the ring still has them, else after a snapshot."""

    session: SessionId
    after_seq: Annotated[int, msgspec.Meta(ge=0)] | None = None
    boot: str | None = None
    role: AttachRole = "writer"
    history: HistoryScope = "full"


class SessionList(_Command, frozen=True, kw_only=True, tag="session.list"):
    """List one's own sessions, last used first."""

    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    query: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    archived: bool = False


class SessionGet(_Command, frozen=True, kw_only=True, tag="session.get"):
    """Return one session with its items."""

    session: SessionId


class SessionUpdate(_Command, frozen=True, kw_only=True, tag="session.update"):
    """Change what is named; another `system` is in the context from the next answer on."""

    session: SessionId
    title: Title | None = None
    system: str | None = None
    params: Params | None = None
    archived: bool | None = None
    pinned: bool | None = None
    metadata: Metadata | None = None
    context_policy: ContextPolicy | None = None


class SessionDetach(_Command, frozen=True, kw_only=True, tag="session.detach"):
    """Receive no more of a session's events."""

    session: SessionId


class SessionClose(_Command, frozen=True, kw_only=True, tag="session.close"):
    """Release a session's KV and keep its text."""

    session: SessionId


class SessionErase(_Command, frozen=True, kw_only=True, tag="session.erase"):
    """Remove a session from every tier and the journal; what forks have of it stays theirs."""

    session: SessionId


class SessionFork(_Command, frozen=True, kw_only=True, tag="session.fork"):
    """Open a session with the messages up to `at`, else all of them; the connection is attached to it as a writer."""

    session: SessionId
    at: ItemId | None = None
    title: Title | None = None


class UserMessage(_Command, frozen=True, kw_only=True, tag="user.message"):
    """Say something; an answer follows unless `respond` is false."""

    session: SessionId
    content: str
    parent: ItemId | None = None
    params: Params | None = None
    respond: bool = True


class MessageEdit(_Command, frozen=True, kw_only=True, tag="message.edit"):
    """Say something else in a message's place, beside it; an answer follows unless `respond` is false."""

    session: SessionId
    item: ItemId
    content: str
    params: Params | None = None
    respond: bool = True


class ResponseRegenerate(_Command, frozen=True, kw_only=True, tag="response.regenerate"):
    """Have another answer beside `item`, else beside the last one, from the same prompt with a fresh seed."""

    session: SessionId
    item: ItemId | None = None
    params: Params | None = None


class ResponseContinue(_Command, frozen=True, kw_only=True, tag="response.continue"):
    """Go on from an answer that was cut short, `item` or the last one, beside it.

    `max_tokens` is for what comes now; absent, the session's holds, or the rest of the context.
    """

    session: SessionId
    item: ItemId | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None


class BranchSelect(_Command, frozen=True, kw_only=True, tag="branch.select"):
    """Go on from `leaf`: the conversation is the path to it."""

    session: SessionId
    leaf: ItemId


class ResponseCancel(_Command, frozen=True, kw_only=True, tag="response.cancel"):
    """End the answer in progress; what is there is kept and marked."""

    session: SessionId


class Prefill(_Command, frozen=True, kw_only=True, tag="prefill"):
    """Compute ahead what is being typed, in place of what was before; without `content` it is taken back."""

    session: SessionId
    content: str | None = None


class PoolSubscribe(_Command, frozen=True, kw_only=True, tag="pool.subscribe"):
    """Receive the state of the block pool."""

    hz: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    detail: Literal["summary", "sessions", "map"] = "summary"
    cells: Annotated[int, msgspec.Meta(ge=64, le=4096)] = 1024


class PoolUnsubscribe(_Command, frozen=True, kw_only=True, tag="pool.unsubscribe"):
    """Receive it no more."""


class PoolInspect(_Command, frozen=True, kw_only=True, tag="pool.inspect"):
    """Tell what is in a cell of the map; `blocks_per_cell` is what the map's `cells` say."""

    cell: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    blocks_per_cell: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class Ping(_Command, frozen=True, kw_only=True, tag="ping"):
    """Ask for a `pong` with the same `t`."""

    t: float


Command = (
    SessionCreate
    | SessionAttach
    | SessionList
    | SessionGet
    | SessionUpdate
    | SessionDetach
    | SessionClose
    | SessionErase
    | SessionFork
    | UserMessage
    | MessageEdit
    | ResponseRegenerate
    | ResponseContinue
    | BranchSelect
    | ResponseCancel
    | Prefill
    | PoolSubscribe
    | PoolUnsubscribe
    | PoolInspect
    | Ping
)
COMMANDS: tuple[type[_Command], ...] = Command.__args__
COMMAND_TYPES: frozenset[str] = frozenset(str(command.__struct_config__.tag) for command in COMMANDS)

"""Sessions and messages as the journal has them, and back. Knows records and conversations; knows no journal."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from chatd.engine.sampling import SamplingParams
from chatd.errors import DamagedRecord
from chatd.journal.records import ID_TYPE, MessageRecord, SessionRecord
from chatd.protocol import Role
from chatd.sessions.conversation import Conversation
from chatd.sessions.logs import Node

if TYPE_CHECKING:
    from chatd.sessions.context_policy import Prompt
    from chatd.sessions.session import Session
    from chatd.sessions.turn import Turn


def session_record(session: Session, *, model: str, **changes: Any) -> SessionRecord:
    """Return a session that is loaded as the journal has it, with these fields changed."""
    conversation = session.conversation
    record = SessionRecord(
        id=session.id,
        tenant=session.owner.tenant,
        user=session.owner.user,
        title=session.title,
        system=conversation.system,
        params=session.params,
        metadata=dict(session.metadata),
        created_at=session.created_at,
        updated_at=session.updated_at,
        date=session.date,
        archived=session.archived,
        pinned=session.pinned,
        closed=session.closed,
        head=None if conversation.head is None else conversation.head.id,
        vocabulary=session.vocabulary,
        model=model,
        num_items=0 if conversation.head is None else conversation.head.depth,
        num_tokens=conversation.num_tokens,
        num_bytes=session.num_bytes,
        context_policy=session.context_policy,
    )
    return msgspec.structs.replace(record, **changes) if changes else record


def headed(record: SessionRecord, head: Node | None) -> SessionRecord:
    """Return a session's record with another head."""
    return msgspec.structs.replace(
        record,
        head=None if head is None else head.id,
        num_items=0 if head is None else head.depth,
        num_tokens=0 if head is None else head.num_tokens,
    )


def message_record(node_id: str, role: Role, content: str, parent: str | None, created_at: float) -> MessageRecord:
    """Return a message that nobody computed, as the journal has it."""
    return MessageRecord(
        id=node_id, parent=parent, role=role, content=content, status="completed", created_at=created_at
    )


def answer_record(
    turn: Turn, node_id: str, parent: str | None, prompt: Prompt, sampling: SamplingParams, created_at: float
) -> MessageRecord:
    """Return an answer that begins, as the journal has it; its seed and its stop strings let it go on elsewhere."""
    return MessageRecord(
        id=node_id,
        parent=parent,
        role="assistant",
        content="",
        status="in_progress",
        created_at=created_at,
        is_answer=True,
        prompt_ids=array(ID_TYPE, prompt.ids),
        ids=array(ID_TYPE, () if turn.text is None else turn.text.ids),
        num_inherited=turn.num_inherited,
        sampling=sampling,
        stop_strings=turn.params.stop,
        key_id=turn.key_id,
        request_class=str(turn.request_class),
        log_system=prompt.log_system,
        context_from=prompt.context_from,
    )


def conversation_of(record: SessionRecord, messages: Iterable[MessageRecord]) -> Conversation:
    """Return the tree that a session's messages make, with its head.

    Args:
        record: Of the session.
        messages: Parents before children, siblings in their order.

    Raises:
        DamagedRecord: An answer has not what makes it one.
    """
    conversation = Conversation(record.system)
    for message in messages:
        parent = None if message.parent is None else conversation.get(message.parent)
        node = conversation.add_stored(message.id, message.role, message.content, parent)
        if message.is_answer:
            if message.sampling is None:
                raise DamagedRecord(f"answer {message.id} is in the journal without its parameters")
            conversation.make_answer(
                node,
                message.prompt_ids,
                message.sampling,
                message.stop_strings,
                log_system=message.log_system,
                context_from=message.context_from,
            )
        node.status, node.reason, node.usage, node.timings = (
            message.status,
            message.reason,
            message.usage,
            message.timings,
        )
        if message.is_answer and message.status != "in_progress":
            conversation.give_ids(node, message.ids)
    conversation.show(None if record.head is None else conversation.get(record.head))
    return conversation


def without_ids(messages: Sequence[MessageRecord]) -> list[MessageRecord]:
    """Return messages whose ids mean nothing any more as text alone, each that changes.

    What one of them used and why it ended stays.
    """
    return [
        MessageRecord(
            id=message.id,
            parent=message.parent,
            role=message.role,
            content=message.content,
            status=message.status,
            created_at=message.created_at,
            reason=message.reason,
            usage=message.usage,
            timings=message.timings,
            key_id=message.key_id,
        )
        for message in messages
        if message.is_answer
    ]


def are_ids_below(vocab_size: int, messages: Iterable[MessageRecord]) -> bool:
    """Return whether all token ids are of a vocabulary of this size; what was imported may have any."""
    return all(max(ids, default=0) < vocab_size for message in messages for ids in (message.prompt_ids, message.ids))

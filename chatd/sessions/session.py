"""A session: a conversation with its owner, its lease and its events. Does not know the engine.

A session is only touched on the event loop. Its transcript events are numbered here and nowhere else. Where a journal
keeps it, its messages need not be in memory: `is_loaded` says so, and `loading` brings them back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, date, datetime
from sys import getsizeof

from chatd.errors import NotFound, PermissionDenied
from chatd.journal.records import MessageRecord, SessionRecord
from chatd.protocol import (
    BranchSelected,
    ContextPolicy,
    ErrorBody,
    HistoryScope,
    ItemAdded,
    LatestState,
    OutputTextDelta,
    Params,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    SessionInfo,
    SessionTruncated,
    SessionUpdated,
    SessionUsage,
    Snapshot,
    TranscriptEvent,
)
from chatd.sessions.conversation import Conversation, Owner
from chatd.sessions.events import EventRing, Subscriber
from chatd.sessions.leases import Latest, Lease
from chatd.sessions.listeners import Listeners
from chatd.sessions.logs import Node, common_node, path_to
from chatd.sessions.turn import TextDelta, Turn, TurnEnd

TAIL_ITEMS = 20


class Session:
    """One conversation of one owner.

    Args:
        session_id: Stable.
        owner: Whose.
        conversation: May have messages already; None where only the journal has them, and `unload` says what they are.
        lease: Its own.
        ring: Empty.
        model_id: For clients.
        context_max: Gives the tokens of a context.
        clock: Gives Unix seconds.
        hidden: It was made for a stateless request, and no list shows it.

    Attributes:
        is_erasing: It is being erased: nothing of it is to be computed, or it would be left over.
        is_erased: Nobody has it any more.
        lock: Held while a change is made durable and takes effect; nothing else changes meanwhile.
        vocabulary: Whose ids its answers have, as in the journal.
        recoded: Messages that lost their ids since the vocabulary changed, until the journal has them so.
        listeners: The connections that are attached.
        on_changed: Called when anything has changed by which an owner's sessions are counted or ordered.
    """

    def __init__(
        self,
        session_id: str,
        owner: Owner,
        conversation: Conversation | None,
        lease: Lease,
        ring: EventRing,
        *,
        model_id: str,
        context_max: Callable[[], int],
        clock: Callable[[], float],
        hidden: bool = False,
    ) -> None:
        self.id = session_id
        self.owner = owner
        self.lease = lease
        self.ring = ring
        self.hidden = hidden
        self.title = ""
        self.params = Params()
        self.metadata: dict[str, str] = {}
        self.created_at = self._updated_at = clock()
        self.date = date_of(self.created_at)
        """What a template that writes the date writes, for as long as the session lives."""
        self._archived = False
        self.pinned = False
        self.context_policy: ContextPolicy = "refuse"
        self._closed = False
        self.turn: Turn | None = None
        self.is_erasing = self.is_erased = False
        self.lock = asyncio.Lock()
        self.vocabulary = ""
        self.recoded: list[MessageRecord] = []
        self.on_changed: Callable[[Session], None] | None = None
        self.latest = Latest()
        self.listeners = Listeners(session_id)
        self._conversation = conversation
        if conversation is not None:
            conversation.on_sized = self._changed
        self._stored: SessionRecord | None = None
        self._leased_message: str | None = None
        self._model_id = model_id
        self._context_max = context_max
        self._clock = clock

    def check_there(self) -> None:
        """Refuse a session that was erased while its lock was waited for.

        Raises:
            NotFound: In the words for one that never was.
        """
        if self.is_erased:
            raise unknown_session(self.id)

    def check_writer(self, subscriber: Subscriber | None) -> None:
        """Refuse what only a writer may do.

        Raises:
            PermissionDenied: The connection is attached as an observer.
        """
        if subscriber is not None and self.listeners.role_of(subscriber) == "observer":
            raise PermissionDenied("this connection is attached as an observer", code="observer")

    # What an owner's sessions are counted and ordered by.

    @property
    def updated_at(self) -> float:
        """When it was last used, in Unix seconds."""
        return self._updated_at

    @updated_at.setter
    def updated_at(self, when: float) -> None:
        self._updated_at = when
        self._changed()

    @property
    def archived(self) -> bool:
        """True while lists show it among the archived ones only."""
        return self._archived

    @archived.setter
    def archived(self, is_archived: bool) -> None:
        self._archived = is_archived
        self._changed()

    @property
    def closed(self) -> bool:
        """True from when its KV was given up until it goes on."""
        return self._closed

    @closed.setter
    def closed(self, is_closed: bool) -> None:
        self._closed = is_closed
        self._changed()

    def _changed(self) -> None:
        if self.on_changed is not None:
            self.on_changed(self)

    # What is in memory of it.

    @property
    def conversation(self) -> Conversation:
        """The messages."""
        assert self._conversation is not None, f"the messages of {self.id} are not in memory"
        return self._conversation

    @property
    def is_loaded(self) -> bool:
        """True while the messages are in memory."""
        return self._conversation is not None

    @property
    def stored(self) -> SessionRecord:
        """What the journal has of a session that is not loaded."""
        assert self._stored is not None, f"{self.id} is in memory"
        return self._stored

    def take(self, record: SessionRecord) -> None:
        """Have what a record says, but for the messages."""
        self.title = record.title
        self.params = record.params
        self.metadata = dict(record.metadata)
        self.created_at, self._updated_at = record.created_at, record.updated_at
        self.date = record.date
        self._archived, self.pinned, self._closed = record.archived, record.pinned, record.closed
        self.vocabulary, self.context_policy = record.vocabulary, record.context_policy
        if self._conversation is not None:
            self._conversation.system = record.system
        self._changed()

    def unload(self, record: SessionRecord) -> None:
        """Have the messages in the journal only, which has the rest as `record`."""
        assert self.turn is None, "a busy session is unloaded"
        assert not len(self.listeners), "a session that somebody looks at is unloaded"
        if self._conversation is not None:
            # A failed turn leaves the lease with messages that are gone.
            node = self.lease.node
            while node is not None and self._conversation.get(node.id) is not node:
                node = node.parent
                self.lease.num_tokens = min(self.lease.num_tokens, 0 if node is None else node.num_tokens)
            self._leased_message = None if node is None else node.id
            self.lease.node = None
            self._conversation.on_sized = None
            self._conversation = None
        self._stored = record
        self._changed()

    def load(self, conversation: Conversation) -> None:
        """Have the messages in memory again."""
        assert self._conversation is None, f"{self.id} is loaded twice"
        self._conversation, self._stored = conversation, None
        if self._leased_message is not None:
            self.lease.node = conversation.get(self._leased_message)
        if self.lease.node is None:
            self.lease.num_tokens = 0
        conversation.on_sized = self._changed
        self._changed()

    # What clients see.

    def info(self) -> SessionInfo:
        """Return the session as a list shows it."""
        stored = self._stored
        head = None if stored is not None else self.conversation.head
        return SessionInfo(
            id=self.id,
            title=self.title,
            model=self._model_id,
            created_at=self.created_at,
            updated_at=self.updated_at,
            num_items=stored.num_items if stored is not None else 0 if head is None else head.depth,
            context_used=self.context_used,
            context_max=self._context_max(),
            busy=self.turn is not None,
            tier=str(self.latest.tier),
            archived=self.archived,
            pinned=self.pinned,
            system=self.conversation.system if stored is None else stored.system,
            params=self.params,
            metadata=self.metadata,
            context_policy=self.context_policy,
            writers=self.listeners.num_as("writer"),
            observers=self.listeners.num_as("observer"),
        )

    @property
    def context_used(self) -> int:
        """Tokens of the log, those of an answer in progress included."""
        if self._stored is not None:
            return self._stored.num_tokens
        used = self.conversation.num_tokens
        turn = self.turn
        if turn is not None and turn.text is not None and turn.answer is self.conversation.head:
            used += len(turn.text.ids)
        return used

    @property
    def num_bytes(self) -> int:
        """Memory of the messages and the system prompt, about."""
        if self._stored is not None:
            return getsizeof(self._stored.system or "")
        return self.conversation.num_bytes + getsizeof(self.conversation.system or "")

    @property
    def num_system_bytes(self) -> int:
        """Memory that is taken also where the messages are in the journal only."""
        return getsizeof((self.conversation.system if self._stored is None else self._stored.system) or "")

    @property
    def num_kept_bytes(self) -> int:
        """As `num_bytes`, also where the messages are in the journal only."""
        return self.num_bytes if self._stored is None else self._stored.num_bytes

    def snapshot(self, history: HistoryScope) -> Snapshot:
        """Return the session at `ring.head_seq`; an answer in progress is always in it."""
        path = self.conversation.path()
        if history == "tail":
            path = path[-TAIL_ITEMS:]
        elif history == "none":
            path = path[-1:] if path and path[-1].status == "in_progress" else []
        in_progress = self.turn is not None and self.turn.answer is not None
        return Snapshot(
            session=self.info(),
            items=[self.conversation.item_of(node) for node in path],
            response=self.turn.response if self.turn is not None and in_progress else None,
            state=LatestState(
                queued=self.latest.queued,
                prefill=self.latest.prefill,
                usage={
                    "context_used": self.context_used,
                    "context_max": self._context_max(),
                    "blocks_held": self.latest.blocks_held,
                    "blocks_shared": self.latest.blocks_shared,
                },
                tier=str(self.latest.tier),
            ),
        )

    # Events.

    def _emit(self, event: TranscriptEvent, re: str | None = None, sender: Subscriber | None = None) -> None:
        """Number, keep and send an event; the sender's copy says to which command it belongs."""
        self.ring.append(event)
        self.listeners.deliver(event, re, sender)

    def emit_item(self, node: Node, re: str | None = None, sender: Subscriber | None = None) -> None:
        """Tell that a message joined the conversation."""
        item = self.conversation.item_of(node)
        self._emit(ItemAdded(session=self.id, seq=self.ring.head_seq + 1, ts=self._clock(), item=item), re, sender)

    def emit_branch(
        self, shown: Node | None, leaf: Node, re: str | None = None, sender: Subscriber | None = None
    ) -> None:
        """Tell that the conversation is the path to `leaf` now, where it was the one to `shown`."""
        self._emit(self.branch_event(shown, leaf, seq=self.ring.head_seq + 1), re, sender)

    def branch_event(self, shown: Node | None, leaf: Node, *, seq: int, re: str | None = None) -> BranchSelected:
        """Return what tells that the conversation is the path to `leaf`, where it was the one to `shown`."""
        fork = common_node(shown, leaf)
        path = path_to(leaf)
        return BranchSelected(
            session=self.id,
            seq=seq,
            ts=self._clock(),
            leaf=leaf.id,
            parent=None if fork is None else fork.id,
            items=[self.conversation.item_of(node) for node in path[0 if fork is None else fork.depth :]],
            re=re,
        )

    def emit_way_to(self, parent: Node | None, shown: Node | None) -> None:
        """Before a message that follows `parent`, tell the path to that one where clients do not show it."""
        if parent is not None and common_node(shown, parent) is not parent:
            self.emit_branch(shown, parent)

    def emit_updated(self, re: str | None = None, sender: Subscriber | None = None) -> None:
        """Tell that the session itself changed."""
        self._emit(
            SessionUpdated(session=self.id, seq=self.ring.head_seq + 1, ts=self._clock(), info=self.info()), re, sender
        )

    def emit_created(self, turn: Turn, re: str | None = None, sender: Subscriber | None = None) -> None:
        """Tell that an answer began, and before that what its context has left out."""
        assert turn.answer is not None, "an answer without its message"
        if turn.dropped is not None:
            dropped = turn.dropped
            self._emit(
                SessionTruncated(
                    session=self.id,
                    seq=self.ring.head_seq + 1,
                    ts=self._clock(),
                    kept_from=dropped.kept_from,
                    dropped_items=dropped.num_items,
                    dropped_tokens=dropped.num_tokens,
                )
            )
        self._emit(
            ResponseCreated(
                session=self.id,
                seq=self.ring.head_seq + 1,
                ts=self._clock(),
                response=turn.response,
                item=self.conversation.item_of(turn.answer),
            ),
            re,
            sender,
        )

    def emit_usage(self) -> None:
        """Tell what the session uses of its context and of the pool."""
        self.listeners.tell(
            SessionUsage(
                session=self.id,
                context_used=self.context_used,
                context_max=self._context_max(),
                blocks_held=self.latest.blocks_held,
                blocks_shared=self.latest.blocks_shared,
            )
        )

    # `TurnSink`: the answers of a native session are its transcript.

    def on_delta(self, turn: Turn, delta: TextDelta) -> None:
        """Tell of more of an answer."""
        assert turn.answer is not None, "an answer without its message"
        event = OutputTextDelta(
            session=self.id,
            seq=self.ring.head_seq + 1,
            ts=self._clock(),
            item_id=turn.answer.id,
            delta=delta.text,
            n_tokens=delta.num_tokens,
            logprobs=delta.logprobs,
        )
        self.ring.append(event)
        self.listeners.tell(event)

    def on_end(self, turn: Turn, end: TurnEnd) -> None:
        """Tell of the end of a turn."""
        assert turn.answer is not None, "an answer without its message"
        seq, ts = self.ring.head_seq + 1, self._clock()
        if end.error is not None:
            assert turn.first_node is not None, "a turn without a message fails"
            before = turn.first_node.parent
            self._emit(
                ResponseFailed(
                    session=self.id,
                    seq=seq,
                    ts=ts,
                    response=turn.response,
                    item_id=turn.answer.id,
                    error=ErrorBody.of(end.error),
                    parent=None if before is None else before.id,
                )
            )
            head = self.conversation.head
            if head is not None and head is not before:
                # The turn went on from another place than the head, which is back where it was.
                self.emit_branch(before, head)
            if turn.given_title is not None and turn.given_title == self.title:
                self.title = ""
                self.emit_updated()
        else:
            assert end.usage is not None, "an end without usage"
            assert end.timings is not None, "an end without timings"
            event_type = ResponseCompleted if end.completed else ResponseIncomplete
            self._emit(
                event_type(
                    session=self.id,
                    seq=seq,
                    ts=ts,
                    response=turn.response,
                    item=self.conversation.item_of(turn.answer),
                    reason=end.reason,  # type: ignore[arg-type]
                    usage=end.usage,
                    timings=end.timings,
                )
            )
        self.emit_usage()


def unknown_session(session_id: str) -> NotFound:
    """Return the error for a session that is not there, or is somebody else's: the same words for both."""
    return NotFound(f"session {session_id[:64]!r} is not known", param="session")


def date_of(unix_s: float) -> date:
    """Return the day on which a session begins, for templates that write it."""
    return datetime.fromtimestamp(unix_s, UTC).date()

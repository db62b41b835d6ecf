"""A conversation as a tree of messages with exact token ids. Knows no engine, no connection and no template.

Token ids are the truth, text is their decoding. Ids belong to answers: an answer holds the ids that were put before it
since the answer before (`prompt_ids`: closing of the last answer, messages, generation prompt) and its own (`ids`). So
the log of a path is the ids of its answers laid end to end, and it is what the engine's lease holds (I25). A message
that no answer followed yet is text only; its ids come into being with the prompt of the next answer, since a template
renders it in its place.

The first answer begins a log, and so does one whose context was put together anew (`sessions.context_policy`): its
`prompt_ids` are all that is before it, and no answer before it counts. So where the oldest messages were dropped, or
the system prompt is another one, the tree is as it was, and the log is what was computed.

All changes go through the methods here, and nodes are never changed once their answer has ended, so paths can be shared
between conversations. What belongs to one tree alone, as which messages follow one, is the conversation's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import getsizeof

from chatd.engine.sampling import SamplingParams
from chatd.journal.records import ID_TYPE
from chatd.protocol import Item, ItemStatus, Message, Role, Siblings, Timings, Usage
from chatd.sessions.events import Subscriber

__all__ = ["Conversation", "Node", "Owner", "Subscriber"]

MESSAGE_OVERHEAD_BYTES = 1024
"""What a message takes beside its text and ids, about: its objects, its event, its place in the tree."""
BIAS_BYTES = 128
"""What one entry of an answer's `logit_bias` takes, about."""


@dataclass(frozen=True, slots=True)
class Owner:
    """To whom a session belongs; both names come from the key, never from a request."""

    tenant: str
    user: str


@dataclass(slots=True, eq=False)
class Node:
    """One message of the tree.

    Attributes:
        id: Stable.
        role: Who wrote it.
        parent: The message before it.
        depth: Messages on the path up to and including this one.
        status: Whether more can come.
        reason: Of a finished answer, why it ended.
        usage: Of a finished answer.
        timings: Of a finished answer.
        sampling: Of an answer: its parameters, the seed included.
        stop_strings: Of an answer, likewise.
        prompt_ids: Of an answer: ids between the answer before and this one.
        ids: Of an answer: its tokens, up to the one that ended it.
        is_answer: It was computed here, so it has ids.
        log_system: Of an answer that begins a log: `system_digest` of the prompt that is in it; "" for any other.
        context_from: Of such an answer: the first message that is in its log, where older ones were left out.
        num_tokens_before: Length of the log up to this message.
        num_bytes: Memory that its conversation is charged for it.
    """

    id: str
    role: Role
    parent: Node | None
    depth: int
    status: ItemStatus = "completed"
    reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    sampling: SamplingParams | None = None
    stop_strings: tuple[str, ...] = ()
    prompt_ids: array[int] = field(default_factory=lambda: array(ID_TYPE))
    ids: array[int] = field(default_factory=lambda: array(ID_TYPE))
    is_answer: bool = False
    log_system: str = ""
    context_from: str | None = None
    num_tokens_before: int = 0
    num_bytes: int = 0
    _parts: list[str] = field(default_factory=list)
    _log_start: Node | None = None

    @property
    def log_start(self) -> Node | None:
        """The answer that begins the log which this message's is; None where no answer is before it."""
        return self if self.log_system else self._log_start

    @property
    def content(self) -> str:
        """The text; of an answer in progress, what has been sent of it."""
        parts = self._parts
        if len(parts) > 1:
            parts[:] = ["".join(parts)]
        return parts[0] if parts else ""

    @property
    def num_tokens(self) -> int:
        """Length of the log up to the end of this message."""
        return self.num_tokens_before + len(self.prompt_ids) + len(self.ids)

    def append_text(self, text: str) -> None:
        """Add to the text of an answer in progress."""
        self._parts.append(text)

    def to_item(self, siblings: Siblings | None = None) -> Item:
        """Return the message as clients see it."""
        return Item(
            id=self.id,
            role=self.role,
            content=self.content,
            status=self.status,
            parent=None if self.parent is None else self.parent.id,
            reason=self.reason,
            usage=self.usage,
            timings=self.timings,
            siblings=siblings,
            context_from=self.context_from,
        )

    def to_message(self) -> Message:
        """Return the message as a template sees it."""
        return Message(role=self.role, content=self.content)


class Conversation:
    """A tree of messages and a head.

    Args:
        system: The system prompt, before all messages.
        head: Start with the path up to this node, which another conversation may hold too.
    """

    def __init__(self, system: str | None = None, head: Node | None = None) -> None:
        self.system = system
        self.head = head
        path = path_to(head)
        self._nodes: dict[str, Node] = {node.id: node for node in path}
        # What follows each message, in order, and which of them was last on the way to the head; None is the start.
        self._children: dict[Node | None, list[Node]] = {node.parent: [node] for node in path}
        self._last_seen: dict[Node | None, Node] = {node.parent: node for node in path}
        self.num_bytes = sum(node.num_bytes for node in path)
        """Memory of the messages, about. What is shared counts in full: it stays when the other conversation goes."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, item_id: str) -> Node | None:
        """Return the message with this id."""
        return self._nodes.get(item_id)

    def path(self) -> list[Node]:
        """Return the messages from the first to the head."""
        return path_to(self.head)

    def select(self, node: Node) -> None:
        """Make a message the head."""
        assert self._nodes.get(node.id) is node, f"{node.id} is no message of this conversation"
        fork = common_node(self.head, node)
        self.head = node
        while node is not fork:
            self._last_seen[node.parent] = node
            if node.parent is None:
                break
            node = node.parent

    def item_of(self, node: Node) -> Item:
        """Return a message as clients see it, with what there is beside it."""
        return node.to_item(self._siblings_of(node))

    def siblings_after(self, parent: Node | None) -> Siblings | None:
        """Return what there will be beside the next message after `parent`."""
        siblings = self._children.get(parent, ())
        if not siblings:
            return None
        count = len(siblings) + 1
        return Siblings(index=count, count=count, previous=self._leaf_below(siblings[-1]).id, next=None)

    def _siblings_of(self, node: Node) -> Siblings | None:
        siblings = self._children.get(node.parent, ())
        if len(siblings) < 2:
            return None
        index = siblings.index(node)
        return Siblings(
            index=index + 1,
            count=len(siblings),
            previous=self._leaf_below(siblings[index - 1]).id if index else None,
            next=self._leaf_below(siblings[index + 1]).id if index + 1 < len(siblings) else None,
        )

    def _leaf_below(self, node: Node) -> Node:
        """Return the end of the branch through a message, as it was last seen."""
        while (child := self._last_seen.get(node)) is not None:
            node = child
        return node

    @property
    def num_tokens(self) -> int:
        """Length of the log of the path to the head."""
        return 0 if self.head is None else self.head.num_tokens

    def log(self) -> array[int]:
        """Return all ids of the path to the head."""
        return log_of(self.head)

    def add_message(self, node_id: str, role: Role, content: str, parent: Node | None) -> Node:
        """Add a message after `parent` and make it the head."""
        node = self.add_stored(node_id, role, content, parent)
        self.select(node)
        return node

    def add_stored(self, node_id: str, role: Role, content: str, parent: Node | None) -> Node:
        """Add a message after `parent`; `show` must follow when all are there."""
        node = Node(
            node_id,
            role,
            parent,
            depth=1 if parent is None else parent.depth + 1,
            num_tokens_before=0 if parent is None else parent.num_tokens,
            _log_start=None if parent is None else parent.log_start,
        )
        if content:
            node.append_text(content)
        self._charge(node, MESSAGE_OVERHEAD_BYTES + getsizeof(content))
        self._nodes[node_id] = node
        self._children.setdefault(parent, []).append(node)
        return node

    def show(self, head: Node | None) -> None:
        """Make a message the head after the others were selected in the order in which they were added.

        At the cost of all of them once: each selection by itself costs the way between two branches, however long.
        """
        last: dict[Node | None, int] = {}
        nodes = list(self._nodes.values())
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            latest = last.setdefault(node, number)
            if latest > last.get(node.parent, -1):
                last[node.parent] = latest
                self._last_seen[node.parent] = node
        self.head = None
        if head is not None:
            self.select(head)

    def begin_answer(
        self,
        node_id: str,
        parent: Node | None,
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        stop_strings: tuple[str, ...],
        *,
        log_system: str = "",
        context_from: str | None = None,
    ) -> Node:
        """Add an empty answer after `parent` and make it the head; with `log_system` it begins a log."""
        node = self.add_message(node_id, "assistant", "", parent)
        self.make_answer(node, prompt_ids, sampling, stop_strings, log_system=log_system, context_from=context_from)
        return node

    def make_answer(
        self,
        node: Node,
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        stop_strings: tuple[str, ...],
        *,
        log_system: str = "",
        context_from: str | None = None,
    ) -> None:
        """Let a message that was just added be an answer, which is in progress."""
        node.status = "in_progress"
        node.is_answer = True
        if log_system:
            node.log_system, node.context_from, node.num_tokens_before = log_system, context_from, 0
        node.prompt_ids = array(ID_TYPE, prompt_ids)
        node.sampling = sampling
        node.stop_strings = stop_strings
        self._charge(node, getsizeof(node.prompt_ids) + BIAS_BYTES * len(sampling.logit_bias))

    def give_ids(self, answer: Node, ids: array[int]) -> None:
        """Let an answer that ended before it was read again have its ids."""
        answer.ids = ids
        self._charge(answer, answer.ids.itemsize * len(ids))

    def end_answer(self, answer: Node, *, status: ItemStatus, reason: str, usage: Usage, timings: Timings) -> None:
        """Commit an answer; it never changes again."""
        assert answer.status == "in_progress", f"answer {answer.id} ends twice"
        answer.status = status
        answer.reason = reason
        answer.usage = usage
        answer.timings = timings
        self._charge(answer, getsizeof(answer.content) + answer.ids.itemsize * usage.output_tokens)

    def remove_from(self, node: Node, previous_head: Node | None) -> None:
        """Take a failed turn out again, from `node` to the head, and go back to the head before it."""
        removed = self.head
        while removed is not None:
            self._remove(removed)
            if removed is node:
                break
            removed = removed.parent
        assert removed is node, f"{node.id} is not on the path to the head"
        self.head = node.parent
        if previous_head is not None:
            self.select(previous_head)

    def _remove(self, node: Node) -> None:
        """Take a message that nothing follows out of the tree."""
        assert node not in self._children, f"{node.id} is followed by other messages"
        del self._nodes[node.id]
        self.num_bytes -= node.num_bytes
        siblings = self._children[node.parent]
        siblings.remove(node)
        if siblings:
            self._last_seen[node.parent] = siblings[-1]
        else:
            del self._children[node.parent], self._last_seen[node.parent]

    def _charge(self, node: Node, num_bytes: int) -> None:
        node.num_bytes += num_bytes
        self.num_bytes += num_bytes


def path_to(node: Node | None) -> list[Node]:
    """Return the messages from the first to this one."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def last_answer(node: Node | None) -> Node | None:
    """Return the nearest message at or before this one whose ids are known."""
    while node is not None and not node.is_answer:
        node = node.parent
    return node


def pending_after(answer: Node | None, node: Node | None) -> list[Node]:
    """Return the messages after `answer` up to `node`, which have no ids yet."""
    nodes = []
    while node is not answer:
        assert node is not None, "the answer is not on the path"
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def answers_of_log(node: Node | None) -> list[Node]:
    """Return the answers whose ids make the log up to a message, the one that begins it first."""
    answers = []
    while (node := last_answer(node)) is not None:
        answers.append(node)
        if node.log_system:
            break
        node = node.parent
    answers.reverse()
    return answers


def log_of(node: Node | None) -> array[int]:
    """Return all ids of the path to a message."""
    ids: array[int] = array(ID_TYPE)
    for answer in answers_of_log(node):
        ids.extend(answer.prompt_ids)
        ids.extend(answer.ids)
    return ids


def log_between(node: Node | None, start: int) -> list[int]:
    """Return the ids of the path to a message from position `start` on, at the cost of these alone."""
    parts: list[Sequence[int]] = []
    while node is not None and node.num_tokens > start:
        for ids, begin in (
            (node.ids, node.num_tokens_before + len(node.prompt_ids)),
            (node.prompt_ids, node.num_tokens_before),
        ):
            if begin + len(ids) > start:
                parts.append(ids[max(0, start - begin) :])
        node = None if node.log_system else node.parent
    return [token_id for part in reversed(parts) for token_id in part]


def common_node(a: Node | None, b: Node | None) -> Node | None:
    """Return the last message that two paths of one tree have in common; None where they part at the start."""
    while a is not b:
        if b is None or (a is not None and a.depth >= b.depth):
            assert a is not None, "two paths of two trees"
            a = a.parent
        else:
            b = b.parent
    return a


def common_length(a: Node | None, b: Node | None) -> int:
    """Return how many ids the logs of two paths of one tree share by having the same messages."""
    common = common_node(a, b)
    if a is None or b is None or common is None:
        return 0
    if a.log_start is b.log_start:
        return common.num_tokens
    return num_equal_ids(log_of(a), log_of(b))


def common_prefix(a: Node | None, answer: Node) -> int:
    """Return how many ids the log of a path shares with that of an answer of the same tree.

    Where they part at two answers, these have the same prompt but for what was edited, so their ids are compared; where
    one of them has a log of its own, so are the logs. At least one id of the answer's log is left, since it has to be
    computed for its logits.
    """
    if a is None or a.log_start is not answer.log_start:
        return 0 if a is None else min(num_equal_ids(log_of(a), log_of(answer)), answer.num_tokens - 1)
    common = common_node(a, answer.parent)
    length = 0 if common is None else common.num_tokens
    old, new = _first_answer_after(common, a), _first_answer_after(common, answer)
    if old is None or new is None:
        return length
    num_equal = num_equal_ids(old.prompt_ids + old.ids, new.prompt_ids + new.ids)
    return min(length + num_equal, answer.num_tokens - 1)


def num_equal_ids(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids two sequences begin with alike."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _first_answer_after(start: Node | None, end: Node | None) -> Node | None:
    """Return the first answer after `start` on the path to `end`."""
    found = None
    while end is not start:
        assert end is not None, "the end is not on a path through the start"
        if end.is_answer:
            found = end
        end = end.parent
    return found


def system_digest(system: str | None) -> str:
    """Return what a system prompt is known by in the answers whose log begins with it; never ""."""
    return "none" if system is None else blake2b(system.encode(errors="surrogatepass"), digest_size=8).hexdigest()

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from sys import getsizeof

from chatd.engine.sampling import SamplingParams
from chatd.journal.records import ID_TYPE
from chatd.protocol import Item, ItemStatus, Role, Siblings, Timings, Usage
from chatd.sessions.events import Subscriber
from chatd.sessions.logs import Node, common_node, log_of, path_to

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


class Conversation:
    """A tree of messages and a head.

    Args:
        system: The system prompt, before all messages.
        head: Start with the path up to this node, which another conversation may hold too.

    Attributes:
        on_sized: Called when `num_bytes` has changed.
    """

    def __init__(self, system: str | None = None, head: Node | None = None) -> None:
        self.system = system
        self.head = head
        path = path_to(head)
        self._nodes: dict[str, Node] = {node.id: node for node in path}
        # What follows each message, in order, and which of them was last on the way to the head; None is the start.
        self._children: dict[Node | None, list[Node]] = {node.parent: [node] for node in path}
        self._last_seen: dict[Node | None, Node] = {node.parent: node for node in path}
        self.on_sized: Callable[[], None] | None = None
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
        self._size(-node.num_bytes)
        siblings = self._children[node.parent]
        siblings.remove(node)
        if siblings:
            self._last_seen[node.parent] = siblings[-1]
        else:
            del self._children[node.parent], self._last_seen[node.parent]

    def _charge(self, node: Node, num_bytes: int) -> None:
        node.num_bytes += num_bytes
        self._size(num_bytes)

    def _size(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.on_sized is not None:
            self.on_sized()

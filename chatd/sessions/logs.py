"""Messages, and the log that a path of them is. Pure functions over nodes; what belongs to a tree is `conversation`'s.

```
root ── user ── answer ── user ── answer          path_to
                │  prompt_ids + ids │             log_of: those of the answers, laid end to end
```
An answer that begins a log (`Node.log_system`) has all that is before it in its own `prompt_ids`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from chatd.engine.sampling import SamplingParams
from chatd.journal.records import ID_TYPE
from chatd.protocol import Item, ItemStatus, Message, Role, Siblings, Timings, Usage


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

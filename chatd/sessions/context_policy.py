"""What an answer's context is: the log so far and what was said since, or a log that is put together anew.

Put together anew it is where the system prompt has changed, and, under the policy `drop_oldest`, where the prompt would
leave no room for an answer. Then whole turns go, the oldest first, and the system prompt stays. Answers keep their ids:
only what stands before the first one that stays is rendered again. What was dropped stays in the tree; the answer that
begins the new log says from which message on it is in the context.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date as Date

from chatd.errors import ContextLengthExceeded
from chatd.protocol import ContextPolicy, Message
from chatd.sessions.logs import Node, last_answer, path_to, pending_after, system_digest
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.ports import ChatEncoder

ROOM_PART = 4
"""An answer has room where one in so many tokens of the context is left, or as many as were asked for."""

KEPT_PART = 2
"""Where turns are dropped, at most one in so many tokens of the context stays taken: what stays has other positions and
is computed again, so that has to last for some turns."""

NEW_MESSAGE = ""
"""In place of the first new message's id, which it gets when it is added."""

_CONTINUATIONS = ("", "a", " a", ".", "1")
"""What may be typed after a draft: each makes other tokens of its end."""

_NUM_COMPARED = 4
_MAX_CUT = 16


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was in the context and is not any more.

    Attributes:
        kept_from: The first message that is.
        num_items: Messages.
        num_tokens: Tokens that the context is shorter by, None where they were never counted.
    """

    kept_from: str
    num_items: int
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What stands before an answer.

    Attributes:
        ids: Between the answer before and this one; all ids before this one where it begins a log.
        log_system: As `Node.log_system`.
        context_from: As `Node.context_from`.
        dropped: Where this prompt left out what the one before had.
    """

    ids: list[int]
    log_system: str = ""
    context_from: str | None = None
    dropped: Dropped | None = None

    def named(self, new_id: str) -> Prompt:
        """Return the same where `new_id` is what the first new message is called."""
        if self.context_from != NEW_MESSAGE:
            return self
        dropped = None if self.dropped is None else replace(self.dropped, kept_from=new_id)
        return replace(self, context_from=new_id, dropped=dropped)

    def num_tokens(self, parent: Node | None) -> int:
        """Return the length of the log up to the answer, which follows `parent`."""
        return len(self.ids) + (0 if self.log_system or parent is None else parent.num_tokens)

    @classmethod
    def of(cls, answer: Node) -> Prompt:
        """Return the prompt that an answer had."""
        return cls(list(answer.prompt_ids), answer.log_system, answer.context_from)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a context is wanted for.

    Attributes:
        system: The system prompt.
        date: Of the session's creation.
        parent: The message that the new ones follow.
        messages: New ones.
        num_answered: Tokens that the answer has already.
        max_tokens: That were asked for.
        nodes: The messages up to the parent that are in the context now; only where it is put together anew.
        starts: Where turns begin among these and the new ones.
    """

    system: str | None
    date: Date
    parent: Node | None
    messages: Sequence[Message]
    num_answered: int
    max_tokens: int | None
    nodes: Sequence[Node] = ()
    starts: Sequence[int] = ()


class ContextMaker:
    """Makes prompts.

    Args:
        encoder: Makes ids; called in threads.
        model: Gives the limits of the served model.
    """

    def __init__(self, encoder: ChatEncoder, model: Callable[[], ModelProfile]) -> None:
        self._encoder = encoder
        self._model = model

    async def prompt(
        self,
        policy: ContextPolicy,
        system: str | None,
        parent: Node | None,
        messages: Sequence[Message],
        *,
        date: Date,
        max_tokens: int | None = None,
        num_answered: int = 0,
    ) -> Prompt:
        """Return the prompt of an answer to `messages`, which follow `parent`; tokenizers run in a thread.

        Args:
            policy: What happens where there is no room.
            system: The system prompt as it is now.
            parent: A message of the tree.
            messages: May be none.
            date: Of the session's creation.
            max_tokens: Asked for, as far as the answer's room is concerned.
            num_answered: Tokens that the answer begins with.

        Raises:
            InvalidRequest: The template has no place for the messages.
            ContextLengthExceeded: The text can never fit.
        """
        asked = _Asked(system, date, parent, messages, num_answered, max_tokens)
        return await asyncio.to_thread(self._prompt, policy, asked)

    async def prompt_of(
        self, policy: ContextPolicy, system: str | None, answer: Node, *, date: Date, max_tokens: int | None
    ) -> Prompt:
        """Return the prompt of an answer that goes on from this one: the same, where it is as it was and has room.

        Arguments and errors as of `prompt`.
        """
        if not self._is_stale(answer, system):
            asked = _Asked(system, date, answer.parent, (), len(answer.ids), max_tokens)
            if policy == "refuse" or answer.num_tokens + self._room(asked) <= self._model().longest_prompt + 1:
                return Prompt.of(answer)
        return await self.prompt(
            policy, system, answer.parent, (), date=date, max_tokens=max_tokens, num_answered=len(answer.ids)
        )

    async def draft(
        self, policy: ContextPolicy, system: str | None, parent: Node | None, content: str, *, date: Date
    ) -> tuple[Node | None, list[int]]:
        """Return the answer whose log a message that is being typed goes on from, and the ids that it will add to that.

        Only those that stay whatever is typed next, and not the last of them: what is typed next may make another one
        of it. Raises as `prompt`.
        """
        return await asyncio.to_thread(self._draft, policy, system, parent, content, date)

    def _draft(
        self, policy: ContextPolicy, system: str | None, parent: Node | None, content: str, date: Date
    ) -> tuple[Node | None, list[int]]:
        prompts = []
        for rest in _CONTINUATIONS:
            message = Message(role="user", content=content + rest)
            prompts.append(self._prompt(policy, _Asked(system, date, parent, (message,), 0, None)))
        first, *others = (prompt.ids for prompt in prompts)
        length = min(map(len, others), default=len(first))
        same = next((i for i in range(min(length, len(first))) if any(o[i] != first[i] for o in others)), length)
        node = None if prompts[0].log_system else last_answer(parent)
        return node, first[: max(0, same - 1)]

    def _prompt(self, policy: ContextPolicy, asked: _Asked) -> Prompt:
        model, parent = self._model(), asked.parent
        is_stale = self._is_stale(parent, asked.system) or self._has_thoughts(last_answer(parent))
        if is_stale:
            asked = _with_turns(asked)
        prompt: Prompt | None = None
        num_tokens: int | None = None
        try:
            prompt = self._rebuilt(asked, 0) if is_stale else self._next(asked)
        except ContextLengthExceeded:
            if policy == "refuse":
                raise
        else:
            num_tokens = prompt.num_tokens(parent)
            if policy == "refuse" or num_tokens + asked.num_answered + self._room(asked) <= model.longest_prompt + 1:
                return prompt
        asked = _with_turns(asked)
        num_turns = len(asked.starts)
        most = (model.longest_prompt + 1) // KEPT_PART
        place = 1 + bisect_left(range(1, num_turns), True, key=lambda place: self._size(asked, place) <= most)
        # Where not even the last turn alone is small enough it is taken as it is, or can never fit.
        place = min(place, num_turns - 1)
        if place < 1:
            return prompt if prompt is not None else self._next(asked)
        rebuilt = self._rebuilt(asked, place)
        assert rebuilt.context_from is not None, "turns were dropped and nobody knows which"
        num_less = None if num_tokens is None else num_tokens - len(rebuilt.ids)
        return replace(rebuilt, dropped=Dropped(rebuilt.context_from, asked.starts[place], num_less))

    @staticmethod
    def _is_stale(node: Node | None, system: str | None) -> bool:
        """Return whether another system prompt is in the log up to a message."""
        start = None if node is None else node.log_start
        return start is not None and start.log_system not in ("", system_digest(system))

    def _has_thoughts(self, answer: Node | None) -> bool:
        """Return whether an answer still has the thoughts that history has not: it was cut short and could go on."""
        return answer is not None and answer.status == "incomplete" and self._encoder.settle(answer.ids) is not None

    def _room(self, asked: _Asked) -> int:
        """Return how many tokens an answer has to have room for."""
        part = (self._model().longest_prompt + 1) // ROOM_PART
        return part if asked.max_tokens is None else max(1, min(part, asked.max_tokens))

    def _size(self, asked: _Asked, place: int) -> float:
        try:
            return len(self._rebuilt(asked, place).ids) + asked.num_answered
        except ContextLengthExceeded:
            return float("inf")

    def _next(self, asked: _Asked) -> Prompt:
        """Return the prompt that goes on from the log."""
        answer = last_answer(asked.parent)
        said = [*(node.to_message() for node in pending_after(answer, asked.parent)), *asked.messages]
        if answer is None:
            return Prompt(self._begin(asked, said), system_digest(asked.system))
        return Prompt(self._extend(asked, said, answer))

    def _rebuilt(self, asked: _Asked, place: int) -> Prompt:
        """Return a prompt that begins a log with the turn at `place` of those that are in the context now."""
        kept = asked.nodes[asked.starts[place] :]
        is_whole = place == 0 and (not kept or kept[0].parent is None)
        context_from = None if is_whole else kept[0].id if kept else NEW_MESSAGE
        said: list[Message] = []
        answer: Node | None = None
        ids: list[int] = []
        for node in kept:
            if not node.is_answer:
                said.append(node.to_message())
                continue
            if answer is not None and not node.log_system:
                ids += node.prompt_ids
            else:
                encoded = self._begin(asked, said) if answer is None else self._extend(asked, said, answer)
                cut = _cut_like(encoded, node)
                if cut is None:
                    return self._as_text(asked, kept, context_from)
                ids += cut
            settled = self._encoder.settle(node.ids) if node.status == "incomplete" else None
            if settled is None:
                ids += node.ids
            else:
                del ids[len(ids) - settled.num_prompt_ids :]
                ids += settled.ids
            answer = node
            said = []
        said += asked.messages
        ids += self._begin(asked, said) if answer is None else self._extend(asked, said, answer)
        return Prompt(ids, system_digest(asked.system), context_from)

    def _as_text(self, asked: _Asked, kept: Sequence[Node], context_from: str | None) -> Prompt:
        """Return a prompt whose answers are encoded from their text, where a template has rewritten them."""
        said = [*(node.to_message() for node in kept), *asked.messages]
        return Prompt(self._begin(asked, said), system_digest(asked.system), context_from)

    def _begin(self, asked: _Asked, said: Sequence[Message]) -> list[int]:
        self._model().check_text([asked.system or "", *(message.content for message in said)])
        return self._encoder.begin(asked.system, said, date=asked.date)

    def _extend(self, asked: _Asked, said: Sequence[Message], answer: Node) -> list[int]:
        self._model().check_text([message.content for message in said])
        ended = len(answer.ids) > 0 and answer.ids[-1] == self._encoder.turn_end_id
        return self._encoder.extend(said, answer_ended=ended, date=asked.date)


def _with_turns(asked: _Asked) -> _Asked:
    """Return the same with the turns that are in the context now."""
    if asked.starts:
        return asked
    nodes = path_to(asked.parent)
    start = None if asked.parent is None else asked.parent.log_start
    if start is not None and start.context_from is not None:
        nodes = nodes[next((i for i, node in enumerate(nodes) if node.id == start.context_from), 0) :]
    roles = [*(node.role for node in nodes), *(message.role for message in asked.messages)]
    return replace(asked, nodes=nodes, starts=[0, *_turn_starts(roles)])


def _turn_starts(roles: Sequence[str]) -> Iterator[int]:
    """Yield where turns begin but for the first one."""
    for place in range(1, len(roles)):
        if roles[place] == "user" and roles[place - 1] == "assistant":
            yield place


def _cut_like(begun: list[int], answer: Node) -> list[int] | None:
    """Return a prompt as an answer in history has it: a template that drops thoughts has opened one in the prompt.

    None where it is not plain how.
    """
    tail = list(answer.prompt_ids[-_NUM_COMPARED:])
    for num_cut in range(min(_MAX_CUT, len(begun) - len(tail)) + 1):
        end = len(begun) - num_cut
        if begun[end - len(tail) : end] == tail:
            return begun[:end]
    return None

"""The stateless door: a request brings its whole history as text and gets one answer.

It finds the session that served that history before and goes on from its exact ids; where that session has gone on
meanwhile, or is busy, a new one shares its blocks. Sessions made here are in no list and go when there are too many.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatd.engine.messages import RequestClass
from chatd.errors import ChatdError, InvalidRequest
from chatd.protocol import Logprob, Message, Params, Timings, Usage
from chatd.sessions.conversation import Conversation, Owner, common_length
from chatd.sessions.known_messages import KnownChain, KnownMessages
from chatd.sessions.limits import SessionLimits
from chatd.sessions.model_profile import NO_PARAMS
from chatd.sessions.session import Session, title_of
from chatd.sessions.stats import SessionStats
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turn import TextDelta, Turn, TurnEnd
from chatd.sessions.turns import TurnRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What the stateless door is asked.

    Attributes:
        messages: The whole history; system messages first.
        params: Over the model's defaults.
        conversation_id: The client's name for the conversation, for people to read; it grants nothing.
        request_class: Its place in the schedule.
    """

    messages: Sequence[Message]
    params: Params = NO_PARAMS
    conversation_id: str | None = None
    request_class: RequestClass = RequestClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """More of an answer: text, the tokens behind it, and their log probabilities where asked for."""

    text: str
    num_tokens: int
    logprobs: list[Logprob] | None = None


class Completion:
    """One answer as it comes: iterate over its deltas, then read how it ended.

    Deltas that nobody has taken yet are merged. Whoever stops reading early calls `cancel`.

    Attributes:
        id: Names the response.
        finish_reason: A reason of the protocol ("stop", "stop_string", "max_output_tokens", …), "failed" where `error`
            is set, or None while the answer goes on.
        usage: At the end, unless it failed.
        timings: Likewise.
        error: Why it failed.
    """

    def __init__(self, cancel: Callable[[Turn], None]) -> None:
        self.id = ""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.error: ChatdError | None = None
        self._cancel = cancel
        self._turn: Turn | None = None
        self._texts: list[str] = []
        self._num_tokens = 0
        self._logprobs: list[Logprob] | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> CompletionDelta:
        while not self._texts:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        delta = CompletionDelta("".join(self._texts), self._num_tokens, self._logprobs)
        self._texts.clear()
        self._num_tokens, self._logprobs = 0, None
        return delta

    async def text(self) -> str:
        """Return what is left of the answer, once it has ended."""
        return "".join([delta.text async for delta in self])

    def cancel(self) -> None:
        """End the generation; what there is of the answer is kept. Does nothing after the end."""
        if self._turn is not None and not self._turn.ended.is_set():
            self._cancel(self._turn)

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    def begin(self, turn: Turn) -> None:
        """Learn which turn this is."""
        self._turn = turn
        self.id = turn.response

    def on_delta(self, turn: Turn, delta: TextDelta) -> None:
        """Take more of the answer."""
        self._texts.append(delta.text)
        self._num_tokens += delta.num_tokens
        if delta.logprobs is not None:
            self._logprobs = delta.logprobs if self._logprobs is None else self._logprobs + delta.logprobs
        self._changed.set()

    def on_end(self, turn: Turn, end: TurnEnd) -> None:
        """Take the end."""
        self.finish_reason, self.usage, self.timings, self.error = end.reason, end.usage, end.timings, end.error
        self._changed.set()


class StatelessDoor:
    """Serves stateless requests from known sessions.

    Args:
        runner: Runs the turns.
        limits: Bounds.
        stats: Counted into.
        new_session: Makes a hidden session around a conversation.
        drop_session: Releases one and forgets it.
    """

    def __init__(
        self,
        runner: TurnRunner,
        limits: SessionLimits,
        stats: SessionStats,
        *,
        new_session: Callable[[Owner, Conversation], Session],
        drop_session: Callable[[Session], None],
    ) -> None:
        self.known = KnownMessages(limits.max_known_messages)
        self._runner = runner
        self._limits = limits
        self._stats = stats
        self._new_session = new_session
        self._drop_session = drop_session
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    async def complete(self, owner: Owner, request: CompletionRequest) -> Completion:
        """Start an answer; see `SessionManager.complete`."""
        messages = check_messages(request.messages, self._limits)
        self._runner.check_ready()
        chain = self.known.find(owner, messages)
        if chain is not None:
            self._stats.known_hits += 1
        elif any(message.role == "assistant" for message in messages):
            self._stats.known_misses += 1
        completion = Completion(self._runner.cancel)
        session = self._place(owner, chain, messages)
        is_new = session.id not in self._sessions
        num_known = chain.num_messages if chain is not None else int(session.conversation.system is not None)
        if is_new:
            self._sessions[session.id] = session
            session.title = title_of(request.conversation_id or messages[-1].content)
        for used in (session, chain.session if chain is not None else session):
            self._sessions.move_to_end(used.id)
        try:
            await self._runner.begin(
                session,
                messages[num_known:],
                parent=None if chain is None else chain.node,
                params=request.params,
                sink=completion,
                request_class=request.request_class,
                on_accepted=lambda turn, _added: completion.begin(turn),
            )
        except BaseException:
            if is_new:
                self._drop(session)
            raise
        self._expire()
        return completion

    def on_ended(self, turn: Turn, *, committed: bool) -> None:
        """Make a committed answer known; forget a session that no request can find any more."""
        session = turn.session
        if session.id not in self._sessions:
            return
        if committed and turn.answer is not None:
            superseded = self.known.remember(session, turn.answer)
            if superseded is not None and superseded.turn is None and superseded.id in self._sessions:
                self._drop(superseded)
        if not self.known.holds(session):
            self._drop(session)

    def _place(self, owner: Owner, chain: KnownChain | None, messages: Sequence[Message]) -> Session:
        """Return the session that takes the turn: the chain's own, a new one that shares with it, or a new one."""
        if chain is None:
            system = messages[0].content if messages[0].role == "system" else None
            return self._new_session(owner, Conversation(system))
        source = chain.session
        if source.turn is None and source.conversation.head is chain.node:
            return source
        session = self._new_session(owner, Conversation(source.conversation.system, chain.node))
        session.date = source.date
        lease = source.lease
        held = min(common_length(lease.node, chain.node), lease.num_tokens)
        if lease.epoch == self._runner.epoch and held > 0:
            session.lease.epoch = lease.epoch
            session.lease.node, session.lease.num_tokens = chain.node, held
            session.lease.fork_of = (lease.id, held)
        return session

    def _expire(self) -> None:
        """Let the longest unused sessions go while there are too many."""
        num_over = len(self._sessions) - self._limits.max_stateless_sessions
        if num_over <= 0:
            return
        idle = [session for session in self._sessions.values() if session.turn is None]
        for session in idle[:num_over]:
            self._drop(session)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.id]
        self.known.forget(session)
        self._drop_session(session)


def check_messages(messages: Sequence[Message], limits: SessionLimits) -> list[Message]:
    """Return a request's messages if they can be a history.

    Raises:
        InvalidRequest: There are none, or they are too large (`content_too_large`).
    """
    if not messages:
        raise InvalidRequest("there are no messages", param="messages")
    for message in messages:
        check_size((message.content,), limits.max_content_bytes)
    check_size((message.content for message in messages), limits.max_history_bytes)
    return list(messages)

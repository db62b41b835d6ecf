"""The stateless door: a request brings its whole history as text and gets one answer.

It finds the session that served that history before, by the client's name for the conversation or by the texts alone,
and goes on from its exact ids; where that session has gone on meanwhile, or is busy, a new one shares its blocks.
Sessions made here are in no list and go when there are too many.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from chatd.errors import InvalidRequest
from chatd.protocol import Message, Params
from chatd.sessions.choices import Choices, params_of_choice, params_of_search
from chatd.sessions.completion import Completion, CompletionRequest
from chatd.sessions.conversation import Conversation, Owner
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.known_messages import KnownChain, KnownMessages
from chatd.sessions.limits import SessionLimits
from chatd.sessions.logs import Node
from chatd.sessions.named_conversations import NamedConversations
from chatd.sessions.session import Session
from chatd.sessions.stats import SessionStats
from chatd.sessions.store import SessionStore
from chatd.sessions.tokenizer import check_size
from chatd.sessions.turn import Turn
from chatd.sessions.turns import TurnRunner
from chatd.titles import title_of


class StatelessDoor:
    """Serves stateless requests from known sessions.

    Args:
        runner: Runs the turns.
        requests: Lets a session share what another one holds.
        store: Makes and forgets hidden sessions.
        limits: Bounds.
        stats: Counted into.
    """

    def __init__(
        self,
        runner: TurnRunner,
        requests: EngineRequests,
        store: SessionStore,
        limits: SessionLimits,
        stats: SessionStats,
    ) -> None:
        self.known = KnownMessages(limits.max_known_messages)
        self.named = NamedConversations()
        self._runner = runner
        self._requests = requests
        self._store = store
        self._limits = limits
        self._stats = stats
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._sessions)

    async def choose(self, owner: Owner, request: CompletionRequest) -> Choices:
        """Start one or more answers; see `SessionManager.choose`."""
        messages = check_messages(request.messages, self._limits)
        self._runner.check_ready()
        chain = self._find(owner, request.conversation_id, messages)
        if chain is not None:
            self._stats.known_hits += 1
        elif any(message.role == "assistant" for message in messages):
            self._stats.known_misses += 1
        others = [Completion(self._runner.cancel) for _ in range(request.num_choices - 1)]
        completion = Completion(self._runner.cancel, others if request.beam is not None else ())
        session = self._place(owner, chain, messages)
        is_new = session.id not in self._sessions
        num_known = chain.num_messages if chain is not None else int(session.conversation.system is not None)
        if is_new:
            self._sessions[session.id] = session
            session.title = title_of(request.conversation_id or messages[-1].content)
        for used in (session, chain.session if chain is not None else session):
            self._sessions.move_to_end(used.id)
        try:
            turn = await self._runner.begin(
                session,
                messages[num_known:],
                parent=None if chain is None else chain.node,
                params=request.params if request.beam is None else params_of_search(request.params),
                sink=completion,
                request_class=request.request_class,
                on_accepted=lambda turn, _added: completion.begin(turn),
                beam=request.beam,
                num_samples=request.num_choices if request.beam is None else 1,
                key_id=request.key_id,
            )
        except BaseException:
            if is_new and session.id in self._sessions:
                self._drop(session)
            raise
        if request.beam is None:
            self._sample(turn, request.params, others)
        if request.conversation_id and session.id in self._sessions:
            nameless = self.named.give(session, request.conversation_id)
            if nameless is not None and nameless.turn is None and not self.known.holds(nameless):
                self._drop(nameless)
        self._expire(owner)
        return Choices([completion, *others], 0 if request.beam is None else request.beam.width)

    async def forget_tenant(self, tenant: str) -> None:
        """End the answers to a tenant's requests, and forget its conversations."""
        for session in list(self._sessions.values()):
            if session.owner.tenant == tenant:
                while (turn := session.turn) is not None:
                    self._runner.cancel(turn)
                    await turn.ended.wait()
                if session.id in self._sessions:
                    self._drop(session)

    def _sample(self, first: Turn, params: Params, others: Sequence[Completion]) -> None:
        """Start more answers to a prompt, each in a session of its own that shares it."""
        begun = [first]
        try:
            for index, completion in enumerate(others, start=1):
                session = self._beside(first)
                try:
                    begun.append(
                        self._runner.begin_sample(
                            first,
                            session,
                            params_of_choice(params, index),
                            completion,
                            lambda turn, _added, completion=completion: completion.begin(turn),  # type: ignore[misc]
                        )
                    )
                except BaseException:
                    self._drop(session)
                    raise
        except BaseException:
            self._runner.forgo_samples(first.session.owner, len(others) - len(begun))
            for turn in begun:
                self._runner.cancel(turn)
            raise

    def _beside(self, turn: Turn) -> Session:
        """Return a new session that ends with the messages that a turn answers."""
        assert turn.answer is not None, "a turn without an answer"
        source = turn.session
        session = self._store.open_hidden(source.owner, Conversation(source.conversation.system, turn.answer.parent))
        session.date, session.title = source.date, source.title
        self._sessions[session.id] = session
        return session

    def on_ended(self, turn: Turn, *, committed: bool) -> None:
        """Make a committed answer known; forget a session that no request can find any more."""
        session = turn.session
        if session.id not in self._sessions:
            return
        if committed and turn.answer is not None:
            self._remember(session, turn.answer)
            for other in turn.others:
                beside = self._beside(turn)
                answer = self._runner.searches.keep_other(turn, other, beside)
                if answer is None:
                    self._drop(beside)
                else:
                    self._remember(beside, answer)
        if not self.known.holds(session) and not (self.named.holds(session) and session.conversation.head is not None):
            self._drop(session)

    def _remember(self, session: Session, answer: Node) -> None:
        superseded = self.known.remember(session, answer)
        if superseded is not None and superseded.turn is None and not self.named.holds(superseded):
            self._drop(superseded)

    def _find(self, owner: Owner, name: str | None, messages: Sequence[Message]) -> KnownChain | None:
        """Return what is known of a history: of the conversation of this name, unless another one has more of it."""
        known = self.known.find(owner, messages)
        named = self.named.find(owner, name, messages) if name else None
        if named is not None and (known is None or named.num_messages >= known.num_messages):
            return named
        return known

    def _place(self, owner: Owner, chain: KnownChain | None, messages: Sequence[Message]) -> Session:
        """Return the session that takes the turn: the chain's own, a new one that shares with it, or a new one."""
        if chain is None:
            system = messages[0].content if messages[0].role == "system" else None
            return self._store.open_hidden(owner, Conversation(system))
        source = chain.session
        if source.turn is None and source.conversation.head is chain.node:
            return source
        session = self._store.open_hidden(owner, Conversation(source.conversation.system, chain.node))
        session.date = source.date
        self._requests.share(source, chain.node, session)
        return session

    def _expire(self, owner: Owner) -> None:
        """Let the longest unused sessions go while the owner's have too much text, or there are too many in all.

        Those of whoever has most go first: one user's many conversations cost no other user theirs.
        """
        idle = [session for session in self._sessions.values() if session.turn is None]
        num_bytes = sum(session.num_bytes for session in self._sessions.values() if session.owner == owner)
        for session in idle:
            if num_bytes <= self._limits.max_text_bytes_per_user:
                break
            if session.owner == owner:
                num_bytes -= session.num_bytes
                self._drop(session)
        while len(self._sessions) > self._limits.max_stateless_sessions:
            idle = [session for session in self._sessions.values() if session.turn is None]
            if not idle:
                break
            ((greediest, _),) = Counter(session.owner for session in idle).most_common(1)
            self._drop(next(session for session in idle if session.owner == greediest))

    def _drop(self, session: Session) -> None:
        del self._sessions[session.id]
        self.known.forget(session)
        self.named.forget(session)
        self._store.drop(session)


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

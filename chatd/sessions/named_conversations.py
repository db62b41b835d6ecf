"""Finds the conversation that a client names itself, as `X-Conversation-Id` or `prompt_cache_key` do.

A name grants nothing: it only says where to look first, among the conversations of the same owner, and counts where the
texts agree. It means the session that answered under it last; a session has one name at most, so there are never more
names than sessions. Two chats that begin with the same words stay apart by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatd.protocol import Message
from chatd.sessions.conversation import Owner
from chatd.sessions.known_messages import KnownChain
from chatd.sessions.session import Session

MAX_CONVERSATION_ID_CHARS = 256


class NamedConversations:
    """The sessions of stateless requests by their owners' names for them."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[Owner, str], Session] = {}
        self._names: dict[Session, tuple[Owner, str]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def holds(self, session: Session) -> bool:
        """Return whether a session has a name."""
        return session in self._names

    def find(self, owner: Owner, name: str, messages: Sequence[Message]) -> KnownChain | None:
        """Return the part of the named conversation, up to an answer, that a history begins with."""
        session = self._sessions.get(_key(owner, name))
        if session is None:
            return None
        system = session.conversation.system
        num_before = 0 if system is None else 1
        if num_before and (messages[0].role, messages[0].content) != ("system", system):
            return None
        found: KnownChain | None = None
        said = messages[num_before:-1]
        for number, (node, message) in enumerate(zip(session.conversation.path(), said, strict=False), num_before + 1):
            if (node.role, node.content) != (message.role, message.content) or node.status == "in_progress":
                break
            if node.is_answer:
                found = KnownChain(session, node, number)
        return found

    def give(self, session: Session, name: str) -> Session | None:
        """Let a name mean this session; return the one that it meant before and that has no name now."""
        self.forget(session)
        key = _key(session.owner, name)
        before = self._sessions.get(key)
        if before is not None:
            del self._names[before]
        self._sessions[key] = session
        self._names[session] = key
        return before

    def forget(self, session: Session) -> None:
        """Take a session's name away."""
        key = self._names.pop(session, None)
        if key is not None:
            del self._sessions[key]


def _key(owner: Owner, name: str) -> tuple[Owner, str]:
    return owner, name[:MAX_CONVERSATION_ID_CHARS]

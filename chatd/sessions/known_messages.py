"""Finds the conversation that a stateless request goes on from. Knows messages and sessions; encodes nothing.

A client without sessions sends its whole history as text. Each message of a conversation served before is an entry
under its parent, so the longest known chain from the first message on is found by walking down; the deepest answer on
it lends its session's exact ids. Entries are compared by their whole text, not by a hash of it, and each owner has a
tree of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from chatd.protocol import Message
from chatd.sessions.conversation import Owner
from chatd.sessions.logs import Node
from chatd.sessions.session import Session

_Key = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class KnownChain:
    """A history that is known.

    Attributes:
        session: Holds it.
        node: Its last answer, in that session's conversation.
        num_messages: How many of the request's messages it covers.
    """

    session: Session
    node: Node
    num_messages: int


@dataclass(slots=True, eq=False)
class _Entry:
    key: _Key
    serial: int
    parent: _Entry | None
    num_children: int = 0
    session: Session | None = None
    node: Node | None = None


class KnownMessages:
    """An index of messages by (parent, role, text), bounded, least recently used out first.

    Args:
        max_messages: Entries kept at most, all owners together.
    """

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._roots: dict[Owner, int] = {}
        self._owner_of_root: dict[int, Owner] = {}
        self._num_under_root: dict[int, int] = {}
        self._held: dict[Session, dict[_Entry, None]] = {}
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, owner: Owner, messages: Sequence[Message]) -> KnownChain | None:
        """Return the longest known chain that ends with an answer and leaves something to say."""
        serial = self._roots.get(owner)
        if serial is None:
            return None
        chain: list[_Entry] = []
        found: KnownChain | None = None
        for i, message in enumerate(messages[:-1]):
            entry = self._entries.get((serial, message.role, message.content))
            if entry is None:
                break
            chain.append(entry)
            serial = entry.serial
            if entry.session is not None and entry.node is not None:
                found = KnownChain(entry.session, entry.node, i + 1)
        self._touch(chain)
        return found

    def holds(self, session: Session) -> bool:
        """Return whether a session's answers can still be found."""
        return session in self._held

    def remember(self, session: Session, answer: Node) -> Session | None:
        """Make the path to a committed answer known, the answer itself with its session.

        Returns the session that had this very answer before and can no longer be found by any other.
        """
        assert answer.is_answer, f"{answer.id} has no ids to lend"
        path: list[tuple[str, str]] = []
        node: Node | None = answer
        while node is not None:
            path.append((node.role, node.content))
            node = node.parent
        if session.conversation.system is not None:
            path.append(("system", session.conversation.system))
        serial = self._root(session.owner)
        parent: _Entry | None = None
        chain: list[_Entry] = []
        for role, content in reversed(path):
            key = (serial, role, content)
            entry = self._entries.get(key)
            if entry is None:
                self._last_serial += 1
                entry = _Entry(key, self._last_serial, parent)
                self._entries[key] = entry
                if parent is None:
                    self._num_under_root[serial] += 1
                else:
                    parent.num_children += 1
            chain.append(entry)
            parent, serial = entry, entry.serial
        last = chain[-1]
        before = last.session
        if before is not None and before is not session:
            self._let_go(last)
        last.session, last.node = session, answer
        self._held.setdefault(session, {})[last] = None
        self._touch(chain)
        while len(self._entries) > self._max_messages:
            self._drop(next(iter(self._entries.values())))
        return before if before is not None and before not in self._held else None

    def forget(self, session: Session) -> None:
        """Take a session's answers out, and every message that leads to none any more."""
        for entry in self._held.pop(session, {}):
            entry.session = entry.node = None
            self._prune(entry)

    def _root(self, owner: Owner) -> int:
        serial = self._roots.get(owner)
        if serial is None:
            self._last_serial += 1
            serial = self._roots[owner] = self._last_serial
            self._owner_of_root[serial] = owner
            self._num_under_root[serial] = 0
        return serial

    def _touch(self, chain: Sequence[_Entry]) -> None:
        # From the leaf to the root, so that a parent is always younger than its children and the oldest has none.
        for entry in reversed(chain):
            self._entries.move_to_end(entry.key)

    def _drop(self, entry: _Entry) -> None:
        assert entry.num_children == 0, "the oldest known message has children"
        self._let_go(entry)
        self._prune(entry)

    def _let_go(self, entry: _Entry) -> None:
        if entry.session is not None:
            held = self._held[entry.session]
            del held[entry]
            if not held:
                del self._held[entry.session]
            entry.session = entry.node = None

    def _prune(self, entry: _Entry | None) -> None:
        while entry is not None and entry.num_children == 0 and entry.session is None:
            if self._entries.pop(entry.key, None) is None:
                return
            parent = entry.parent
            if parent is None:
                self._leave_root(entry.key[0])
            else:
                parent.num_children -= 1
            entry = parent

    def _leave_root(self, serial: int) -> None:
        self._num_under_root[serial] -= 1
        if self._num_under_root[serial] == 0:
            del self._num_under_root[serial]
            del self._roots[self._owner_of_root.pop(serial)]

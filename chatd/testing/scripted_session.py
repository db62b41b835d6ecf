"""A session of the scripted daemon: a tree of messages, of which `items` is the path that is shown."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from chatd import protocol as p
from chatd.errors import NotFound
from chatd.testing.protocol_values import make_info

NOW = 1_700_000_000.0


@dataclass
class ScriptedSession:
    """One session.

    Attributes:
        items: The path to the head; a test may put messages there.
        ring: Events for those who come back.
        task: Of the answer in progress.
        roles: Of the connections that are attached, by their names.
    """

    id: str
    title: str
    system: str | None
    items: list[p.Item] = field(default_factory=list)
    ring: list[p.Event] = field(default_factory=list)
    params: p.Params = field(default_factory=p.Params)
    archived: bool = False
    pinned: bool = False
    context_policy: p.ContextPolicy = "refuse"
    tier: str = "device"
    seq: int = 0
    touched: int = 0
    response: str | None = None
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    tree: dict[str, p.Item] = field(default_factory=dict)
    roles: dict[str, p.AttachRole] = field(default_factory=dict)

    def info(self, model: p.ModelInfo) -> p.SessionInfo:
        """Describe it."""
        used = sum(len(item.content) // 4 + 4 for item in self.items)
        return make_info(
            self.id,
            self.title,
            model=model.id,
            created_at=NOW,
            updated_at=NOW + self.touched,
            num_items=len(self.items),
            context_used=used,
            context_max=model.context,
            busy=self.response is not None,
            tier=self.tier,
            archived=self.archived,
            pinned=self.pinned,
            system=self.system,
            params=self.params,
            context_policy=self.context_policy,
            writers=list(self.roles.values()).count("writer"),
            observers=list(self.roles.values()).count("observer"),
        )

    def snapshot(self, model: p.ModelInfo) -> p.Snapshot:
        """Return all that a client shows."""
        return p.Snapshot(session=self.info(model), items=self.path(), response=self.response, state=p.LatestState())

    def update(self, command: p.SessionUpdate) -> None:
        """Change what is named."""
        for name in ("title", "system", "params", "archived", "pinned", "context_policy"):
            value = getattr(command, name)
            if value is not None:
                setattr(self, name, value)

    # The tree.

    def path(self) -> list[p.Item]:
        """Return the messages that are shown, each with its siblings."""
        self._remember()
        return [self.with_siblings(item) for item in self.items]

    def with_siblings(self, item: p.Item) -> p.Item:
        """Return a message that says which version of how many it is."""
        self._remember()
        beside = [other.id for other in self.tree.values() if other.parent == item.parent]
        if item.id not in beside or len(beside) < 2:
            return item
        at = beside.index(item.id)
        siblings = p.Siblings(
            index=at + 1,
            count=len(beside),
            previous=self._leaf(beside[at - 1]) if at else None,
            next=self._leaf(beside[at + 1]) if at + 1 < len(beside) else None,
        )
        return msgspec.structs.replace(item, siblings=siblings)

    def node(self, item_id: str) -> p.Item:
        """Return a message of any branch."""
        self._remember()
        if item_id not in self.tree:
            raise NotFound(f"item {item_id!r} is not known", code="not_found")
        return self.tree[item_id]

    def put(self, item: p.Item) -> None:
        """Add a message after its parent, or change it; the path leads to it."""
        self._remember()
        self.tree[item.id] = item
        self.items = self._path_to(item)

    def remove(self, item: p.Item) -> None:
        """Take a message away, which nothing follows."""
        self._remember()
        self.tree.pop(item.id, None)
        self.items = [other for other in self.items if other.id != item.id]

    def select(self, leaf: str) -> tuple[str | None, list[p.Item]]:
        """Show the path to a message; return where it parts from what was shown, and what follows that."""
        before = [item.id for item in self.items]
        self.items = self._path_to(self.node(leaf))
        after = [item.id for item in self.items]
        same = next(
            (n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new),
            min(len(before), len(after)),
        )
        return after[same - 1] if same else None, self.path()[same:]

    def _remember(self) -> None:
        for item in self.items:
            self.tree[item.id] = item

    def _path_to(self, item: p.Item) -> list[p.Item]:
        path = [item]
        while path[0].parent is not None and path[0].parent in self.tree:
            path.insert(0, self.tree[path[0].parent])
        return path

    def _leaf(self, item_id: str) -> str:
        children = [other.id for other in self.tree.values() if other.parent == item_id]
        return self._leaf(children[-1]) if children else item_id

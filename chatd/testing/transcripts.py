"""A client as the protocol wants one: it keeps items and the last `seq` that it saw, and misses nothing."""

from __future__ import annotations

import msgspec

from chatd import protocol
from chatd.protocol import SessionAttach
from chatd.sessions.manager import Session, SessionManager
from chatd.testing.sessions import RecordingSubscriber


class TranscriptClient:
    """Follows one session over connections that come and go.

    Args:
        name: Of the client; its connections are numbered.

    Attributes:
        connection: None while it is away.
        items: As it shows them.
        last_seq: The last event that it saw.
        num_snapshots: How often it was given everything anew.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.connection: RecordingSubscriber | None = None
        self.items: list[protocol.Item] = []
        self.last_seq: int | None = None
        self.num_snapshots = 0
        self._num_connections = 0
        self._boot: str | None = None

    def connect(self, manager: SessionManager, session: Session) -> None:
        """Attach by a new connection, with what it knows."""
        self._num_connections += 1
        self.connection = RecordingSubscriber(f"{self.name}_{self._num_connections}")
        command = SessionAttach(session=session.id, after_seq=self.last_seq, boot=self._boot)
        frame = manager.attach(session, self.connection, command)
        assert self.connection.events == [], "events come before the answer to attach"
        if frame.snapshot is not None:
            self.num_snapshots += 1
            self.items = list(frame.snapshot.items)
            self.last_seq = frame.head_seq
        self._boot = manager.boot
        manager.start(session, self.connection)

    def disconnect(self, manager: SessionManager) -> None:
        """Lose the connection, after what has come by it."""
        if self.connection is not None:
            manager.detach_all(self.connection)
            self.read()
            self.connection = None

    def read(self) -> None:
        """Take in what has come.

        Raises:
            AssertionError: Something is missing, came twice, or does not fit what is shown.
        """
        if self.connection is None:
            return
        for event in self.connection.take():
            if isinstance(event, protocol.TranscriptEvent):
                assert self.last_seq is not None, "an event comes before there is anything to show"
                assert event.seq == self.last_seq + 1, f"I17: event {event.seq} comes after {self.last_seq}"
                self.last_seq = event.seq
                self._apply(event)
            elif isinstance(event, protocol.SessionClosed):
                self.connection = None

    def _apply(self, event: protocol.TranscriptEvent) -> None:
        match event:
            case protocol.ItemAdded() | protocol.ResponseCreated():
                self._cut_to(event.item.parent)
                self.items.append(event.item)
            case protocol.OutputTextDelta():
                last = self.items[-1]
                assert last.id == event.item_id, f"I17: text for {event.item_id}, the last item is {last.id}"
                self.items[-1] = msgspec.structs.replace(last, content=last.content + event.delta)
            case protocol.ResponseCompleted() | protocol.ResponseIncomplete():
                assert self.items[-1].content == event.item.content, "I17: the deltas are not the text"
                self.items[-1] = event.item
            case protocol.ResponseFailed():
                assert event.item_id == self.items[-1].id, f"I17: {event.item_id} fails and is not the last item"
                self._cut_to(event.parent)
            case protocol.BranchSelected():
                self._cut_to(event.parent)
                self.items += event.items
                assert event.leaf == self.items[-1].id, "the branch that was chosen ends elsewhere"
            case _:
                pass

    def _cut_to(self, parent: str | None) -> None:
        while self.items and self.items[-1].id != parent:
            self.items.pop()
        assert self.items or parent is None, f"{parent} is not shown"

"""Which connection is attached to which session, and what it is told when it comes.

A connection is held from `attach` to `start`, so that the answer to its command can go out before any event.
"""

from __future__ import annotations

import msgspec

from chatd.protocol import (
    AttachRole,
    SessionAttach,
    SessionAttached,
    SessionClosed,
    SessionCreated,
    SessionErased,
    TranscriptEvent,
)
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.events import Subscriber
from chatd.sessions.session import Session


class Attachments:
    """All attachments of a daemon.

    Args:
        requests: Tells the engine whether anybody is attached.
        boot: Names this start of the daemon.
    """

    def __init__(self, requests: EngineRequests, boot: str) -> None:
        self._requests = requests
        self._boot = boot
        self._sessions: dict[str, dict[str, Session]] = {}  # by connection, then by name

    def created(self, session: Session, subscriber: Subscriber, role: AttachRole, re: str | None) -> SessionCreated:
        """Attach the connection that created a session; see `SessionManager.created`."""
        replay = session.ring.after(0)
        self._attach(session, subscriber, role, replay or [])
        return SessionCreated(
            session=session.info(), head_seq=0 if replay is not None else session.ring.head_seq, re=re
        )

    def attach(self, session: Session, subscriber: Subscriber, command: SessionAttach) -> SessionAttached:
        """Attach a connection; see `SessionManager.attach`."""
        replay = None
        if command.after_seq is not None and command.boot == self._boot:
            replay = session.ring.after(command.after_seq)
        head_seq = session.ring.head_seq
        self._attach(session, subscriber, command.role, replay or [])
        snapshot = session.snapshot(command.history) if replay is None else None
        return SessionAttached(
            session=session.id,
            head_seq=head_seq,
            replay="exact" if snapshot is None else "snapshot",
            snapshot=snapshot,
            re=command.id,
        )

    def detach(self, session: Session, subscriber: Subscriber) -> None:
        """Deliver no more of a session's events to a connection."""
        if session.listeners.remove(subscriber):
            self._forget(session, subscriber.connection_id)
            self._requests.retain(session)

    def detach_all(self, subscriber: Subscriber) -> None:
        """Detach a connection that is gone from everything."""
        for session in list(self._sessions.get(subscriber.connection_id, {}).values()):
            self.detach(session, subscriber)

    def close(self, session: Session, closed: SessionClosed | SessionErased, sender: Subscriber | None) -> None:
        """Detach everybody from a session that ends, and say so; the sender is told with `re`, attached or not."""
        for connection_id in session.listeners.connections():
            self._forget(session, connection_id)
        was_attached = session.listeners.close(msgspec.structs.replace(closed, re=None), closed.re, sender)
        if sender is not None and not was_attached:
            sender.deliver(closed)

    def _attach(
        self, session: Session, subscriber: Subscriber, role: AttachRole, replay: list[TranscriptEvent]
    ) -> None:
        session.listeners.add(subscriber, role, replay)
        self._sessions.setdefault(subscriber.connection_id, {})[session.id] = session
        self._requests.retain(session)

    def _forget(self, session: Session, connection_id: str) -> None:
        attached = self._sessions.get(connection_id, {})
        attached.pop(session.id, None)
        if not attached:
            self._sessions.pop(connection_id, None)

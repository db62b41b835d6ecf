"""Who listens to one session: the connections that are attached, and what each of them is told. Numbers nothing."""

from __future__ import annotations

import msgspec

from chatd.protocol import (
    AttachRole,
    ClientAttached,
    ClientLeft,
    Event,
    SessionClosed,
    SessionErased,
    TranscriptEvent,
)
from chatd.sessions.events import Subscriber, Subscription


class Listeners:
    """The connections that are attached to a session.

    Args:
        session_id: Which.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._subscriptions: dict[str, Subscription] = {}

    def __len__(self) -> int:
        return len(self._subscriptions)

    def num_as(self, role: AttachRole) -> int:
        """Return how many are attached in a role."""
        return sum(subscription.role == role for subscription in self._subscriptions.values())

    def connections(self) -> list[str]:
        """Return the names of the connections that are attached."""
        return list(self._subscriptions)

    def role_of(self, subscriber: Subscriber) -> AttachRole | None:
        """Return the role of a connection, None where it is not attached."""
        subscription = self._subscriptions.get(subscriber.connection_id)
        return None if subscription is None else subscription.role

    def add(self, subscriber: Subscriber, role: AttachRole, replay: list[TranscriptEvent]) -> None:
        """Attach a connection, held until `start`; the others are told. One that is attached already starts anew."""
        known = self._subscriptions.pop(subscriber.connection_id, None)
        if known is None or known.role != role:
            self.tell(ClientAttached(session=self._session_id, connection=subscriber.connection_id, role=role))
        self._subscriptions[subscriber.connection_id] = Subscription(subscriber, role, replay)

    def start(self, subscriber: Subscriber) -> None:
        """Let a held connection have its events."""
        subscription = self._subscriptions.get(subscriber.connection_id)
        if subscription is not None:
            subscription.start()

    def remove(self, subscriber: Subscriber) -> bool:
        """Detach a connection; return whether it was attached."""
        if self._subscriptions.pop(subscriber.connection_id, None) is None:
            return False
        self.tell(ClientLeft(session=self._session_id, connection=subscriber.connection_id))
        return True

    def close(self, closed: SessionClosed | SessionErased, re: str | None, sender: Subscriber | None) -> bool:
        """Tell everybody of the end and detach them; return whether `sender` was among them."""
        subscriptions = list(self._subscriptions.values())
        self._subscriptions.clear()
        for subscription in subscriptions:
            is_sender = subscription.subscriber is sender
            subscription.deliver(msgspec.structs.replace(closed, re=re) if is_sender else closed)
        return any(subscription.subscriber is sender for subscription in subscriptions)

    def tell(self, event: Event) -> None:
        """Send everybody an event."""
        for subscription in self._subscriptions.values():
            subscription.deliver(event)

    def deliver(self, event: TranscriptEvent, re: str | None, sender: Subscriber | None) -> None:
        """Send everybody an event; the sender's copy, attached or not, says to which command it belongs."""
        for subscription in self._subscriptions.values():
            if re is not None and sender is not None and subscription.subscriber is sender:
                subscription.deliver(msgspec.structs.replace(event, re=re))
            else:
                subscription.deliver(event)
        if re is not None and sender is not None and sender.connection_id not in self._subscriptions:
            sender.deliver(msgspec.structs.replace(event, re=re))

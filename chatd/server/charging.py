"""Carries commands out within what a key may use: turns, changes that begin no answer, and looks at what there is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from chatd.engine.messages import RequestClass
from chatd.protocol import Command, RateLimitsUpdated
from chatd.server.daemon import charge
from chatd.server.idempotency import receipt_of

if TYPE_CHECKING:
    from chatd.server.websocket import Connection
    from chatd.sessions.session import Session
    from chatd.tenants.quotas import KeyQuota

T = TypeVar("T")


async def take_turn(
    connection: Connection, session: Session, begin: Callable[..., Awaitable[None]], command: Command
) -> None:
    """Begin a turn within the key's quota, and charge it when it has ended."""
    daemon = connection.daemon
    quota = daemon.quota_of(connection.principal)
    quota.admit()
    try:
        await begin(
            request_class=RequestClass(connection.principal.key_class),
            key_id=connection.principal.key_id,
            receipt=receipt_of(command),
        )
    except BaseException:
        quota.refund()
        raise
    if session.turn is not None:
        daemon.spawn(charge(session.turn, quota), "charge of a turn")
    else:
        quota.finish(0)
    if not daemon.authenticator.is_current(connection.principal):
        daemon.manager.end_answers_of(connection.principal.key_id)  # Revoked while it was accepted.
    _tell_limits(connection, quota)


def look(connection: Connection) -> None:
    """Count a look at what there is, within the key's quota.

    Raises:
        RateLimited: There were too many.
    """
    connection.daemon.quota_of(connection.principal).admit_look()


async def change(connection: Connection, work: Coroutine[Any, Any, T]) -> T:
    """Carry out what writes and begins no answer, within the key's quota of requests."""
    quota = connection.daemon.quota_of(connection.principal)
    try:
        quota.admit_change()
    except BaseException:
        work.close()
        raise
    try:
        changed = await work
    except BaseException:
        quota.refund_change()
        raise
    _tell_limits(connection, quota)
    return changed


def _tell_limits(connection: Connection, quota: KeyQuota) -> None:
    limits = quota.state()
    if limits:
        connection.deliver(RateLimitsUpdated(limits=[dict(row) for row in limits]))

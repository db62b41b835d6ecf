"""What becomes of sessions that nobody uses: their KV is given up, they leave the list, and at last they are erased.

Each by a time of its own; pinned ones stay in the list and are not erased. A session that somebody looks at, or that
answers, is used.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from chatd.errors import ChatdError, DamagedRecord, NotFound
from chatd.sessions.limits import SessionLimits
from chatd.sessions.session import Session
from chatd.sessions.store import SessionStore

DAY_S = 86400.0

MAX_CHANGES = 64
"""Sessions that one sweep archives or erases at most: each is read from the journal for it."""

_log = logging.getLogger(__name__)


class IdlePolicy:
    """Looks over idle sessions.

    Args:
        store: Has the sessions.
        limits: Say after how long.
        archive: Takes a session out of the usual list.
        erase: Removes a session.
        clock: Gives Unix seconds.
    """

    def __init__(
        self,
        store: SessionStore,
        limits: SessionLimits,
        *,
        archive: Callable[[Session], Awaitable[object]],
        erase: Callable[[Session], Awaitable[object]],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._limits = limits
        self._archive = archive
        self._erase = erase
        self._clock = clock

    async def sweep(self) -> None:
        """Do what is due; what is refused is tried again with the next sweep.

        One session that cannot be put away, as a damaged one, keeps no other from it.
        """
        num_changes = 0
        for session in list(self._store.by_lease.values()):
            change = self._due(session)
            if change is None:
                continue
            num_changes += 1
            if num_changes > MAX_CHANGES:
                return
            try:
                await change(session)
            except NotFound:
                continue  # It was erased meanwhile.
            except DamagedRecord as error:
                _log.error("an idle session cannot be put away: %s", error.message)
            except ChatdError as error:
                _log.warning("an idle session could not be put away (%s)", error.error_code)
                return  # The engine or the journal is not there for anybody.
            except Exception:
                _log.exception("session %s cannot be put away", session.id)

    def release_in_s(self, session: Session) -> float | None:
        """Return in how long a session's KV is given up if nobody uses it; None where that is not by time."""
        if not self._limits.idle_release_s or session.turn is not None or len(session.listeners):
            return None
        return max(0.0, self._limits.idle_release_s - (self._clock() - session.updated_at))

    def _due(self, session: Session) -> Callable[[Session], Awaitable[object]] | None:
        """Return what changes a session now; its KV is given up at once, where that is due."""
        if session.hidden or session.is_erased or session.turn or len(session.listeners) or session.lock.locked():
            return None
        limits, idle_s = self._limits, self._clock() - session.updated_at
        if limits.idle_release_s and idle_s >= limits.idle_release_s:
            self._store.release(session)
        if session.pinned:
            return None
        days = limits.retention_days_of.get(session.owner.tenant, limits.retention_days)
        if days is not None and idle_s >= days * DAY_S:
            return self._erase
        archive_s = limits.idle_archive_days * DAY_S
        return self._archive if archive_s and not session.archived and idle_s >= archive_s else None

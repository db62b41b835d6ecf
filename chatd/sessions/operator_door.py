"""What an operator does with anybody's sessions: erase one or a whole tenant's, remove old ones, bring in others.

No owner is asked and none is named: whoever calls this was let in as the operator. Texts go in and never out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from chatd.engine.messages import Erased as ErasedBlocks
from chatd.errors import Conflict, NotFound, StorageError
from chatd.journal.records import Change, MessageRecord, SaveMessage, SaveSession, SessionRecord
from chatd.protocol import EraseReceipt, SessionErased
from chatd.sessions.engine_requests import EngineRequests
from chatd.sessions.erasing import Eraser
from chatd.sessions.ports import Journal
from chatd.sessions.recorder import Recorder
from chatd.sessions.session import Session, unknown_session
from chatd.sessions.stateless import StatelessDoor
from chatd.sessions.store import SessionStore

DAY_S = 86400.0

MAX_NAMES = 4096
"""Names of blocks on the disk that one message to the engine has."""

FindBlocks = Callable[[str], Awaitable[Sequence[bytes]]]
"""Returns the names of a tenant's blocks on the disk."""


class TenantErased(msgspec.Struct, frozen=True):
    """What is gone of a tenant.

    Attributes:
        tenant: Which.
        sessions: That its users had.
        messages: Of those, as the journal had them.
        tokens: Ids that the journal had.
        bytes: Of text and ids that the journal had.
        blocks: Of the pool.
        host_blocks: Of the host's buffer.
        disk_blocks: Of the disk.
    """

    tenant: str
    sessions: int
    messages: int
    tokens: int
    bytes: int
    blocks: int
    host_blocks: int
    disk_blocks: int


class OperatorDoor:
    """Carries out what an operator asks for.

    Args:
        eraser: Erases one session.
        requests: Have the engine forget.
        store: Has the sessions.
        stateless: Has those of stateless requests.
        recorder: Commits for all sessions.
        journal: Forgets.
        clock: Gives Unix seconds.
        on_erased: Called with each session that is gone.
    """

    def __init__(
        self,
        eraser: Eraser,
        requests: EngineRequests,
        store: SessionStore,
        stateless: StatelessDoor,
        recorder: Recorder,
        journal: Journal,
        *,
        clock: Callable[[], float],
        on_erased: Callable[[Session], None],
    ) -> None:
        self._eraser = eraser
        self._requests = requests
        self._store = store
        self._stateless = stateless
        self._recorder = recorder
        self._journal = journal
        self._clock = clock
        self._on_erased = on_erased
        self._taking_in = asyncio.Lock()

    async def erase(self, session_id: str) -> tuple[Session, SessionErased]:
        """Remove a session, whoever has it, as `SessionManager.erase` does for its owner.

        Raises:
            NotFound: There is none of this name.
            Unavailable: `engine_unavailable`.
            StorageError: The journal takes nothing.
        """
        session = self._store.find(session_id)
        if session is None:
            raise unknown_session(session_id)
        erased = await self._eraser.erase(session, None, None, None)
        self._on_erased(session)
        return session, erased

    async def remove(self, session_ids: Sequence[str]) -> AsyncIterator[tuple[Session, SessionErased]]:
        """Remove sessions by name and yield each once it is gone; none where one is not there at the beginning.

        Raises:
            ChatdError: As `erase`; those before are gone.
        """
        for session_id in session_ids:
            if self._store.find(session_id) is None:
                raise unknown_session(session_id)
        for session_id in dict.fromkeys(session_ids):
            with contextlib.suppress(NotFound):  # Its owner has erased it meanwhile.
                yield await self.erase(session_id)

    async def remove_unused(
        self, unused_days: float, tenant: str | None
    ) -> AsyncIterator[tuple[Session, SessionErased]]:
        """Remove the sessions that nobody used for so long, of one tenant or of all; yield each once it is gone.

        Those that are pinned, that somebody looks at or that answer stay.

        Raises:
            ChatdError: As `erase`; those before are gone.
        """
        before = self._clock() - unused_days * DAY_S
        for session in self._store.all():
            is_used = session.turn is not None or len(session.listeners) or session.pinned or session.is_erased
            if not is_used and session.updated_at < before and tenant in (None, session.owner.tenant):
                with contextlib.suppress(NotFound):  # Its owner has erased it meanwhile.
                    yield await self.erase(session.id)

    async def erase_tenant(self, tenant: str, find_blocks: FindBlocks) -> TenantErased:
        """Remove all that there is of a tenant: sessions, kept answers, usage, and its blocks in every tier.

        Answers in progress are cancelled; whoever is attached is told. What its keys do meanwhile goes too, or is
        refused: they are better revoked before.

        Raises:
            Unavailable: `engine_unavailable`; nothing is lost.
            StorageError: The journal takes nothing; the sessions are there, and their KV is computed anew.
        """
        gone = TenantErased(tenant, 0, 0, 0, 0, 0, 0, 0)
        while True:
            await self._stateless.forget_tenant(tenant)
            sessions = [session for session in self._store.all() if session.owner.tenant == tenant]
            gone = _sum(gone, await self._erase_all(tenant, sessions, find_blocks))
            # One that was made meanwhile is in memory still.
            if not any(session.owner.tenant == tenant for session in self._store.all()):
                return gone

    async def _erase_all(self, tenant: str, sessions: Sequence[Session], find_blocks: FindBlocks) -> TenantErased:
        async with contextlib.AsyncExitStack() as stack:
            held = [session for session in sessions if await self._eraser.hold(session, stack)]
            blocks = await self._forget_blocks(tenant, find_blocks)
            owed = await self._recorder.forgive_tenant(tenant, [session.id for session in held])
            try:
                num_sessions, kept = await self._journal.erase_tenant(tenant)
            except BaseException:
                for changes in owed:
                    self._recorder.owe(changes)
                raise
            for session in held:
                self._eraser.drop(session, SessionErased(session=session.id, receipt=self._receipt(session)))
                self._on_erased(session)
        return TenantErased(
            tenant,
            num_sessions if self._recorder.is_kept else len(held),
            kept.messages,
            kept.tokens,
            kept.num_bytes,
            blocks.num_blocks,
            blocks.num_host_blocks,
            blocks.num_disk_blocks,
        )

    async def _forget_blocks(self, tenant: str, find_blocks: FindBlocks) -> ErasedBlocks:
        """Have the engine forget a tenant: first what may be written to the disk, then what is there."""
        lease = self._store.new_lease()
        gone = await self._requests.erase_tenant(lease, tenant, ())
        names = list(await find_blocks(tenant))
        for start in range(0, len(names), MAX_NAMES):
            more = await self._requests.erase_tenant(lease, tenant, names[start : start + MAX_NAMES])
            gone = ErasedBlocks(
                lease,
                gone.num_blocks + more.num_blocks,
                gone.num_host_blocks + more.num_host_blocks,
                gone.num_disk_blocks + more.num_disk_blocks,
            )
        return gone

    def _receipt(self, session: Session) -> EraseReceipt:
        """Return what those who are attached are told; what the tiers had is in the operator's receipt."""
        num_messages = len(list(session.conversation)) if session.is_loaded else session.stored.num_items
        return EraseReceipt(
            messages=num_messages,
            shared_messages=0,
            tokens=session.context_used,
            blocks=0,
            host_blocks=0,
            disk_blocks=0,
            journal_bytes=session.num_kept_bytes if self._recorder.is_kept else 0,
        )

    async def take_in(self, record: SessionRecord, messages: Sequence[MessageRecord]) -> None:
        """Have a session that was exported, with its messages, for its owner to use at once.

        Raises:
            Conflict: Its id is taken, or that of a message by another one.
            StorageError: It cannot be kept, or nothing is.
        """
        if not self._recorder.is_kept:
            raise StorageError("this daemon keeps no sessions (journal.enabled)")
        async with self._taking_in:
            if self._store.find(record.id) is not None:
                raise Conflict(
                    f"session {record.id!r} is in the journal already", hint="--new-ids makes another one of it"
                )
            for message in messages:
                known = await self._journal.message(message.id)
                if known is not None and known != (record.tenant, record.user, message):
                    raise Conflict(
                        f"message {message.id!r} is in the journal already, and is another one", hint="use --new-ids"
                    )
            changes: list[Change] = [SaveSession(record), *(SaveMessage(record.id, message) for message in messages)]
            await self._recorder.commit(changes)
            self._store.add_stored(record)


def _sum(a: TenantErased, b: TenantErased) -> TenantErased:
    counts = {name: getattr(a, name) + getattr(b, name) for name in a.__struct_fields__ if name != "tenant"}
    return TenantErased(a.tenant, **counts)

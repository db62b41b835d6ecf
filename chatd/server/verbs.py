"""The commands of chatd.v1: for each, what a caller must show and what is done.

Every command that names a session finds it through `manager.resolve`, where somebody else's session is as unknown as
one that does not exist. A command without an entry in `VERBS` keeps the daemon from starting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from chatd.errors import ChatdError, PermissionDenied
from chatd.protocol import (
    COMMANDS,
    BranchSelect,
    BranchSelected,
    Command,
    Event,
    ItemAdded,
    MessageEdit,
    Params,
    Ping,
    Pong,
    PoolInspect,
    PoolSubscribe,
    PoolUnsubscribe,
    PoolUnsubscribed,
    Prefill,
    ResponseCancel,
    ResponseContinue,
    ResponseCreated,
    ResponseRegenerate,
    SessionAttach,
    SessionClose,
    SessionCreate,
    SessionCreated,
    SessionDetach,
    SessionDetached,
    SessionErase,
    SessionFork,
    SessionGet,
    SessionGot,
    SessionList,
    SessionUpdate,
    SessionUpdated,
    TranscriptEvent,
    UserMessage,
)
from chatd.server.charging import change, look, take_turn
from chatd.server.idempotency import NO_SEQ, receipt_of
from chatd.server.policy import Access, check_verbs
from chatd.server.pool_view import PoolSubscription

if TYPE_CHECKING:
    from chatd.server.websocket import Connection
    from chatd.sessions.session import Session

_NO_PARAMS = Params()


@dataclass(frozen=True, slots=True)
class Verb:
    """One command.

    Attributes:
        access: What a caller must show.
        handler: Carries it out; returns the answer where it may be asked for again.
        once: A second command with the same id gets the first answer.
    """

    access: Access
    handler: Callable[[Connection, Any], Awaitable[Event | None]]
    once: bool = False


async def carry_out(connection: Connection, command: Command) -> None:
    """Carry out one command of a connection.

    Raises:
        ChatdError: It is refused; nothing was done.
    """
    verb = VERBS[type(command)]
    if verb.access in (Access.OPERATOR, Access.OPERATORS_KEY) and not connection.principal.operator:
        raise PermissionDenied("this needs the operator's key")
    connection.daemon.metrics.command_received(str(command.__struct_config__.tag))
    if not verb.once or command.id is None:
        await verb.handler(connection, command)
        return
    answers, owner = connection.daemon.answers, connection.owner
    earlier = await answers.earlier(owner.tenant, owner.user, command)
    if earlier is not None:
        await _repeat(connection, earlier)
        return
    answer: Event | None = None
    try:
        answer = await verb.handler(connection, command)
    finally:
        if answer is None:
            answers.forget(owner.tenant, owner.user, command)
        else:
            answers.finish(owner.tenant, owner.user, command, answer)


async def _repeat(connection: Connection, earlier: Event) -> None:
    """Give the first answer again; a session that was created is attached to this connection too."""
    if isinstance(earlier, SessionCreated):
        session = await connection.daemon.manager.resolve(connection.owner, earlier.session.id)
        _attach_new(connection, session, earlier)
        return
    if isinstance(earlier, TranscriptEvent) and earlier.seq == NO_SEQ:
        # Its number was another start's; whoever is attached now has seen this one, in a snapshot.
        session = await connection.daemon.manager.resolve(connection.owner, earlier.session)
        earlier = msgspec.structs.replace(earlier, seq=session.ring.head_seq)
    connection.deliver(earlier)


async def _session_create(connection: Connection, command: SessionCreate) -> Event | None:
    manager = connection.daemon.manager
    connection.daemon.check_accepting()
    session = await change(connection, manager.create(connection.owner, command, receipt=receipt_of(command)))
    return _attach_new(connection, session, SessionCreated(session=manager.info(session), re=command.id))


async def _session_fork(connection: Connection, command: SessionFork) -> Event | None:
    manager = connection.daemon.manager
    connection.daemon.check_accepting()
    source = await manager.resolve(connection.owner, command.session)
    session, forked = await change(connection, manager.fork(source, command, connection, receipt=receipt_of(command)))
    created = manager.forked(session, forked, command.id)
    return _attach_new(connection, session, created)


def _attach_new(connection: Connection, session: Session, created: SessionCreated) -> Event:
    """Attach a connection to a session that it made, and answer it with `created` as things are now."""
    manager = connection.daemon.manager
    if connection.is_closed:
        return created
    attached = manager.created(session, connection, re=created.re)
    created = msgspec.structs.replace(created, session=attached.session, head_seq=attached.head_seq)
    connection.deliver(created)
    manager.start(session, connection)
    return created


async def _session_attach(connection: Connection, command: SessionAttach) -> Event | None:
    manager = connection.daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    if not connection.is_closed:
        connection.deliver(manager.attach(session, connection, command))
        manager.start(session, connection)
    return None


async def _session_list(connection: Connection, command: SessionList) -> Event | None:
    look(connection)
    listed = await connection.daemon.manager.list(connection.owner, command)
    # A page of what may be large in each session would hold the loop and fill the outbox; `session.get` has it.
    rows = [msgspec.structs.replace(row, system=None, params=_NO_PARAMS, metadata={}) for row in listed.sessions]
    connection.deliver(msgspec.structs.replace(listed, sessions=rows, re=command.id))
    return None


async def _session_get(connection: Connection, command: SessionGet) -> Event | None:
    look(connection)
    manager = connection.daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    connection.deliver(SessionGot(session=manager.info(session), items=manager.items(session), re=command.id))
    return None


async def _session_update(connection: Connection, command: SessionUpdate) -> Event | None:
    manager = connection.daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    before = session.ring.head_seq
    receipt = receipt_of(command)
    await change(connection, manager.update(session, command, re=command.id, subscriber=connection, receipt=receipt))
    return _first_after(session, before, SessionUpdated, command.id)


async def _session_detach(connection: Connection, command: SessionDetach) -> Event | None:
    manager = connection.daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    manager.detach(session, connection)
    connection.deliver(SessionDetached(session=session.id, re=command.id))
    return None


async def _session_close(connection: Connection, command: SessionClose) -> Event | None:
    manager = connection.daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    return await manager.close(session, re=command.id, subscriber=connection, receipt=receipt_of(command))


async def _session_erase(connection: Connection, command: SessionErase) -> Event | None:
    daemon, owner = connection.daemon, connection.owner
    session = await daemon.manager.resolve(owner, command.session, with_messages=False)
    erased = await daemon.manager.erase(session, re=command.id, subscriber=connection, receipt=receipt_of(command))
    daemon.answers.erase(owner.tenant, owner.user, session.id)
    return erased


async def _user_message(connection: Connection, command: UserMessage) -> Event | None:
    manager = connection.daemon.manager
    return await _say(connection, command, manager.user_message)


async def _message_edit(connection: Connection, command: MessageEdit) -> Event | None:
    return await _say(connection, command, connection.daemon.manager.edit)


async def _say(
    connection: Connection, command: UserMessage | MessageEdit, say: Callable[..., Coroutine[Any, Any, None]]
) -> Event | None:
    daemon = connection.daemon
    daemon.check_accepting()
    session = await daemon.manager.resolve(connection.owner, command.session)
    before = session.ring.head_seq
    if command.respond:
        await take_turn(connection, session, lambda **given: say(session, command, connection, **given), command)
    else:
        await change(connection, say(session, command, connection, receipt=receipt_of(command)))
    return _first_after(session, before, ItemAdded, command.id)


async def _response_regenerate(connection: Connection, command: ResponseRegenerate) -> Event | None:
    daemon = connection.daemon
    daemon.check_accepting()
    manager = daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    before = session.ring.head_seq
    await take_turn(
        connection, session, lambda **given: manager.regenerate(session, command, connection, **given), command
    )
    return _first_after(session, before, ResponseCreated, command.id)


async def _branch_select(connection: Connection, command: BranchSelect) -> Event | None:
    look(connection)
    manager = connection.daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    before = session.ring.head_seq
    await manager.select_branch(session, command, connection, receipt=receipt_of(command))
    return _first_after(session, before, BranchSelected, command.id)


def _first_after(
    session: Session,
    seq: int,
    kind: type[ItemAdded] | type[SessionUpdated] | type[ResponseCreated] | type[BranchSelected],
    re: str | None,
) -> Event | None:
    """Return the event with which a command was answered, to give it again."""
    for event in session.ring.after(seq) or ():
        if isinstance(event, kind):
            return msgspec.structs.replace(event, re=re)
    return None


async def _response_cancel(connection: Connection, command: ResponseCancel) -> Event | None:
    manager = connection.daemon.manager
    await manager.cancel(await manager.resolve(connection.owner, command.session), connection)
    return None


async def _response_continue(connection: Connection, command: ResponseContinue) -> Event | None:
    daemon = connection.daemon
    daemon.check_accepting()
    manager = daemon.manager
    session = await manager.resolve(connection.owner, command.session)
    before = session.ring.head_seq
    await take_turn(connection, session, lambda **given: manager.go_on(session, command, connection, **given), command)
    return _first_after(session, before, ResponseCreated, command.id)


async def _prefill(connection: Connection, command: Prefill) -> Event | None:
    daemon = connection.daemon
    session = await daemon.manager.resolve(connection.owner, command.session)
    quota = daemon.quota_of(connection.principal)
    if command.content:
        daemon.check_accepting()
        quota.check_tokens()
    daemon.manager.prefill(session, command.content, connection, charge=quota.charge, re=command.id)
    return None


async def _pool_subscribe(connection: Connection, command: PoolSubscribe) -> Event | None:
    daemon, principal = connection.daemon, connection.principal
    connection.drop_pool()
    subscription = PoolSubscription(principal, command, sees_all=_sees_all(connection), clock=daemon.clock)
    if not connection.is_closed:
        daemon.pool.subscribe(connection.connection_id, subscription, connection.deliver_pool)
    return None


async def _pool_unsubscribe(connection: Connection, command: PoolUnsubscribe) -> Event | None:
    connection.daemon.pool.unsubscribe(connection.connection_id)
    connection.drop_pool()
    connection.deliver(PoolUnsubscribed(re=command.id))
    return None


def _sees_all(connection: Connection) -> Callable[[], bool]:
    """Return what tells whether a caller sees the whole pool; keys come and go meanwhile."""
    principal, authenticator = connection.principal, connection.daemon.authenticator
    return lambda: principal.operator or authenticator.is_single_tenant


async def _pool_inspect(connection: Connection, command: PoolInspect) -> Event | None:
    manager, pointer = connection.daemon.manager, connection.pointer
    pointer.begin()

    async def answer() -> None:
        try:
            sees_all, num_blocks = _sees_all(connection), manager.model.blocks
            connection.deliver(
                await pointer.answer(command, manager.inspect_blocks, manager.lease_sessions, sees_all, num_blocks)
            )
        except ChatdError as error:
            connection.refuse(error, re=command.id)

    # What waits for its time or for the engine holds up none of this connection's other commands.
    connection.daemon.spawn(answer(), "look at a cell of the pool")
    return None


async def _ping(connection: Connection, command: Ping) -> Event | None:
    connection.deliver(Pong(t=command.t, re=command.id))
    return None


VERBS: Mapping[type, Verb] = {
    SessionCreate: Verb(Access.KEY, _session_create, once=True),
    SessionAttach: Verb(Access.KEY, _session_attach),
    SessionList: Verb(Access.KEY, _session_list),
    SessionGet: Verb(Access.KEY, _session_get),
    SessionUpdate: Verb(Access.KEY, _session_update, once=True),
    SessionDetach: Verb(Access.KEY, _session_detach),
    SessionClose: Verb(Access.KEY, _session_close, once=True),
    SessionErase: Verb(Access.KEY, _session_erase, once=True),
    SessionFork: Verb(Access.KEY, _session_fork, once=True),
    UserMessage: Verb(Access.KEY, _user_message, once=True),
    MessageEdit: Verb(Access.KEY, _message_edit, once=True),
    ResponseRegenerate: Verb(Access.KEY, _response_regenerate, once=True),
    ResponseContinue: Verb(Access.KEY, _response_continue, once=True),
    BranchSelect: Verb(Access.KEY, _branch_select, once=True),
    ResponseCancel: Verb(Access.KEY, _response_cancel),
    Prefill: Verb(Access.KEY, _prefill),
    PoolSubscribe: Verb(Access.KEY, _pool_subscribe),
    PoolUnsubscribe: Verb(Access.KEY, _pool_unsubscribe),
    PoolInspect: Verb(Access.KEY, _pool_inspect),
    Ping: Verb(Access.KEY, _ping),
}
check_verbs(COMMANDS, VERBS)

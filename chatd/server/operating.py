"""What `chatd sessions import|rm|erase|erase-tenant` ask of a daemon that runs; the operator's key, and nothing less.

```
POST   /v1/sessions/import     a conversation as `export --format json` writes it        {"session": …}
POST   /v1/sessions/remove     {"sessions": […]}, or {"unused_days": 30, "tenant": …}    {"removed": […]}
DELETE /v1/sessions/{session}                                                           the receipt
DELETE /v1/tenants/{tenant}                                                             the receipt
```
No text of a conversation leaves by any of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chatd.config import disk_tier_directory
from chatd.errors import EnvironmentProblem, InvalidRequest
from chatd.kvcache.block_directory import find_tenant
from chatd.server.auth import Principal
from chatd.server.daemon import Daemon
from chatd.server.logging import get_logger
from chatd.server.openai import read_body
from chatd.server.openai_frames import encode_body
from chatd.session_files import from_json
from chatd.sessions.manager import Session

IMPORT_PATH = "/v1/sessions/import"
REMOVE_PATH = "/v1/sessions/remove"
SESSION_PATH = "/v1/sessions/{session}"
TENANT_PATH = "/v1/tenants/{tenant}"
MAX_REMOVED = 10_000
"""Sessions that one request names."""

logger = get_logger("chatd.server")


class Removal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sessions are to be removed.

    Attributes:
        sessions: By name.
        unused_days: Or all that nobody used for so long.
        tenant: Of this tenant only, with `unused_days`.
    """

    sessions: Annotated[list[str], msgspec.Meta(max_length=MAX_REMOVED)] = []
    unused_days: Annotated[float, msgspec.Meta(ge=0)] | None = None
    tenant: str | None = None


async def import_session(request: Request) -> Response:
    """Serve `POST /v1/sessions/import`.

    Raises:
        InvalidRequest: The body is no export.
        Conflict: Its ids are taken.
        StorageError: It cannot be kept.
    """
    daemon: Daemon = request.app.state.daemon
    daemon.check_accepting()
    manager = daemon.manager
    body = await read_body(request, daemon.settings.server.max_body_bytes)
    file = await asyncio.to_thread(from_json, body)
    await manager.operator.take_in(file.session, file.messages)
    _note(request, "session.imported", session=file.session.id, owner=file.session.tenant)
    return _answer({"session": file.session.id})


async def remove_sessions(request: Request) -> Response:
    """Serve `POST /v1/sessions/remove`.

    Raises:
        InvalidRequest: Neither sessions nor an age is named, or both; or sessions with a tenant.
        NotFound: A session is not there; none was removed.
        Unavailable: No engine serves.
        StorageError: The journal takes nothing.
    """
    daemon: Daemon = request.app.state.daemon
    operator = daemon.manager.operator
    body = await read_body(request, daemon.settings.server.max_body_bytes)
    try:
        wanted = msgspec.json.decode(body, type=Removal)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"that does not say what to remove: {error}") from None
    if bool(wanted.sessions) == (wanted.unused_days is not None):
        raise InvalidRequest("name sessions, or unused_days", param="sessions")
    if wanted.sessions and wanted.tenant is not None:
        raise InvalidRequest("tenant goes with unused_days", param="tenant")
    if wanted.unused_days is not None:
        gone = operator.remove_unused(wanted.unused_days, wanted.tenant)
    else:
        gone = operator.remove(wanted.sessions)
    removed: list[str] = []
    try:
        async for session, _ in gone:
            _forget_answers(daemon, session)
            removed.append(session.id)
    finally:  # Those before one that could not be removed are gone.
        _note(request, "sessions.removed", sessions=len(removed))
    return _answer({"removed": removed})


async def erase_session(request: Request) -> Response:
    """Serve `DELETE /v1/sessions/{session}`.

    Raises:
        NotFound: It is not there.
        Unavailable: No engine serves.
        StorageError: The journal takes nothing.
    """
    daemon: Daemon = request.app.state.daemon
    session, erased = await daemon.manager.operator.erase(request.path_params["session"])
    _forget_answers(daemon, session)
    receipt = erased.receipt
    _note(request, "session.erased", session=session.id, owner=session.owner.tenant)
    return _answer(
        {
            "session": session.id,
            "messages": receipt.messages,
            "shared_messages": receipt.shared_messages,
            "tokens": receipt.tokens,
            "bytes": receipt.journal_bytes,
            "blocks": receipt.blocks,
            "host_blocks": receipt.host_blocks,
            "disk_blocks": receipt.disk_blocks,
        }
    )


async def erase_tenant(request: Request) -> Response:
    """Serve `DELETE /v1/tenants/{tenant}`.

    Raises:
        Unavailable: No engine serves.
        StorageError: The journal takes nothing.
        EnvironmentProblem: The disk tier cannot be looked through.
    """
    daemon: Daemon = request.app.state.daemon
    tenant = request.path_params["tenant"]
    root = disk_tier_directory(daemon.settings)

    async def find_blocks(name: str) -> Sequence[bytes]:
        try:
            return await asyncio.to_thread(find_tenant, root, name)
        except OSError as error:
            raise EnvironmentProblem(f"{root} cannot be looked through: {error.strerror or error}") from None

    erased = await daemon.manager.operator.erase_tenant(tenant, find_blocks)
    daemon.answers.erase_tenant(tenant)
    _note(request, "tenant.erased", owner=tenant, sessions=erased.sessions)
    return _answer(msgspec.structs.asdict(erased))


def _forget_answers(daemon: Daemon, session: Session) -> None:
    daemon.answers.erase(session.owner.tenant, session.owner.user, session.id)


def _note(request: Request, event: str, **fields: object) -> None:
    principal: Principal = request.state.principal
    logger.info(event, by=principal.key_id, **fields)


def _answer(body: object) -> Response:
    return Response(encode_body(body), media_type="application/json", headers={"cache-control": "no-store"})

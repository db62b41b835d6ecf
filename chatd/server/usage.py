"""`GET /v1/usage`: tokens by tenant, key and day; one's own tenant's, and for an operator everybody's."""

from __future__ import annotations

from datetime import date

from starlette.requests import Request
from starlette.responses import Response

from chatd.errors import InvalidRequest, NotFound, PermissionDenied
from chatd.journal.records import UsageRow
from chatd.server.auth import Principal
from chatd.server.daemon import Daemon
from chatd.server.openai_frames import encode_body

USAGE_PATH = "/v1/usage"
_PARAMS = ("tenant", "from", "to")


async def get_usage(request: Request) -> Response:
    """Serve `GET /v1/usage?from=DAY&to=DAY&tenant=NAME`.

    Raises:
        InvalidRequest: A parameter is unknown, twice, or no day.
        PermissionDenied: Another tenant's, without the operator's key.
        NotFound: The daemon keeps nothing.
        Unavailable: It is loading.
        StorageError: The journal cannot be read.
    """
    daemon: Daemon = request.app.state.daemon
    principal: Principal = request.state.principal
    for name in request.query_params:
        if name not in _PARAMS or len(request.query_params.getlist(name)) > 1:
            raise InvalidRequest(
                f"{name[:64]!r} is no parameter, or is there twice; there are {', '.join(_PARAMS)}", param=name[:64]
            )
    tenant = request.query_params.get("tenant")
    if not principal.operator:
        if tenant not in (None, principal.tenant):
            raise PermissionDenied("another tenant's usage needs the operator's key", param="tenant")
        tenant = principal.tenant
    first, last = _day(request, "from"), _day(request, "to")
    daemon.check_loaded()
    if daemon.usage is None:
        raise NotFound("this daemon keeps no usage (journal.enabled)")
    rows = await daemon.usage(tenant, first, last)
    body = {"object": "list", "data": [_row(row) for row in rows]}
    return Response(encode_body(body), media_type="application/json", headers={"cache-control": "no-store"})


def _day(request: Request, name: str) -> date | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text[:64]!r} is no day such as 2026-01-31", param=name) from None


def _row(row: UsageRow) -> dict[str, object]:
    return {
        "object": "usage",
        "tenant": row.tenant,
        "key_id": row.key_id,
        "day": row.day.isoformat(),
        "requests": row.requests,
        "input_tokens": row.input_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
    }

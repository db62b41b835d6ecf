"""What a daemon says of itself and of a session, for tests that need some of it and not all by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from chatd import protocol as p

_MODEL = p.ModelInfo(id="smollm2-135m", context=8192, block_size=16, blocks=512)
_HELLO = p.Hello(
    protocol=p.SUBPROTOCOL,
    server="0.1.0",
    boot="b",
    connection="c",
    tenant="acme",
    user="ada",
    model=_MODEL,
    caps=[],
    limits=p.Limits(frame_bytes=p.MIN_FRAME_BYTES, sessions=64, inflight=8, replay_events=8192, replay_ttl_s=300),
    heartbeat_s=20,
)
_INFO = p.SessionInfo(
    id="s",
    title="",
    model=_MODEL.id,
    created_at=0,
    updated_at=0,
    num_items=2,
    context_used=1234,
    context_max=_MODEL.context,
    busy=False,
    tier="device",
)


def make_hello(**changes: Any) -> p.Hello:
    """Return the first frame of a connection to a daemon with a small model and no caps, but for `changes`."""
    return msgspec.structs.replace(_HELLO, **changes)


def make_info(ident: str = "s", title: str = "", **changes: Any) -> p.SessionInfo:
    """Return an idle session of one turn without params, as a list shows it, but for `changes`."""
    return msgspec.structs.replace(_INFO, id=ident, title=title, **changes)

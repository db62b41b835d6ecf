"""What the front and the engine say to each other: length-prefixed msgpack over a socketpair, no pickle.

The whole vocabulary can be had from here: words of both sides (`vocabulary`), what the front says (`front_messages`),
what the engine says (`engine_messages`) and its rows of the pool (`pool_messages`). The front decides where an answer
ends. This module does no I/O and knows no torch; `encode` and the two decoders are all there is to the wire.
"""

from __future__ import annotations

import msgspec

from chatd.engine.engine_messages import (
    Beams,
    BeamSequence,
    Done,
    EngineMessage,
    EngineStats,
    Erased,
    Forked,
    Inspected,
    LeaseLost,
    LeaseTier,
    Loading,
    Pong,
    Preempted,
    Prefill,
    Ready,
    RequestTimings,
    Started,
    StartFailed,
    TokenDelta,
    Tokens,
    Waiting,
)
from chatd.engine.front_messages import (
    Cancel,
    Erase,
    EraseTenant,
    Finish,
    Fork,
    FrontMessage,
    InspectBlocks,
    Ping,
    Release,
    Retain,
    SetTenant,
    Shutdown,
    Submit,
    Trim,
    WatchPool,
)
from chatd.engine.pool_messages import (
    MAX_INSPECTED,
    BlockFacts,
    BlockHolder,
    LeasePool,
    LeaseUse,
    PoolFrame,
    TenantPool,
    TierPool,
)
from chatd.engine.vocabulary import PUBLIC_TENANT, FinishReason, LeaseId, RequestClass, Tier, WaitReason

__all__ = [
    "LENGTH_PREFIX_BYTES",
    "MAX_INSPECTED",
    "MAX_MESSAGE_BYTES",
    "PUBLIC_TENANT",
    "BeamSequence",
    "Beams",
    "BlockFacts",
    "BlockHolder",
    "Cancel",
    "Done",
    "EngineMessage",
    "EngineStats",
    "Erase",
    "EraseTenant",
    "Erased",
    "Finish",
    "FinishReason",
    "Fork",
    "Forked",
    "FrontMessage",
    "InspectBlocks",
    "Inspected",
    "LeaseId",
    "LeaseLost",
    "LeasePool",
    "LeaseTier",
    "LeaseUse",
    "Loading",
    "Ping",
    "Pong",
    "PoolFrame",
    "Preempted",
    "Prefill",
    "Ready",
    "Release",
    "RequestClass",
    "RequestTimings",
    "Retain",
    "SetTenant",
    "Shutdown",
    "StartFailed",
    "Started",
    "Submit",
    "TenantPool",
    "Tier",
    "TierPool",
    "TokenDelta",
    "Tokens",
    "Trim",
    "WaitReason",
    "Waiting",
    "WatchPool",
    "decode_engine",
    "decode_front",
    "encode",
]

LENGTH_PREFIX_BYTES = 4
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_front_decoder = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: FrontMessage | EngineMessage) -> bytes:
    """Return the frame of a message: four bytes of length (big endian), then msgpack."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"{len(body)} bytes in one message, the limit is {MAX_MESSAGE_BYTES}"
    return len(body).to_bytes(LENGTH_PREFIX_BYTES, "big") + body


def decode_front(body: bytes | memoryview) -> FrontMessage:
    """Decode what the front sent."""
    return _front_decoder.decode(body)


def decode_engine(body: bytes | memoryview) -> EngineMessage:
    """Decode what the engine sent."""
    return _engine_decoder.decode(body)

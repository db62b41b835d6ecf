"""Words that the front and the engine share: ids, classes, reasons and tiers, and what every message is."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

LeaseId = NewType("LeaseId", int)

PUBLIC_TENANT = ""
"""As `Submit.tenant`: a system request, whose blocks every tenant may reuse. No key belongs to it."""


class RequestClass(StrEnum):
    """Who waits for a request: a person, nobody, or a draft that is being typed."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    PREFILL_AHEAD = "prefill-ahead"


class FinishReason(StrEnum):
    """Why a request ended; each request ends with exactly one."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    KV_EXHAUSTED = "kv_exhausted"
    FAILED = "failed"
    COMPUTED = "computed"
    """Of a request that only had its prompt computed."""


class WaitReason(StrEnum):
    """Why a request is not running now."""

    FAIR_SHARE = "fair_share"
    SLOTS = "slots"
    NO_BLOCKS = "no_blocks"
    JOIN = "join"
    SWAP_IN = "swap_in"
    RESTORE = "restore"


class Tier(StrEnum):
    """Where a session's KV is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    TOKENS = "tokens"


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all messages: tagged with the class's name, fields in order."""

"""The bounds of sessions. Knows numbers only; `chatd.config` says where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chatd.protocol import ContextPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How much one user, one session and one daemon may keep.

    Attributes:
        max_sessions_per_user: Open sessions of one user.
        max_closed_sessions_per_user: Closed ones whose text is kept; the oldest go first.
        max_kept_sessions_per_user: With a journal, all of one user's, closed ones too.
        max_kept_bytes_per_user: With a journal, the messages of all these, what forks share in each.
        max_content_bytes: Largest message.
        max_history_bytes: All messages that one request or one new session brings along.
        max_session_bytes: All messages of one session, every branch included.
        max_text_bytes_per_user: All messages of one user's sessions. Closed ones go, the longest unused first, where
            room is needed; so do those of stateless requests, which are counted by themselves.
        max_turns_per_user: Answers in progress, waiting ones included.
        replay_events: Events that a session keeps for clients that reconnect.
        replay_bytes: Bytes of those events.
        replay_ttl_s: How long they are kept.
        max_known_messages: Messages by which stateless requests find their history, all users together.
        context_policy: What becomes of a turn that does not fit into the context, in sessions that say nothing.
        idle_release_s: After so long without use a session's KV is given up; 0 is never.
        idle_archive_days: After so many days without use a session that is not pinned is archived; 0 is never.
        retention_days: After so many it is erased; None is never.
        retention_days_of: Of tenants that have another one.
        max_stateless_sessions: Sessions that stateless requests leave behind, all users together.
    """

    max_sessions_per_user: int = 1024
    max_closed_sessions_per_user: int = 1024
    max_kept_sessions_per_user: int = 4096
    max_kept_bytes_per_user: int = 4 * 2**30
    max_content_bytes: int = 2**20
    max_history_bytes: int = 4 * 2**20
    max_session_bytes: int = 16 * 2**20
    max_text_bytes_per_user: int = 256 * 2**20
    max_turns_per_user: int = 64
    replay_events: int = 8192
    replay_bytes: int = 2**20
    replay_ttl_s: float = 300.0
    max_known_messages: int = 65536
    max_stateless_sessions: int = 1024
    context_policy: ContextPolicy = "refuse"
    idle_release_s: float = 0.0
    idle_archive_days: float = 0.0
    retention_days: float | None = None
    retention_days_of: Mapping[str, float] = field(default_factory=dict)

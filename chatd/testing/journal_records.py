"""Records of conversations for tests and benchmarks of the journal: a session, its messages, an answer in flight."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import date

from chatd.engine.sampling import SamplingParams
from chatd.journal.records import ID_TYPE, MessageRecord, SessionRecord
from chatd.protocol import Params, Timings, Usage


def make_session(
    session: str,
    *,
    tenant: str = "acme",
    user: str = "ann",
    title: str = "",
    updated_at: float = 0.0,
    pinned: bool = False,
    head: str | None = None,
) -> SessionRecord:
    """Return a session's record with plain values."""
    return SessionRecord(
        id=session,
        tenant=tenant,
        user=user,
        title=title,
        system="Be brief.",
        params=Params(temperature=0.5),
        metadata={"from": "a test"},
        created_at=1.5,
        updated_at=updated_at,
        date=date(2026, 2, 28),
        archived=False,
        pinned=pinned,
        closed=False,
        head=head,
        vocabulary="v1",
        model="small",
        num_items=3,
        num_tokens=41,
        context_policy="drop_oldest",
    )


def make_user_message(message: str, content: str, parent: str | None = None) -> MessageRecord:
    """Return what a user said."""
    return MessageRecord(id=message, parent=parent, role="user", content=content, status="completed", created_at=2.0)


def make_answer(
    message: str,
    parent: str | None,
    content: str | None,
    ids: Sequence[int],
    *,
    prompt_ids: Sequence[int] = (1, 2, 3),
) -> MessageRecord:
    """Return an answer that ended; one in flight where `content` is None."""
    ended = content is not None
    return MessageRecord(
        id=message,
        parent=parent,
        role="assistant",
        content=content or "",
        status="completed" if ended else "in_progress",
        created_at=3.25,
        is_answer=True,
        prompt_ids=array(ID_TYPE, prompt_ids),
        ids=array(ID_TYPE, ids),
        reason="stop" if ended else None,
        usage=Usage.of(len(prompt_ids), 0, len(ids)) if ended else None,
        timings=Timings(queue_ms=0.5, ttft_ms=12.0, prefill_tok_s=100.0, decode_tok_s=30.0, preemptions=0)
        if ended
        else None,
        sampling=SamplingParams(max_tokens=64, temperature=0.5, seed=7),
        stop_strings=("END",),
        key_id="key_1",
        num_deaths=0 if ended else 1,
        num_inherited=2,
        log_system="9f86d081884c7d65",
        context_from="m1",
    )

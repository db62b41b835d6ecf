"""What is told of a turn at its end: timings, and the error of one that the engine failed."""

from __future__ import annotations

from chatd.engine.messages import Done, RequestTimings
from chatd.errors import ChatdError, ContextLengthExceeded, EngineError, InvalidRequest, RateLimited, Unavailable
from chatd.protocol import Timings
from chatd.sessions.turn import Turn


def timings_of(turn: Turn, engine: RequestTimings | None) -> Timings:
    """Return where a turn's time went; without the engine's word only what the front saw.

    The rates are of the last submission: what another engine computed before is in neither its tokens nor its time.
    """
    ttft_ms = 0.0 if turn.first_token_at is None else 1e3 * (turn.first_token_at - turn.accepted_at)
    if engine is None:
        return Timings(queue_ms=0.0, ttft_ms=ttft_ms, prefill_tok_s=0.0, decode_tok_s=0.0, preemptions=0)
    num_decoded = 0 if turn.text is None else max(0, len(turn.text.ids) - turn.num_submitted - 1)
    return Timings(
        queue_ms=1e3 * engine.queue_s,
        ttft_ms=ttft_ms,
        prefill_tok_s=engine.num_prefill_tokens / engine.prefill_s if engine.prefill_s > 0 else 0.0,
        decode_tok_s=num_decoded / engine.decode_s if engine.decode_s > 0 else 0.0,
        preemptions=engine.num_preemptions,
    )


def error_of(done: Done) -> ChatdError:
    """Return the error that ended a request, in the class that has its code."""
    message = done.error_message or "the engine failed while it computed this answer"
    for error in (ContextLengthExceeded, InvalidRequest, RateLimited, Unavailable):
        if done.error_code == error.code:
            return error(message)
    return EngineError(message, code=done.error_code or None)

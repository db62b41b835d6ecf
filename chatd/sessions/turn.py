"""One turn: the text of its answer as tokens come, and what is known of it until it ends. Does no I/O.

`AnswerText` is the one place where tokens become text: detokenizer, ids that have no text, stop strings held back.
Whatever the steps in which tokens arrive, the deltas concatenate to the same text, and the ids kept are the same.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from chatd.engine.messages import FinishReason, RequestClass
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch
from chatd.errors import ChatdError
from chatd.journal.records import ID_TYPE, MessageRecord
from chatd.protocol import Logprob, Params, Timings, Usage
from chatd.sessions.deaths import DeathCount
from chatd.sessions.detokenizer import Detokenizer
from chatd.sessions.logs import Node
from chatd.sessions.stop_strings import StopStrings

if TYPE_CHECKING:
    from chatd.sessions.context_policy import Dropped
    from chatd.sessions.session import Session

TokenLogprobs = tuple[float, list[tuple[int, float]]]


class TextDelta(NamedTuple):
    """More of an answer: text, the tokens behind it, and their log probabilities where asked for."""

    text: str
    num_tokens: int
    logprobs: list[Logprob] | None = None


class AnswerText:
    """Turns the tokens of one answer into deltas and finds where a stop string ends it.

    Args:
        detokenizer: A fresh one.
        stop_strings: None of them empty.
        hidden_ids: Ids that end the answer; they count as tokens and have no text.
        token_text: Gives the text of one token, for log probabilities.
    """

    __slots__ = (
        "_detokenizer",
        "_hidden_ids",
        "_num_chars",
        "_num_sent",
        "_num_uncounted",
        "_pending_logprobs",
        "_stops",
        "_token_text",
        "ids",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str] = (),
        hidden_ids: frozenset[int] = frozenset(),
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._hidden_ids = hidden_ids
        self._token_text = token_text
        self._pending_logprobs: list[tuple[int, Logprob]] = []
        self._num_chars = 0
        self._num_sent = 0
        self._num_uncounted = 0
        self.ids: array[int] = array(ID_TYPE)
        """The tokens kept: up to the one that completed a stop string, where one was completed."""

    @property
    def is_stopped(self) -> bool:
        """True once a stop string is complete; nothing is kept after it."""
        return self._stops is not None and self._stops.match is not None

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> TextDelta | None:
        """Take the next tokens; return the text that can be sent now, or None."""
        if self._stops is None and logprobs is None and self._hidden_ids.isdisjoint(ids):
            self.ids.extend(ids)
            text = self._detokenizer.push(ids)
            self._num_uncounted += len(ids)
            return self._delta(text) if text else None
        parts: list[str] = []
        for i, token_id in enumerate(ids):
            if self.is_stopped:
                break
            parts.append(self._push_one(token_id, None if logprobs is None else logprobs[i]))
        text = "".join(parts)
        return self._delta(text) if text else None

    def begin(self, ids: Sequence[int]) -> str:
        """Take the tokens that an answer begins with which goes on from another one; return the text they have."""
        delta = self.push(ids)
        self._num_uncounted = 0
        return "" if delta is None else delta.text

    def flush(self) -> TextDelta | None:
        """Return what is still held back, once the answer has ended."""
        if self.is_stopped:
            return None
        text = self._detokenizer.flush()
        self._num_chars += len(text)
        if self._stops is not None:
            text = self._stops.push(text, 0) + self._stops.flush()
        return self._delta(text) if text else None

    def _push_one(self, token_id: int, logprob: TokenLogprobs | None) -> str:
        self.ids.append(token_id)
        self._num_uncounted += 1
        if token_id in self._hidden_ids:
            return ""
        text = self._detokenizer.push((token_id,))
        self._num_chars += len(text)
        if logprob is not None:
            self._pending_logprobs.append((self._num_chars, self._show(token_id, logprob)))
        return text if self._stops is None else self._stops.push(text)

    def _delta(self, text: str) -> TextDelta:
        num_tokens, self._num_uncounted = self._num_uncounted, 0
        self._num_sent += len(text)
        if not self._pending_logprobs:
            return TextDelta(text, num_tokens)
        # A token's log probability goes out with the last of its text, so that it tells nothing of a stop string.
        num_ready = 0
        for end, _ in self._pending_logprobs:
            if end > self._num_sent:
                break
            num_ready += 1
        ready = [logprob for _, logprob in self._pending_logprobs[:num_ready]]
        del self._pending_logprobs[:num_ready]
        return TextDelta(text, num_tokens, ready)

    def _show(self, token_id: int, logprob: TokenLogprobs) -> Logprob:
        assert self._token_text is not None, "log probabilities without a vocabulary"
        text = self._token_text
        return Logprob(
            token=text(token_id), logprob=logprob[0], top=[(text(other), value) for other, value in logprob[1]]
        )


class TurnSink(Protocol):
    """Where a turn's answer goes: a session's transcript, or one HTTP request."""

    def on_delta(self, turn: Turn, delta: TextDelta) -> None:
        """Take more of the answer."""
        ...

    def on_end(self, turn: Turn, end: TurnEnd) -> None:
        """Take the one end of the turn; the session is free again."""
        ...


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended.

    Attributes:
        reason: Of the protocol: "stop", "max_output_tokens", …, or "failed".
        completed: The model ended its answer, by itself or by a stop string.
        usage: Of the tokens that are kept.
        timings: Where the time went.
        error: Of a failed turn.
        others: Of a search, what it found beside the answer, best first.
    """

    reason: str
    completed: bool
    usage: Usage | None = None
    timings: Timings | None = None
    error: ChatdError | None = None
    others: Sequence[OtherAnswer] = ()


@dataclass(frozen=True, slots=True)
class OtherAnswer:
    """An answer that a search found and that was not taken.

    Attributes:
        text: Of it, complete.
        answer: Its ids.
        reason: As in `TurnEnd`.
    """

    text: str
    answer: AnswerText
    reason: str


@dataclass(slots=True, eq=False)
class Turn:
    """A turn in flight.

    Attributes:
        session: The session whose one turn it is.
        sink: Where the answer goes.
        response: Names the answer in progress.
        params: The message's parameters over the session's.
        request_class: Its place in the schedule.
        accepted_at: When the message came, in monotonic seconds.
        request: In the engine; None while the prompt is being encoded.
        base_len: What the last submission took the lease to hold.
        num_submitted: Tokens of the answer that were there at the last submission.
        answer: The answer's message.
        first_node: The first message that the turn added, the answer where it added no other.
        previous_head: Where the conversation stood before it.
        given_title: What it called a session that had no title; a failed turn takes it back.
        text: Makes text of tokens.
        num_cached_tokens: As the engine said.
        first_token_at: In monotonic seconds.
        last_token_at: Likewise.
        decided: How the front ended the answer; tokens that come later are dropped.
        cancel_reason: What a cancelled answer is called, where not that.
        ended: Set at the end.
        sample_of: The turn whose prompt this one answers again.
        beam: How it searches for its answer, where it does.
        others: What the search found beside the answer.
        dropped: What its context has left out that the one before had.
        num_inherited: Tokens of the answer that it goes on from, which were asked for before.
        key_id: Whose key asked for it.
        record: The answer as the journal has it, in progress; None where it is not kept.
        is_ending: Its end is being made durable, or is over.
        deaths: Of the engines that it ran on.
        is_running: The engine has begun with it.
        is_interrupted: Its engine is gone, and no other one has begun with it yet.
    """

    session: Session
    sink: TurnSink
    response: str
    params: Params
    request_class: RequestClass
    accepted_at: float
    request: RequestId | None = None
    base_len: int = 0
    num_submitted: int = 0
    answer: Node | None = None
    first_node: Node | None = None
    previous_head: Node | None = None
    given_title: str | None = None
    text: AnswerText | None = None
    num_cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    decided: FinishReason | None = None
    cancel_reason: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    sample_of: Turn | None = None
    beam: BeamSearch | None = None
    others: list[OtherAnswer] = field(default_factory=list)
    dropped: Dropped | None = None
    num_inherited: int = 0
    key_id: str = ""
    record: MessageRecord | None = None
    is_ending: bool = False
    deaths: DeathCount = field(default_factory=DeathCount)
    is_running: bool = False
    is_interrupted: bool = False

"""Fakes for whoever uses sessions without a model: an engine that says what it is told, a vocabulary of bytes, a chat.

```
engine = ScriptedEngine(reply=lambda ids: encode_text("hello") + [TURN_END])
manager = make_manager(engine)
await manager.user_message(...)
engine.run()                       every answer is computed, token by token, and the manager has seen all of it
```
The engine keeps leases as the real one does: it refuses a base that it does not hold, trims what is beyond it, and
ends each request once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from itertools import count
from typing import Any

from chatd.engine.client import EngineDied, EngineEvent
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import (
    Beams,
    BeamSequence,
    BlockFacts,
    Cancel,
    Done,
    EngineMessage,
    Erase,
    Erased,
    EraseTenant,
    Finish,
    FinishReason,
    Fork,
    Forked,
    FrontMessage,
    InspectBlocks,
    Inspected,
    LeaseId,
    LeaseLost,
    Ready,
    Release,
    RequestTimings,
    Started,
    Submit,
    TokenDelta,
    Tokens,
)
from chatd.engine.plan import RequestId
from chatd.engine.pulse import NOT_KNOWN
from chatd.errors import InvalidRequest, Unavailable
from chatd.protocol import Event, Message
from chatd.sessions.detokenizer import Detokenizer, TokenBytes
from chatd.sessions.limits import SessionLimits
from chatd.sessions.manager import SessionManager
from chatd.sessions.model_profile import ModelProfile
from chatd.sessions.ports import Journal
from chatd.testing.engine import NAMESPACE, FakeClock, ProvenanceRunner, Truth, chains_of

SYSTEM, USER, ASSISTANT, TURN_END, END_OF_TEXT = range(256, 261)
VOCAB_SIZE = 261
BLOCK_SIZE = 16
STOP_IDS = frozenset({TURN_END, END_OF_TEXT})
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


def encode_text(text: str) -> list[int]:
    """Return the ids of a text in the vocabulary of bytes."""
    return list(text.encode())


class ByteVocabulary:
    """Every byte is a token, and there are five control tokens."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        chars = {byte: chr(byte) for byte in printable}
        chars.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in chars)})
        self.token_bytes = TokenBytes({"type": "ByteLevel"}, chars.get, range(256, VOCAB_SIZE))

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return Detokenizer(self.token_bytes)


class ByteChatEncoder:
    """A chat format over the vocabulary of bytes: role, content, turn end."""

    turn_end_id: int | None = TURN_END
    stop_token_ids = STOP_IDS

    def begin(self, system: str | None, messages: Sequence[Message], *, date: Date) -> list[int]:
        """Return the ids of a whole conversation up to where the answer begins."""
        ids = [] if system is None else [SYSTEM, *encode_text(system), TURN_END]
        return ids + self._said(messages)

    def extend(self, new_messages: Sequence[Message], *, answer_ended: bool, date: Date) -> list[int]:
        """Return the ids to append after an answer."""
        return [*([] if answer_ended else [TURN_END]), *self._said(new_messages)]

    def settle(self, answer_ids: Sequence[int]) -> None:
        """Return None: no answer has thoughts."""

    def _said(self, messages: Sequence[Message]) -> list[int]:
        if not messages or messages[-1].role != "user":
            raise InvalidRequest("last message must be the user's", param="messages")
        ids: list[int] = []
        for message in messages:
            ids += [_ROLES[message.role], *encode_text(message.content), TURN_END]
        return [*ids, ASSISTANT]


@dataclass(slots=True)
class _Running:
    submit: Submit
    num_prompt: int
    num_cached: int
    answer: list[int]
    num_sent: int = 0
    is_started: bool = False


class ScriptedEngine:
    """An `EngineGateway` without a process; nothing happens until it is told to step.

    Args:
        reply: Gives the ids of the answer to a whole log; an answer that does not end with a stop id goes on to
            `max_tokens`, by repeating its last id.
        context: Tokens of a context.
        is_ready: It serves from the start.

    Attributes:
        blocks: What it answers to questions about blocks.
    """

    def __init__(
        self, reply: Callable[[list[int]], Sequence[int]], *, context: int = 4096, is_ready: bool = True
    ) -> None:
        self.reply = reply
        self.blocks: list[BlockFacts] = []
        self.ready: Ready | None = None
        self.sent: list[FrontMessage] = []
        self.leases: dict[LeaseId, list[int]] = {}
        self.running: dict[RequestId, _Running] = {}
        self.on_messages: Callable[[Sequence[EngineEvent]], None] | None = None
        self._context = context
        self._outbox: list[EngineMessage] = []
        self._unread: deque[list[EngineEvent]] = deque()
        self._changed = asyncio.Event()
        self._step = 0
        if is_ready:
            self.ready = self._ready_message()

    @property
    def submits(self) -> list[Submit]:
        """Every submission so far."""
        return [message for message in self.sent if isinstance(message, Submit)]

    def send(self, message: FrontMessage) -> None:
        """Take a message; what it causes is delivered at the next step."""
        if self.ready is None:
            if isinstance(message, Submit | Fork | Erase | EraseTenant | InspectBlocks):
                raise Unavailable("the engine is restarting", code="engine_unavailable", retry_after_ms=1000)
            return
        self.sent.append(message)
        match message:
            case Submit():
                self._submit(message)
            case Fork():
                held = self.leases.get(message.lease)
                shared = 0
                if held is not None and message.new_lease not in self.leases and message.at <= len(held):
                    self.leases[message.new_lease] = held[: message.at]
                    shared = message.at
                self._outbox.append(Forked(message.new_lease, shared, -(-shared // BLOCK_SIZE)))
            case Release():
                self.leases.pop(message.lease, None)
            case Erase():
                held = self.leases.pop(message.lease, [])
                self._outbox.append(Erased(message.lease, -(-len(held) // BLOCK_SIZE), 0, 0))
            case EraseTenant():
                self._outbox.append(Erased(message.lease, 0, 0, len(message.digests)))
            case InspectBlocks():
                self._outbox.append(Inspected(message.question, self._step, list(self.blocks)))
            case Cancel():
                self._end(message.request, FinishReason.CANCELLED)
            case Finish():
                if message.lease in self.leases:
                    del self.leases[message.lease][message.length :]
                self._end(message.request, FinishReason.STOP_STRING)
            case _:
                pass

    async def batches(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield what each step brought, for ever."""
        while True:
            while not self._unread:
                self._changed.clear()
                await self._changed.wait()
            yield self._unread.popleft()

    def step(self, num_tokens: int = 1) -> None:
        """Give every running request its next tokens, and deliver everything."""
        self.flush()
        for _ in range(num_tokens):
            deltas = []
            ended = []
            for request, running in self.running.items():
                if running.submit.compute_only:
                    ended.append((request, FinishReason.COMPUTED))
                    continue
                token = running.answer[running.num_sent]
                running.num_sent += 1
                self.leases[running.submit.lease].append(token)
                logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
                if running.submit.params.logprobs is not None:
                    logprobs = [(-0.5, [(token, -0.5)][: running.submit.params.logprobs])]
                deltas.append(TokenDelta(request, [token], logprobs))
                if token in running.submit.params.stop_token_ids:
                    ended.append((request, FinishReason.STOP))
                elif running.num_sent >= running.submit.params.max_tokens:
                    ended.append((request, FinishReason.MAX_OUTPUT_TOKENS))
            if deltas:
                self._step += 1
                self._outbox.append(Tokens(self._step, deltas))
            for request, reason in ended:
                self._end(request, reason)
        self.flush()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing runs."""
        self.flush()
        for _ in range(max_steps):
            if not self.running:
                return
            self.step()
        raise AssertionError(f"requests still run after {max_steps} steps")

    def flush(self) -> None:
        """Deliver what waits, and what that causes."""
        while self._outbox:
            messages, self._outbox = self._outbox, []
            self._deliver(list(messages))

    def end(self, request: RequestId, reason: FinishReason, error_code: str = "", error_message: str = "") -> None:
        """End a request for any reason, and deliver it."""
        self._end(request, reason, error_code, error_message)
        self.flush()

    def lose(self, lease: LeaseId) -> None:
        """Forget a lease, as under pressure."""
        self.leases.pop(lease, None)

    def die(self, alone: int = NOT_KNOWN) -> None:
        """End as a process does: with everything in flight; what was not delivered is lost."""
        self.ready = None
        self._outbox.clear()
        self.leases.clear()
        self.running.clear()
        self._deliver([EngineDied("it was killed", -9, alone)])

    def restart(self) -> None:
        """Serve again, knowing nothing."""
        self.ready = self._ready_message()
        self._deliver([self.ready])

    def say(self, *messages: EngineMessage) -> None:
        """Deliver messages in one batch."""
        self._deliver(list(messages))

    def _ready_message(self) -> Ready:
        return Ready(4096, BLOCK_SIZE, self._context, VOCAB_SIZE, 0, "fp32", [])

    def _submit(self, message: Submit) -> None:
        held = self.leases.get(message.lease, [])
        if any(running.submit.lease == message.lease for running in self.running.values()):
            raise AssertionError(f"lease {message.lease} has a request already")
        if len(held) < message.base_len:
            self._outbox.append(LeaseLost(message.request, message.lease))
            return
        log = [*held[: message.base_len], *message.new_ids]
        self.leases[message.lease] = log
        if message.beam is not None:
            self._search(message, log)
            return
        prompt, answered = log[: len(log) - message.num_answered], log[len(log) - message.num_answered :]
        answer = [] if message.compute_only else [*self.reply(list(prompt))]
        if not message.compute_only and (not answer or answer[-1] not in message.params.stop_token_ids):
            answer += [answer[-1] if answer else 0] * (message.params.max_tokens - len(answer))
        assert answer[: len(answered)] == answered, "an answer goes on after tokens that are not its own"
        running = _Running(message, len(prompt), min(message.base_len, len(prompt)), answer, len(answered))
        self.running[message.request] = running
        self._outbox.append(Started(message.request, running.num_prompt, running.num_cached, 0.0))

    def _search(self, message: Submit, log: list[int]) -> None:
        """Find as many answers as are wanted, by asking for a reply so often."""
        assert message.beam is not None, "no search"
        found = []
        for rank in range(message.beam.num_returned):
            ids = [*self.reply(list(log))]
            ends = bool(ids) and ids[-1] in message.params.stop_token_ids
            found.append(BeamSequence(ids, -0.5 - rank, FinishReason.STOP if ends else FinishReason.MAX_OUTPUT_TOKENS))
        best = found[0]
        self.running[message.request] = _Running(message, len(log), message.base_len, best.ids, len(best.ids))
        self.leases[message.lease] = [*log, *best.ids]
        self._outbox.append(Started(message.request, len(log), message.base_len, 0.0))
        self._outbox.append(Beams(message.request, found))
        self._end(message.request, best.reason)

    def _end(self, request: RequestId, reason: FinishReason, error_code: str = "", error_message: str = "") -> None:
        running = self.running.pop(request, None)
        if running is not None:
            timings = RequestTimings(0.001, 0.5, 0.25, running.num_prompt - running.num_cached, 0)
            self._outbox.append(
                Done(
                    request,
                    reason,
                    running.num_prompt,
                    running.num_cached,
                    running.num_sent,
                    timings,
                    error_code,
                    error_message,
                )
            )

    def _deliver(self, batch: list[EngineEvent]) -> None:
        if self.on_messages is not None:
            self.on_messages(batch)
        else:
            self._unread.append(batch)
            self._changed.set()


class CoreEngine:
    """An `EngineGateway` over the real engine core, whose runner checks every slot against what the sessions hold.

    Args:
        num_blocks: Of the pool.
        answer_ids: What answers are made of, in place of the whole vocabulary.
        config: Of the engine, by name.
    """

    def __init__(self, num_blocks: int = 256, *, answer_ids: Sequence[int] = (), **config: Any) -> None:
        self.clock = FakeClock()
        self._answer_ids = answer_ids
        settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "namespace": NAMESPACE,
            "max_model_len": 4096,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "eos_token_ids": STOP_IDS,
            "vocab_size": VOCAB_SIZE,
            **config,
        }
        self.config = EngineConfig(**settings)
        self.runner, self.core = self._start()
        self.ready: Ready | None = self._ready_message()
        self.sent: list[FrontMessage] = []
        self.on_messages: Callable[[Sequence[EngineEvent]], None] | None = None
        self.log_of: Callable[[RequestId], tuple[str, Sequence[int]]] | None = None
        """Gives the tenant and the ids of a request, as the sessions have them."""
        self._outbox: list[EngineEvent] = []

    def send(self, message: FrontMessage) -> None:
        """Give the core a message; what it says is delivered at the next step."""
        if self.ready is None:
            raise Unavailable("the engine is restarting", code="engine_unavailable", retry_after_ms=1000)
        self.sent.append(message)
        self._outbox += self.core.handle(message, self.clock())

    async def batches(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield nothing: everything is delivered by `on_messages`."""
        return
        yield []

    def step(self) -> None:
        """Compute one step and deliver what it says."""
        self.clock.advance(0.01)
        self._deliver()
        self._outbox += self.core.step(self.clock())
        self._deliver()
        self.core.check_invariants()

    def flush(self) -> None:
        """Deliver what waits, and what that causes."""
        self._deliver()

    def die(self, alone: int = NOT_KNOWN) -> None:
        """End as a process does: what was not delivered is lost, and so is everything that it held."""
        self.ready = None
        self.runner, self.core = self._start()
        self._outbox = [EngineDied("it was killed", -9, alone)]
        self._deliver()

    def restart(self) -> None:
        """Serve again, knowing nothing."""
        self.ready = self._ready_message()
        self._outbox.append(self.ready)
        self._deliver()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing runs."""
        self._deliver()
        for _ in range(max_steps):
            if not self.core.has_work and not self._outbox:
                return
            self.step()
        raise AssertionError(f"requests still run after {max_steps} steps")

    def _start(self) -> tuple[ProvenanceRunner, EngineCore]:
        config = self.config
        runner = ProvenanceRunner(config.num_blocks, config.block_size, VOCAB_SIZE, truth=self._truth, clock=self.clock)
        runner.answer_ids = self._answer_ids
        return runner, EngineCore(config, runner, self.clock)

    def _ready_message(self) -> Ready:
        config = self.config
        return Ready(config.num_blocks, config.block_size, config.max_model_len, VOCAB_SIZE, 0, "fp32", [])

    def _deliver(self) -> None:
        while self._outbox and self.on_messages is not None:
            batch, self._outbox = self._outbox, []
            self.on_messages(batch)

    def _truth(self, request: RequestId) -> Truth:
        assert self.log_of is not None, "nobody says what the requests are"
        group = self.core.scheduler.requests[request].group
        tenant, ids = self.log_of(request if group is None else group.head.request_id)
        if group is not None:
            # A search's prompt is what the sessions know of it; what a beam goes on with is the engine's to say.
            beam = self.core.scheduler.requests[request].lease.token_ids
            assert list(beam[: len(ids)]) == list(ids), f"beam {request} has another prompt"
            ids = beam
        return Truth(tenant or None, chains_of(ids))


@dataclass
class RecordingSubscriber:
    """A connection that keeps every event."""

    connection_id: str = "con_1"
    events: list[Event] = field(default_factory=list)

    def deliver(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)

    def take(self) -> list[Event]:
        """Return what came since the last call."""
        events, self.events = self.events, []
        return events


def make_manager(
    engine: ScriptedEngine | CoreEngine,
    *,
    limits: SessionLimits | None = None,
    max_tokens: int | None = 64,
    context: int = 4096,
    encoder: ByteChatEncoder | None = None,
    clock: Callable[[], float] = lambda: 1000.0,
    monotonic: Callable[[], float] = lambda: 50.0,
    journal: Journal | None = None,
    boot: str = "boot_1",
    vocabulary: str = "bytes",
) -> SessionManager:
    """Return a manager over the vocabulary of bytes, with counted ids, a clock that stands still and seed 7.

    A manager of another boot over the same journal is the daemon after a restart; its ids have the boot in them.
    """
    numbers = count(1)
    suffix = "" if boot == "boot_1" else f"_{boot}"
    manager = SessionManager(
        engine,
        encoder or ByteChatEncoder(),
        ModelProfile(
            id="bytes",
            context=context,
            vocab_size=VOCAB_SIZE,
            stop_token_ids=STOP_IDS,
            max_tokens=max_tokens,
            vocabulary=vocabulary,
        ),
        limits or SessionLimits(),
        vocabulary=ByteVocabulary(),
        boot=boot,
        clock=clock,
        monotonic=monotonic,
        new_id=lambda prefix: f"{prefix}_{next(numbers)}{suffix}",
        draw=lambda: 7,
        journal=journal,
    )
    engine.on_messages = manager.on_engine_messages
    if isinstance(engine, CoreEngine):
        engine.log_of = manager.log_of_request
    return manager

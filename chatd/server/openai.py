"""The OpenAI-compatible door: `GET /v1/models` and `POST /v1/chat/completions`, streamed and not.

Here a disconnect cancels the answer, the opposite of the native door: the client has no way to come back for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from chatd.engine.messages import RequestClass
from chatd.errors import AuthenticationError, ChatdError, EngineError, InvalidRequest, NotFound, Unavailable
from chatd.protocol import Logprob
from chatd.server.auth import Principal
from chatd.server.daemon import Daemon, Stream
from chatd.server.http_errors import BodyTooLarge, BodyTooSlow
from chatd.server.logging import get_logger
from chatd.server.openai_frames import (
    DONE,
    AnswerMessage,
    ChatCompletion,
    Choice,
    Chunk,
    ChunkChoice,
    ChunkWithUsage,
    CompletionUsage,
    Delta,
    encode_body,
    encode_event,
    error_body,
    finish_reason_of,
    logprobs_of,
    model_body,
)
from chatd.server.openai_schema import CONVERSATION_ID_CHARS, ChatRequest, beam_search_of, decode_chat_request
from chatd.server.policy import owner_of
from chatd.sessions.manager import Choices, CompletionRequest
from chatd.tenants.quotas import KeyQuota

BODY_TIMEOUT_S = 30.0
REVOKED_TIMEOUT_S = 2.0
"""How long a reader whose key was revoked has to read that."""

SEND_TIMEOUT_S = 30.0
CONVERSATION_HEADERS = ("x-conversation-id", "x-openwebui-chat-id")
T = TypeVar("T")
logger = get_logger("chatd.server")


async def list_models(request: Request) -> Response:
    """Serve `GET /v1/models`."""
    daemon: Daemon = request.app.state.daemon
    model = daemon.manager.model
    body = {"object": "list", "data": [model_body(model.id, daemon.created, model.context)]}
    return Response(encode_body(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """Serve `GET /v1/models/{model}`."""
    daemon: Daemon = request.app.state.daemon
    model = daemon.manager.model
    _check_model(request.path_params["model"], model.id)
    return Response(encode_body(model_body(model.id, daemon.created, model.context)), media_type="application/json")


async def chat_completions(request: Request) -> Response:
    """Serve `POST /v1/chat/completions`.

    Raises:
        ChatdError: The request is refused; nothing was done.
    """
    daemon: Daemon = request.app.state.daemon
    principal: Principal = request.state.principal
    daemon.check_accepting()
    manager = daemon.manager
    chat, messages, params = decode_chat_request(await read_body(request, daemon.settings.server.max_body_bytes))
    _check_model(chat.model, manager.model.id)
    wanted = CompletionRequest(
        messages=messages,
        params=params,
        conversation_id=_conversation_id(request, chat),
        request_class=RequestClass(principal.key_class),
        key_id=principal.key_id,
        num_choices=chat.num_choices,
        beam=beam_search_of(chat),
    )
    quota = daemon.quota_of(principal)
    num_answers = chat.num_choices if wanted.beam is None else wanted.beam.width
    quota.admit(num_answers)
    try:
        choices = await manager.choose(owner_of(principal), wanted)
    except BaseException as error:
        quota.refund(num_answers)
        if isinstance(error, InvalidRequest):
            raise _in_words_of_this_door(error) from None
        raise
    # From here on the answer has an owner: sending it ends the generation and settles the quota, whatever happens.
    answer = _Answer(daemon, principal, quota, num_answers, choices, chat)
    if not daemon.authenticator.is_current(principal):
        answer.cancel()
    return StreamedAnswer(answer) if chat.stream else WholeAnswer(answer)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return a body, read no further than `max_bytes`.

    Raises:
        BodyTooLarge: Says both numbers where the client told its own.
        BodyTooSlow: It took longer than `BODY_TIMEOUT_S`.
    """
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > max_bytes:
        raise BodyTooLarge(f"the body has {told[:20]} bytes, the limit is {max_bytes} (server.max_body_bytes)")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not read", param="content-encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes (server.max_body_bytes)")
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except ClientDisconnect:
        raise InvalidRequest("the client left before its body was read", code="disconnected") from None
    return bytes(body)


def _check_model(named: str, served: str) -> None:
    if named != served:
        raise NotFound(
            f"the model {named[:128]!r} is not served here", code="model_not_found", param="model", hint=f"use {served}"
        )


def _conversation_id(request: Request, chat: ChatRequest) -> str | None:
    for name in CONVERSATION_HEADERS:
        value = request.headers.get(name)
        if value:
            return value[:CONVERSATION_ID_CHARS]
    return chat.prompt_cache_key[:CONVERSATION_ID_CHARS] if chat.prompt_cache_key else None


def _in_words_of_this_door(error: InvalidRequest) -> InvalidRequest:
    """Return a refusal of sessions for a client that sends messages and has no session."""
    if error.param in ("content", "input"):
        error.param, error.hint = "messages", "send less"
    return error


class _Answer:
    """The choices of one request on their way out; they end with their client, with its key, or by themselves."""

    def __init__(
        self,
        daemon: Daemon,
        principal: Principal,
        quota: KeyQuota,
        num_answers: int,
        choices: Choices,
        chat: ChatRequest,
    ) -> None:
        self.choices = choices
        self.chat = chat
        self.id = f"chatcmpl-{choices.id.removeprefix('resp_')}"
        self.created = int(time.time())
        self.fingerprint = f"chatd-{daemon.version}"
        self._daemon = daemon
        self._quota = quota
        self._num_answers = num_answers
        self._stream = Stream(principal.key_id, self.cancel)
        self._revoked = asyncio.Event()
        daemon.streams.add(self._stream)

    def cancel(self) -> None:
        """End it from outside: its key was revoked."""
        self._revoked.set()

    async def race(self, work: Awaitable[T], receive: Receive) -> T | None:
        """Return what `work` does, or None where the client left first; the generation is over in any case.

        Raises:
            AuthenticationError: The key was revoked.
        """
        working = asyncio.ensure_future(work)
        left = asyncio.ensure_future(_until_disconnect(receive))
        revoked = asyncio.ensure_future(self._revoked.wait())
        try:
            await asyncio.wait((working, left, revoked), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            logger.info("completion.cancelled", id=self.id)
            if left.done():
                return None
            raise AuthenticationError("the key was revoked")
        finally:
            for task in (working, left, revoked):
                task.cancel()
            await asyncio.gather(working, left, revoked, return_exceptions=True)
            self._end()

    def _end(self) -> None:
        self.choices.cancel()
        self._daemon.streams.discard(self._stream)
        self._daemon.spawn(self._charge(), "charge of an answer")

    async def _charge(self) -> None:
        """Charge what was computed, also for a client that has left: it is known when the generation is over."""
        num_tokens = 0
        try:
            await self.choices.ended()
            num_tokens = self.choices.num_charged_tokens
        finally:
            self._quota.finish(num_tokens, self._num_answers)

    def check(self) -> None:
        """Raise where the answer failed, once it has ended.

        Raises:
            ChatdError: What went wrong.
        """
        error = self.choices.error
        if error is not None:
            raise error
        if self.is_stopping:
            raise Unavailable("the daemon is stopping", code="draining", retry_after_ms=5000)

    @property
    def is_stopping(self) -> bool:
        """True where the daemon ended a choice to stop: nobody else who cancels here waits for the answer."""
        reasons = {completion.finish_reason for completion in self.choices.completions}
        return self._daemon.draining and not reasons.isdisjoint(("draining", "cancelled"))

    def usage(self) -> CompletionUsage:
        """Return the tokens of choices that have ended: the prompt once, and every answer's."""
        usage = self.choices.usage
        assert usage is not None, "an answer without usage"
        return CompletionUsage.of(usage)


async def _until_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


class WholeAnswer(Response):
    """An answer in one piece."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answer, then send it."""
        body = await self._answer.race(self._collect(), receive)
        if body is not None:
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _collect(self) -> bytes:
        answer = self._answer
        texts: list[list[str]] = [[] for _ in answer.choices.completions]
        logprobs: list[list[Logprob]] = [[] for _ in answer.choices.completions]
        async for event in answer.choices:
            if event.delta is not None:
                texts[event.index].append(event.delta.text)
                logprobs[event.index] += event.delta.logprobs or ()
        answer.check()
        choices = [
            Choice(
                index=index,
                message=AnswerMessage(content="".join(texts[index])),
                finish_reason=finish_reason_of(completion.finish_reason or ""),
                logprobs=logprobs_of(logprobs[index] if answer.chat.logprobs else None),
            )
            for index, completion in enumerate(answer.choices.completions)
        ]
        return encode_body(
            ChatCompletion(
                id=answer.id,
                created=answer.created,
                model=answer.chat.model,
                system_fingerprint=answer.fingerprint,
                choices=choices,
                usage=answer.usage(),
            )
        )


class StreamedAnswer(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, answer: _Answer) -> None:
        super().__init__()
        self._answer = answer
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the answer ends or the client leaves."""
        abort = scope.get(ABORT_EXTENSION)
        try:
            await self._answer.race(self._stream(send, abort), receive)
        except AuthenticationError as error:
            if not self._has_begun:
                raise
            last = {"type": "http.response.body", "body": encode_event(error_body(error)) + DONE}
            await _send_in_time(send, last, abort, REVOKED_TIMEOUT_S)

    async def _stream(self, send: Send, abort: Callable[[], None] | None) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        self._has_begun = True
        await _send_in_time(send, {"type": "http.response.start", "status": 200, "headers": headers}, abort)
        async for event in self._events():
            await _send_in_time(send, {"type": "http.response.body", "body": event, "more_body": True}, abort)
        await _send_in_time(send, {"type": "http.response.body", "body": DONE}, abort)

    async def _events(self) -> AsyncIterator[bytes]:
        answer = self._answer
        completions = answer.choices.completions
        for index in range(len(completions)):
            yield self._event(index, Delta(role="assistant", content=""))
        try:
            async for event in answer.choices:
                delta = event.delta
                if delta is not None:
                    logprobs = logprobs_of(delta.logprobs if answer.chat.logprobs else None)
                    yield self._event(event.index, Delta(content=delta.text), logprobs=logprobs)
                elif completions[event.index].error is None and not answer.is_stopping:
                    reason = finish_reason_of(completions[event.index].finish_reason or "")
                    yield self._event(event.index, Delta(), finish_reason=reason)
            answer.check()
        except ChatdError as error:
            yield encode_event(error_body(error))
            return
        except Exception:
            logger.exception("completion.failed", id=answer.id)
            yield encode_event(error_body(EngineError("the answer failed; the daemon's log says more")))
            return
        if self._with_usage:
            yield encode_event(self._chunk(None, answer.usage()))

    def _event(self, index: int, delta: Delta, **fields: Any) -> bytes:
        return encode_event(self._chunk(ChunkChoice(index=index, delta=delta, **fields)))

    @property
    def _with_usage(self) -> bool:
        options = self._answer.chat.stream_options
        return options is not None and options.include_usage

    def _chunk(self, choice: ChunkChoice | None, usage: CompletionUsage | None = None) -> Chunk:
        answer = self._answer
        fields: dict[str, Any] = {
            "id": answer.id,
            "created": answer.created,
            "model": answer.chat.model,
            "system_fingerprint": answer.fingerprint,
            "choices": (choice,) if choice is not None else (),
        }
        return ChunkWithUsage(**fields, usage=usage) if self._with_usage else Chunk(**fields)


ABORT_EXTENSION = "chatd.abort"
"""In an HTTP scope: drops the connection at once, with what it has not read."""


async def _send_in_time(
    send: Send, message: AsgiMessage, abort: Callable[[], None] | None, timeout_s: float = SEND_TIMEOUT_S
) -> None:
    """Send, or end the connection of a reader that does not read."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError:
        logger.info("completion.reader_too_slow")
        if abort is not None:
            abort()
        raise ClientDisconnect from None

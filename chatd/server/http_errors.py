"""Errors as HTTP answers, on every door the same."""

from __future__ import annotations

import http

from starlette.responses import Response

from chatd.errors import ChatdError, InvalidRequest
from chatd.server.openai_frames import encode_body, error_body


class BodyTooLarge(InvalidRequest):
    """A body above `server.max_body_bytes`."""

    code = "body_too_large"
    http_status = 413


class BodyTooSlow(InvalidRequest):
    """A body that did not arrive in time."""

    code = "body_timeout"
    http_status = 408


class HttpRefusal(ChatdError):
    """A path or a method that does not exist.

    Args:
        status: Of the answer.
    """

    error_type = "invalid_request_error"

    def __init__(self, status: int) -> None:
        phrase = http.HTTPStatus(status).phrase.lower()
        super().__init__(phrase, code=phrase.replace(" ", "_"))
        self.status = status


def error_response(error: ChatdError) -> Response:
    """Return the answer that shows an error; with the headers that the official clients read to retry."""
    status = error.status if isinstance(error, HttpRefusal) else error.http_status
    headers: dict[str, str] = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, -(-error.retry_after_ms // 1000)))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if status == http.HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Response(encode_body(error_body(error)), status, headers, "application/json")

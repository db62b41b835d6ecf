"""Logs: one line per event on stderr, JSON or readable, without prompt text and without keys.

What a stranger wrote (titles, ids, header values) cannot forge a line or steer a terminal: JSON is ASCII, and the
readable form has its control and direction characters escaped.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

REQUEST_ID = re.compile(r"[0-9A-Za-z._-]{1,128}\Z")
_KEY = re.compile(r"ck_[0-9A-Za-z]+_[0-9A-Za-z]+")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_MAX_VALUE_CHARS = 2000

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]


def configure_logging(level: Level, output_format: Format, stream: TextIO | None = None) -> None:
    """Send chatd's and uvicorn's events to `stream` (stderr), each as one line."""
    stream = stream if stream is not None else sys.stderr
    readable = output_format == "console" or (output_format == "auto" and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        _redact,
    ]
    if readable:
        renderers += [_escape, structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0)]
    else:
        renderers.append(structlog.processors.JSONRenderer(sort_keys=False, ensure_ascii=True))
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=renderers))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("chatd").setLevel(level.upper())
    # uvicorn's own lines carry whole URLs; the access lines are ours.
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").disabled = True
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> Any:
    """Return a logger whose events are names with fields: `logger.info("turn.finished", session=…)`."""
    return structlog.stdlib.get_logger(name)


def is_request_id(text: str) -> bool:
    """True for a request id that may be echoed and logged."""
    return REQUEST_ID.match(text) is not None and not text.startswith("ck_")


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: _map_text(value, _hide_keys) for name, value in event.items()}


def _escape(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    traceback = event.pop("exception", None)
    escaped: dict[str, Any] = {name: _map_text(value, _escape_controls) for name, value in event.items()}
    if traceback is not None:
        escaped["exception"] = "\n".join(_escape_controls(line) for line in str(traceback).splitlines())
    return escaped


def _map_text(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_text(inner, change) for inner in value]
    if isinstance(value, dict):
        return {name: _map_text(inner, change) for name, inner in value.items()}
    return value


def _hide_keys(text: str) -> str:
    hidden = _KEY.sub("ck_[hidden]", text)
    return hidden if len(hidden) <= _MAX_VALUE_CHARS or "\n" in hidden else hidden[:_MAX_VALUE_CHARS] + "…"


def _escape_controls(text: str) -> str:
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)

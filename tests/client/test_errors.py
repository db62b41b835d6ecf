"""Errors are rebuilt on the client's side as the class that the daemon raised."""

import ast
from pathlib import Path

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

from chatd import errors
from chatd.client.errors import error_from, error_of_connect
from chatd.errors import ChatdError, Unavailable
from chatd.protocol import ErrorBody

SOURCES = [*Path(errors.__file__).parent.glob("server/*.py"), *Path(errors.__file__).parent.glob("sessions/*.py")]
SOURCES.append(Path(errors.__file__).parent / "engine" / "client.py")


def raised() -> set[tuple[str, str]]:
    """Return the class and code of every refusal that the daemon's source makes."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(errors, node.func.id):
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        found.add((node.func.id, str(keyword.value.value)))
    return {pair for pair in found if not issubclass(getattr(errors, pair[0]), errors.StartupError)}


@pytest.mark.parametrize(("kind", "code"), sorted(raised()))
def test_a_code_comes_back_as_the_class_that_was_raised(kind: str, code: str) -> None:
    error: ChatdError = getattr(errors, kind)("words", code=code, retry_after_ms=5)
    rebuilt = error_from(ErrorBody.of(error))
    assert (type(rebuilt), rebuilt.error_code, rebuilt.retry_after_ms) == (type(error), code, 5)


def test_a_503_of_something_else_is_unavailable() -> None:
    refused = InvalidStatus(Response(503, "Service Unavailable", Headers(), b"<html>"))
    assert type(error_of_connect(refused, "ws://h")) is Unavailable

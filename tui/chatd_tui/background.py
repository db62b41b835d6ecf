"""Work in the event loop beside the handling of messages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from textual.dom import DOMNode
from textual.worker import WorkType


def run_beside(
    node: DOMNode, work: Callable[[], Coroutine[Any, Any, None]], *, group: str = "default", exclusive: bool = False
) -> None:
    """Run a function as a worker of `node`; whatever it raises ends the app.

    A function, since a worker may never start, as when the app ends: a coroutine would be one that nobody awaited.
    """
    wanted: WorkType[None] = work
    node.run_worker(wanted, group=group, exclusive=exclusive)

"""Runs the tests of folders called "interpreted" under Triton's interpreter, in one process of their own.

Triton reads TRITON_INTERPRET when it is imported, so one process cannot both interpret kernels and compile them. The
first of these tests that is reached starts the other process with all of them that this run selected, and the reports
come back. The `conftest.py` of such a folder imports everything that is public here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

__all__ = ["interpreted", "pytest_runtest_logreport", "pytest_runtest_protocol"]

FOLDER_NAME = "interpreted"
REPORTS = os.environ.get("CHATD_INTERPRETER_REPORTS")
"""In the other process: where its reports go."""

_found = pytest.StashKey[dict[str, list[pytest.TestReport]]]()
_output = pytest.StashKey[str]()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Take a test's reports from the other process."""
    # The hook is asked about every test of a run.
    if REPORTS is not None or not _is_interpreted(item):
        return None
    stash = item.session.stash
    if _found not in stash:
        selected = [other.nodeid for other in item.session.items if _is_interpreted(other)]
        stash[_found], stash[_output] = _run(item.config, selected)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[_found].get(item.nodeid) or [_lost(item, stash[_output])]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the other process: pass a report on, once, whatever folders have asked for it."""
    if REPORTS is not None and not hasattr(report, "was_passed_on"):
        report.__dict__["was_passed_on"] = True
        with Path(REPORTS).open("a") as file:
            file.write(json.dumps(report._to_json(), default=str) + "\n")


def _is_interpreted(item: pytest.Item) -> bool:
    return FOLDER_NAME in item.path.parts


def _run(config: pytest.Config, node_ids: list[str]) -> tuple[dict[str, list[pytest.TestReport]], str]:
    """Run tests in the other process, and return their reports and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        reports, arguments = Path(folder, "reports"), Path(folder, "arguments")
        reports.touch()
        arguments.write_text("\n".join(node_ids))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"@{arguments}"],
            cwd=config.rootpath,
            env=environment | {"TRITON_INTERPRET": "1", "CHATD_INTERPRETER_REPORTS": str(reports)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = defaultdict(list)
        for line in reports.read_text().splitlines():
            report = pytest.TestReport._from_json(json.loads(line))
            if isinstance(report.longrepr, list):
                # Where and why it was skipped; JSON has no tuples.
                report.longrepr = tuple(report.longrepr)
            found[report.nodeid].append(report)
    return dict(found), done.stdout


def _lost(item: pytest.Item, output: str) -> pytest.TestReport:
    """A test of which the other process said nothing."""
    message = f"the interpreter's process reported nothing of this test; it printed:\n{output[-4000:]}"
    return pytest.TestReport(item.nodeid, item.location, {item.name: 1}, "failed", message, "call")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test of this folder runs compiled; what runs rounds as a GPU does, and makes no word about infinities."""
    from triton import knobs
    from triton.runtime import interpreter

    assert knobs.runtime.interpret
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        """The interpreter cuts float32 to bfloat16 off; GPUs round to nearest, ties to even."""
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, tl.bfloat16)
        return cast(self, source, dtype)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """The interpreter multiplies the bits of bfloat16."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = cast(self, a, tl.float32), cast(self, b, tl.float32)
        return dot(self, a, b, *others)

    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "create_dot", create_dot)
    _prepare_once(monkeypatch, interpreter)
    with np.errstate(all="ignore"):
        yield


def _prepare_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Let a launch make the language ready for functions of each kind once; at each call it takes most of the time."""
    modules, start = (interpreter.tl, interpreter.tl.core), interpreter.GridExecutor.__call__
    prepared: set[tuple[bool, ...]] = set()

    def launch(self: Any, *arguments: Any, **named: Any) -> Any:
        prepared.clear()
        return start(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        kind = tuple(any(value is module for value in self.fn.__globals__.values()) for module in modules)
        if kind not in prepared:
            prepared.add(kind)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)

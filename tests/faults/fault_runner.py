"""Applies each seeded fault to a copy of the source, and asks the tests that are named for it whether they notice.

    python tests/faults/fault_runner.py              all of them, two at a time
    python tests/faults/fault_runner.py NAME …       some
    python tests/faults/fault_runner.py --list       their names

A fault is caught where pytest ends with "tests failed", a named test failed with an assertion (or with the words that
the fault says), and nothing else went wrong: a fault that cannot be imported or collected proves nothing. The same
tests must pass on a copy without the fault.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import hypothesis.stateful  # noqa: F401  (what takes longest to import is imported once, before the forks)
import pytest
from seeded_fault import Fault
from seeded_faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("chatd", "kernels", "tui", "tests", "configs", "docs")
TIMEOUT_S = 300
"""Of the tests of one fault."""

ALL_TIMEOUT_S = 1800
"""Of all tests without a fault: two minutes where nothing else runs."""

TESTS_FAILED = 1

_ASSERTION = re.compile(r"AssertionError|^assert |Failed: DID NOT RAISE|FlakyFailure|ExceptionGroup")


@dataclass(frozen=True)
class Outcome:
    """What came of one run of tests.

    Attributes:
        problem: Why it is not what it should be; "" where it is.
        failed: The tests that failed.
        seconds: Wall clock.
    """

    problem: str
    failed: tuple[str, ...]
    seconds: float


def copy_tree(target: Path) -> None:
    """Copy what the tests need, compiled files included."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name)
    shutil.copy2(ROOT / "pyproject.toml", target)


def apply(fault: Fault, root: Path) -> None:
    """Edit the copy."""
    for edit in fault.edits:
        path = root / edit.file
        text = path.read_text(encoding="utf-8")
        found = text.count(edit.old)
        assert found == 1, f"{fault.name}: {edit.file} has {edit.old!r} {found} times"
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def run_tests(root: Path, tests: Sequence[str], timeout_s: int) -> tuple[int, list[tuple[str, str]], list[str], str]:
    """Run tests of a copy in this process, a fork of one that has imported nothing of the product.

    Returns:
        pytest's exit code, (test, message) of each failure, what went wrong otherwise, and what was printed.
    """
    report, printed = root / "report.xml", root / "printed"
    os.chdir(root)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(root / name) for name in (".", "kernels", "tui")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(timeout_s)
        code = pytest.main(
            [
                *("-q", "-x", "--hypothesis-seed=0", "-p", "no:cacheprovider", f"--junitxml={report}"),
                # Plugins that were imported before the fork have no assertions of their own to explain.
                *("-W", "ignore::pytest.PytestAssertRewriteWarning", *tests),
            ]
        )
        signal.alarm(0)
    failures: list[tuple[str, str]] = []
    errors: list[str] = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            for failure in case.iter("failure"):
                text = f"{failure.get('message', '')}\n{failure.text or ''}"
                failures.append((str(case.get("name")), text))
            errors += [str(error.get("message")) for error in case.iter("error")]
    return int(code), failures, errors, printed.read_text()[-4000:]


def try_fault(fault: Fault) -> Outcome:
    """Run a fault's tests on a copy that has it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chatd-fault-") as folder:
        root = Path(folder)
        copy_tree(root)
        try:
            apply(fault, root)
        except AssertionError as error:
            return Outcome(str(error), (), 0.0)
        code, failures, errors, output = run_tests(root, fault.tests, TIMEOUT_S)
        os.chdir(ROOT)
    seconds = time.monotonic() - started
    failed = tuple(name for name, _ in failures)
    if code == 0:
        return Outcome("SURVIVES", failed, seconds)
    if code != TESTS_FAILED or errors or not failures:
        return Outcome(f"pytest ended with {code}: {errors or output}", failed, seconds)
    for name, text in failures:
        if not (re.search(fault.says, text) if fault.says else _ASSERTION.search(text)):
            return Outcome(f"{name} failed for another reason: {text[:3000]}", failed, seconds)
    return Outcome("", failed, seconds)


def check_without(tests: Sequence[str]) -> Outcome:
    """Run all named tests on a copy without any fault."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chatd-fault-") as folder:
        root = Path(folder)
        copy_tree(root)
        code, failures, _, output = run_tests(root, tests, ALL_TIMEOUT_S)
        os.chdir(ROOT)
    return Outcome(output if code else "", tuple(name for name, _ in failures), time.monotonic() - started)


def run(faults: Sequence[Fault], jobs: int) -> int:
    """Try faults, print a table, and return how many were not caught, or were in tests that fail anyway."""
    tests = sorted({test for fault in faults for test in fault.tests})
    print(f"{len(faults)} faults, {len(tests)} tests", flush=True)
    started = time.monotonic()
    bad = 0
    width = max(len(fault.name) for fault in faults)
    # One process for each: nothing of one copy is ever imported beside another one.
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        without = pool.apply_async(check_without, (tests,))
        outcomes = [(fault, pool.apply_async(try_fault, (fault,))) for fault in faults]
        pool.close()
        for fault, result in outcomes:
            outcome = result.get(2 * TIMEOUT_S)
            bad += bool(outcome.problem)
            caught_by = outcome.problem or f"caught by {', '.join(outcome.failed)}"
            print(f"{fault.name:{width}}  {outcome.seconds:5.1f} s  {caught_by}", flush=True)
        clean = without.get(ALL_TIMEOUT_S)
    if clean.problem:
        print(f"the same tests fail without any fault:\n{clean.problem}")
        bad += 1
    print(f"{len(faults) - bad} of {len(faults)} faults are caught; {time.monotonic() - started:.0f} s")
    return bad


def main() -> None:
    """Try the faults that are named, or all."""
    parser = argparse.ArgumentParser(description="Apply each seeded fault and see that a test notices it.")
    parser.add_argument("names", nargs="*", help="of faults; all where none is given")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--list", action="store_true", help="only print what there is")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    if arguments.list:
        for fault in faults:
            print(f"{fault.name}: {fault.why}")
        return
    if not faults or len(faults) < len(arguments.names):
        sys.exit("there is no such fault; --list prints their names")
    sys.exit(bool(run(faults, arguments.jobs)))


if __name__ == "__main__":
    main()

"""Every benchmark is run in one way."""

import subprocess
import sys

import pytest

from chatd.bench.__main__ import BENCHMARKS, COMMANDS


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chatd.bench", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_name_answers_help(name: str) -> None:
    done = bench(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m chatd.bench {name}")
    assert ("--json" in done.stdout) == (name in BENCHMARKS)


def test_an_unknown_name_is_a_usage_error_that_lists_them() -> None:
    done = bench("nothing")
    assert done.returncode == 2
    assert all(name in done.stderr for name in COMMANDS)

"""Acknowledged means durable: a writer that is killed at a random moment, two hundred times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_what_was_acknowledged_is_there_after_200_kills(tmp_path: Path) -> None:
    # In a process of its own, since it forks and must have no threads.
    command = [sys.executable, "-m", "chatd.testing.journal_kills", str(tmp_path / "journal"), "--seed", "5"]
    result = subprocess.run([*command, "--kills", "200"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("200 kills, ")

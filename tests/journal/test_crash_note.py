"""A crash is told from a kill by what the process could still write."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chatd.journal.journal import Journal

END = """
import os, resource, sys
from pathlib import Path
from chatd.journal.journal import Journal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
journal = Journal.open(Path(sys.argv[1]), notes_crashes=True)
print(repr(journal.crash))
journal.note_crashes(is_counted=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


def end(directory: Path, number: int) -> str:
    """Have a daemon end by a signal; return what it found of the one before."""
    result = subprocess.run(
        [sys.executable, "-c", END, str(directory), str(number)], capture_output=True, text=True, check=False
    )
    assert result.returncode == -number, result.stderr
    return result.stdout


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
async def test_a_fault_in_native_code_is_found_once_and_a_kill_is_none(tmp_path: Path, fault: int) -> None:
    directory = tmp_path / "journal"
    assert end(directory, signal.SIGKILL) == "''\n"
    assert (directory / "crash").stat().st_mode & 0o777 == 0o600
    assert end(directory, fault) == "''\n"
    for _ in range(2):  # Until it is counted it stays.
        journal = Journal.open(directory)
        assert "Fatal Python error" in journal.crash
        await journal.close()
    assert "Fatal Python error" in end(directory, signal.SIGKILL)
    assert end(directory, signal.SIGKILL) == "''\n"

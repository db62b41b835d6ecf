"""A kill for want of memory is told from any other by the kernel's count of such kills."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chatd.journal.memory_kills import MemoryKills

END = """
import os, sys
from functools import partial
from pathlib import Path
from chatd.journal import journal as journals
from chatd.journal.memory_kills import MemoryKills
journals.MemoryKills = partial(MemoryKills, proc=Path(sys.argv[2]))
journal = journals.Journal.open(Path(sys.argv[1]), notes_crashes=True)
print(journal.crash)
journal.note_crashes(is_counted=True)
Path(sys.argv[2], "vmstat").write_text(f"nr_free_pages 5\\noom_kill {sys.argv[3]}\\n")
os.kill(os.getpid(), 9)
"""


class Kernel:
    """What a kernel says in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        (self.proc / "sys/kernel/random").mkdir(parents=True)
        self.start("first")

    def start(self, name: str, num_killed: int = 0) -> None:
        """Switch the machine on."""
        (self.proc / "sys/kernel/random/boot_id").write_text(f"{name}\n")
        self.has_killed(num_killed)

    def has_killed(self, num_killed: int) -> None:
        """Have killed so many for want of memory."""
        (self.proc / "vmstat").write_text(f"nr_free_pages 5\noom_kill {num_killed}\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def run(kernel: Kernel, directory: Path, *, is_counted: bool = True) -> MemoryKills:
    """Return what a daemon has that runs; left alone it was killed."""
    kills = MemoryKills(directory, is_own=True, proc=kernel.proc)
    kills.renew(is_counted=is_counted)
    return kills


def test_only_a_kill_while_the_kernel_lacks_memory_is_found(kernel: Kernel, tmp_path: Path) -> None:
    kernel.has_killed(98)
    assert run(kernel, tmp_path).found == ""
    assert run(kernel, tmp_path).found == "", "kill -9"
    kernel.has_killed(100)
    after = run(kernel, tmp_path)
    assert after.found == "killed, and since it looked last the kernel has killed 2 for want of memory"
    assert run(kernel, tmp_path).found == "", "it was counted"
    kernel.start("second", 200)
    assert run(kernel, tmp_path).found == "", "a power cut"


def test_what_is_killed_while_a_daemon_goes_on_is_not_the_daemon(kernel: Kernel, tmp_path: Path) -> None:
    daemon = run(kernel, tmp_path)
    kernel.has_killed(1)
    daemon.refresh()
    assert run(kernel, tmp_path).found == ""


def test_a_daemon_that_ends_by_itself_leaves_nothing(kernel: Kernel, tmp_path: Path) -> None:
    daemon = run(kernel, tmp_path)
    kernel.has_killed(1)
    daemon.close()
    daemon_after = MemoryKills(tmp_path, is_own=True, proc=kernel.proc)
    assert daemon_after.found == ""
    daemon_after.close()


def test_it_is_found_until_it_is_counted_and_commands_leave_it(kernel: Kernel, tmp_path: Path) -> None:
    run(kernel, tmp_path)
    kernel.has_killed(1)
    command = MemoryKills(tmp_path, is_own=False, proc=kernel.proc)
    assert command.found
    command.renew(is_counted=True)
    command.close()
    assert run(kernel, tmp_path, is_counted=False).found, "the disk was full"
    assert run(kernel, tmp_path).found
    assert run(kernel, tmp_path).found == ""


@pytest.mark.parametrize(
    ("name", "text"), [("vmstat", ""), ("vmstat", "oom_kill\n"), ("vmstat", "oom_kill x\n"), ("vmstat", None)]
)
def test_a_system_that_does_not_count_finds_nothing(
    kernel: Kernel, tmp_path: Path, name: str, text: str | None
) -> None:
    run(kernel, tmp_path)
    if text is None:
        (kernel.proc / name).unlink()
    else:
        (kernel.proc / name).write_text(text)
    assert run(kernel, tmp_path).found == ""
    kernel.has_killed(5)
    assert run(kernel, tmp_path).found == ""


@pytest.mark.parametrize("kept", [b"", b"first", b"first x\n", b"first 1 2\n", b"\xff\xfe"])
def test_a_damaged_file_finds_nothing(kernel: Kernel, tmp_path: Path, kept: bytes) -> None:
    (tmp_path / "memory-kills").write_bytes(kept)
    kernel.has_killed(9)
    assert run(kernel, tmp_path).found == ""


def test_nothing_is_written_after_the_end(kernel: Kernel, tmp_path: Path) -> None:
    daemon = run(kernel, tmp_path)
    daemon.close()
    kernel.has_killed(1)
    daemon.refresh()
    assert (tmp_path / "memory-kills").read_bytes() == b""


def test_a_journal_says_that_its_daemon_was_killed_for_want_of_memory(kernel: Kernel, tmp_path: Path) -> None:
    found = []
    for num_killed in (0, 1, 1):
        command = [sys.executable, "-c", END, str(tmp_path / "journal"), str(kernel.proc), str(num_killed)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        found.append(ended.stdout.strip())
    assert found == ["", "", "killed, and since it looked last the kernel has killed 1 for want of memory"]
    assert (tmp_path / "journal" / "memory-kills").stat().st_mode & 0o777 == 0o600

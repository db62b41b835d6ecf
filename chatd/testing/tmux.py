"""Terminals of tmux to run a program in: real pseudo-terminals with keys to press and a screen to read.

```
with Tmux() as tmux:
    terminal = tmux.open(["chatd-tui", url], environment={...})
    terminal.wait_for("connected")
    terminal.type("What is the capital of France?")
    terminal.press("Enter")
    terminal.wait_for("Paris")
```
What is waited for is looked for on the screen many times a second, so nothing sleeps for a guessed time.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_INTERVAL_S = 0.05
_servers = itertools.count()


def has_tmux() -> bool:
    """Whether tmux is installed."""
    return shutil.which("tmux") is not None


class Tmux:
    """A tmux server of one's own, which reads nobody's settings; `with` it, and it ends with all that runs in it."""

    def __init__(self) -> None:
        self._command = ["tmux", "-L", f"chatd-{os.getpid()}-{next(_servers)}", "-u", "-f", os.devnull]
        self._windows = itertools.count()
        # Python's readline sets COLUMNS and LINES where no Python code sees them.
        self._environment = dict(os.environ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run([*self._command, "kill-server"], check=False, capture_output=True)  # noqa: S603

    def run(self, *arguments: str) -> str:
        """Run a command of tmux and return what it prints."""
        done = subprocess.run(  # noqa: S603
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"tmux {arguments[0]}: {done.stderr.strip()}"
        return done.stdout

    def open(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        columns: int = 100,
        rows: int = 30,
    ) -> Terminal:
        """Start a program in a terminal; when it has ended, the screen says `ended with` and its exit code.

        Args:
            command: The program and its arguments.
            environment: Variables beside our own.
            folder: In which it runs.
            columns: Width of the terminal.
            rows: Height of the terminal.
        """
        name = f"terminal{next(self._windows)}"
        variables = [f"-e{key}={value}" for key, value in (environment or {}).items()]
        place = [f"-c{folder}"] if folder is not None else []
        size = [f"-x{columns}", f"-y{rows}"]
        line = f"{shlex.join(command)}; echo ended with $?; read done"
        self.run("new-session", "-d", "-s", name, *size, *variables, *place, line)
        # What a program copies is kept, so that it can be seen.
        self.run("set-option", "-s", "set-clipboard", "on")
        return Terminal(self, name)


class Terminal:
    """One terminal.

    Args:
        tmux: Its server.
        name: Of its session there.
    """

    def __init__(self, tmux: Tmux, name: str) -> None:
        self._tmux = tmux
        self._name = name

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, Escape, Tab, Up, F1, C-q, or a character."""
        self._tmux.run("send-keys", "-t", self._name, *keys)

    def type(self, text: str) -> None:
        """Type a text, character by character."""
        self._tmux.run("send-keys", "-l", "-t", self._name, text)

    def enter(self, text: str) -> None:
        """Type a line and press Enter."""
        self.type(text)
        self.press("Enter")

    def screen(self) -> str:
        """Return what is on the screen, a line of text a row."""
        return self._tmux.run("capture-pane", "-p", "-t", self._name)

    def clipboard(self) -> str:
        """Return what a program copied last by OSC 52."""
        return self._tmux.run("show-buffer")

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        self._tmux.run("resize-window", "-t", self._name, "-x", str(columns), "-y", str(rows))

    def wait_for(self, *patterns: str, timeout_s: float = 60.0) -> str:
        """Wait until every pattern is found on one screen, and return that screen."""
        return self.wait_until(
            lambda screen: all(re.search(pattern, screen) for pattern in patterns), f"{patterns}", timeout_s
        )

    def wait_until_gone(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Wait until a pattern is not found on the screen any more, and return that screen."""
        return self.wait_until(lambda screen: re.search(pattern, screen) is None, f"no {pattern!r}", timeout_s)

    def wait_until(self, holds: Callable[[str], object], what: str, timeout_s: float = 60.0) -> str:
        """Wait until a screen is as it should be, and return it."""
        deadline = time.monotonic() + timeout_s
        while True:
            screen = self.screen()
            if holds(screen):
                return screen
            assert time.monotonic() < deadline, f"waited in vain for {what}; the screen:\n{screen}"
            time.sleep(POLL_INTERVAL_S)

"""A program on a pseudo-terminal, and all that it writes. For tests and measurements of clients."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class PseudoTerminal:
    """Runs a program on a pseudo-terminal; `async with` it. Leaving it ends the program.

    Args:
        command: The program and its arguments.
        columns: Of the terminal.
        rows: Of the terminal.
        environment: Of the program, and nothing else.

    Attributes:
        output: What the program wrote.
        written_at: When the last of it came, by `time.monotonic`.
        process: The program, once it was started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, columns: int, rows: int) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._size = (columns, rows)
        self._arrived = asyncio.Event()
        self._master = -1
        self.output = bytearray()
        self.written_at = 0.0
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> PseudoTerminal:
        self._master, slave = os.openpty()
        self.resize(*self._size)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)

    def write(self, keys: bytes) -> None:
        """Send a few bytes, as the keyboard does."""
        os.write(self._master, keys)

    async def write_all(self, data: bytes) -> None:
        """Send as many bytes as there are, as fast as the program takes them."""
        loop = asyncio.get_running_loop()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._master, rest) :]
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(self._master, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(self._master)

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size; the program is told by a signal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def drawn(self, text: bytes, *, start: int = 0, timeout_s: float = 30.0) -> float:
        """Return when `text` was in the output after `start`, by `time.monotonic`.

        Raises:
            TimeoutError: It never was.
        """
        async with asyncio.timeout(timeout_s):
            while self.output.find(text, start) < 0:
                # What is searched once needs no second look, but for a beginning of the text at its end.
                start = max(start, len(self.output) - len(text))
                self._arrived.clear()
                await self._arrived.wait()
        return self.written_at

    def _read(self) -> None:
        try:
            self.output += os.read(self._master, 1 << 16)
        except OSError:
            asyncio.get_running_loop().remove_reader(self._master)
        self.written_at = time.monotonic()
        self._arrived.set()

"""One engine process as the front sees it: its start, the pipe to it, and how it ended. No torch.

Knows nothing of restarts; `engine.client` supervises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
import psutil  # type: ignore[import-untyped]

from chatd.config import child_environment
from chatd.engine.messages import EngineMessage, Ready, StartFailed, decode_engine
from chatd.engine.options import EXIT_DEVICE_FAULT, EXIT_PROTOCOL, STACKS_SIGNAL, EngineOptions, encode_options
from chatd.engine.pipe import FrameError, FrameReader
from chatd.engine.pulse import Pulse, create_page
from chatd.errors import ConfigError, EnvironmentProblem, ModelError, StartupError
from chatd_kernels.cpus import available_cpus

_EXIT_CLASSES: dict[int, type[StartupError]] = {
    error.exit_code: error for error in (StartupError, ConfigError, EnvironmentProblem, ModelError)
}


_MAIN_STATES = {psutil.STATUS_RUNNING: "R", psutil.STATUS_DISK_SLEEP: "D"}

# What a process that hangs is given to write its stacks to its log.
_STACKS_S = 0.5


class ProcessEnd(msgspec.Struct, frozen=True):
    """Why a process is gone."""

    reason: str
    exit_code: int | None
    start_failed: StartFailed | None = None
    has_hung: bool = False

    @property
    def error(self) -> StartupError:
        """What `start` raises."""
        if self.start_failed is None:
            return EnvironmentProblem(
                f"the engine did not start: {self.reason}", code="engine_died", hint="its log on stderr says more"
            )
        failed = self.start_failed
        return _EXIT_CLASSES.get(failed.exit_code, StartupError)(failed.message, code=failed.code)


def thread_states(pid: int) -> str:
    """Return a letter for each thread's state, as Linux's `proc` has it; for the main one's where there is none."""
    states = ""
    tasks = Path(f"/proc/{pid}/task")
    threads: list[str] = []
    with contextlib.suppress(OSError):  # the process has ended, or this is no Linux
        threads = os.listdir(tasks)
    for thread in threads:
        with contextlib.suppress(OSError):  # it has just ended
            # The name before the state may hold anything, also spaces and parentheses.
            states += (tasks / thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    if not states:
        with contextlib.suppress(psutil.Error):
            states = _MAIN_STATES.get(psutil.Process(pid).status(), "S")
    return states


class EngineProcess(asyncio.Protocol):
    """One process and the pipe to it, from start to exit.

    Attributes:
        process: The child.
        ready: Set when it serves.
        closed: Set when its end of the pipe is gone.
        heard: Set by each read; whoever watches clears it.
        pulse: What the process says of itself without a message.
    """

    def __init__(self, on_batch: Callable[[EngineProcess, list[EngineMessage]], None], pulse: Pulse) -> None:
        loop = asyncio.get_running_loop()
        self.process: asyncio.subprocess.Process
        self.ready: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.heard = False
        self.pulse = pulse
        self._on_batch = on_batch
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        self._has_hung = False
        self._start_failed: StartFailed | None = None

    @classmethod
    async def open(
        cls,
        command: Sequence[str],
        options: EngineOptions,
        stderr: IO[bytes] | int | None,
        on_batch: Callable[[EngineProcess, list[EngineMessage]], None],
    ) -> EngineProcess:
        """Start a process with one end of a socket pair, and send the options over the other."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        page = create_page()
        connection = cls(on_batch, Pulse(page))
        try:
            await loop.create_connection(lambda: connection, sock=ours)
            connection.process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                str(page),
                pass_fds=(theirs.fileno(), page),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                env=engine_environment(options.num_threads or available_cpus()),
            )
        except BaseException:
            # A process that was started sees this and exits.
            if connection._transport is not None:
                connection._transport.abort()
            else:
                ours.close()
            raise
        finally:
            theirs.close()
            os.close(page)
        connection.send(encode_options(options))
        return connection

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the engine has not taken."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, frame: bytes) -> None:
        """Send a frame; it is lost where the pipe is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read for now."""
        return self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading()

    def pause(self) -> None:
        """Read no more for now."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_reading() and not self._transport.is_closing():
            self._transport.resume_reading()

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def is_runnable(self) -> bool:
        """Tell whether one of its threads runs, waits for a CPU that others hold, or waits for the disk.

        The main thread alone would not do: in a kernel it sleeps until the other threads of the kernel have ended, and
        these may be the ones that wait for a CPU.
        """
        return not {"R", "D"}.isdisjoint(thread_states(self.process.pid))

    def kill(self, reason: str) -> None:
        """Kill the process; `closed` follows."""
        self._reason = self._reason or reason
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        if self._transport is not None:
            self._transport.abort()

    async def kill_hung(self, reason: str) -> None:
        """Kill a process that hangs, once it has written to its log where it does."""
        self._reason = self._reason or reason
        self._has_hung = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(STACKS_SIGNAL)
        await asyncio.wait((self.closed,), timeout=_STACKS_S)
        self.kill(reason)

    async def end(self, timeout_s: float) -> ProcessEnd:
        """Wait for the process to exit, kill it after `timeout_s`, and say why it ended."""
        try:
            if self._transport is not None:
                self._transport.close()  # flushes first; the engine exits when the pipe closes
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.kill(f"its process did not exit within {timeout_s:.0f} s")
        finally:
            # A cancelled wait leaves no process either.
            if self.process.returncode is None:
                self.kill("closed")
        exit_code = await self.process.wait()
        await asyncio.shield(self.closed)
        refusal = self._start_failed.message if self._start_failed is not None else ""
        reason = self._reason or refusal or _exit_reason(exit_code)
        return ProcessEnd(reason, exit_code, self._start_failed, self._has_hung)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the pipe's transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decode all messages that arrived and hand them over together; kill a process that sends nonsense."""
        self.heard = True
        try:
            batch = [decode_engine(body) for body in self._reader.feed(data)]
        except (FrameError, msgspec.DecodeError) as error:
            self.kill(f"it sent nonsense: {error}")
            return
        for message in batch:
            if isinstance(message, Ready) and not self.ready.done():
                self.ready.set_result(None)
            elif isinstance(message, StartFailed):
                self._start_failed = message
        if batch:
            self._on_batch(self, batch)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the process's end is closed."""
        if not self.closed.done():
            self.closed.set_result(None)


_EXIT_MEANINGS = {
    1: "an error of its own, which its log on stderr tells",
    EXIT_PROTOCOL: "it was sent what is no message: is the installation of one version?",
    EXIT_DEVICE_FAULT: "the device does not answer any more, its log on stderr says why",
}


def _exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        meaning = _EXIT_MEANINGS.get(exit_code)
        return f"its process ended with exit code {exit_code}{f' ({meaning})' if meaning else ''}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def engine_environment(num_threads: int) -> dict[str, str]:
    """Return the environment of the engine's process; libgomp and MKL read it when torch loads them.

    Idle OpenMP threads that spin make every parallel region wait for a core that a neighbor has taken.
    """
    threads = str(num_threads)
    return child_environment(
        OMP_WAIT_POLICY="PASSIVE",
        KMP_BLOCKTIME="0",
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        NUMBA_NUM_THREADS=threads,
        TOKENIZERS_PARALLELISM="false",
    )

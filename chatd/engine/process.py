"""The engine's process: `python -m chatd.engine.process PIPE PULSE`, started by `engine.client` with two descriptors.

```
options arrive → phases of start-up go out → Ready → loop: take what has arrived, step, send
```

The process has no life of its own: it ignores the terminal's and the service manager's signals, since the front
decides when turns in flight are done, and exits when its pipe closes. Logs are JSON lines on stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chatd.engine.loop import EngineLoop
from chatd.engine.messages import Loading, StartFailed, encode
from chatd.engine.options import (
    EXIT_DEVICE_FAULT,
    EXIT_PROTOCOL,
    STACKS_SIGNAL,
    EngineOptions,
    decode_options,
)
from chatd.engine.pipe import EnginePipe, FrameError, PipeClosed
from chatd.engine.plan import DeviceFault
from chatd.engine.pulse import Pulse
from chatd.errors import EnvironmentProblem, StartupError

if TYPE_CHECKING:
    from chatd.engine.core import EngineCore

logger = logging.getLogger("chatd.engine")

EXIT_GRACE_S = 2.0
"""After the front is gone a step may end for so long; then the process exits in the middle of it."""

PROGRESS_STEP = 0.05
"""Progress within a phase is told in steps of this size."""

_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def main(arguments: list[str]) -> int:
    """Serve over the descriptor that is the first argument, with a pulse on the second, and return the exit code."""
    for name in _IGNORED_SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACKS_SIGNAL)
    pipe = EnginePipe(socket.socket(fileno=int(arguments[0])))
    pulse = Pulse(int(arguments[1]))
    threading.Thread(target=_exit_without_front, args=(pipe.fileno(),), daemon=True).start()
    try:
        bodies: list[bytes] = []
        while not bodies:
            bodies = pipe.receive(None)
        options = decode_options(bodies.pop(0))
        configure_logging(options.log_level)
        core = _start(options, pipe)
        if isinstance(core, int):
            return core
        core.scheduler.on_planned = pulse.expect
        with contextlib.closing(core):
            EngineLoop(core, pipe, time.monotonic, pulse).run(bodies)
    except PipeClosed:
        return 0
    except (FrameError, msgspec.DecodeError):
        logger.exception("engine.protocol_error")
        return EXIT_PROTOCOL
    except DeviceFault:
        logger.exception("engine.device_fault")
        return EXIT_DEVICE_FAULT
    except Exception:
        # A fault of the engine's own: nothing of its state is to be trusted, so the supervisor starts another.
        logger.exception("engine.failed")
        return 1
    pipe.finish(EXIT_GRACE_S)
    return 0


def _start(options: EngineOptions, pipe: EnginePipe) -> EngineCore | int:
    """Build the engine and say that it is ready; or say why not, and return the exit code."""
    started = time.monotonic()
    report = _Progress(pipe)
    try:
        report("importing", 0.0)
        _read_ahead(Path(options.model_path))
        from chatd.engine.startup import build_engine  # torch and all that follows

        core, ready = build_engine(options, time.monotonic, report)
    except PipeClosed:
        raise
    except StartupError as error:
        message = error.message if error.hint is None else f"{error.message}\n{error.hint}"
        return _refuse(pipe, StartFailed(error.error_code, message, type(error).exit_code))
    except ImportError as error:
        logger.exception("engine.import_failed")
        message = f'{error}; the engine needs the server\'s packages: pip install "chatd[server]"'
        return _refuse(pipe, StartFailed("not_installed", message, EnvironmentProblem.exit_code))
    except Exception as error:
        logger.exception("engine.start_failed")
        return _refuse(pipe, StartFailed("engine_start_failed", f"{type(error).__name__}: {error}", 1))
    # What start-up made stays: no collection has to look at it again.
    gc.collect()
    gc.freeze()
    gc.disable()
    logger.info("engine.ready", extra={"fields": {"start_s": round(time.monotonic() - started, 3)}})
    pipe.send([encode(ready)])
    return core


class _Progress:
    """Sends phases to the front; within a phase only steps that a person can see."""

    def __init__(self, pipe: EnginePipe) -> None:
        self._pipe = pipe
        self._told = ("", 0.0)

    def __call__(self, phase: str, progress: float) -> None:
        told_phase, told_progress = self._told
        if phase != told_phase or progress - told_progress >= PROGRESS_STEP or (progress >= 1.0 > told_progress):
            self._told = (phase, progress)
            self._pipe.send([encode(Loading(phase, progress))])


def _read_ahead(folder: Path) -> None:
    """Ask the system to read the weights from the disk while torch is imported."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _refuse(pipe: EnginePipe, failed: StartFailed) -> int:
    pipe.send([encode(failed)])
    pipe.finish(EXIT_GRACE_S)
    return failed.exit_code


def _exit_without_front(descriptor: int) -> None:
    """Wait until the other end is closed, then end the process even if its main thread is busy."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    time.sleep(EXIT_GRACE_S)
    os._exit(0)


class _JsonLines(logging.Formatter):
    """One JSON object a line, with the field names of the front's log."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "event": record.getMessage(),
            "logger": record.name,
            "level": record.levelname.lower(),
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event).decode()


def configure_logging(level: str) -> None:
    """Send chatd's events to stderr as JSON lines; of other packages only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("chatd").setLevel(level.upper())
    logging.captureWarnings(True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

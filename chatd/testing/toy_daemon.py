"""A whole daemon in a process of its own, over the engine core with its fake runner: to be killed, starved and counted.

```
with ToyFarm(folder) as farm:
    pid = farm.start(port)         forked from a process that has imported everything: some milliseconds
    farm.kill(pid)                 kill -9, and the process is gone
```
What it answers is a function of the conversation's ids alone, so an answer that was interrupted can be compared, token
for token, with one that was not. It listens on the loopback, takes everybody, and has no engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from chatd.config import Settings, journal_directory, local_url
from chatd.engine.client import EngineClient
from chatd.engine.messages import FrontMessage, Submit
from chatd.journal.journal import Journal
from chatd.journal.records import ID_TYPE
from chatd.server.backend import Backend, session_limits
from chatd.server.daemon import Daemon
from chatd.server.logging import configure_logging
from chatd.server.serve import serve_async
from chatd.sessions.manager import SessionManager
from chatd.sessions.model_profile import ModelProfile
from chatd.testing.sessions import STOP_IDS, VOCAB_SIZE, ByteChatEncoder, ByteVocabulary, encode_text
from chatd.testing.ticking_core import TickingCore

LETTERS = "abcdefghijklmnopqrstuvwxyz  "
CONTEXT = 4096


class FaultyCore(TickingCore):
    """Serves until it is sent what its process does not survive.

    Args:
        fault: That, in the ids of a request; "" is nothing.
        options: Of `TickingCore`.
    """

    def __init__(self, fault: str, **options: Any) -> None:
        super().__init__(**options)
        self._fault = array(ID_TYPE, encode_text(fault)).tobytes()

    def send(self, message: FrontMessage) -> None:
        """Take a message."""
        if self._fault and isinstance(message, Submit) and self._fault in array(ID_TYPE, message.new_ids).tobytes():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), signal.SIGSEGV)
        super().send(message)


class ToyBackend:
    """Stands where `Backend` stands.

    Args:
        daemon: Is opened over the engine core.
        settings: Of the daemon.
        pace_s: Seconds of a step.
        fault: What has this in its log ends the process as a fault in native code does.
    """

    def __init__(self, daemon: Daemon, settings: Settings, pace_s: float, fault: str = "") -> None:
        self._daemon = daemon
        self._settings = settings
        self._pace_s = pace_s
        self._fault = fault
        self._ticking: asyncio.Task[None] | None = None
        self._journal: Journal | None = None
        self._manager: SessionManager | None = None

    async def load(self) -> None:
        """Open the daemon."""
        if self._settings.journal.enabled:
            folder, own = journal_directory(self._settings), self._daemon.owns_process
            self._journal = await asyncio.to_thread(Journal.open, folder, notes_crashes=own)
            self._daemon.usage = self._journal.usage
            self._journal.announce(local_url(self._daemon.url))
        engine = FaultyCore(self._fault, pace_s=self._pace_s, num_blocks=1024, answer_ids=encode_text(LETTERS))
        profile = ModelProfile(
            id="toy", context=CONTEXT, vocab_size=VOCAB_SIZE, stop_token_ids=STOP_IDS, max_tokens=None
        )
        manager = SessionManager(
            cast(EngineClient, engine),
            ByteChatEncoder(),
            profile,
            session_limits(self._settings),
            vocabulary=ByteVocabulary(),
            boot=self._daemon.boot,
            journal=self._journal,
        )
        engine.on_messages = manager.on_engine_messages
        engine.log_of = manager.log_of_request
        manager.on_engine_messages([cast(Any, engine.ready)])
        self._manager = manager
        if self._journal is not None:
            self._daemon.take_up(await manager.restore())
        self._ticking = asyncio.create_task(engine.tick(), name="engine")
        self._daemon.open(manager, cast(EngineClient, engine))

    async def close(self) -> None:
        """End the engine, and close the journal."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if self._manager is not None:
            await self._manager.settle()
        if self._journal is not None:
            await self._journal.close()


class ToyFarm:
    """Starts daemons from one that is ready to be forked.

    Args:
        folder: Of all that they write; settings and state are the caller's to name below it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._running: set[int] = set()

    def __enter__(self) -> Self:
        environment = {**os.environ, "XDG_STATE_HOME": str(self._folder / "state")}
        with (self._folder / "daemon.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chatd.testing.toy_daemon"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in list(self._running):
            self.kill(pid)
        assert self._process is not None, "the farm was not entered"
        self._process.communicate(timeout=30)

    def start(self, port: int, *, pace_s: float = 0.002, fault: str = "", **settings: Any) -> int:
        """Start a daemon and return its process.

        Args:
            port: Where it listens; it may be a while until it does.
            pace_s: Seconds of a step.
            fault: As of `ToyBackend`.
            settings: Sections of the settings.
        """
        asked = {"port": port, "pace_s": pace_s, "fault": fault, "settings": settings}
        pid = int(self._ask({"start": asked}))
        self._running.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        """Kill a daemon; returns when nothing of it is left."""
        self._running.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._ask({"wait": pid})

    def wait(self, pid: int) -> int:
        """Return the exit code of a daemon that ends by itself, once it has."""
        self._running.discard(pid)
        return os.waitstatus_to_exitcode(int(self._ask({"wait": pid})))

    def stop(self, pid: int) -> int:
        """Ask a daemon to stop, as a service manager does; return its exit code once it has."""
        os.kill(pid, signal.SIGTERM)
        return self.wait(pid)

    @property
    def log(self) -> str:
        """What the daemons have logged."""
        return (self._folder / "daemon.log").read_text()

    def _ask(self, request: dict[str, Any]) -> str:
        process = self._process
        assert process is not None, "the farm was not entered"
        assert process.stdin is not None, "a farm without a pipe"
        assert process.stdout is not None, "a farm without a pipe"
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the farm is gone: {self.log[-2000:]}"
        return answer.strip()


def _serve(port: int, pace_s: float, fault: str, sections: dict[str, Any]) -> None:
    server = {"port": port, "allow_anonymous_loopback": True, **sections.pop("server", {})}
    settings = Settings(server=server, **sections)

    def make_backend(daemon: Daemon, own: Settings) -> Backend:
        return cast(Backend, ToyBackend(daemon, own, pace_s, fault))

    configure_logging("warning", "json")
    asyncio.run(serve_async(settings, make_backend=make_backend))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> int:
    """Fork what is asked for on stdin, a line of JSON each, until that is closed."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            _say(status)
            continue
        asked = request["start"]
        pid = os.fork()
        if pid:
            _say(pid)
            continue
        exit_code = 0
        try:
            # The pipes are the farm's.
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)
            _serve(asked["port"], asked["pace_s"], asked["fault"], asked["settings"])
        except BaseException:
            traceback.print_exc()
            exit_code = 1
        sys.stderr.flush()
        os._exit(exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A daemon that this process starts for one person and stops again: `chatd chat`, and the terminal client's offer."""

from __future__ import annotations

import http.client
import importlib.util
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from chatd.client import websocket_url
from chatd.config import is_loopback, read_local_key, start_hint, state_dir
from chatd.errors import EnvironmentProblem

STOP_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.1
LOG_TAIL_LINES = 20


def readiness(url: str, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """Return what `/ready` says of the daemon at `url`, or None where nobody answers as chatd does.

    The answer has "status" ("ready", or what it is doing) and, while it loads, "phase" and "progress" (0 to 1).

    Raises:
        EnvironmentProblem: Its certificate is not trusted.
    """
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme in ("https", "wss") else http.client.HTTPConnection
    connection = kind(address.hostname or "127.0.0.1", address.port, timeout=timeout_s)
    try:
        connection.request("GET", "/ready")
        body = json.loads(connection.getresponse().read(65536))
    except ssl.SSLCertVerificationError as error:
        raise EnvironmentProblem(
            f"the certificate of {url} is not trusted: {error.verify_message}",
            code="untrusted_certificate",
            hint="where it is your own, name it in SSL_CERT_FILE",
        ) from None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return body if isinstance(body, dict) and "status" in body else None


def daemon_url(url: str) -> str:
    """Return a daemon's address as http(s), which is where `/ready` is asked.

    Raises:
        InvalidRequest: Not the address of a daemon, or it holds a key.
    """
    address = urlsplit(websocket_url(url))
    return f"{'https' if address.scheme == 'wss' else 'http'}://{address.netloc}"


def check_can_start(address: str) -> None:
    """Refuse where a daemon cannot be started by a command on this machine.

    Raises:
        EnvironmentProblem: The address is another machine's, or the server is not installed here.
    """
    if not is_loopback(urlsplit(address).hostname or "") or address.startswith("https"):
        raise EnvironmentProblem(f"no daemon answers at {address}", hint=f"{start_hint(address)}, or check the address")
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("uvicorn") is None:
        raise EnvironmentProblem(
            f"no daemon answers at {address}, and none can be started here: the server is not installed",
            hint='pip install "chatd[server]", or name the daemon of another machine',
        )


def private_url(port: int) -> str:
    """Return where a daemon of our own can listen: this port of loopback, or a free one where it is taken or 0."""
    for wanted in (port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", wanted))
                return f"http://127.0.0.1:{probe.getsockname()[1]}"
    raise EnvironmentProblem("no port of this machine is free")


class LocalDaemon:
    """A `chatd serve` of our own: started, waited for, and stopped on exit.

    Whatever the settings say, it listens on loopback, asks for the local key and has no TLS and no keys file. The child
    also stops when this process dies, however it dies: it serves until its standard input closes.

    Args:
        url: Where it will listen; loopback.
        arguments: More flags for `chatd serve`.
        log_path: Where its log goes.
    """

    def __init__(self, url: str, arguments: Sequence[str] = (), log_path: Path | None = None) -> None:
        self.url = url
        self.log_path = log_path or state_dir() / "serve.log"
        address = urlsplit(url)
        port = 80 if address.port is None else address.port
        self._command = [
            *(sys.executable, "-m", "chatd.cli", "serve", "--until-stdin-closes"),
            *("--host", address.hostname or "127.0.0.1", "--port", str(port)),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalDaemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def key(self) -> str | None:
        """The key that it asks for, once it is ready."""
        return read_local_key()

    @property
    def pid(self) -> int:
        """The daemon's process, while it runs."""
        assert self._process is not None, "the daemon was not started"
        return self._process.pid

    def start(self) -> None:
        """Start the child; its log begins anew.

        Raises:
            EnvironmentProblem: The log cannot be written.
        """
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            log = self.log_path.open("wb")
        except OSError as error:
            raise EnvironmentProblem(f"{self.log_path} cannot be written: {error.strerror}") from None
        with log:
            self._process = subprocess.Popen(  # noqa: S603
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self, on_phase: Callable[[str, float], None], timeout_s: float = 600.0) -> None:
        """Return when the daemon serves.

        Raises:
            EnvironmentProblem: It ended, or took too long; with the end of its log.
        """
        assert self._process is not None, "the daemon was not started"
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            exit_code = self._process.poll()
            if exit_code is not None:
                raise EnvironmentProblem(f"the daemon ended with exit code {exit_code}\n{self.log_tail()}")
            state = readiness(self.url)
            if state is not None:
                if state["status"] == "ready":
                    return
                on_phase(str(state.get("phase") or "starting"), float(state.get("progress") or 0.0))
            time.sleep(POLL_INTERVAL_S)
        raise EnvironmentProblem(f"the daemon is not ready after {timeout_s:.0f} s\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the end of the daemon's log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        except OSError:
            return ""

    def stop(self) -> None:
        """Ask the child to end, and make it end if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

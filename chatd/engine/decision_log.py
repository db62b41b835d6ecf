"""The file of a decision log: what went into an engine core, what it decided, and what it said, call by call.

```
chatd decision log 1\n               the format's version
HEAD | length | crc | crc of these | Header, msgpack
CALL | length | crc | crc of these | zlib of an array of Call, msgpack       as often as there was something to write
END  | length | crc | crc of these | why the log ends, text
```

A log begins with an engine and can be replayed from there only, so it is never rotated: it ends at its limit. What a
killed process had not written yet is missing at the end, and a log without `END` says so. Token ids are numbers in the
order of their first appearance (`token_mask`). Knows files and records; `recording` makes them, `replay` uses them.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

import msgspec

from chatd.engine.disk_record import DiskAnswer
from chatd.engine.draft import Decision
from chatd.engine.engine_config import EngineConfig
from chatd.engine.messages import EngineMessage, FrontMessage
from chatd.engine.plan import BlockId, RequestId, StepOutput
from chatd.errors import ChatdError, EnvironmentProblem, StartupError

FORMAT_VERSION = 1
_MAGIC = b"chatd decision log "
_FRAME = struct.Struct(">4sII")
_CHECK = struct.Struct(">I")
_HEAD, _CALLS, _END = b"HEAD", b"CALL", b"END "

FLUSH_INTERVAL_S = 0.1
"""What a killed engine may not have written: the calls of so long, and the last batch."""

MAX_UNWRITTEN_BYTES = 64 * 2**20
"""A disk that falls behind by so much ends the log: a log with a gap cannot be replayed."""

CLOSED = "closed"
"""Why a log ends whose engine ended."""

MAX_BATCH_BYTES = 2**20
"""Calls that are compressed together, before they are."""

_COMPRESSION_LEVEL = 1
_ARRAY_32 = b"\xdd"

_log = logging.getLogger(__name__)


class DecisionLogError(StartupError):
    """A file that cannot be replayed: it is no decision log, is damaged, or is another version's."""

    code = "decision_log_unreadable"
    exit_code = 2


class ChunkRecord(msgspec.Struct, array_like=True, frozen=True):
    """One chunk of a plan. Its block table is told as a change to the one that the request had in its last chunk.

    Attributes:
        request: Whose.
        start: Position of the first row.
        num_tokens: Rows.
        output_position: Of the draw after the last row; -1 where nothing is drawn.
        num_kept: Leading blocks of the table before that are the same.
        new_blocks: The blocks after these.
    """

    request: RequestId
    start: int
    num_tokens: int
    output_position: int
    num_kept: int
    new_blocks: list[BlockId]


class RunRecord(msgspec.Struct, array_like=True, frozen=True):
    """One plan that the runner got, and what came of it.

    Attributes:
        step: The plan's.
        chunks: Of the plan.
        copies: Source and target of each block copy.
        stores: Block and host slot of each block that is saved.
        loads: Block and host slot of each block that is filled.
        output: What the runner returned; None where it raised, or where its result is in a `ResultRecord`.
        error: The name of the exception's class.
    """

    step: int
    chunks: list[ChunkRecord]
    copies: list[tuple[int, int]]
    stores: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    output: StepOutput | None
    error: str = ""


class ResultRecord(msgspec.Struct, array_like=True, frozen=True):
    """What came of a plan that was launched, in this call or the one before.

    Attributes:
        step: The plan's.
        output: What the runner returned; None where it raised.
        error: The name of the exception's class.
    """

    step: int
    output: StepOutput | None
    error: str = ""


class Call(msgspec.Struct, array_like=True, frozen=True):
    """One call of the core.

    Attributes:
        verb: "handle", "step" or "idle".
        now: As given.
        message: Of `handle`.
        clock: What the core's clock said, in the order of asking.
        decisions: The scheduler's, but for those that a plan says as well.
        runs: Plans that were executed or launched.
        disk: What the disk tier was asked, and its answers.
        said: Messages for the front.
        error: The name of the exception's class where the call raised, which ends the engine and the log.
        results: Of launched plans, in the order in which they were waited for.
    """

    verb: str
    now: float
    message: FrontMessage | None
    clock: list[float]
    decisions: list[Decision]
    runs: list[RunRecord]
    disk: list[DiskAnswer]
    said: list[EngineMessage]
    error: str = ""
    results: list[ResultRecord] = []


class Header(msgspec.Struct, frozen=True):
    """What the core was built with.

    Attributes:
        chatd_version: That wrote the log.
        config: Of the core, with token ids masked and without the key of the tiers.
        has_disk: A disk tier was there.
    """

    chatd_version: str
    config: EngineConfig
    has_disk: bool = False


class Writer(Protocol):
    """Takes the calls of a core."""

    def write(self, call: Call) -> None:
        """Take one call."""
        ...

    def close(self) -> None:
        """Write what was taken."""
        ...


class LogWriter:
    """Writes a log on a thread of its own; a step pays for encoding its record and no more.

    A file of this name is kept as `NAME.1`, since an engine that died and was started again would write over what
    explains its death; what is no file, such as a directory or a device, stays where it is. Where the limit is reached
    or the disk refuses, the log ends with one warning.

    Args:
        path: Readable by its owner alone.
        header: Of the log.
        limit_bytes: Largest file.

    Raises:
        EnvironmentProblem: The file cannot be written.
    """

    def __init__(self, path: Path, header: Header, limit_bytes: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        try:
            if path.exists():
                if not path.is_file():
                    raise OSError(errno.EEXIST, "something else than a file has this name")
                path.replace(path.with_name(f"{path.name}.1"))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise EnvironmentProblem(
                f"{path} cannot be written: {error.strerror} (engine.decision_log)", param="engine.decision_log"
            ) from None
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0)
        self._encode = msgspec.msgpack.Encoder().encode
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._taken_bytes = self._done_bytes = 0
        self._is_closing = threading.Event()
        self._is_over = False
        start = b"%s%d\n%s" % (_MAGIC, FORMAT_VERSION, _frame(_HEAD, self._encode(header)))
        self._file_bytes = len(start)
        self._file.write(start)
        self._thread = threading.Thread(target=self._run, name="decision log", daemon=True)
        self._thread.start()

    def write(self, call: Call) -> None:
        """Take one call."""
        if self._is_over:
            return
        body = self._encode(call)
        self._taken_bytes += len(body)
        if self._taken_bytes - self._done_bytes > MAX_UNWRITTEN_BYTES:
            self._stop("the disk is too slow")
            return
        self._queue.put(body)

    def close(self) -> None:
        """Write what was taken and close the file."""
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._file:
            while not self._take_batch():
                pass
            if not self._is_over:
                self._write_end(CLOSED)

    def _take_batch(self) -> bool:
        """Write what is there, once there is something; return whether the end was among it."""
        body = self._queue.get()
        self._is_closing.wait(FLUSH_INTERVAL_S)
        bodies: list[bytes] = []
        num_bytes = 0
        while body is not None:
            bodies.append(body)
            num_bytes += len(body)
            if num_bytes >= MAX_BATCH_BYTES or self._queue.empty():
                break
            body = self._queue.get()
        self._write_batch(bodies)
        return body is None

    def _write_batch(self, bodies: list[bytes]) -> None:
        self._done_bytes += sum(map(len, bodies))
        if self._is_over or not bodies:
            return
        batch = _ARRAY_32 + len(bodies).to_bytes(4, "big") + b"".join(bodies)
        frame = _frame(_CALLS, zlib.compress(batch, _COMPRESSION_LEVEL))
        if self._file_bytes + len(frame) > self._limit_bytes:
            reason = f"{self._limit_bytes} bytes are reached"
            self._stop(f"{reason} (engine.decision_log_limit)")
            self._write_end(reason)
            return
        try:
            self._file.write(frame)
        except OSError as error:
            self._stop(error.strerror or "the disk refuses")
            return
        self._file_bytes += len(frame)

    def _write_end(self, reason: str) -> None:
        with suppress(OSError):
            self._file.write(_frame(_END, reason.encode()))

    def _stop(self, why: str) -> None:
        self._is_over = True
        _log.warning("the decision log %s ends: %s", self.path, why)


def _frame(kind: bytes, body: bytes) -> bytes:
    head = _FRAME.pack(kind, len(body), zlib.crc32(body))
    return head + _CHECK.pack(zlib.crc32(head)) + body


class LogReader:
    """Reads a log once, from its beginning.

    Args:
        path: Of the log.

    Attributes:
        header: Of the log.
        end: Why the log ends, once `calls` is exhausted; None where it ends in the middle of the engine's work.
        num_cut_bytes: Of an unfinished frame at the end.

    Raises:
        DecisionLogError: It is no log, or of a version that this one does not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: str | None = None
        self.num_cut_bytes = 0
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise DecisionLogError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._check_version()
            frame = self._next_frame()
            if frame is None or frame[0] != _HEAD:
                raise self._damaged("it has no header")
            self.header = self._decode_header(frame[1])
        except BaseException:
            self._file.close()
            raise
        self._decode_calls = msgspec.msgpack.Decoder(list[Call]).decode

    def __enter__(self) -> LogReader:
        """Return the reader, which is closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def calls(self) -> Iterator[Call]:
        """Yield the calls in order.

        Raises:
            DecisionLogError: The file is damaged before its end.
        """
        while (frame := self._next_frame()) is not None:
            kind, body = frame
            if kind == _END:
                self.end = body.decode(errors="replace")
                if self._file.read(1):
                    raise self._damaged("something stands after its end")
                return
            if kind != _CALLS:
                raise self._damaged(f"it has a frame {kind!r}")
            try:
                calls = self._decode_calls(zlib.decompress(body))
            except (msgspec.DecodeError, zlib.error) as error:
                raise DecisionLogError(
                    f"{self.path} was written by chatd {self.header.chatd_version}, whose records this version cannot"
                    f" read: {error}"
                ) from None
            yield from calls

    def _check_version(self) -> None:
        line = self._file.readline(64)
        if not line.startswith(_MAGIC) or not line.endswith(b"\n"):
            raise DecisionLogError(f"{self.path} is no decision log")
        version = line[len(_MAGIC) : -1].decode(errors="replace")
        if version != str(FORMAT_VERSION):
            raise DecisionLogError(
                f"{self.path} is a decision log of version {version}, this chatd reads version {FORMAT_VERSION}"
            )

    def _decode_header(self, body: bytes) -> Header:
        try:
            return msgspec.msgpack.decode(body, type=Header)
        except (msgspec.DecodeError, ChatdError) as error:
            raise DecisionLogError(f"{self.path} has a header that this version cannot read: {error}") from None

    def _next_frame(self) -> tuple[bytes, bytes] | None:
        head = self._file.read(_FRAME.size + _CHECK.size)
        if len(head) < _FRAME.size + _CHECK.size:
            self.num_cut_bytes = len(head)
            return None
        kind, length, crc = _FRAME.unpack_from(head)
        if zlib.crc32(head[: _FRAME.size]) != _CHECK.unpack_from(head, _FRAME.size)[0]:
            raise self._damaged("a frame's head is not what was written")
        body = self._file.read(length)
        if len(body) < length:
            self.num_cut_bytes = len(head) + len(body)
            return None
        if zlib.crc32(body) != crc:
            raise self._damaged("a frame is not what was written")
        return kind, body

    def _damaged(self, what: str) -> DecisionLogError:
        return DecisionLogError(f"{self.path} is damaged before byte {self._file.tell()}: {what}")

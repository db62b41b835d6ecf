"""The one thread that writes the journal: what waits together is committed together.

```
submit ─> queue ─> [ savepoint, savepoint, … ] ─> one transaction, one fsync ─> futures, on their loop
append_tokens ─┘   with the next transaction, else with one of their own after 100 ms, without an fsync
```
One connection, one thread and one queue: changes and tokens in flight take effect in the order in which they came, so
tokens that came before an answer's end cannot appear after it. Tokens alone are written with `synchronous = NORMAL`:
a killed process loses nothing of them, a power cut the last ones.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from chatd.errors import ChatdError, DamagedRecord, StorageError
from chatd.journal.checkpoints import Checkpointer
from chatd.journal.records import ID_TYPE
from chatd.journal.scrubber import Scrubber
from chatd.journal.search import NUM_PARTS, is_index_damaged, rebuild_index
from chatd.journal.storage_errors import primary_code, storage_error
from chatd.journal.tables import Tables

TOKENS_EVERY_S = 0.1
MAX_QUEUED_BYTES = 64 * 2**20
MAX_TOKEN_BYTES = 16 * 2**20
MAX_GROUP = 256
MAX_GROUP_BYTES = 16 * 2**20
BUSY_S = 10.0
"""How long another process may hold the write lock, which only a person with the database's own tools does."""

_RETRY_S = 1.0
_SCRUB_EVERY_S = 0.05
_SCRUB_WARNING_S = 10.0
_ID_BYTES = array(ID_TYPE).itemsize
_PER_TRANSACTION_BYTES = 16 * 4096
_logger = logging.getLogger("chatd.journal")
_T = TypeVar("_T")
Synchronous = Literal["FULL", "NORMAL"]


@dataclass(slots=True, eq=False)
class _Job:
    """Something to do in a transaction, and who waits for it."""

    apply: Callable[[Tables], Any]
    num_bytes: int
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None
    has_erased: bool = False
    waits_for_scrub: bool = True


@dataclass(slots=True, eq=False)
class _Tokens:
    """Tokens in flight between two jobs: (message, from where on, ids), in order."""

    since: float
    runs: list[tuple[str, int, array[int]]] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Add tokens; those that go on where the last ones of the message ended become one run with them."""
        self.num_bytes += _ID_BYTES * len(ids)
        index = self.last.get(message)
        if index is not None:
            _, begin, known = self.runs[index]
            if start == begin + len(known):
                known.extend(ids)
                return
        self.last[message] = len(self.runs)
        self.runs.append((message, start, array(ID_TYPE, ids)))


class JournalWriter:
    """The journal's only writer; the methods are for the event loop's thread, and none but `close` waits.

    Args:
        connect: Returns a connection to a database of the newest schema; called now, and in the writer's thread where
            the one before has failed: what a file's descriptor or a cache of pages has gone wrong by goes with it.
        directory: Named in errors.
        checkpointer: Told about how many bytes of log were written.

    Attributes:
        num_transactions: That were committed since the start.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        directory: Path,
        checkpointer: Checkpointer,
    ) -> None:
        self.num_transactions = 0
        self._connect = connect
        self._directory = directory
        self._checkpointer = checkpointer
        self._use(connect())
        # What was erased, and who waits until nothing of it is left; the writer's thread alone has them.
        self._to_scrub: list[_Job] = []
        self._tokens_error: StorageError | None = None
        self._scrub_since = self._scrub_at = 0.0

        self._condition = threading.Condition()
        # All below is guarded by the condition.
        self._queue: deque[_Job | _Tokens] = deque()
        self._queued_bytes = 0
        self._token_bytes = 0
        self._num_jobs = 0
        self._is_closed = False
        self._retry_at = 0.0

        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    def submit(
        self, apply: Callable[[Tables], _T], num_bytes: int, *, waits_for_scrub: bool = True
    ) -> asyncio.Future[_T]:
        """Queue work for a transaction and return the future of its result, for when it is durable.

        Args:
            apply: Called in the writer's thread, inside of a transaction of its own within the group's.
            num_bytes: What it writes, about.
            waits_for_scrub: Where it erases, the future also waits until nothing is left of that in the files.

        Raises:
            StorageError: The journal is closed, or too much waits.
        """
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        with self._condition:
            if self._is_closed:
                raise StorageError("the journal is closed")
            if self._num_jobs and self._queued_bytes + num_bytes > MAX_QUEUED_BYTES:
                raise StorageError(
                    f"{self._queued_bytes} bytes wait to be written to the journal already", retry_after_ms=1000
                )
            self._queue.append(_Job(apply, num_bytes, future, waits_for_scrub=waits_for_scrub))
            self._num_jobs += 1
            self._queued_bytes += num_bytes
            self._condition.notify()
        return future

    def append_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Queue tokens of an answer in flight; more than there is memory for are forgotten, and so are later ones."""
        with self._condition:
            num_bytes = _ID_BYTES * len(ids)
            if self._is_closed or self._token_bytes + num_bytes > MAX_TOKEN_BYTES:
                return
            last = self._queue[-1] if self._queue else None
            if not isinstance(last, _Tokens):
                last = _Tokens(time.monotonic())
                self._queue.append(last)
                self._condition.notify()
            last.add(message, start, ids)
            self._token_bytes += num_bytes

    def flush(self) -> asyncio.Future[None]:
        """Return the future of having written all tokens that were appended; as `submit`."""
        return self.submit(lambda tables: self._check_tokens(), 0)

    def close(self) -> None:
        """Write what waits, and close the connection; what cannot be written fails."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _use(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._tables = Tables(connection)
        self._scrubber = Scrubber(connection, self._tables)
        self._synchronous: Synchronous | None = None
        self._has_failed = False

    # In the writer's thread.

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            if group:
                self._write(group)
                self._checkpointer.move_rest(self._db)
            if not self._scrubber.is_done and time.monotonic() >= self._scrub_at:
                self._scrub()
        self._finish(self._to_scrub)
        with suppress(sqlite3.Error):
            self._db.close()

    def _next_group(self) -> list[_Job | _Tokens] | None:
        """Return what goes into the next transaction, [] where there is time to scrub, None where all is done."""
        with self._condition:
            while True:
                if self._num_jobs or self._is_closed:
                    return self._take() or None
                now = time.monotonic()
                wait = None
                if not self._scrubber.is_done:
                    wait = self._scrub_at - now
                    if wait <= 0:
                        return []
                if self._queue:
                    oldest = self._queue[0]
                    assert isinstance(oldest, _Tokens), "a job that is not counted"
                    due = max(oldest.since + TOKENS_EVERY_S, self._retry_at) - now
                    if due <= 0:
                        return self._take()
                    wait = due if wait is None else min(wait, due)
                self._condition.wait(wait)

    def _take(self) -> list[_Job | _Tokens]:
        group: list[_Job | _Tokens] = []
        num_bytes = 0
        while self._queue and len(group) < MAX_GROUP:
            item = self._queue[0]
            if isinstance(item, _Job):
                if group and num_bytes + item.num_bytes > MAX_GROUP_BYTES:
                    break
                num_bytes += item.num_bytes
                self._queued_bytes -= item.num_bytes
                self._num_jobs -= 1
            else:
                self._token_bytes -= item.num_bytes
            group.append(self._queue.popleft())
        return group

    def _write(self, group: list[_Job | _Tokens]) -> None:
        jobs = [item for item in group if isinstance(item, _Job)]
        error = self._transaction(group)
        if error is not None and len(group) > 1:
            # Perhaps one of them is too large for what room there is, and the others are not.
            for item in group:
                self._fail(item, self._transaction([item]))
        else:
            self._fail(group[0], error)
        erased = [job for job in jobs if job.has_erased and job.error is None]
        if erased:
            self._scrub_since = time.monotonic()
            try:
                unused, self._tables.unused = self._tables.unused, []
                self._scrubber.begin(unused)
            except sqlite3.Error as failure:
                _logger.error("what was erased is not yet out of the files: %s", failure)
                self._has_failed = True
        waiting = [job for job in erased if job.waits_for_scrub and not self._scrubber.is_done]
        self._to_scrub += waiting
        self._finish(job for job in jobs if job not in waiting)

    def _fail(self, item: _Job | _Tokens, error: StorageError | None) -> None:
        """Note that a transaction failed with what it was for."""
        if error is None:
            return
        if isinstance(item, _Job):
            item.error = item.error or error
        else:
            self._tokens_error = error
            self._keep_tokens(item)

    def _transaction(self, items: Sequence[_Job | _Tokens]) -> StorageError | None:
        """Do all in one transaction, or nothing; a job that is wrong fails alone."""
        error = self._attempt(items)
        if is_index_damaged(error):
            _logger.error("the full-text index is damaged, and is made anew from the messages: %s", error)
            error = self._attempt_to(self._rebuild_index) or self._attempt(items)
        return None if error is None else storage_error(error, self._directory)

    def _attempt(self, items: Sequence[_Job | _Tokens]) -> Exception | None:
        """Do all in one transaction, and return what made it fail."""
        is_durable = any(isinstance(item, _Job) for item in items)
        error = self._attempt_to(lambda: self._do_all(items), "FULL" if is_durable else "NORMAL")
        if error is None:
            self.num_transactions += 1
            written = sum(item.num_bytes for item in items)
            self._checkpointer.note(_PER_TRANSACTION_BYTES + written)
        return error

    def _attempt_to(self, act: Callable[[], None], synchronous: Synchronous = "FULL") -> Exception | None:
        try:
            if self._has_failed:
                with suppress(sqlite3.Error):
                    self._db.close()
                self._use(self._connect())
            self._set_synchronous(synchronous)
            self._db.execute("BEGIN IMMEDIATE")
            act()
            self._db.execute("COMMIT")
        except Exception as error:
            # Whatever it is: this thread goes on, since everybody waits for it.
            self._roll_back()
            self._has_failed = primary_code(error) != sqlite3.SQLITE_FULL
            return error
        return None

    def _do_all(self, items: Sequence[_Job | _Tokens]) -> None:
        for item in items:
            if isinstance(item, _Job):
                item.error = None
                self._do(item)
            else:
                self._tokens_error = None
                for message, start, ids in item.runs:
                    with suppress(DamagedRecord):  # Who reads the session is told.
                        self._tables.append_tokens(message, start, ids)

    def _rebuild_index(self) -> None:
        for part in range(NUM_PARTS):
            rebuild_index(self._db, part)

    def _do(self, job: _Job) -> None:
        self._db.execute("SAVEPOINT job")
        self._tables.has_erased = False
        try:
            job.result = job.apply(self._tables)
            job.has_erased = self._tables.has_erased
        except Exception as error:
            if is_index_damaged(error) or (isinstance(error, sqlite3.Error) and not self._db.in_transaction):
                raise  # In the second case SQLite gave up the whole transaction.
            self._db.execute("ROLLBACK TO job")
            self._tables.forget()
            job.error = (
                error if isinstance(error, ChatdError | AssertionError) else storage_error(error, self._directory)
            )
        self._db.execute("RELEASE job")

    def _roll_back(self) -> None:
        self._tables.forget()
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _set_synchronous(self, level: Synchronous) -> None:
        if self._synchronous != level:
            self._db.execute(f"PRAGMA synchronous = {level}")
            self._synchronous = level

    def _check_tokens(self) -> None:
        if self._tokens_error is not None:
            raise self._tokens_error

    def _keep_tokens(self, tokens: _Tokens) -> None:
        """Try tokens again later: nobody waits for them, and they cannot be had again.

        A change of their answer may come before them then, and they are what the answer has at their place as well.
        """
        with self._condition:
            if not self._is_closed:
                self._queue.appendleft(tokens)
                self._token_bytes += tokens.num_bytes
                self._retry_at = time.monotonic() + _RETRY_S

    def _scrub(self) -> None:
        """Do a part of removing what erased rows left behind, and tell who waits when all of it is gone."""
        scrubber = self._scrubber
        late = time.monotonic() - self._scrub_since > _SCRUB_WARNING_S
        try:
            self._set_synchronous("NORMAL")
            scrubber.do_part()
            self._checkpointer.note(_PER_TRANSACTION_BYTES)
            self._scrub_at = time.monotonic() + _SCRUB_EVERY_S if scrubber.must_wait else 0.0
            if scrubber.must_wait and late and self._to_scrub:
                _logger.warning("what was erased stays in the log until nobody reads an older state of the journal")
        except sqlite3.Error as error:
            _logger.error("what was erased is not yet out of the files: %s", error)
            self._scrub_at = time.monotonic() + _RETRY_S
        if scrubber.is_done or (late and self._scrub_at):
            self._finish(self._to_scrub)
            self._to_scrub = []

    def _finish(self, jobs: Iterable[_Job]) -> None:
        """Tell who waits, with one call for all of them."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        for job in jobs:
            by_loop.setdefault(job.future.get_loop(), []).append(job)
        for loop, own in by_loop.items():
            with suppress(RuntimeError):  # The loop has ended, and nobody waits.
                loop.call_soon_threadsafe(_resolve, own)


def _resolve(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)

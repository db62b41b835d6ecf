"""A disk that is full or fails: a typed error, nothing acknowledged, and all as before once it works again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chatd.errors import StorageError
from chatd.journal import writer as writer_module
from chatd.journal.journal import Journal
from chatd.journal.records import SaveMessage, SaveSession
from chatd.journal.tables import Tables
from chatd.testing.journal_records import make_answer, make_session, make_user_message

on_linux = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    await journal.commit([SaveSession(make_session("s"))])
    yield journal
    await journal.close()


async def contents(journal: Journal) -> list[str]:
    return [message.id for message in await journal.messages("s")]


async def limit_pages(journal: Journal, num_pages: int | None) -> None:
    """Let the database grow by so many pages and no more, as on a disk with no more room."""

    def limit(tables: Tables) -> None:
        connection = tables._db
        (used,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {2**30 if num_pages is None else used + num_pages}")

    await journal._writer.submit(limit, 0)


@pytest.fixture
def writers_log(journal: Journal) -> int:
    """Return the writer's descriptor of the log, which was opened last."""
    log = str(journal.directory / "journal.db-wal")
    return max(int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd) == log)


def replace(descriptor: int, path: str | Path, flags: int) -> None:
    """Put another file in a descriptor's place, where its reads and writes then go."""
    other = os.open(path, flags)
    os.dup2(other, descriptor)
    os.close(other)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


async def test_what_does_not_fit_is_refused_and_the_rest_of_its_group_is_kept(journal: Journal) -> None:
    await limit_pages(journal, 20)
    large = SaveMessage("s", make_user_message("large", "x" * 200_000))
    small = [SaveMessage("s", make_user_message(f"m{i}", "hello")) for i in range(3)]
    results = await asyncio.gather(
        *(journal.commit([change]) for change in (small[0], large, *small[1:])), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), StorageError, type(None), type(None)]
    assert "there is no room for the journal" in str(results[1])
    assert str(journal.directory) not in str(results[1]), "a tenant sees this"
    assert await contents(journal) == ["m0", "m1", "m2"]
    await limit_pages(journal, None)
    await journal.commit([large])
    assert await contents(journal) == ["m0", "m1", "m2", "large"]


async def test_a_full_disk_refuses_one_commit_after_another_until_there_is_room(journal: Journal) -> None:
    await limit_pages(journal, 8)
    num_kept = num_refused = 0
    while num_refused < 5:
        change = SaveMessage("s", make_user_message(f"m{num_kept}", "some text " * 100))
        try:
            await journal.commit([change])
            num_kept += 1
        except StorageError:
            num_refused += 1
    assert await contents(journal) == [f"m{i}" for i in range(num_kept)]
    await limit_pages(journal, None)
    await journal.commit([change])
    assert len(await contents(journal)) == num_kept + 1


@on_linux
@pytest.mark.parametrize("fault", ["no room", "read-only", "nothing there"])
async def test_a_log_that_cannot_be_written_acknowledges_nothing(
    journal: Journal, writers_log: int, fault: str
) -> None:
    await journal.commit([SaveMessage("s", make_user_message("before", "x"))])
    log = journal.directory / "journal.db-wal"
    replace(
        writers_log,
        {"no room": "/dev/full", "read-only": log, "nothing there": "/dev/null"}[fault],
        os.O_RDWR if fault == "no room" else os.O_RDONLY,
    )
    with pytest.raises(StorageError):
        await journal.commit([SaveMessage("s", make_user_message("lost", "x"))])
    assert await contents(journal) == ["before"]
    # What is wrong with a descriptor goes with it.
    while True:
        try:
            await journal.commit([SaveMessage("s", make_user_message("after", "x"))])
            break
        except StorageError:
            assert await contents(journal) == ["before"]
    directory = journal.directory
    await journal.close()
    again = Journal.open(directory)
    assert await contents(again) == ["before", "after"]
    await again.close()


async def test_tokens_in_flight_are_written_when_there_is_room_again(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.01)
    ids = list(range(1000, 5000))
    await journal.commit([SaveMessage("s", make_answer("m", None, None, []))])
    await limit_pages(journal, 0)
    journal.append_tokens("m", 0, ids)
    with pytest.raises(StorageError, match="there is no room"):
        await journal.flush()
    assert not (await journal.messages("s"))[0].ids
    journal.append_tokens("m", 4000, [3])
    await limit_pages(journal, None)
    await journal.flush()
    assert (await journal.messages("s"))[0].ids.tolist() == [*ids, 3]


async def test_more_tokens_than_there_is_memory_for_leave_no_gap(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_TOKEN_BYTES", 40)
    await journal.commit([SaveMessage("s", make_answer("m", None, None, []))])
    journal.append_tokens("m", 0, [1] * 8)
    journal.append_tokens("m", 8, [2] * 8)
    journal.append_tokens("m", 16, [3])
    await journal.flush()
    assert (await journal.messages("s"))[0].ids.tolist() == [1] * 8


async def test_more_than_the_queue_holds_is_refused_at_once(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 10_000)
    changes = [SaveMessage("s", make_user_message(f"m{i}", "x" * 1000)) for i in range(20)]
    results = await asyncio.gather(*(journal.commit([change]) for change in changes), return_exceptions=True)
    refused = [isinstance(result, StorageError) for result in results]
    assert any(refused)
    assert await contents(journal) == [f"m{i}" for i, is_refused in enumerate(refused) if not is_refused]


_WITH_A_FILE_LIMIT = """
import asyncio, resource, signal, sys
from pathlib import Path
from chatd.errors import StorageError
from chatd.journal.journal import Journal
from chatd.journal.records import SaveMessage, SaveSession
from chatd.testing.journal_records import make_session, make_user_message

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal.open(Path(sys.argv[1]))
    await journal.commit([SaveSession(make_session("s"))])
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    kept = []
    refused = 0
    for number in range(200):
        try:
            await journal.commit([SaveMessage("s", make_user_message(f"m{number}", "some text " * 200))])
            kept.append(f"m{number}")
        except StorageError:
            refused += 1
        if refused == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = [message.id for message in await journal.messages("s")]
    await journal.close()
    print(refused, found == kept)

asyncio.run(main())
"""


def test_files_that_may_not_grow_refuse_commits_and_then_take_them_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITH_A_FILE_LIMIT, str(tmp_path / "journal")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "3 True\n", result.stderr

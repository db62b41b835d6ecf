"""`chatd sessions` and `chatd usage`, beside a daemon that writes and without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from chatd import journal_commands
from chatd.cli import app
from chatd.errors import ChatdError, ConfigError, Conflict, EnvironmentProblem, InvalidRequest, NotFound
from chatd.journal import reader
from chatd.journal.directory import DATABASE, JournalDirectory, JournalInUse
from chatd.journal.journal import Journal
from chatd.journal.reader import JournalReader, connect_to_read
from chatd.journal.records import Change, CountUsage, MessageRecord, SaveMessage, SaveSession, ShareMessages
from chatd.kvcache.block_directory import BlockDirectory
from chatd.kvcache.block_file import Origin, write_block
from chatd.session_files import FORMAT, VERSION, SessionFile, as_json, from_json
from chatd.sessions.conversation import MESSAGE_OVERHEAD_BYTES
from chatd.sessions.stored import conversation_of
from chatd.testing.engine import NAMESPACE
from chatd.testing.journal_records import make_answer, make_session, make_user_message

NOON = datetime(2026, 1, 31, 12).timestamp()
HOSTILE = "\x1b]0;owned\x07<script>alert(1)</script>\u202e[bold]&amp;\x9b2J"
TREE = [
    make_user_message("msg_1", "what is a whale?"),
    make_answer("msg_2", "msg_1", "a mammal", [5, 70000]),
    make_answer("msg_3", "msg_1", "no fish", [6]),
    make_user_message("msg_4", HOSTILE, "msg_2"),
]


COUNTS = ("num_items", "num_tokens", "num_bytes")


def write(directory: Path, *changes: Change) -> None:
    async def run() -> None:
        journal = Journal.open(directory)
        await journal.commit(changes)
        await journal.close()

    asyncio.run(run())


def read(directory: Path, session: str) -> list[MessageRecord]:
    reader = JournalReader(connect_to_read(directory / DATABASE))
    messages = reader.messages(session)
    reader.close()
    return messages


@pytest.fixture(autouse=True)
def own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk tier of the test's own."""
    monkeypatch.setenv("CHATD_ENGINE__DISK_DIRECTORY", str(tmp_path / "kv"))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    directory = tmp_path / "journal"
    session = make_session("ses_1", title=f"Whales {HOSTILE}", updated_at=86400.0, head="msg_4")
    write(
        directory,
        SaveSession(session),
        *(SaveMessage("ses_1", message) for message in TREE),
        SaveSession(make_session("fork", user="bob", pinned=True, head="msg_1")),
        ShareMessages("fork", ("msg_1",)),
        CountUsage("acme", "key_1", date(2026, 2, 27), 1000, 200, 30),
        CountUsage("acme", "key_1", date(2026, 2, 28), 5, 4, 3),
        CountUsage("other", "key_2", date(2026, 2, 28), 1, 0, 1),
    )
    return directory


@pytest.fixture
def in_use(journal: Path) -> Iterator[None]:
    """A journal that a daemon writes."""
    loop = asyncio.new_event_loop()
    open_journal = Journal.open(journal)
    yield
    loop.run_until_complete(open_journal.close())
    loop.close()


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def sessions(command: str, journal: Path, *arguments: object) -> str:
    return run("sessions", command, "--directory", journal, *arguments)


def listed(journal: Path, *arguments: object) -> list[str]:
    return [row["id"] for row in json.loads(sessions("ls", journal, "--json", *arguments))]


def without_counts(exported: str) -> dict[str, Any]:
    """Return an export but for how much it has, which an import counts anew."""
    file: dict[str, Any] = json.loads(exported)
    for name in COUNTS:
        file["session"].pop(name, None)
    return file


def has_controls(text: str) -> bool:
    return any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u202e" for c in text)


@pytest.mark.usefixtures("in_use")
def test_conversations_are_read_beside_a_daemon(journal: Path) -> None:
    assert listed(journal) == ["ses_1", "fork"]
    assert listed(journal, "--user", "bob") == ["fork"]
    assert listed(journal, "--tenant", "other") == []
    assert listed(journal, "--limit", 1) == ["ses_1"]
    assert listed(journal, "--tenant", "acme", "--user", "ann", "--query", "MAMM") == ["ses_1"]
    assert "a mammal" in sessions("show", journal, "ses_1")
    assert json.loads(run("usage", "--directory", journal, "--json"))[0]["input_tokens"] == 1000


CHANGES = [("rm", "ses_1"), ("rm", "--unused-days", 1), ("erase", "ses_1"), ("erase-tenant", "acme")]


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("command", CHANGES)
def test_nothing_is_written_beside_a_daemon_that_does_not_say_where_it_is(
    journal: Path, command: tuple[Any, ...]
) -> None:
    with pytest.raises(JournalInUse, match=r"in use by process \d+") as caught:
        sessions(command[0], journal, *command[1:])
    assert "--url" in str(caught.value.hint)
    assert read(journal, "ses_1") == TREE


@pytest.mark.parametrize("command", CHANGES)
def test_a_daemon_that_does_not_answer_is_said_and_nothing_is_written(journal: Path, command: tuple[Any, ...]) -> None:
    held = JournalDirectory(journal)
    held.announce("http://127.0.0.1:9")
    try:
        with pytest.raises(EnvironmentProblem, match=r"the daemon at \S+ does not answer"):
            sessions(command[0], journal, *command[1:])
    finally:
        held.close()
    assert read(journal, "ses_1") == TREE


def test_a_list_shows_titles_without_what_a_terminal_obeys(journal: Path) -> None:
    shown = sessions("ls", journal)
    assert "Whales" in shown
    assert "[bold]" in shown
    assert not has_controls(shown)


def test_a_list_never_cuts_an_id_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(
        f"ses_{'0f' * 12}", tenant="a-long-name-of-a-tenant", title="words " * 30, updated_at=NOON, pinned=True
    )
    write(tmp_path / "journal", SaveSession(session))
    terminal = {"COLUMNS": "80", "FORCE_COLOR": "1"}
    monkeypatch.setattr(journal_commands, "output", Console(width=80, force_terminal=True, color_system=None))
    result = CliRunner().invoke(app, ["sessions", "ls", "--directory", str(tmp_path / "journal")], env=terminal)
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if session.id in line]
    assert row.endswith("│ 3        │ 2026-01-31 12:00 │")
    words = " ".join(result.stdout.replace("│", " ").split())
    assert words.count("words") == 30
    assert "…" not in words
    assert "(pinned)" in words


def test_a_list_in_a_pipe_has_each_conversation_whole_on_a_line_of_its_own(journal: Path) -> None:
    command = ["sessions", "ls", "--directory", str(journal)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "60"}, catch_exceptions=False)
    (row,) = [line for line in result.output.splitlines() if "ses_1" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["ses_1", "acme", "ann"]
    assert cells[3].startswith("Whales")
    assert cells[3].endswith("2J")
    assert cells[4:] == ["3", "1970-01-02 00:00", ""]


def test_markdown_is_the_path_to_the_head_and_has_no_controls(journal: Path) -> None:
    shown = sessions("show", journal, "ses_1")
    assert shown.startswith("# Whales ")
    assert "## System\n\n> Be brief.\n\n## You\n\n> what is a whale?\n\n## Assistant\n\n> a mammal\n\n## You" in shown
    assert "no fish" not in shown
    assert not has_controls(shown)
    assert sessions("export", journal, "ses_1") == shown


def test_html_escapes_everything(journal: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert sessions("export", journal, "ses_1", "--format", "html", "--output", file) == ""
    page = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "&amp;amp;" in page
    assert "default-src 'none'" in page
    assert not has_controls(page)
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        sessions("export", journal, "ses_1", "--format", "html", "--output", file)


def test_a_conversation_is_the_same_after_export_and_import(journal: Path, tmp_path: Path) -> None:
    files = [tmp_path / "ses_1.json", tmp_path / "fork.json"]
    for file in files:
        sessions("export", journal, file.stem, "--format", "json", "--output", file)
        assert file.read_text().isascii()
    other = tmp_path / "other"
    for directory in (other, journal):
        if directory == journal:
            sessions("rm", journal, "ses_1", "fork")
        sessions("import", directory, files[0])
        sessions("import", directory, files[1], "--user", "ann")
        assert read(directory, "ses_1") == TREE
        assert read(directory, "fork") == TREE[:1]
        assert without_counts(sessions("export", directory, "ses_1", "--format", "json")) == without_counts(
            files[0].read_text()
        )
        assert listed(directory, "--tenant", "acme", "--user", "ann", "--query", "whale") == ["ses_1", "fork"]


def test_an_export_takes_a_file_whose_name_says_what_it_is(journal: Path, tmp_path: Path) -> None:
    printed = {name: sessions("export", journal, "ses_1", "--format", name) for name in ("md", "html", "json")}
    for name, asked in (
        ("a.html", ()),
        ("a.JSON", ()),
        ("a.md", ()),
        ("a.txt", ()),
        ("b.txt", ("--format", "html")),
        ("b.json", ("--format", "md")),
    ):
        file = tmp_path / name
        sessions("export", journal, "ses_1", file, *asked)
        expected = asked[1] if asked else {"html": "html", "JSON": "json"}.get(file.suffix[1:], "md")
        if expected == "json":
            assert without_counts(file.read_text()) == without_counts(printed["json"])
        else:
            assert file.read_text() == printed[expected]
    sessions("export", journal, "ses_1", "-o", tmp_path / "c.html")
    assert (tmp_path / "c.html").read_text() == printed["html"]
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        sessions("export", journal, "ses_1", tmp_path / "c.html")
    arguments = ["sessions", "export", "ses_1", str(tmp_path / "d"), "-o", str(tmp_path / "e")]
    refused = CliRunner().invoke(app, [*arguments, "--directory", str(journal)], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "name one" in refused.output


@given(text=st.text(max_size=50), title=st.text(max_size=30), ids=st.lists(st.integers(0, 2**32 - 1), max_size=5))
def test_any_text_is_the_same_after_export_and_import(text: str, title: str, ids: list[int]) -> None:
    session = msgspec.structs.replace(make_session("s", title=title, head="a"), system=text)
    messages = [make_user_message("q", text), make_answer("a", "q", text[::-1], ids)]
    exported = as_json(session, messages)
    assert exported.isascii()
    assert not has_controls(exported)
    read = from_json(exported)
    counts = {name: getattr(read.session, name) for name in COUNTS}
    session = msgspec.structs.replace(session, **counts)
    assert read == SessionFile(format=FORMAT, version=VERSION, session=session, messages=messages)


@pytest.mark.parametrize("claimed", [0, 1, 2**31 - 1])
def test_how_much_an_imported_conversation_has_is_counted_and_not_believed(claimed: int) -> None:
    session = make_session("s", head="a")
    messages = [make_user_message("q", "x" * 5000), make_answer("a", "q", "yes", range(100))]
    claims = msgspec.structs.replace(session, num_items=claimed, num_tokens=claimed, num_bytes=claimed)
    read = from_json(as_json(claims, messages)).session
    assert (read.num_items, read.num_tokens) == (2, conversation_of(session, messages).num_tokens)
    assert 5000 + 4 * 100 <= read.num_bytes <= 5000 + 4 * 100 + 3 * MESSAGE_OVERHEAD_BYTES


def test_an_import_changes_nothing_that_is_there(journal: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(sessions("export", journal, "ses_1", "--format", "json"))
    with pytest.raises(Conflict, match="session 'ses_1' is in the journal already"):
        sessions("import", journal, file)
    sessions("rm", journal, "ses_1")
    file.write_text(file.read_text().replace("what is a whale?", "what is a shark?"))
    with pytest.raises(Conflict, match="message 'msg_1' is in the journal already"):
        sessions("import", journal, file)
    assert read(journal, "fork") == TREE[:1]
    sessions("import", journal, file, "--new-ids")
    (session,) = listed(journal, "--user", "ann")
    messages = read(journal, session)
    assert [message.content for message in messages] == ["what is a shark?", "a mammal", "no fish", HOSTILE]
    assert messages[3].parent == messages[1].id
    assert messages[1].ids == TREE[1].ids


def test_an_answer_in_progress_is_left_out_of_an_import(tmp_path: Path) -> None:
    unfinished = make_answer("msg_5", "msg_1", None, [1, 2])
    write(
        tmp_path / "a",
        SaveSession(make_session("s", head="msg_5")),
        SaveMessage("s", TREE[0]),
        SaveMessage("s", unfinished),
    )
    file = tmp_path / "s.json"
    file.write_text(sessions("export", tmp_path / "a", "s", "--format", "json"))
    assert json.loads(file.read_text())["messages"][1]["ids"] == [1, 2]
    assert "(the answer is in progress)" in sessions("show", tmp_path / "a", "s")
    sessions("import", tmp_path / "b", file)
    assert read(tmp_path / "b", "s") == TREE[:1]
    assert sessions("show", tmp_path / "b", "s").endswith("what is a whale?\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format":"chatd.session"', '"format":"else"'),
        ('"version":1', '"version":2'),
        ('"parent":"msg_1"', '"parent":"msg_9"'),
        ('"head":"msg_4"', '"head":"msg_9"'),
        ('"id":"msg_2"', '"id":"msg_1"'),
        ("70000", "4294967296"),
        ("70000", "-1"),
        ('"id":"ses_1"', '"id":"../ses_1"'),
        ('"id":"msg_4"', '"id":"msg\\u001b4"'),
        ('"role":"user"', '"role":"root"'),
        ('"pinned"', '"pinnned"'),
        ("{", "["),
        ('"context_policy":', '"num_bytes":-1,"context_policy":'),
        ('"archived":', '"updated_at":1e308,"archived":'),
        ('"num_deaths":0', '"num_deaths":1000000000000000000000000000000'),
        ('"is_answer":false', '"is_answer":true'),
        ('"top_k":0', '"top_k":-1'),
        ('"seed":7', f'"seed":{2**80}'),
        ('"stop_token_ids":[]', f'"stop_token_ids":[{2**62}]'),
        ('"logit_bias":[]', '"logit_bias":[[-1,1.0]]'),
        ('"stop_strings":[]', '"stop_strings":[""]'),
        ('"params":{', f'"params":{{"seed":{2**80},'),
        ('"params":{"temperature":0.5', '"params":{"temperature":-1'),
        ('"params":{', '"params":{"logit_bias":{"x":1},'),
        ('"tenant":"acme"', '"tenant":""'),
        ('"user":"ann"', '"user":"ann\\u0000"'),
        ('"session":', '"x":' + "[" * 100_000 + ',"session":'),
    ],
)
def test_a_file_that_is_no_export_is_refused(journal: Path, tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "file.json"
    text = sessions("export", journal, "ses_1", "--format", "json")
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(InvalidRequest, match=r"file\.json: "):
        sessions("import", tmp_path / "new", file)
    assert not (tmp_path / "new").exists()


def test_rm_removes_by_id_or_by_age_and_spares_what_is_pinned(journal: Path) -> None:
    with pytest.raises(NotFound):
        sessions("rm", journal, "ses_1", "ses_2")
    with pytest.raises(InvalidRequest):
        sessions("rm", journal)
    with pytest.raises(InvalidRequest, match="goes with --unused-days"):
        sessions("rm", journal, "ses_1", "--tenant", "other")
    assert listed(journal) == ["ses_1", "fork"]
    sessions("rm", journal, "--unused-days", 1, "--tenant", "other")
    assert listed(journal) == ["ses_1", "fork"]
    sessions("rm", journal, "--unused-days", 1)
    assert listed(journal) == ["fork"]
    sessions("rm", journal, "fork")
    assert listed(journal) == []


def test_erase_prints_what_was_removed_and_leaves_none_of_it(journal: Path) -> None:
    receipt = json.loads(sessions("erase", journal, "ses_1"))
    assert receipt["session"] == "ses_1"
    assert (receipt["messages"], receipt["shared_messages"], receipt["tokens"]) == (3, 1, 9)
    assert not any(b"mammal" in file.read_bytes() for file in journal.iterdir())
    with pytest.raises(NotFound):
        sessions("erase", journal, "ses_1")


def test_a_journal_on_a_disk_that_cannot_be_written_is_read(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_is_read_only", lambda _directory: True)
    before = sorted(journal.iterdir())
    assert "a mammal" in sessions("show", journal, "ses_1")
    assert sorted(journal.iterdir()) == before
    (journal / f"{DATABASE}-wal").write_bytes(b"changes that a crash has left")
    (journal / f"{DATABASE}-wal").chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be written, and the journal's log has changes") as caught:
        sessions("show", journal, "ses_1")
    assert "copy the folder" in str(caught.value.hint)


def test_usage_is_shown_by_tenant_key_and_day(journal: Path) -> None:
    shown = run("usage", "--directory", journal)
    assert "1,000" in shown
    rows = json.loads(run("usage", "--directory", journal, "--json", "--from", "2026-02-28", "--tenant", "acme"))
    assert rows == [
        {
            "tenant": "acme",
            "key_id": "key_1",
            "day": "2026-02-28",
            "requests": 1,
            "input_tokens": 5,
            "cached_tokens": 4,
            "output_tokens": 3,
        }
    ]
    with pytest.raises(InvalidRequest, match="'yesterday' is no day"):
        run("usage", "--directory", journal, "--to", "yesterday")


def test_what_cannot_be_read_is_a_plain_refusal(journal: Path, tmp_path: Path) -> None:
    for error, directory, session in (
        (EnvironmentProblem, tmp_path / "nowhere", "ses_1"),
        (NotFound, journal, "ses_9"),
    ):
        with pytest.raises(error):
            sessions("show", directory, session)
    with pytest.raises(InvalidRequest, match="name --tenant and --user"):
        sessions("ls", journal, "--query", "x")
    (journal / DATABASE).write_bytes(b"SQLite format 3\0" + bytes(4096))
    with pytest.raises(ChatdError):
        sessions("ls", journal)


def test_nothing_is_left_of_a_tenant_that_is_erased(journal: Path, tmp_path: Path, monkeypatch) -> None:
    """I26: deleting a tenant leaves nothing of it, in the journal and in the disk tier."""
    blocks = tmp_path / "kv"
    monkeypatch.setenv("CHATD_ENGINE__DISK_DIRECTORY", str(blocks))
    directory = BlockDirectory(blocks)
    for number, tenant in enumerate(("acme", "acme", "acme-2", None)):
        origin = Origin(NAMESPACE.of(tenant).frame(), bytes(32), number.to_bytes(4, "little"))
        write_block(directory.writing, origin, memoryview(bytes(64)))
        directory.publish(bytes([number]) * 32)
    directory.writing.write_bytes(b"half a block of acme's")
    directory.close()
    write(journal, SaveSession(make_session("theirs", tenant="other", user="eve")))
    receipt = json.loads(sessions("erase-tenant", journal, "acme"))
    assert {name: receipt[name] for name in ("tenant", "sessions", "messages", "disk_blocks")} == {
        "tenant": "acme",
        "sessions": 2,
        "messages": 4,
        "disk_blocks": 2,
    }
    assert listed(journal) == ["theirs"]
    rows = json.loads(run("usage", "--directory", journal, "--json"))
    assert {row["tenant"] for row in rows} == {"other"}
    left = [path for path in [*journal.rglob("*"), *blocks.rglob("*")] if path.is_file()]
    assert not any(b"mammal" in path.read_bytes() for path in left)
    assert sorted(path.name[:2] for path in blocks.rglob("*.kv")) == ["02", "03"]
    assert json.loads(sessions("erase-tenant", journal, "acme"))["sessions"] == 0

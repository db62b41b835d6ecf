"""The registry of commands, and what is typed, without a screen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from chatd import protocol as p
from chatd.errors import InvalidRequest
from chatd.testing.protocol_values import make_info
from chatd.transcript_file import format_of
from chatd_tui import status_text
from chatd_tui.command_table import BOTTOM, COMMANDS
from chatd_tui.commands import Context, Typed, as_typed, find, key_name, parse, similar, suggestions
from chatd_tui.export import as_json, code_blocks, rendered, wished, write_new
from chatd_tui.keymap import DEFAULT, bindings
from chatd_tui.widgets.versions import leaf_at, marker

ALL = Context(
    connected=True,
    caps=frozenset({"fork", "branch", "continue", "erase", "context", "prefill", "pool.map"}),
    exists=True,
)


def available(context: Context) -> set[str]:
    return {command.name for command in COMMANDS if not command.unavailable(context)}


def test_names_and_keys_are_used_once_and_each_command_says_what_it_does() -> None:
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)
    keys = [key for command in COMMANDS for key in command.keys]
    assert len(set(keys)) == len(keys)
    assert len(DEFAULT.message_keys) == sum(len(command.message_keys) for command in COMMANDS)
    assert all(0 < len(command.help) <= 60 and "\n" not in command.help for command in COMMANDS)
    assert {binding.id for binding in bindings()} == {command.name for command in COMMANDS}
    assert set(BOTTOM) == {command.name for command in COMMANDS if command.short}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("hello", "hello"),
        ("/fork", Typed("fork", "")),
        ("/Fork  a title ", Typed("fork", "a title")),
        ("/system one\ntwo", Typed("system", "one\ntwo")),
        ("/system\none", Typed("system", "one")),
        ("/", Typed("", "")),
        ("//fork", "/fork"),
        ("//", "/"),
        ("/etc/hosts is a file", "/etc/hosts is a file"),
        ("/2 of it", "/2 of it"),
        (" /fork", " /fork"),
    ],
)
def test_a_slash_and_a_word_is_a_command_and_all_else_a_message(typed: str, read: Typed | str) -> None:
    assert parse(typed) == read


@pytest.mark.parametrize("message", ["hi", "/fork", "//x", "/", "/etc/hosts", "", "a\n/b"])
def test_every_message_can_be_typed(message: str) -> None:
    assert parse(as_typed(message)) == message


def test_what_cannot_be_done_says_why() -> None:
    assert available(ALL) == {command.name for command in COMMANDS}
    old = replace(ALL, caps=frozenset())
    new = {"fork", "edit", "regenerate", "branch", "continue", "erase", "context", "typeahead"}
    assert available(ALL) - available(old) == new
    assert find(COMMANDS, "fork").unavailable(old) == "this daemon is too old for that"
    answering = replace(ALL, answering=True)
    assert available(ALL) - available(answering) == {"edit", "regenerate", "branch", "continue", "close"}
    watching = replace(ALL, observer=True)
    assert available(ALL) - available(watching) == {
        *("fork", "edit", "regenerate", "branch", "stop", "rename", "pin", "archive", "system", "set"),
        *("continue", "erase", "context", "typeahead", "close"),
    }
    assert {"help", "quit", "copy", "connect"} <= available(Context())
    assert find(COMMANDS, "pool").unavailable(Context()) == "there is no connection to the daemon yet"


def test_unknown_names_bring_the_likeliest() -> None:
    assert [command.name for command in similar(COMMANDS, "regen")][:1] == ["regenerate"]
    assert [command.name for command in similar(COMMANDS, "frok")][:1] == ["fork"]
    assert similar(COMMANDS, "zzzz") == []


def test_completion_offers_names_then_what_comes_after_them() -> None:
    assert [row.text for row in suggestions(COMMANDS, "/se", ALL)] == ["/server ", "/search ", "/set ", "/settings"]
    assert len(suggestions(COMMANDS, "/", ALL)) == len(COMMANDS)
    assert suggestions(COMMANDS, "//", ALL) == []
    assert suggestions(COMMANDS, "/nothing", ALL) == []
    assert suggestions(COMMANDS, "/se\n", ALL) == []
    assert [row.text for row in suggestions(COMMANDS, "/set temperature=1 top_", ALL)] == [
        "/set temperature=1 top_p=",
        "/set temperature=1 top_k=",
    ]
    assert suggestions(COMMANDS, "/fork my title", ALL)[0].label == "/fork [TITLE]"
    old = suggestions(COMMANDS, "/fork", replace(ALL, caps=frozenset()))[0]
    assert (old.enabled, old.help) == (False, "this daemon is too old for that")


def test_keys_are_written_as_people_do() -> None:
    assert [key_name(key) for key in ("ctrl+y", "f2", "escape", "ctrl+home")] == ["Ctrl+Y", "F2", "Esc", "Ctrl+Home"]


INFO = make_info(title="A\x1b[2Jtitle", system="Be brief.")
ITEMS = [
    p.Item(id="q", role="user", content="hi\x9b31m", status="completed"),
    p.Item(id="a", role="assistant", content="**Hello**\u202e", status="completed", parent="q"),
]


def test_an_export_is_what_the_files_name_asks_for() -> None:
    for name in ("a.md", "a", "a.json.txt"):
        assert rendered(format_of(name), INFO, ITEMS) == (
            "# A␛[2Jtitle\n\n## System\n\n> Be brief.\n\n## You\n\n> hi\ufffd31m\n\n## Assistant\n\n> **Hello**\n"
        )
    for name in ("a.html", "~/b.HTM"):
        page = rendered(format_of(name), INFO, ITEMS)
        assert page.startswith("<!doctype html>")
        assert '<section class="user"><h2>You</h2><pre>hi\ufffd31m</pre></section>' in page
    text = rendered(format_of("A.JSON"), INFO, ITEMS)
    assert text == as_json(INFO, ITEMS)
    assert text.isascii()
    assert [item["content"] for item in json.loads(text)["items"]] == [item.content for item in ITEMS]


@pytest.mark.parametrize(
    ("typed", "name", "file_format"),
    [
        ("a.html", "a.html", "html"),
        ("my talk.json", "my talk.json", "json"),
        ("a.txt --format json", "a.txt", "json"),
        ("--format=html a b.md", "a b.md", "html"),
        ("-o a.json", "a.json", "json"),
        ("--format md --output a.json", "a.json", "md"),
        ("--output=~/a", "~/a", "md"),
        ("-out.md", "-out.md", "md"),
    ],
)
def test_an_export_takes_what_the_command_line_takes(typed: str, name: str, file_format: str) -> None:
    assert wished(typed) == (name, file_format)


def test_an_export_without_a_file_or_in_no_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no file is named"):
        wished("--format md")
    with pytest.raises(InvalidRequest, match="there is no format 'p␛df'"):
        wished("a --format p\x1bdf")


def test_an_export_overwrites_nothing_and_is_its_owners(tmp_path: Path) -> None:
    path = write_new(str(tmp_path / "a.md"), "x")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_new(str(path), "y")
    assert path.read_text() == "x"


def test_code_blocks_are_the_fences_in_order() -> None:
    text = "a\n```python\none\n```\n- b\n  ~~~\n  two\n  ~~~\n`no`\n```\nopen"
    assert [block.rstrip("\n") for block in code_blocks(text)] == ["one", "two", "open"]


def test_the_mark_says_which_version_and_a_click_goes_where_it_points() -> None:
    siblings = p.Siblings(index=2, count=3, previous="a", next="c")
    assert marker(siblings).plain == "‹2/3›"
    assert [leaf_at(siblings, x) for x in (-1, 0, 2, 3, 4, 5)] == [None, "a", "a", "c", "c", None]
    assert leaf_at(p.Siblings(index=1, count=2, next="b"), 0) is None
    assert marker(None).plain == ""
    assert leaf_at(None, 0) is None


def test_states_are_said_in_plain_words() -> None:
    moved = status_text.moved(p.SessionTier(session="s", tier="disk", why="pressure"))
    assert (moved.text, moved.hint) == ("moved to disk for want of memory", "the next turn loads it")
    assert status_text.moved(p.SessionTier(session="s", tier="device", why="used")) is None
    assert status_text.moved(p.SessionTier(session="s", tier="tokens", why="used")) is None
    created = p.SessionCreated(session=INFO, shared_tokens=55, shared_blocks=4, copies_on_write=1)
    assert status_text.forked(created).text == "forked: 55 tokens in 4 blocks are shared"
    assert status_text.forked(p.SessionCreated(session=INFO)).text == "forked"

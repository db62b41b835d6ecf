"""What was sent before: in what order it comes back, what is kept of it, and the keys that bring it."""

import json
from pathlib import Path

import pytest

from chatd.config import input_history_path
from chatd.errors import ConfigError
from chatd_tui import input_history
from chatd_tui.app import ChatApp
from chatd_tui.input_history import MAX_ENTRIES, MAX_ENTRY_CHARS, InputHistory


def filled(*texts: str, path: Path | None = None) -> InputHistory:
    history = InputHistory(path)
    for text in texts:
        assert history.add(text)
        history.save(text)
    return history


def test_it_goes_back_to_the_oldest_and_forward_to_what_was_begun() -> None:
    history = filled("one", "two")
    assert [history.back("begun"), history.back("two"), history.back("one")] == ["two", "one", None]
    assert [history.forward("one"), history.forward("two"), history.forward("begun")] == ["two", "begun", None]


def test_a_recalled_text_that_was_changed_is_a_draft_and_is_not_lost() -> None:
    history = filled("one", "two")
    assert history.back("") == "two"
    assert history.back("two!") == "two"
    assert history.forward("two") == "two!"


def test_the_same_twice_blanks_and_what_is_too_long_are_not_kept() -> None:
    history = filled("one")
    for text in ("one", " secret", "\n", "", "x" * (MAX_ENTRY_CHARS + 1)):
        assert not history.add(text)
    assert [history.back(""), history.back("one")] == ["one", None]


def test_the_file_is_the_owners_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "input-history"
    filled("one\n\ttwo", "caf\u00e9", path=path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line) for line in path.read_text().splitlines()] == ["one\n\ttwo", "caf\u00e9"]
    again = InputHistory(path)
    again.load()
    assert [again.back(""), again.back("caf\u00e9")] == ["caf\u00e9", "one\n\ttwo"]


def test_a_file_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "input-history"
    path.write_text("")
    path.chmod(0o644)
    filled("one", path=path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_is_read_as_far_as_it_goes_and_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "input-history"
    path.write_bytes(b'"good"\n\xff\n{}\n7\n"\n' + json.dumps("a\x1b[2J").encode() + b"\n")
    history = InputHistory(path)
    history.load()
    assert [history.back(""), history.back("a␛[2J"), history.back("good")] == ["a␛[2J", "good", None]


def test_it_stays_within_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "input-history"
    path.write_text("".join(f'"{n}"\n' for n in range(2 * MAX_ENTRIES + 1)))
    history = InputHistory(path)
    history.load()
    lines = path.read_text().splitlines()
    assert (len(lines), lines[-1]) == (MAX_ENTRIES, f'"{2 * MAX_ENTRIES}"')
    shown, count = "", 0
    while (text := history.back(shown)) is not None:
        shown, count = text, count + 1
    assert count == MAX_ENTRIES


def test_of_a_file_that_is_too_large_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_history, "MAX_FILE_BYTES", 20)
    path = tmp_path / "input-history"
    path.write_text('"a long old text"\n"older"\n"new"\n')
    history = InputHistory(path)
    history.load()
    assert [history.back(""), history.back("new"), history.back("older")] == ["new", "older", None]
    assert path.read_text() == '"older"\n"new"\n'


def test_a_place_that_cannot_be_written_costs_nothing_but_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = filled("one", path=tmp_path / "file" / "input-history")
    history.load()
    assert history.back("") == "one"
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    filled("one", path=tmp_path / "link")
    assert not target.exists()


def test_a_variable_turns_the_file_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("CHATD_INPUT_HISTORY", raising=False)
    assert input_history_path() == tmp_path / "chatd" / "input-history"
    monkeypatch.setenv("CHATD_INPUT_HISTORY", "off")
    assert input_history_path() is None
    monkeypatch.setenv("CHATD_INPUT_HISTORY", "never")
    with pytest.raises(ConfigError, match="neither on nor off"):
        input_history_path()


async def test_the_arrows_bring_back_what_was_sent(daemon, tmp_path: Path, wait_until) -> None:
    path = tmp_path / "input-history"
    path.write_text('"/search tea"\n"first\\nsecond"\n')
    app = ChatApp(daemon.url, copies=tmp_path, history=InputHistory(path))
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected" and not list(app.workers)[1:])
        composer = app.chat.composer
        await pilot.press(*"now", "enter")
        await wait_until(lambda: len(path.read_text().splitlines()) == 3)
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        await pilot.press(*"dr", "up")
        assert composer.text == "now"
        await pilot.press("up")
        assert composer.text == "first\nsecond"
        # Within a text the arrows move in it.
        await pilot.press("up")
        assert composer.text == "first\nsecond"
        await pilot.press("up")
        assert composer.text == "/search tea"
        await pilot.press("down", "down", "down")
        assert composer.text == "dr"
        await pilot.press("down")
        assert composer.text == "dr"


async def test_an_edited_message_has_no_history(daemon, make_app, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        await pilot.press(*"one", "enter")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        app.chat.composer.begin_edit("itm_1", "other")
        await pilot.press("up")
        assert app.chat.composer.text == "other"

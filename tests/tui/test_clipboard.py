"""What is said of a copy: what is known, and nothing that is not."""

import os
import stat
from pathlib import Path

import pytest

from chatd_tui.app import ChatApp
from chatd_tui.clipboard import MAX_OSC52_BYTES, obstacle, save_copy, told
from chatd_tui.copying import Copying


def fake_tmux(folder: Path, answer: str) -> dict[str, str]:
    program = folder / "tmux"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o700)
    return {"TMUX": "/tmp/tmux-0/default,1,0", "PATH": f"{folder}:/bin:/usr/bin"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo on", ""),
        ("echo external", "tmux keeps it, its set-clipboard is external"),
        ("echo off", "tmux keeps it, its set-clipboard is off"),
        ("echo perhaps", ""),
        ("exit 1", ""),
    ],
)
def test_tmux_is_asked_what_it_does(tmp_path: Path, answer: str, expected: str) -> None:
    assert obstacle(fake_tmux(tmp_path, answer)) == expected


def test_terminals_that_are_known_not_to_take_it_are_named() -> None:
    assert obstacle({"TERM": "xterm-256color"}) == ""
    assert obstacle({"STY": "1.x", "TERM": "screen"}) == "screen does not pass it on"
    assert obstacle({"TERM": "linux"}) == "the console has no clipboard"
    assert obstacle({"TERM_PROGRAM": "Apple_Terminal"}) == "Terminal.app does not take it"


def test_success_is_never_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "copied.txt"
    kind, text, hint = told("the message", path, "", is_remote=False)
    assert (kind, text) == ("notice", "sent the message to the terminal's clipboard")
    assert hint == f"it does not say if it took it; also in {path}"
    assert told("it", path, "", is_remote=True)[2].endswith(f"also in {path} over there")
    assert told("it", None, "", is_remote=False)[2].endswith("no file could be written")
    assert told("it", path, "too long", is_remote=False) == (
        "notice",
        f"it is in {path}",
        "not in the clipboard: too long",
    )
    assert told("it", None, "too long", is_remote=False)[0] == "warning"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert told("it", path, "too long", is_remote=False)[1] == "it is in ~/copied.txt"


def test_the_file_is_its_owners_only_and_one_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    path = save_copy("text \ud800", tmp_path / "a" / "b")
    assert path is not None
    assert path.read_text() == "text ?"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    (tmp_path / "file").write_text("")
    assert save_copy("text", tmp_path / "file") is None


async def test_what_is_too_long_for_a_terminal_is_in_the_file_only(daemon, make_app, wait_until, tmp_path) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(120, 24)):
        await wait_until(lambda: app.chat.is_attached)
        text = "x" * (MAX_OSC52_BYTES + 1)
        await Copying(app, tmp_path).copy("the message", text)
        assert (tmp_path / "copied.txt").read_text() == text
        assert app.clipboard == ""
        assert app.chat.status.hint == "not in the clipboard: too long for a terminal's clipboard"
        await Copying(app, tmp_path / "copied.txt").copy("the message", text)
        assert app.chat.status.kind == "warning"
        await Copying(app, tmp_path).copy("the message", "half of a pair \ud83d")
        assert app.clipboard == "half of a pair ?"

"""Files named in a message: which are found, how they are completed, refused and put into it."""

import os
from pathlib import Path

import pytest

from chatd.errors import InvalidRequest
from chatd_tui.app import ChatApp
from chatd_tui.attachments import FRAME_OVERHEAD_BYTES, attachments, completions, with_attachments
from chatd_tui.screens.help import ConfirmScreen

LIMIT = 256 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("print(1)\n")
    (tmp_path / "two words.txt").write_text("x ``` y ```` z")
    (tmp_path / ".hidden").write_text("h")
    return tmp_path


def named(text: str, folder: Path) -> list[str]:
    return [file.name for file in attachments(text, folder)]


def test_words_that_name_files_are_found_once_and_others_are_words(folder: Path) -> None:
    assert named('See @src/main.py, @"two words.txt" and (again) @src/main.py.', folder) == [
        "src/main.py",
        "two words.txt",
    ]
    assert named("ask @ada or a@src/main.py, @app.route('/x') @ src @src @types/node", folder) == []
    assert named(f"@{folder}/src/main.py", folder) == [f"{folder}/src/main.py"]


@pytest.mark.parametrize("name", ["./nope", "/nope/nope", "../nope.txt", "~/no such", '"nope"', "./src"])
def test_what_says_that_it_is_a_path_must_be_a_file(name: str, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="is no file that can be attached"):
        attachments(f"see @{name}", folder)


def test_a_pipe_is_no_file_and_nothing_waits_for_it(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert named("@pipe", folder) == []


def test_each_file_is_a_block_that_its_text_cannot_end(folder: Path) -> None:
    text = 'Compare @src/main.py with @"two words.txt".'
    assert with_attachments(text, attachments(text, folder), LIMIT) == (
        'Compare src/main.py with "two words.txt".\n\n'
        "src/main.py:\n```py\nprint(1)\n```\n\n"
        "two words.txt:\n`````txt\nx ``` y ```` z\n`````"
    )


def test_only_names_of_files_lose_their_at(folder: Path) -> None:
    (folder / "a.txt").write_text("x")
    text = "Mail ann@a.txt about @a.txt, not @a.txt.old"
    assert with_attachments(text, attachments(text, folder), LIMIT) == (
        "Mail ann@a.txt about a.txt, not @a.txt.old\n\na.txt:\n```txt\nx\n```"
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ab\xff", "data.bin is no UTF-8 text (at byte 2)"),
        (b"ab\0c", "data.bin is no text (it has a NUL at 2)"),
        (b"x" * (LIMIT + 5), f"data.bin has {LIMIT + 5} bytes, the limit is {LIMIT} (limits.frame_bytes)"),
        (b"\n" * (LIMIT // 2) + b"x", f"data.bin has {LIMIT // 2 + 1}"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_numbers(data: bytes, said: str, folder: Path) -> None:
    (folder / "data.bin").write_bytes(data)
    with pytest.raises(InvalidRequest) as caught:
        with_attachments("@data.bin", attachments("@data.bin", folder), LIMIT)
    assert said in caught.value.message


def test_what_fits_to_the_byte_is_sent(folder: Path) -> None:
    (folder / "a.txt").write_text("x")
    files = attachments("@a.txt", folder)
    message = with_attachments("@a.txt", files, LIMIT)
    frame = len(message) + message.count("\n") + 2 + FRAME_OVERHEAD_BYTES
    assert with_attachments("@a.txt", files, frame) == message
    with pytest.raises(InvalidRequest, match=f"a frame of {frame} bytes, the limit is {frame - 1}"):
        with_attachments("@a.txt", files, frame - 1)


def test_names_are_completed_into_folders_and_with_quotes(folder: Path) -> None:
    def texts(text: str) -> list[str]:
        return [row.text for row in completions(text, folder)]

    assert texts("see @") == ["see @src/", 'see @"two words.txt"']
    assert texts("see @sr") == ["see @src/"]
    assert texts("@src/") == ["@src/main.py"]
    assert texts("@src/main.py") == []
    assert texts('@"two w') == ['@"two words.txt"']
    assert texts("@.h") == ["@.hidden"]
    assert texts("@src/main.py and @ada and @sr") == ["@src/main.py and @ada and @src/"]
    assert texts('@"two words.txt" and @"tw') == ['@"two words.txt" and @"two words.txt"']
    assert texts("me@src") == texts("@nowhere/x") == texts("@src/main.py and") == texts("no") == []


async def test_a_file_is_completed_shown_and_sent(
    folder: Path, daemon, make_app, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    app = make_app(daemon)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        await pilot.press(*"Run ", "@", "s")
        await wait_until(lambda: bool(app.chat.suggestions.view.rows))
        await pilot.press("tab", "tab")
        assert app.chat.composer.text == "Run @src/main.py"
        await pilot.press("enter")
        await wait_until(lambda: isinstance(app.screen, ConfirmScreen))
        assert not daemon.sessions
        await pilot.press("n")
        await wait_until(lambda: app.screen is app.chat)
        assert app.chat.composer.text == "Run @src/main.py"
        await pilot.press("enter")
        await wait_until(lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
    [session] = daemon.sessions.values()
    assert session.items[0].content == "Run src/main.py\n\nsrc/main.py:\n```py\nprint(1)\n```"
    assert session.title == "Run src/main.py"


async def test_a_file_that_is_named_before_there_is_a_connection_stays_in_the_input(
    folder: Path, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    app = ChatApp("http://127.0.0.1:1", copies=folder)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press(*"Run ", "@", *"src/main.py", "enter")
        await wait_until(lambda: app.chat.status.text == "there is no connection to the daemon yet")
        assert (app.screen, app.chat.composer.text) == (app.chat, "Run @src/main.py")


async def test_words_with_an_at_are_words_where_the_folder_is_gone(
    tmp_path: Path, daemon, make_app, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    app = make_app(daemon)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        monkeypatch.chdir(gone)
        gone.rmdir()
        await pilot.press(*"Ask ", "@", *"ada", "enter")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        monkeypatch.chdir(tmp_path)
    [session] = daemon.sessions.values()
    assert session.items[0].content == "Ask @ada"

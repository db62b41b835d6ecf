"""Text that wants to be obeyed, through the widgets and through the whole client in a pseudo-terminal (S19, S20)."""

import re
import sys
from itertools import product

import msgspec
import pytest
from textual.widgets import OptionList

from chatd import protocol as p
from chatd.clean import clean, clean_line
from chatd.client import FoundSession
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.messages import LinkChosen
from chatd_tui.screens.found import FoundScreen
from chatd_tui.screens.pool import session_table
from chatd_tui.views import FoundRow, ItemView, ServerRow, SessionRow
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.markdown_view import MarkdownView
from chatd_tui.widgets.status import StatusView, TitleView
from chatd_tui.widgets.user_message import UserMessage

MARK = "QXJ"
"""Follows each control in the corpus; nothing that the client draws may have that control right before it."""

CONTROLS = [chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0))] + list("\u202e\u2066\u200f\u061c")
SEQUENCES = [
    "\x1b]0;{}\x07",
    "\x1b]52;c;{}\x07",
    "\x1b]8;;http://{}\x1b\\x\x1b]8;;\x1b\\",
    "\x1b[2J{}",
    "\x1b[31m{}\x1b[0m",
    "\x1b[{}n",
    "\x1bP{}\x1b\\",
    "\x1b_G{}\x1b\\",
    "\x1b[?1049h{}",
    "\x1b[200~{}\x1b[201~",
    "\x9b31m{}",
    "\x9d0;{}\x9c",
    "\x1b\x1b[{}",
    "\x1bc{}",
    "\r{}",
    "\b\b\b{}",
]
MARKUP = [
    "[/foo]",
    "[/]",
    "[bold]x",
    "[@click=app.quit]go[/]",
    "[@click='app.bell()']x[/]",
    "[link=file:///etc/passwd]x[/link]",
    "[link='https://example.com']x",
    "[$primary]x[/]",
    "[[[[",
    "]]]]",
    "\\[x\\]",
    "[red on blue]x[/red on blue]",
    "[not a style !!]x[/]",
    "[a](javascript:alert(1))",
    "[a](file:///x)",
    "[a](http://h/%1b%5b31m)",
    "![a](http://h/')",
    "[a](<http://h/') app.quit('>)",
    "<script>x</script>",
    "<a href='x'>y</a>",
    "<!--",
    "&#27;[31m",
    "&lt;b&gt;",
    "|a|b|\n|-|-|\n|[/x]|`[/]`|",
    "> > > > > > x",
    "- - - - - x",
    "# [/h]",
    "```[/lang]\n[/code]\n```",
    "~~~\n[@click=x]",
    "**[/b]**",
    "`[/]`",
    "<http://[::1>",
    "http://[x",
    "www.example.com/[/]",
    "{{x}} {x} %s $x",
    "\\",
    "#" * 40,
    "*" * 300,
    "[" * 200,
    "`" * 99,
    "1. " * 30,
    "^[0m",
    "$" * 20,
]
WIDE = [
    "日本語" * 20,
    "👩‍👩‍👧‍👦" * 9,
    "e" + "\u0301" * 80,
    "ﷺ" * 9,
    "\u200b" * 50,
    "\ufeff",
    "\U000e0041" * 9,
    "שלום عالم" * 9,
    "　x　",
]
CORPUS = [
    *[f"{before}{control}{MARK}" for before, control in product(("", "text "), CONTROLS)],
    *[sequence.replace("{}", MARK) for sequence in SEQUENCES],
    *MARKUP,
    *WIDE,
]


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 200


async def test_every_string_goes_through_every_widget_as_text(daemon: ScriptedDaemon, make_app, wait_until) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(90, 30)):
        await wait_until(lambda: app.chat.is_attached)
        transcript = app.chat.transcript
        for start in range(0, len(CORPUS), 24):
            batch = CORPUS[start : start + 24]
            items = [ItemView(f"u{n}", "user", clean(text)) for n, text in enumerate(batch)]
            items += [
                ItemView(f"a{n}", "assistant", clean(text), note=clean_line(text)) for n, text in enumerate(batch)
            ]
            await transcript.show(items[:30])
            await transcript.show(items[-30:])
            for widget in app.chat.query(UserMessage):
                assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", str(widget.render()))
            for text in batch:
                app.chat.status_line.view = StatusView("error", clean_line(text), clean_line(text))
                app.chat.title_bar.view = TitleView(clean_line(text), clean_line(text), clean_line(text))
                info = session_info(text)
                app.chat.sessions.show([ServerRow("", "connected", "connected", (SessionRow.of(info, None),))])
                session_table([blocks(text)], 60)
                assert app.chat.status_line.render().cell_length <= 90
        assert app.is_running


async def test_what_a_search_found_and_what_an_edit_shows_is_text(daemon: ScriptedDaemon, make_app, wait_until) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(90, 30)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        for text in CORPUS:
            app.chat.composer.begin_edit("m", clean(text))
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", app.chat.composer.text)
            app.chat.composer.leave_edit()
        for query in CORPUS[:: len(CORPUS) // 4]:
            found_rows = [
                FoundRow.of(
                    FoundSession(
                        msgspec.structs.replace(session_info(text), id=f"s{n}"),
                        p.Passage(session=f"s{n}", item="m", text=text) if n % 2 else None,
                    ),
                    "",
                )
                for n, text in enumerate(CORPUS)
            ]
            app.show_found(query, found_rows)
            await wait_until(lambda: isinstance(app.screen, FoundScreen) and bool(app.screen.query(OptionList)))
            found = app.screen.query_one(OptionList)
            assert found.option_count == len(CORPUS)
            shown = "\n".join(str(option.prompt) for option in found.options)
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
            await pilot.press("escape")
            await wait_until(lambda: app.screen is app.chat)


@pytest.mark.parametrize("size", [1, 3])
async def test_streamed_in_pieces_no_string_escapes_or_crashes(make_app, wait_until, size: int) -> None:
    text = "\n\n".join(CORPUS)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    async with ScriptedDaemon([Script(deltas=pieces)], frame_bytes=1 << 22) as daemon:
        app: ChatApp = make_app(daemon)
        async with app.run_test(size=(90, 30)):
            await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
            app.link.send("go")
            await wait_until(lambda: app.conversation.last_answer() == clean(text))
            await wait_until(lambda: bool(app.chat.query(AnswerMessage)))
            answer = app.chat.query_one(AnswerMessage)
            await wait_until(lambda: answer.settled)
            assert answer.drawn == clean(text)
            assert app.is_running


async def test_the_actions_of_rendered_answers_are_links_only(make_app, wait_until, daemon: ScriptedDaemon) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(90, 30)) as pilot:
        await wait_until(lambda: app.chat.is_attached)
        await app.chat.transcript.show([ItemView("a", "assistant", clean("\n\n".join(MARKUP)))])
        await pilot.pause()
        actions = set()
        for line in app.chat.query_one(MarkdownView).lines:
            for span in line.spans:
                meta = getattr(span.style, "meta", None) or {}
                actions |= {str(action) for name, action in meta.items() if name.startswith("@")}
        assert actions
        assert all(re.fullmatch(r"link\((['\"]).*\1\)", action, re.DOTALL) for action in actions)
        app.post_message(LinkChosen("http://h/\x1b[31m"))
        await wait_until(lambda: app.chat.status_line.view.text.startswith("not opened"))


def session_info(text: str) -> p.SessionInfo:
    return p.SessionInfo(
        id="s",
        title=text,
        model=text,
        created_at=0,
        updated_at=0,
        num_items=1,
        context_used=1,
        context_max=2,
        busy=False,
        tier=text,
    )


def blocks(text: str) -> p.SessionBlocks:
    return p.SessionBlocks(session="s", title=text, held=1, shared=1, tokens=1, tier=text, active=True)


async def test_the_whole_client_in_a_pseudo_terminal_writes_no_raw_control(wait_until, tmp_path, make_terminal) -> None:
    per_answer = 45
    chunks = [CORPUS[start : start + per_answer] for start in range(0, len(CORPUS), per_answer)]
    scripts = [Script(deltas=["\n\n".join(chunk) + f"\n\nEND{n}DNE"]) for n, chunk in enumerate(chunks)]
    async with ScriptedDaemon(scripts) as daemon:
        daemon.model = p.ModelInfo(id=f"\x1b]0;{MARK}\x07m", context=8192, block_size=16, blocks=256)
        program = (
            "import sys; from pathlib import Path; from chatd_tui.app import ChatApp\n"
            "ChatApp(sys.argv[1], None, copies=Path(sys.argv[2])).run()"
        )
        async with make_terminal([sys.executable, "-c", program, daemon.url, str(tmp_path)]) as terminal:
            await wait_until(lambda: b"connected" in terminal.output)
            for n in range(len(chunks)):
                terminal.write(b"go\r")
                await wait_until(lambda n=n: f"END{n}DNE".encode() in terminal.output)
            hostile = p.ErrorBody(type="server_error", code="x", message=f"\x1b]2;{MARK}\x07 ERRORSHOWN")
            await daemon.send_everywhere(p.encode(p.Error(error=hostile)))
            await wait_until(lambda: b"ERRORSHOWN" in terminal.output)
            terminal.write(b"\x11")
            await wait_until(lambda: terminal.process is not None and terminal.process.returncode == 0)
        written = terminal.output
    assert written.count(MARK.encode()) >= len(CONTROLS)
    for control in CONTROLS:
        assert (control + MARK).encode() not in written
    for sequence in SEQUENCES:
        assert sequence.split("{}")[0].encode() + MARK.encode() not in written
    # The one sequence with a BEL that Textual writes of itself: the shape of the pointer.
    assert b"\x07" not in re.sub(rb"\x1b\]22;[a-z-]*\x07", b"", written)
    assert not re.search(rb"\xc2[\x80-\x9f]", written)
    assert not re.search(rb"\x1b\](?:0|1|2|8|52);", written)

"""Text that wants to be obeyed, through the widgets and through the whole client in a pseudo-terminal (S19, S20)."""

import re
import sys

import msgspec
import pytest
from textual.content import Content
from textual.style import Style
from textual.widgets import OptionList

from chatd import protocol as p
from chatd.clean import clean, clean_line
from chatd.client import FoundSession
from chatd.testing.hostile import BIDI, CONTROLS, CORPUS, MARK, MARKUP, SEQUENCES
from chatd.testing.protocol_values import make_info
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession
from chatd_tui.app import ChatApp
from chatd_tui.highlighting import Highlighter
from chatd_tui.markdown_lines import render
from chatd_tui.messages import LinkChosen
from chatd_tui.plain_lines import plain_lines
from chatd_tui.screens.found import FoundScreen
from chatd_tui.views import FoundRow, ItemView, ServerRow, SessionRow
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.pool_tables import session_table, tenant_table
from chatd_tui.widgets.status import StatusView, TitleView

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
WIRE = [text for text in CORPUS if not re.search(r"[\ud800-\udfff]", text)]
"""What a frame can hold; half a pair comes from files and keyboards only."""


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) == len(set(CORPUS)) >= 500


def test_no_string_has_a_control_left_however_it_is_cut() -> None:
    for text in CORPUS:
        assert not CONTROL.search(clean(text))
        for size in {1, 2, 3, 5, 8, 13, len(text)}:
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            assert "".join(map(clean, pieces)) == clean(text)
        for limit in (1, 10, 300):
            line = clean_line(text, limit)
            assert len(line) <= limit
            assert "\n" not in line
            assert not CONTROL.search(line)


async def test_every_string_goes_through_every_widget_as_text(daemon: ScriptedDaemon, make_app, wait_until) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(90, 30)):
        await wait_until(lambda: app.chat.is_attached and bool(app.chat.transcript.size))
        transcript = app.chat.transcript
        for start in range(0, len(CORPUS), 24):
            batch = CORPUS[start : start + 24]
            items = [ItemView(f"u{n}", "user", clean(text)) for n, text in enumerate(batch)]
            items += [
                ItemView(f"a{n}", "assistant", clean(text), note=clean_line(text)) for n, text in enumerate(batch)
            ]
            await transcript.show(items)
            assert transcript.views() == items
            for text in batch:
                app.chat.status_line.view = StatusView("error", clean_line(text), clean_line(text))
                app.chat.title_bar.view = TitleView(clean_line(text), clean_line(text), clean_line(text))
                info = session_info(text)
                app.chat.sessions.show([ServerRow("", "connected", "connected", (SessionRow.of(info, None),))])
                assert app.chat.status_line.render().cell_length <= 90
        assert app.is_running


@pytest.mark.parametrize("width", [1, 9, 80])
def test_every_string_is_laid_out_as_text_within_its_width(width: int) -> None:
    highlight = Highlighter()
    for text in map(clean, CORPUS):
        for line in plain_lines(text, width):
            assert line.cell_length <= max(2, width)
            assert not CONTROL.search(line.plain)
        for line in render(text, width, highlight):
            assert not CONTROL.search(line.plain)
            assert not {type(span.style) for span in line.spans} - {str, Style}
            for span in line.spans:
                if isinstance(span.style, Style):
                    actions = [value for name, value in span.style.meta.items() if name.startswith("@")]
                    assert all(re.fullmatch(r"link\((['\"]).*\1\)", str(action), re.DOTALL) for action in actions)


def test_every_string_in_the_pools_tables_is_text() -> None:
    for text in CORPUS:
        tenants = [tenant(text), tenant("other")]
        for content in (session_table([blocks(text)], 90), tenant_table(tenants, 90)):
            assert content is not None
            assert not CONTROL.search(content.plain)
            lines = content.plain.split("\n")
            assert len(lines) <= 4
            assert all(Content(line).cell_length <= 90 for line in lines)


async def test_what_a_search_found_and_what_an_edit_shows_is_text(daemon: ScriptedDaemon, make_app, wait_until) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(90, 30)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        for text in CORPUS:
            app.chat.composer.begin_edit("m", clean(text))
            assert not CONTROL.search(app.chat.composer.text)
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
            assert not CONTROL.search(shown)
            await pilot.press("escape")
            await wait_until(lambda: app.screen is app.chat)


@pytest.mark.parametrize(("size", "step"), [(1, 9), (3, 4), (40, 1)])
async def test_streamed_in_pieces_no_string_escapes_or_crashes(make_app, wait_until, size: int, step: int) -> None:
    text = "\n\n".join(WIRE[::step])
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
            assert answer.source == clean(text)
            assert app.is_running


async def test_the_actions_of_rendered_answers_are_links_only(make_app, wait_until, daemon: ScriptedDaemon) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(90, 30)) as pilot:
        await wait_until(lambda: app.chat.is_attached)
        await app.chat.transcript.show([ItemView("a", "assistant", clean("\n\n".join(MARKUP)))])
        await pilot.pause()
        actions = set()
        for line in app.chat.query_one(AnswerMessage).lines:
            for span in line.spans:
                meta = getattr(span.style, "meta", None) or {}
                actions |= {str(action) for name, action in meta.items() if name.startswith("@")}
        assert actions
        assert all(re.fullmatch(r"link\((['\"]).*\1\)", action, re.DOTALL) for action in actions)
        app.post_message(LinkChosen("http://h/\x1b[31m"))
        await wait_until(lambda: app.chat.status_line.view.text.startswith("not opened"))


def session_info(text: str) -> p.SessionInfo:
    return make_info(title=text, model=text, tier=text)


def tenant(text: str) -> p.TenantBlocks:
    return p.TenantBlocks(tenant=text, active=1, cached=1, running=1, waiting=0)


def blocks(text: str) -> p.SessionBlocks:
    return p.SessionBlocks(session="s", title=text, held=1, shared=1, tokens=1, tier=text, active=True)


async def test_the_whole_client_in_a_pseudo_terminal_writes_no_raw_control(wait_until, tmp_path, make_terminal) -> None:
    per_answer = 90
    chunks = [WIRE[start : start + per_answer] for start in range(0, len(WIRE), per_answer)]
    scripts = [Script(deltas=["\n\n".join(chunk) + f"\n\nEND{n}DNE"]) for n, chunk in enumerate(chunks)]
    async with ScriptedDaemon(scripts) as daemon:
        for n, text in enumerate(WIRE[::60]):
            daemon.sessions[f"s{n}"] = ScriptedSession(f"s{n}", text, None)
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
    for control in (*CONTROLS, *BIDI):
        assert (control + MARK).encode() not in written
    for sequence in SEQUENCES:
        assert sequence.encode() not in written
    # The one sequence with a BEL that Textual writes of itself: the shape of the pointer.
    assert b"\x07" not in re.sub(rb"\x1b\]22;[a-z-]*\x07", b"", written)
    assert not re.search(rb"\xc2[\x80-\x9f]", written)
    assert not re.search(rb"\x1b\](?:0|1|2|8|52);", written)

"""The line above the input and what completion offers: hints are whole or left out, the least important first."""

import pytest

from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.command_table import COMMANDS
from chatd_tui.widgets.status import StatusView, fitting
from chatd_tui.widgets.suggestion_list import MAX_ROWS


@pytest.mark.parametrize(
    ("hint", "room", "shown"),
    [
        ("press Esc", 9, "press Esc"),
        ("press Esc", 8, ""),
        ("it does not say; also in ~/x", 28, "it does not say; also in ~/x"),
        ("it does not say; also in ~/x", 27, "it does not say"),
        ("it does not say; also in ~/x", 14, ""),
        ("one of nord, dracula, gruvbox", 25, "one of nord, dracula, …"),
        ("one of nord, dracula, gruvbox", 22, ""),
        ("河河; 河", 7, "河河"),
        ("", 0, ""),
        ("anything", -3, ""),
    ],
)
def test_a_hint_is_never_cut_in_the_middle(hint: str, room: int, shown: str) -> None:
    assert fitting(hint, room) == shown


@pytest.mark.parametrize("width", [120, 100, 80, 60, 40])
async def test_what_is_said_beside_the_list_is_whole_at_every_width(
    daemon: ScriptedDaemon, tmp_path, wait_until, width: int
) -> None:
    app = ChatApp(daemon.url, copies=tmp_path)
    async with app.run_test(size=(width, 30)) as pilot:
        await wait_until(lambda: app.is_running and app.context.connected)
        line = app.chat.status_line
        app.chat.status = StatusView("notice", "type-ahead is on", "the first part of it; /typeahead off stops that")
        room = line.content_size.width
        shown = line.render().plain
        whole = "• type-ahead is on · the first part of it; /typeahead off stops that"
        assert shown == (whole if len(whole) <= room else whole.split(";")[0] if room >= 39 else "• type-ahead is on")
        for command in COMMANDS:
            app.chat.composer.load_text(f"/{command.name}")
            await pilot.pause()
            drawn = app.chat.suggestions
            rows, lines = drawn.view.rows, drawn.render().plain.split("\n")
            for row, text in zip(rows[:MAX_ROWS], lines, strict=True):
                assert len(text) <= drawn.content_size.width
                said = text[2:].removeprefix(row.label).strip()
                assert row.help == said or (row.help.startswith(said) and row.help[len(said)] in ";,") or not said

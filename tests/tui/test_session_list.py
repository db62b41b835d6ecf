"""The list of conversations: an arrow key draws what it changes, and that is what drawing everything gives."""

import pytest
from textual.app import App, ComposeResult

from chatd_tui.views import ServerRow, SessionRow
from chatd_tui.widgets.session_list import SessionList


class Counting(SessionList):
    """Counts the lines that are drawn."""

    num_lines = 0

    def render_line(self, y: int):
        self.num_lines += 1
        return super().render_line(y)


class ListApp(App[None]):
    def compose(self) -> ComposeResult:
        yield Counting()

    def on_mount(self) -> None:
        sessions = [SessionRow(f"s{n}", f"Conversation {n}", "12 msg · 1.2k tok", n == 3, n == 0) for n in range(1000)]
        self.query_one(Counting).show(
            [
                ServerRow("box", "connected", "connected", tuple(sessions[:6])),
                ServerRow("gpu", "connected", "connected", tuple(sessions[6:]), is_shown=False),
            ]
        )


def picture(app: ListApp) -> list[str]:
    return [repr(list(strip)) for strip in app.screen._compositor.render_strips()]


@pytest.mark.parametrize("key", ["down", "up"])
async def test_an_arrow_key_draws_the_lines_of_two_options_and_no_others(key: str) -> None:
    app = ListApp()
    async with app.run_test(size=(100, 40)) as pilot:
        shown = app.query_one(Counting)
        shown.focus()
        shown.highlighted = 5
        await pilot.pause()
        for _ in range(4):
            shown.num_lines = 0
            await pilot.press(key)
            assert 0 < shown.num_lines <= 4


async def test_what_is_drawn_in_part_looks_as_if_all_were_drawn() -> None:
    app = ListApp()
    async with app.run_test(size=(100, 40)) as pilot:
        shown = app.query_one(Counting)
        shown.focus()
        for key in ("down", "down", "up", "pagedown", "up", "end", "up", "home", *["down"] * 9, "f1"):
            await pilot.press(key)
            in_part = picture(app)
            shown.refresh()
            await pilot.pause()
            assert picture(app) == in_part, key

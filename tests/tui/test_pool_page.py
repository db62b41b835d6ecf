"""Every key of the pool page, by Textual's pilot: point, look inside, pause, step, scroll, go back."""

import msgspec
import pytest
from textual.widgets import Static

from chatd import protocol as p
from chatd.client import CellMap
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.pool_moments import PoolHistory
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.top import PoolApp
from chatd_tui.widgets.key_line import NOT_HERE, KeyLine
from chatd_tui.widgets.pool_cell import LIVE_ONLY, NOT_TOLD
from chatd_tui.widgets.pool_map import PoolMap

WIDE, NARROW = (120, 36), (80, 24)
MINE = p.CellHolder(session="ses_a", title="Rivers [bold]", own=True, tenant="local", tokens=16)


def block(number: int, **changes) -> p.CellBlock:
    fields = {
        "block": number,
        "state": "active",
        "references": 1,
        "public": False,
        "registered": True,
        "place": 3,
        "tokens": 16,
        "age_s": 94.0,
        "hit_age_s": 12.0,
        "holders": [MINE],
        "others": 0,
    }
    return p.CellBlock(**{**fields, **changes})


def drawn(app: PoolApp, ident: str) -> str:
    return str(app.screen.query_one(ident, Static).render())


def cursor(app: PoolApp) -> int | None:
    return app.screen.query_one(PoolMap).cursor


def asked(daemon: ScriptedDaemon) -> list[tuple[int, int]]:
    return [(c.cell, c.blocks_per_cell) for c in daemon.commands if isinstance(c, p.PoolInspect)]


async def opened(app: PoolApp, wait_until) -> None:
    await wait_until(lambda: isinstance(app.screen, PoolScreen) and bool(app.screen.query(PoolMap)))
    await wait_until(lambda: bool(app.screen.query_one(PoolMap).states))


async def test_arrows_point_at_cells_and_enter_looks_inside(daemon: ScriptedDaemon, wait_until) -> None:
    daemon.blocks = {1: [block(1)]}
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        assert cursor(app) is None
        await pilot.press("right")
        assert cursor(app) == 0
        await pilot.press("right")
        columns = app.screen.query_one(PoolMap)._layout.columns
        for key, cell in (("down", columns + 1), ("left", columns), ("up", 0), ("left", 0), ("up", 0), ("right", 1)):
            await pilot.press(key)
            assert cursor(app) == cell, key
        assert asked(daemon) == []
        await pilot.press("enter")
        await wait_until(lambda: "Rivers [bold]" in drawn(app, "#cell"))
        assert asked(daemon)[0] == (1, 1)
        text = drawn(app, "#cell")
        assert "48–63 (16)" in text
        assert "12s ago" in text
        assert app.screen.query_one("#cell-panel").border_title == "cell 1: block 1"


async def test_the_open_cell_follows_the_cursor_and_time(daemon: ScriptedDaemon, wait_until) -> None:
    daemon.blocks = {0: [block(0)], 1: [block(1, holders=[], others=1)]}
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        await pilot.press("enter")
        await wait_until(lambda: "Rivers" in drawn(app, "#cell"))
        await pilot.press("right")
        await wait_until(lambda: "another's" in drawn(app, "#cell"))
        # Its age goes on: it is asked again although nobody presses a key.
        num_asked = len(asked(daemon))
        daemon.blocks = {1: [block(1, holders=[MINE], others=4)]}
        await wait_until(lambda: "4 more" in drawn(app, "#cell"))
        assert len(asked(daemon)) > num_asked


async def test_a_click_looks_into_the_cell_under_the_mouse(daemon: ScriptedDaemon, wait_until) -> None:
    daemon.blocks = {2: [block(2)]}
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        width = app.screen.query_one(PoolMap)._layout.cell_width
        await pilot.click(PoolMap, offset=(2 * width, 0))
        await wait_until(lambda: "Rivers" in drawn(app, "#cell"))
        assert cursor(app) == 2


async def test_escape_closes_the_cell_first_and_then_the_page(daemon: ScriptedDaemon, wait_until) -> None:
    app = PoolApp(daemon.url)
    async with app.run_test(size=NARROW) as pilot:
        await opened(app, wait_until)
        await pilot.press("enter")
        await wait_until(lambda: app.screen.query_one("#cell-panel").display)
        assert not app.screen.query_one("#side").display, "a narrow page gives the tables' room to the cell"
        await pilot.press("escape")
        assert app.is_running
        assert app.screen.query_one("#side").display
        await pilot.press("escape")
        await wait_until(lambda: not app.is_running)


async def test_space_pauses_says_so_and_goes_on_while_the_pool_goes_on_behind(
    daemon: ScriptedDaemon, wait_until
) -> None:
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        page = app.screen
        assert isinstance(page, PoolScreen)
        before = list(page.query_one(PoolMap).states)
        await pilot.press("space")
        assert "PAUSED at " in drawn(app, "#head")
        await daemon.show_pool([(0, 0, 0, 1)] * 256)
        await wait_until(lambda: page.player.history.latest.state.step == 1)
        await pilot.pause()
        assert page.query_one(PoolMap).states == before
        await pilot.press("space")
        assert "PAUSED" not in drawn(app, "#head")
        assert page.query_one(PoolMap).states == ["shared"] * 256


async def test_brackets_step_through_time(daemon: ScriptedDaemon, wait_until) -> None:
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        page = app.screen
        assert isinstance(page, PoolScreen)
        state, first_s = page.player.history.latest.state, page.player.clock() + 60.0
        page.player.history = PoolHistory()
        for step in range(3):
            counts = ((0, 0, 1, 0),) * step + ((1, 0, 0, 0),) * (256 - step)
            page.show(msgspec.structs.replace(state, step=step, cells=CellMap(1, counts)), first_s + step)
        await pilot.press("left_square_bracket")
        assert "step 1 (" in drawn(app, "#head")
        assert page.query_one(PoolMap).states.count("active") == 1
        await pilot.press("left_square_bracket")
        assert "step 0 (" in drawn(app, "#head")
        await pilot.press("right_square_bracket", "right_square_bracket")
        assert "step 2 (" in drawn(app, "#head")
        for key, step in (("comma", 1), ("left_curly_bracket", 0), ("full_stop", 1), ("right_curly_bracket", 2)):
            await pilot.press(key)
            assert f"step {step} (" in drawn(app, "#head"), key
        assert page.query_one(PoolMap).states.count("active") == 2


async def test_a_paused_cell_tells_what_it_was_and_that_its_facts_are_of_now_only(
    daemon: ScriptedDaemon, wait_until
) -> None:
    daemon.blocks = {0: [block(0)]}
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        await pilot.press("enter")
        await wait_until(lambda: "Rivers" in drawn(app, "#cell"))
        await pilot.press("space")
        assert f"{LIVE_ONLY}: Space goes on" in drawn(app, "#cell")
        assert "1 free" in drawn(app, "#cell")
        await pilot.press("space")
        await wait_until(lambda: "Rivers" in drawn(app, "#cell"))


async def test_pages_scroll_the_tables_and_the_open_cell(daemon: ScriptedDaemon, wait_until) -> None:
    daemon.blocks = {0: [block(number) for number in range(30)]}
    app = PoolApp(daemon.url)
    async with app.run_test(size=NARROW) as pilot:
        await opened(app, wait_until)
        rows = [
            p.SessionBlocks(session=f"s{n}", title=f"t{n}", held=n, shared=0, tokens=9, tier="device", active=False)
            for n in range(40)
        ]
        await daemon.show_pool(list(daemon.cells), sessions=rows)
        await wait_until(lambda: "t39" in drawn(app, "#sessions"))
        await pilot.pause()
        await pilot.press("pagedown")
        await wait_until(lambda: app.screen.query_one("#tables").scroll_offset.y > 0)
        await pilot.press("pageup")
        await wait_until(lambda: app.screen.query_one("#tables").scroll_offset.y == 0)
        await pilot.press("enter")
        await wait_until(lambda: "Rivers" in drawn(app, "#cell"))
        await pilot.press("pagedown")
        await wait_until(lambda: app.screen.query_one("#cell-panel").scroll_offset.y > 0)


@pytest.mark.parametrize("key", ["q", "f2"])
async def test_each_other_key_closes_the_page_at_once(daemon: ScriptedDaemon, wait_until, key: str) -> None:
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        await pilot.press("enter")
        await pilot.press(key)
        await wait_until(lambda: not app.is_running)


async def test_the_operator_sees_tenants_shares_and_floors(daemon: ScriptedDaemon, wait_until) -> None:
    daemon.tenants = [
        p.TenantBlocks(
            tenant=name, active=active, cached=0, running=1, waiting=2, weight=1.0, share=128.0, floor=16, evicted=3
        )
        for name, active in (("acme", 90), ("be\x1bta", 6))
    ]
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE):
        await opened(app, wait_until)
        await wait_until(lambda: "acme" in drawn(app, "#tenants"))
        assert "be␛ta" in drawn(app, "#tenants")
        assert drawn(app, "#tenants").split("\n")[1].split()[:4] == ["acme", "90", "128", "16"]


async def test_a_daemon_that_does_not_tell_of_cells_greys_the_key_and_says_so_inside(wait_until) -> None:
    async with ScriptedDaemon(caps=["pool.map"]) as plain:
        plain.cells = [(0, 0, 1, 0)] * 256
        app = PoolApp(plain.url)
        async with app.run_test(size=WIDE) as pilot:
            await opened(app, wait_until)
            assert f"Enter look inside{NOT_HERE}" in str(app.screen.query_one(KeyLine).render())
            await pilot.press("enter")
            await wait_until(lambda: NOT_TOLD in drawn(app, "#cell"))
            assert "1 active" in drawn(app, "#cell")
            assert asked(plain) == []


async def test_a_daemon_without_a_map_points_at_nothing_and_scrolls(wait_until) -> None:
    async with ScriptedDaemon(caps=[]) as plain:
        app = PoolApp(plain.url)
        async with app.run_test(size=WIDE) as pilot:
            await wait_until(lambda: isinstance(app.screen, PoolScreen) and "256 blocks" in drawn(app, "#head"))
            await pilot.press("down", "enter", "space", "space")
            assert not app.screen.query_one("#cell-panel").display
            assert NOT_HERE in str(app.screen.query_one(KeyLine).render())


async def test_a_refusal_is_told_in_the_panel_and_the_next_answer_replaces_it(
    daemon: ScriptedDaemon, wait_until
) -> None:
    refused = p.ErrorBody(type="rate_limit_error", code="busy", message="one \x1bquestion at a time")

    async def refuse(command: p.Command) -> bool:
        if isinstance(command, p.PoolInspect):
            await daemon.send_everywhere(p.encode(p.Error(error=refused, re=command.id)))
            return True
        return False

    daemon.blocks = {0: [block(0)]}
    daemon.on_command = refuse
    app = PoolApp(daemon.url)
    async with app.run_test(size=WIDE) as pilot:
        await opened(app, wait_until)
        await pilot.press("enter")
        await wait_until(lambda: "no answer: one ␛question at a time" in drawn(app, "#cell"))
        daemon.on_command = None
        await wait_until(lambda: "Rivers" in drawn(app, "#cell"))

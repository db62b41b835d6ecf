from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from chatd import protocol as p
from chatd.client import Client
from chatd.errors import EngineError
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.messages import LinkChosen, SessionNews
from chatd_tui.screens.help import HelpScreen, LinkScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.status_text import ANSWERING
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.composer import Composer
from chatd_tui.widgets.meter import Meter
from chatd_tui.widgets.pool_map import PoolMap
from chatd_tui.widgets.session_list import SessionList
from chatd_tui.widgets.status import StatusLine, StatusView, TitleBar
from chatd_tui.widgets.transcript import Transcript
from chatd_tui.widgets.user_message import UserMessage
from chatd_tui.widgets.welcome import Welcome

MakeApp = Callable[..., ChatApp]
SIZE = (90, 30)


def status(app: ChatApp) -> StatusView:
    return app.chat.query_one(StatusLine).view


def answers(app: ChatApp) -> list[AnswerMessage]:
    return list(app.chat.query(AnswerMessage))


def shown(answer: AnswerMessage) -> str:
    return answer.source


def connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and app.chat.query_one(TitleBar).view.phase == "connected"


async def say(pilot: Pilot[None], text: str) -> None:
    composer = pilot.app.screen.query_one(Composer)
    composer.load_text(text)
    await pilot.press("enter")


async def test_a_question_is_sent_and_its_answer_is_drawn_as_markdown(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        assert app.chat.query(Welcome)
        await pilot.press(*"hi", "enter")
        await wait_until(lambda: len(answers(app)) == 1 and shown(answers(app)[0]) == "Hello **there**.")
        assert not app.chat.query(Welcome)
        assert [message.text for message in app.chat.query(UserMessage)] == ["hi"]
        assert app.chat.query_one(Composer).text == ""
        await wait_until(lambda: status(app).kind == "idle")
        await wait_until(lambda: answers(app)[0].settled)
        view = app.chat.query_one(Meter).view
        assert (view.hit_rate, view.ttft_ms, view.blocks) == (0.87, 120.0, 256)


@pytest.mark.parametrize("key", ["shift+enter", "alt+enter", "ctrl+j"])
async def test_keys_that_make_a_line_do_not_send(daemon: ScriptedDaemon, make_app: MakeApp, wait_until, key) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await pilot.press("a", key, "b", "\\", "enter", "c")
        assert app.chat.query_one(Composer).text == "a\nb\nc"
        assert not any(isinstance(command, p.UserMessage) for command in daemon.commands)
        await pilot.press("enter")
        await wait_until(lambda: bool(answers(app)))
        assert [message.text for message in app.chat.query(UserMessage)] == ["a\nb\nc"]


async def test_blank_input_is_not_sent(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await pilot.press("enter", "space", "enter")
        assert not any(isinstance(command, p.SessionCreate) for command in daemon.commands)


async def test_escape_stops_the_answer_and_keeps_its_text(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["one ", "two ", "three"], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "count")
            daemon.release(2)
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "one two ")
            await pilot.press("escape")
            await wait_until(lambda: status(app).kind == "idle")
            await wait_until(lambda: answers(app)[0].settled and answers(app)[0].view.trouble)
            assert shown(answers(app)[0]) == "one two "


async def test_a_second_message_waits_for_the_answer(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "one")
            daemon.release(1)
            await wait_until(lambda: bool(answers(app)) and bool(answers(app)[0].text))
            await say(pilot, "two")
            assert status(app).kind == "warning"
            assert app.chat.query_one(Composer).text == "two"
            daemon.release(2)
            await wait_until(lambda: status(app).kind == "idle")


async def test_waiting_says_the_place_and_the_reason_and_reading_its_progress(make_app: MakeApp, wait_until) -> None:
    before = [
        (p.ResponseQueued, {"position": 3, "why": "slots"}),
        (p.ResponsePrefill, {"done": 512, "total": 2048, "cached": 256}),
    ]
    async with ScriptedDaemon([Script(before=before, manual=True)]) as daemon:
        app = make_app(daemon)
        seen: list[StatusView] = []
        async with app.run_test(size=SIZE) as pilot:
            app.watch(app.chat.query_one(StatusLine), "view", lambda view: seen.append(view))
            await wait_until(connected(app))
            await app.link.open(None)
            await say(pilot, "first")
            daemon.release(3)
            await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
            await say(pilot, "second")
            await wait_until(lambda: any("in line" in view.text for view in seen))
            await wait_until(lambda: any("reading" in view.text for view in seen))
            daemon.release(3)
            await wait_until(lambda: status(app).kind == "idle")
        assert StatusView("busy", "waiting, number 3 in line", "all slots are busy") in seen
        assert StatusView("busy", "reading the prompt, 512 of 2k tokens", "256 from the cache") in seen


async def test_the_list_says_at_once_where_a_session_went(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(connected(app))
        await say(pilot, "first")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        sessions = app.chat.query_one(SessionList)
        await wait_until(lambda: sessions.option_count == 2)
        assert "disk" not in str(sessions.get_option_at_index(1).prompt)
        app.post_message(SessionNews("ses_1", p.SessionTier(session="ses_1", tier="disk", why="pressure")))
        await wait_until(lambda: "disk" in str(sessions.get_option_at_index(1).prompt))


async def test_sessions_are_listed_and_switched_and_a_new_one_begins_empty(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(connected(app))
        await say(pilot, "first question")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        await pilot.press("ctrl+n")
        await wait_until(lambda: bool(app.chat.query(Welcome)))
        await say(pilot, "second question")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        sessions = app.chat.query_one(SessionList)
        await wait_until(lambda: sessions.option_count == 3)
        assert app.chat.query_one(TitleBar).view.session == "second question"
        await pilot.press("f3")
        if not sessions.has_focus:
            await pilot.press("f3")
        sessions.highlighted = 2
        await pilot.press("enter")
        await wait_until(lambda: [m.text for m in app.chat.query(UserMessage)] == ["first question"])
        assert app.chat.query_one(Composer).has_focus
        await wait_until(lambda: app.chat.query_one(TitleBar).view.session == "first question")


async def test_the_list_has_what_another_screen_began_when_it_is_asked_for(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(60, 20)) as pilot:
        await wait_until(connected(app))
        sessions = app.chat.query_one(SessionList)
        assert sessions.option_count == 1
        async with Client.connect(daemon.url) as other:
            await other.create_session(title="From elsewhere")
        await pilot.press("f3")
        await wait_until(lambda: sessions.option_count == 2)
        assert "From elsewhere" in str(sessions.get_option_at_index(1).prompt)


async def test_on_a_narrow_terminal_the_sessions_lie_over_and_escape_hides_them(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(60, 20)) as pilot:
        await wait_until(connected(app))
        sessions = app.chat.query_one(SessionList)
        assert not sessions.display
        await pilot.press("f3")
        assert sessions.display
        assert sessions.has_focus
        await pilot.press("escape")
        assert not sessions.display
        assert app.chat.query_one(Composer).has_focus


async def test_a_terminal_that_becomes_narrow_hides_the_list_that_nobody_is_in(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_until(connected(app))
        await pilot.press("f3", "escape")
        await wait_until(lambda: app.chat.query_one(Composer).has_focus)
        sessions = app.chat.query_one(SessionList)
        assert sessions.display
        await pilot.resize_terminal(60, 20)
        await wait_until(lambda: not sessions.display)
        await pilot.resize_terminal(120, 30)
        await wait_until(lambda: sessions.display)


async def test_copy_goes_to_the_terminal_and_to_a_file_of_ones_own(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until, tmp_path: Path
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await pilot.press("ctrl+y")
        assert status(app).text == "there is no answer to copy yet"
        await say(pilot, "hi")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        await pilot.press("ctrl+y")
        await wait_until(lambda: status(app).text == "sent the message to the terminal's clipboard")
        assert app.clipboard == "Hello **there**."
        copied = tmp_path / "copied.txt"
        assert copied.read_text() == "Hello **there**."
        assert copied.stat().st_mode & 0o777 == 0o600


async def test_the_pool_page_draws_the_daemons_cells_and_follows_them(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_until(connected(app))
        await pilot.press("f2")
        await wait_until(lambda: isinstance(app.screen, PoolScreen) and bool(app.screen.query_one(PoolMap).states))
        pool_map = app.screen.query_one(PoolMap)
        expected = ["free"] * 128 + ["cached"] * 64 + ["active"] * 48 + ["shared"] * 16
        assert pool_map.states == expected
        wish = next(c for c in reversed(daemon.commands) if isinstance(c, p.PoolSubscribe) and c.detail == "map")
        assert wish.cells >= 64
        cells = list(daemon.cells)
        cells[0], cells[200] = (0, 0, 0, 1), (1, 0, 0, 0)
        await daemon.show_pool(cells)
        expected[0], expected[200] = "shared", "free"
        await wait_until(lambda: pool_map.states == expected)
        await pilot.press("escape")
        await wait_until(lambda: app.screen is app.chat)
        await wait_until(lambda: getattr(daemon.commands[-1], "detail", "") == "summary")


async def test_without_the_cap_the_page_has_no_map_and_still_its_numbers(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon(caps=[]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await pilot.press("f2")
            await wait_until(lambda: isinstance(app.screen, PoolScreen) and app.screen.player.shown is not None)
            assert not app.screen.query_one("#map-panel").display
            assert "map" not in [command.detail for command in daemon.commands if isinstance(command, p.PoolSubscribe)]


async def test_a_lost_connection_is_shown_and_the_answer_goes_on_when_it_is_back(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b ", "c"], manual=True)]) as daemon:
        app = make_app(daemon)
        phases: list[str] = []
        async with app.run_test(size=SIZE) as pilot:
            app.watch(app.chat.query_one(TitleBar), "view", lambda view: phases.append(view.phase))
            await wait_until(connected(app))
            await say(pilot, "hi")
            daemon.release(1)
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "a ")
            daemon.abort()
            daemon.release(3)
            await wait_until(lambda: answers(app)[0].text == "a b c" and status(app).kind == "idle")
            assert "waiting" in phases
            assert phases[-1] == "connected"


async def test_a_restart_with_another_answer_replaces_what_was_shown(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b"], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            daemon.release(1)
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "a ")
            session = next(iter(daemon.sessions.values()))
            assert session.task is not None
            session.task.cancel()
            session.response = None
            session.items[-1] = p.Item(
                id=session.items[-1].id, role="assistant", content="other", status="incomplete", reason="cancelled"
            )
            daemon.forget()
            await daemon.drop(p.CLOSE_RESTART)
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "other")
            await wait_until(lambda: status(app).kind == "idle")


async def test_a_conversation_that_a_restart_lost_is_said_and_the_next_message_begins_a_new_one(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await say(pilot, "hi")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        daemon.sessions.clear()
        await daemon.drop(p.CLOSE_RESTART)
        gone = StatusView("error", "the daemon no longer has this conversation", "the next message begins a new one")
        await wait_until(lambda: status(app) == gone)
        await say(pilot, "again")
        await wait_until(lambda: [m.text for m in app.chat.query(UserMessage)] == ["again"])
        await wait_until(lambda: status(app).kind == "idle")


async def test_a_conversation_that_is_lost_in_the_middle_of_its_answer_leaves_the_list_and_lets_a_new_one_begin(
    make_app: MakeApp, wait_until
) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b"], manual=True), Script(deltas=["c"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            daemon.release(1)
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "a ")
            sessions = app.chat.query_one(SessionList)
            await wait_until(lambda: sessions.option_count == 2)
            session = next(iter(daemon.sessions.values()))
            assert session.task is not None
            session.task.cancel()
            daemon.sessions.clear()
            await daemon.drop(p.CLOSE_RESTART)
            await wait_until(lambda: status(app).text == "the daemon no longer has this conversation")
            await wait_until(lambda: sessions.option_count == 1)
            await wait_until(lambda: "cut off" in answers(app)[0].lines[-1].plain)
            await say(pilot, "again")
            await wait_until(lambda: [m.text for m in app.chat.query(UserMessage)] == ["again"])
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "c")


async def test_an_answer_whose_connection_is_lost_is_not_said_to_come_until_it_does(
    make_app: MakeApp, wait_until
) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b ", "c"], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            daemon.release(1)
            await wait_until(lambda: status(app) == ANSWERING)
            daemon.abort()
            daemon.release(1)
            await wait_until(lambda: answers(app)[0].text == "a b ")
            await wait_until(lambda: status(app) == ANSWERING)
            await daemon.stop()
            waiting = StatusView("busy", "waiting for the connection", "the answer goes on by itself")
            await wait_until(lambda: status(app) == waiting)
            assert app.meter.tok_s is None
            await say(pilot, "more")
            held = StatusView("warning", "an answer is in progress", "it goes on once there is a connection")
            await wait_until(lambda: status(app) == held)
            assert app.chat.query_one(Composer).text == "more"


async def test_what_is_told_in_the_middle_of_an_answer_outlives_its_next_piece(
    make_app: MakeApp, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b ", "c ", "d"], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            daemon.release(1)
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "a ")
            await daemon.send_everywhere(p.encode(p.ServerDraining(deadline_s=10.0)))
            told = StatusView("warning", "the daemon stops within 10 s")
            await wait_until(lambda: status(app) == told)
            daemon.release(1)
            await wait_until(lambda: answers(app)[0].text == "a b ")
            assert status(app) == told
            monkeypatch.setattr("chatd_tui.conversation.TOLD_S", 0.0)
            daemon.release(1)
            await wait_until(lambda: status(app) == ANSWERING)


async def test_keys_are_obeyed_while_the_daemon_is_away(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
            session = next(iter(daemon.sessions))
            await daemon.stop()
            await wait_until(lambda: not connected(app)())
            await pilot.press("ctrl+n")
            await wait_until(lambda: bool(app.chat.query(Welcome)))
            await pilot.press("f3")
            await pilot.press("escape", *"hello")
            assert app.chat.composer.text == "hello"
            await app.open_session(session)
            await daemon.start()
            await wait_until(lambda: bool(answers(app)) and answers(app)[0].text == "a")
            await say(pilot, "more")
            await wait_until(lambda: len(answers(app)) == 2 and status(app).kind == "idle")


async def test_a_wrong_key_is_said_with_what_helps(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon(key="right") as daemon:
        app = make_app(daemon, "wrong")
        async with app.run_test(size=SIZE):
            await wait_until(lambda: status(app).kind == "error")
            assert status(app) == StatusView(
                "error", "key is not known", "give a key with CHATD_KEY_FILE, CHATD_KEY or servers.toml"
            )
            assert app.chat.query_one(TitleBar).view.phase == "closed"


async def test_an_address_that_the_client_refuses_is_said_and_nothing_is_sent(wait_until, tmp_path: Path) -> None:
    app = ChatApp("http://key@127.0.0.1:1", copies=tmp_path)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(lambda: status(app).kind == "error")
        assert "a key does not belong in an address" in status(app).text
        await say(pilot, "hi")
        await wait_until(lambda: "no connection" in status(app).text)
        assert app.chat.composer.text == "hi"


async def test_a_failed_turn_gives_the_text_back(make_app: MakeApp, wait_until) -> None:
    failing = Script(deltas=["so "], fail=EngineError("the engine died", code="engine_died", hint="say it again"))
    async with ScriptedDaemon([failing, Script()]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hello?")
            await wait_until(lambda: status(app).kind == "error")
            assert status(app) == StatusView("error", "the engine died", "say it again")
            await wait_until(lambda: app.chat.query_one(Composer).text == "hello?")
            await pilot.press("enter")
            await wait_until(lambda: status(app).kind == "idle")


async def test_events_that_are_not_known_change_nothing(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await say(pilot, "hi")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        session = app.link.session
        assert session is not None
        for frame in ('{"type":"x.y"}', '{"type":"pool.delta","step":"?"}', f'{{"type":"a","session":"{session}"}}'):
            await daemon.send_everywhere(frame)
        app.post_message(SessionNews(session, p.ClientLeft(session=session, connection="c")))
        await daemon.send_everywhere(p.encode(p.ServerDraining(deadline_s=5.0)))
        await wait_until(lambda: status(app).text == "the daemon stops within 5 s")


async def test_links_are_shown_before_they_open_and_only_web_links_open(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(daemon)
    opened: list[str] = []
    monkeypatch.setattr(app, "open_url", lambda url, **_: opened.append(url))
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        for href in ("file:///etc/passwd", "javascript:alert(1)", "ssh://x", "http://a\x1b[31m", "https://a b"):
            app.post_message(LinkChosen(href))
            await wait_until(lambda: status(app).text.startswith("not opened"))
            app.chat.query_one(StatusLine).view = StatusView()
            assert app.screen is app.chat
        app.post_message(LinkChosen("https://example.com/a"))
        await wait_until(lambda: isinstance(app.screen, LinkScreen))
        await pilot.press("n")
        assert opened == []
        app.post_message(LinkChosen("https://example.com/a"))
        await wait_until(lambda: isinstance(app.screen, LinkScreen))
        await pilot.press("y")
        assert opened == ["https://example.com/a"]


async def test_a_click_on_a_link_of_an_answer_asks_first(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["[docs](https://example.com/x)"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "where?")
            await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
            await wait_until(lambda: "docs" in shown(answers(app)[0]))
            await pilot.pause()
            await pilot.click(AnswerMessage, offset=(3, 0))
            await wait_until(lambda: isinstance(app.screen, LinkScreen))


async def test_help_opens_and_any_key_closes_it(daemon: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("x")
        assert app.screen is app.chat


async def test_control_c_twice_quits_and_once_only_says_so(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await pilot.press("ctrl+c")
        assert "once more" in status(app).text
        assert app.is_running
        await pilot.press("ctrl+c")
        await wait_until(lambda: not app.is_running)


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 8), (10, 4), (200, 60)])
async def test_every_size_draws_and_pages_open(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until, size: tuple[int, int]
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=size) as pilot:
        await wait_until(connected(app))
        await say(pilot, "hi")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        await pilot.press("f2")
        await wait_until(lambda: isinstance(app.screen, PoolScreen) and bool(app.screen.query_one(PoolMap).states))
        await pilot.resize_terminal(size[0] + 13, size[1] + 3)
        await pilot.press("escape", "f1", "x", "f3", "escape")
        assert app.is_running


async def test_another_branch_is_drawn_from_where_it_parts(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await say(pilot, "first")
        await wait_until(lambda: bool(answers(app)) and status(app).kind == "idle")
        await say(pilot, "second")
        await wait_until(lambda: len(answers(app)) == 2 and status(app).kind == "idle")
        session = next(iter(daemon.sessions.values()))
        first, answer, second, last = session.items

        def news(event: p.Event) -> None:
            app.post_message(SessionNews(session.id, event))

        def shown() -> list[str]:
            return [child.item_id for child in app.chat.query_one(Transcript).children if hasattr(child, "item_id")]

        # Somebody edits the second message: what followed its parent gives way.
        edited = p.Item(id="e", role="user", content="edited", status="completed", parent=answer.id)
        news(p.ItemAdded(session=session.id, seq=90, ts=0, item=edited))
        await wait_until(lambda: shown() == [first.id, answer.id, "e"])
        begun = p.Item(id="a", role="assistant", content="", status="in_progress", parent="e")
        news(p.ResponseCreated(session=session.id, seq=91, ts=0, response="r", item=begun))
        await wait_until(lambda: shown()[-1] == "a")
        # The turn fails, and the branch before it is back.
        error = p.ErrorBody(type="server_error", code="engine_error", message="no")
        news(
            p.ResponseFailed(session=session.id, seq=92, ts=0, response="r", item_id="a", error=error, parent=answer.id)
        )
        news(p.BranchSelected(session=session.id, seq=93, ts=0, leaf=last.id, parent=answer.id, items=[second, last]))
        await wait_until(lambda: shown() == [first.id, answer.id, second.id, last.id])
        # An answer is regenerated: only it gives way, and its message is not lost when that fails.
        begun = p.Item(id="b", role="assistant", content="", status="in_progress", parent=second.id)
        news(p.ResponseCreated(session=session.id, seq=94, ts=0, response="r", item=begun))
        await wait_until(lambda: shown() == [first.id, answer.id, second.id, "b"])
        app.chat.composer.clear()
        news(
            p.ResponseFailed(session=session.id, seq=95, ts=0, response="r", item_id="b", error=error, parent=second.id)
        )
        await wait_until(lambda: status(app).kind == "error")
        assert not app.chat.query("UserMessage.-lost")
        assert app.chat.composer.text == ""
        # From the start.
        news(p.BranchSelected(session=session.id, seq=96, ts=0, leaf="e", items=[edited]))
        await wait_until(lambda: shown() == ["e"])


@pytest.mark.parametrize("headless", [True, False])
async def test_what_starting_leaves_is_passed_over_by_searches_for_garbage_where_there_is_a_terminal(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until, monkeypatch, headless: bool
) -> None:
    app = make_app(daemon)
    settled: list[str] = []
    monkeypatch.setattr("chatd_tui.news_app.settle", lambda: settled.append(app.chat.title_bar.view.phase))
    monkeypatch.setattr(ChatApp, "is_headless", property(lambda _: headless))
    async with app.run_test() as pilot:
        await wait_until(connected(app))
        await pilot.pause()
        assert settled == ([] if headless else ["connected"])

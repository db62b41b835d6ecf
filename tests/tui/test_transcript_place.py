"""What of a conversation is on the screen after it changed."""

from collections.abc import Callable

from textual.pilot import Pilot

from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.welcome import Welcome

MakeApp = Callable[..., ChatApp]


async def type_line(pilot: Pilot[None], text: str) -> None:
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.chat.set_focus(app.chat.composer)
    app.chat.composer.load_text(text)
    await pilot.press("enter")


async def test_the_answer_to_an_edited_message_is_on_the_screen_to_its_last_line(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["one"]), Script(deltas=["two"]), Script(deltas=["three"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=(90, 40)) as pilot:
            await wait_until(lambda: app.is_running and app.chat.title_bar.view.phase == "connected")
            await type_line(pilot, "hello")
            await wait_until(lambda: app.chat.query(AnswerMessage) and app.chat.query_one(AnswerMessage).settled)
            await pilot.press("tab", "r")
            await wait_until(lambda: [view.text for view in app.chat.transcript.views()] == ["hello", "two"])
            await wait_until(lambda: app.chat.query_one(AnswerMessage).settled)
            await pilot.press("escape")
            await type_line(pilot, "/edit")
            await wait_until(lambda: app.chat.composer.editing is not None)
            await type_line(pilot, "hello again")
            await wait_until(lambda: [view.text for view in app.chat.transcript.views()] == ["hello again", "three"])
            await wait_until(lambda: app.chat.query_one(AnswerMessage).settled)
            answer = app.chat.query_one(AnswerMessage)
            await pilot.pause()
            assert answer.region.height == len(answer.lines) > 2
            assert answer.region.bottom <= app.chat.transcript.region.bottom


async def test_the_first_screen_is_whole_after_a_short_conversation(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(90, 40)) as pilot:
        await wait_until(lambda: app.is_running and app.chat.title_bar.view.phase == "connected")
        await type_line(pilot, "hello")
        await wait_until(lambda: app.chat.query(AnswerMessage) and app.chat.query_one(AnswerMessage).settled)
        await pilot.press("ctrl+n")
        await wait_until(lambda: bool(app.chat.query(Welcome)))
        await pilot.pause()
        welcome, transcript = app.chat.query_one(Welcome).region, app.chat.transcript.region
        assert abs((welcome.y - transcript.y) - (transcript.bottom - welcome.bottom)) <= 1

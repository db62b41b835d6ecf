"""What is typed faster than the keyboard goes elsewhere is there, whole and in its order."""

from collections.abc import Callable

import pytest
from textual import events
from textual.command import CommandPalette
from textual.keys import _character_to_key

from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.screens.form import FormScreen
from chatd_tui.screens.found import FoundScreen
from chatd_tui.screens.help import ConfirmScreen, HelpScreen
from chatd_tui.screens.pool import PoolScreen

TYPED = "Hello, you!"


def burst(app: ChatApp, key: str, text: str = TYPED) -> None:
    """Have a key and a text come together, as over a slow line."""
    for name, character in [(key, None), *((_character_to_key(each), each) for each in text)]:
        app.post_message(events.Key(name, character))


async def in_a_conversation(app: ChatApp, pilot, wait_until) -> None:
    await wait_until(lambda: app.is_running and app.context.connected)
    app.chat.composer.load_text("one")
    await pilot.press("enter")
    await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)


@pytest.mark.parametrize(
    ("opened", "page", "closing"),
    [
        ("/help", HelpScreen, "escape"),
        ("/pool", PoolScreen, "escape"),
        ("/pool", PoolScreen, "q"),
        ("/settings", FormScreen, "escape"),
        ("/search one", FoundScreen, "escape"),
        ("/search one", FoundScreen, "enter"),
        ("/erase", ConfirmScreen, "n"),
        ("/erase", ConfirmScreen, "y"),
        ("/palette", CommandPalette, "escape"),
        ("/palette", CommandPalette, "enter"),
        ("/server", None, "enter"),
    ],
)
async def test_what_is_typed_while_a_page_closes_is_in_the_input(
    tmp_path, wait_until: Callable, opened: str, page: type | None, closing: str
) -> None:
    async with ScriptedDaemon([Script(deltas=["answer"])]) as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(110, 30)) as pilot:
            await in_a_conversation(app, pilot, wait_until)
            app.chat.composer.load_text(opened)
            await pilot.press("enter")
            await wait_until(lambda: app.screen is not app.chat and isinstance(app.screen, page or object))
            if page is CommandPalette:
                await pilot.press(*"rename")
                await wait_until(lambda: "rename" in str(app.screen.query("CommandList").first().options))
            await pilot.pause()
            burst(app, closing)
            begun = "/rename " if (page, closing) == (CommandPalette, "enter") else ""
            await wait_until(lambda: app.screen is app.chat and len(app.chat.composer.text) == len(begun + TYPED))
            assert app.chat.composer.text == begun + TYPED
            assert app.chat.composer.has_focus


async def test_what_is_typed_behind_the_choice_of_a_conversation_is_in_the_input(
    tmp_path, wait_until: Callable
) -> None:
    async with ScriptedDaemon([Script(deltas=["answer"])]) as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(110, 30)) as pilot:
            await in_a_conversation(app, pilot, wait_until)
            await wait_until(lambda: app.chat.sessions.option_count == 2)
            await pilot.press("f3")
            assert app.chat.sessions.has_focus
            app.chat.sessions.highlighted = 0
            burst(app, "enter")
            await wait_until(lambda: app.chat.composer.text == TYPED)
            assert app.link.session is None


async def test_what_is_typed_behind_the_key_of_a_selected_message_goes_where_that_leads(
    tmp_path, wait_until: Callable
) -> None:
    async with ScriptedDaemon([Script(deltas=["answer"])]) as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(110, 30)) as pilot:
            await in_a_conversation(app, pilot, wait_until)
            await pilot.press("tab")
            await wait_until(lambda: app.chat.transcript.has_focus)
            burst(app, "e")
            await wait_until(lambda: app.chat.composer.text == "one" + TYPED)


async def test_what_is_typed_at_a_selected_message_is_in_the_input_in_its_order(tmp_path, wait_until: Callable) -> None:
    async with ScriptedDaemon([Script(deltas=["answer"])]) as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(110, 30)) as pilot:
            await in_a_conversation(app, pilot, wait_until)
            await pilot.press("tab")
            await wait_until(lambda: app.chat.transcript.has_focus)
            burst(app, "tab", "ab")
            app.post_message(events.Key("left", None))
            app.post_message(events.Key("c", "c"))
            await wait_until(lambda: len(app.chat.composer.text) == 3)
            assert app.chat.composer.text == "acb"


async def test_a_paste_and_what_is_typed_behind_it_keep_their_order(tmp_path, wait_until: Callable) -> None:
    async with ScriptedDaemon() as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=(110, 30)) as pilot:
            await wait_until(lambda: app.is_running and app.context.connected)
            await pilot.press("f1")
            await wait_until(lambda: isinstance(app.screen, HelpScreen))
            burst(app, "escape", "a")
            app.post_message(events.Paste("bc"))
            app.post_message(events.Key("d", "d"))
            await wait_until(lambda: app.chat.composer.text == "abcd")

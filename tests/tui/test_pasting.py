"""Pastes of every length: what stands in the input, what is sent, and what is refused with its numbers."""

import asyncio

import pytest
from textual import events

from chatd import protocol as p
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.pasted import MAX_HELD, SHOWN_CHARS, Pasted

LINE = "a line of a log\n"


def test_a_mark_stands_for_its_text_and_other_text_for_itself() -> None:
    pasted = Pasted()
    first, second = "x" * 20_000, LINE * 1000
    assert pasted.mark(first) == "[text 1: 20,000 characters in 1 line]"
    assert pasted.mark(second) == "[text 2: 16,000 characters in 1,001 lines]"
    shown = "before [text 2: 16,000 characters in 1,001 lines] [text 9: 1 characters in 1 line] [bold]"
    assert pasted.whole(shown) == f"before {second} [text 9: 1 characters in 1 line] [bold]"
    assert pasted.shown(pasted.whole(shown)) == shown


def test_a_mark_inside_of_what_is_pasted_is_text() -> None:
    pasted = Pasted()
    inner = pasted.mark("y" * 20_000)
    outer = pasted.mark(inner + "z" * 20_000)
    assert pasted.whole(outer) == inner + "z" * 20_000


def test_the_last_few_texts_are_kept() -> None:
    pasted = Pasted()
    marks = [pasted.mark(str(n) * 20_000) for n in range(MAX_HELD + 1)]
    assert pasted.whole(marks[0]) == marks[0]
    assert all(pasted.whole(mark) == str(n) * 20_000 for n, mark in enumerate(marks) if n)


def test_a_long_message_that_comes_back_stands_as_a_mark() -> None:
    pasted = Pasted()
    assert pasted.shown("short") == "short"
    mark = pasted.shown("x" * (SHOWN_CHARS + 1))
    assert mark.startswith("[text 1: ")
    assert pasted.whole(mark) == "x" * (SHOWN_CHARS + 1)


async def paste(app: ChatApp, text: str) -> None:
    app.post_message(events.Paste(text))
    await asyncio.sleep(0)


def sent(daemon: ScriptedDaemon) -> list[str]:
    return [command.content for command in daemon.commands if isinstance(command, p.UserMessage)]


@pytest.mark.parametrize("text", ["one\ntwo", LINE * 2000, "x" * 100_000])
async def test_what_is_pasted_is_sent_once_and_whole(make_app, wait_until, daemon: ScriptedDaemon, text: str) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        await pilot.press("a", ":", " ")
        await paste(app, text)
        await wait_until(lambda: app.chat.composer.message == f"a: {text}")
        assert len(app.chat.composer.text) <= SHOWN_CHARS
        await pilot.press("enter")
        await wait_until(lambda: bool(sent(daemon)))
        assert sent(daemon) == [f"a: {text}".strip("\n")]


async def test_a_paste_that_no_message_can_hold_is_refused_with_its_numbers(
    make_app, wait_until, daemon: ScriptedDaemon
) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        await pilot.press("a")
        await paste(app, "é" * (1 << 20))
        await wait_until(lambda: app.chat.status.kind == "error")
        assert app.chat.status.text == "what is pasted has 2097152 bytes, the limit is 262144 (limits.frame_bytes)"
        assert app.chat.composer.text == "a"


async def test_a_message_that_no_frame_can_hold_stays_in_the_input(
    make_app, wait_until, daemon: ScriptedDaemon
) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        for letter in "xy":
            await paste(app, letter * 150_000)
        await wait_until(lambda: len(app.chat.composer.message) == 300_000)
        shown = app.chat.composer.text
        await pilot.press("enter")
        await wait_until(lambda: app.chat.status.kind == "error")
        assert app.chat.status.text == "the message has 300000 bytes, the limit is 262144 (limits.frame_bytes)"
        assert app.chat.composer.text == shown
        assert not sent(daemon)


async def test_a_message_that_the_daemon_refuses_comes_back_as_its_mark(
    make_app, wait_until, daemon: ScriptedDaemon
) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(lambda: app.chat.title_bar.view.phase == "connected")
        # Short enough in itself, and too long for a frame once JSON has escaped it.
        text = '"' * 200_000
        await paste(app, text)
        await wait_until(lambda: app.chat.composer.message == text)
        shown = app.chat.composer.text
        await pilot.press("enter")
        await wait_until(lambda: app.chat.status.kind == "error")
        assert "the message makes a frame of" in app.chat.status.text
        assert (app.chat.composer.text, app.chat.composer.message) == (shown, text)


async def test_a_paste_at_a_selected_message_goes_to_the_input_as_what_is_typed_does(
    make_app, wait_until, daemon: ScriptedDaemon
) -> None:
    app: ChatApp = make_app(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(lambda: app.is_running and app.context.connected)
        app.chat.composer.load_text("one")
        await pilot.press("enter")
        await wait_until(lambda: len(app.chat.transcript.views()) == 2 and not app.conversation.busy)
        await pilot.press("tab")
        await wait_until(lambda: app.chat.transcript.has_focus)
        await paste(app, "two\n\x1b[31m")
        app.post_message(events.Key("x", "x"))
        await wait_until(lambda: app.chat.composer.text.endswith("x"))
        await pilot.pause()
        assert app.chat.composer.text == "two\n␛[31mx"
        assert app.chat.composer.has_focus

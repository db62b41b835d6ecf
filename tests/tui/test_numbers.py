"""The numbers that are always on, from a scripted daemon's events to the two lines that show them."""

from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from chatd import protocol as p
from chatd.client import Client
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.status_text import ANSWERING
from chatd_tui.widgets.status import StatusView

MakeApp = Callable[..., ChatApp]
SIZE = (120, 30)


def connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and app.chat.title_bar.view.phase == "connected"


async def say(pilot: Pilot[None], text: str) -> None:
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.chat.set_focus(app.chat.composer)
    app.chat.composer.load_text(text)
    await pilot.press("enter")


def ended(app: ChatApp, num_messages: int) -> Callable[[], bool]:
    return lambda: len(app.chat.transcript.views()) == num_messages and not app.conversation.busy


async def test_a_turns_place_progress_and_hits_are_shown_while_it_waits_and_reads(
    make_app: MakeApp, wait_until
) -> None:
    async with ScriptedDaemon([Script(deltas=["Hello ", "there."], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            await wait_until(lambda: app.conversation.busy)
            session = daemon.sessions[app.link.session]
            for position, why, expected in (
                (3, "fair_share", StatusView("busy", "waiting, number 3 in line", "others' turn")),
                (1, "no_blocks", StatusView("busy", "waiting, next in line", "no memory is free")),
            ):
                await daemon._broadcast(session, p.ResponseQueued(session=session.id, position=position, why=why))
                await wait_until(lambda expected=expected: app.chat.status == expected)
            await daemon._broadcast(session, p.ResponsePrefill(session=session.id, done=600, total=1000, cached=500))
            read = StatusView("busy", "reading the prompt, 600 of 1k tokens", "500 from the cache")
            await wait_until(lambda: app.chat.status == read)
            assert app.chat.meter.view.turn_hit == 0.5
            assert "turn 50%" in app.chat.meter.render().plain
            daemon.release(3)
            await wait_until(ended(app, 2))


@pytest.mark.parametrize(
    "halt",
    [
        lambda session: p.ResponsePreempted(session=session),
        lambda session: p.ResponseQueued(session=session, position=1, why="restore"),
    ],
)
async def test_an_answer_that_is_set_aside_has_no_speed(
    halt: Callable[[str], p.Event], make_app: MakeApp, wait_until
) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b"], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "hi")
            daemon.release(1)
            await wait_until(lambda: app.chat.status == ANSWERING)
            app.draw_meter(tok_s=45.0)
            session = daemon.sessions[app.link.session]
            await daemon._broadcast(session, halt(session.id))
            await wait_until(lambda: app.chat.status.text != "answering")
            assert app.chat.meter.view.tok_s is None
            daemon.release(2)
            await wait_until(ended(app, 2))


async def test_the_last_turns_numbers_stay_until_another_conversation_is_shown(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "one")
            await wait_until(ended(app, 2))
            item = daemon.sessions[app.link.session].items[-1]
            view = app.chat.meter.view
            assert (view.tok_s, view.last_tok_s, view.ttft_ms, view.turn_hit) == (
                None,
                item.timings.decode_tok_s,
                item.timings.ttft_ms,
                item.usage.cached_tokens / item.usage.input_tokens,
            )
            session = app.link.session
            await app.open_session(None)
            view = app.chat.meter.view
            assert (view.last_tok_s, view.ttft_ms, view.turn_hit, view.context_used) == (None, None, None, 0)
            # Those of one that is opened again are those of its last answer.
            await app.open_session(session)
            await wait_until(lambda: app.chat.meter.view.last_tok_s == item.timings.decode_tok_s)
            assert app.chat.meter.view.ttft_ms == item.timings.ttft_ms


async def test_nothing_is_said_to_be_in_memory_of_a_conversation_that_was_erased(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a ", "b"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await say(pilot, "one")
            await wait_until(ended(app, 2))
            app.draw_meter(tier="device")
            async with Client.connect(daemon.url) as other:
                await other.attach(app.link.session)
                await other.erase_session(app.link.session)
            await wait_until(lambda: app.chat.status.text == "this conversation was erased")
            view = app.chat.meter.view
            assert (view.context_used, view.tier, view.last_tok_s, view.ttft_ms) == (0, "", None, None)


async def test_a_context_that_fills_is_seen_as_soon_as_the_daemon_says_it(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await say(pilot, "one")
        await wait_until(ended(app, 2))
        session = daemon.sessions[app.link.session]
        for used, mark in ((8000, "8k/8.2k !!"), (6000, "6k/8.2k !"), (100, "100/8.2k ·")):
            usage = p.SessionUsage(
                session=session.id, context_used=used, context_max=8192, blocks_held=1, blocks_shared=0
            )
            await daemon._broadcast(session, usage)
            await wait_until(lambda used=used: app.chat.meter.view.context_used == used)
            assert mark in f"{app.chat.meter.render().plain} ·"

"""Several daemons in one list: each for itself, with one conversation on the screen."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from chatd import protocol as p
from chatd.config import Server
from chatd.errors import ConfigError
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.screens.server_choice import ServerScreen
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.status import StatusView
from chatd_tui.widgets.user_message import UserMessage

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]
SIZE = (120, 30)


def server(name: str, daemon: ScriptedDaemon, key: str | None = None) -> Server:
    return Server(name, daemon.url, lambda: key)


def listed(app: ChatApp) -> list[str]:
    sessions = app.chat.sessions
    return [str(sessions.get_option_at_index(n).prompt).splitlines()[0].strip() for n in range(sessions.option_count)]


def all_connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and all(daemon.is_connected for daemon in app.daemons)


def said(app: ChatApp) -> list[str]:
    return [message.text for message in app.chat.query(UserMessage)]


def answered(app: ChatApp) -> list[str]:
    return [answer.text for answer in app.chat.query(AnswerMessage)]


async def choose(app: ChatApp, pilot: Pilot[None], place: int) -> None:
    app.chat.sessions.focus()
    app.chat.sessions.highlighted = place
    await pilot.press("enter")


async def say(app: ChatApp, pilot: Pilot[None], text: str) -> None:
    app.chat.composer.focus()
    app.chat.composer.load_text(text)
    await pilot.press("enter")


async def test_each_servers_conversations_stand_under_its_name_and_open_there(tmp_path: Path, wait_until) -> None:
    async with (
        ScriptedDaemon([Script(deltas=["from box"])]) as box,
        ScriptedDaemon([Script(deltas=["from gpu"])]) as gpu,
    ):
        app = ChatApp([server("box", box), server("gpu", gpu)], copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(all_connected(app))
            await wait_until(lambda: listed(app) == ["box", "+ New conversation", "gpu", "+ New conversation"])
            await say(app, pilot, "one")
            await wait_until(lambda: answered(app) == ["from box"] and not app.conversation.busy)
            await choose(app, pilot, app.chat.sessions.option_count - 1)
            await wait_until(lambda: app.link.name == "gpu" and not said(app))
            await say(app, pilot, "two")
            await wait_until(lambda: answered(app) == ["from gpu"] and not app.conversation.busy)
            assert app.chat.title_bar.view.server == "gpu"
            await wait_until(
                lambda: listed(app) == ["box", "+ New conversation", "one", "gpu", "+ New conversation", "▸ two"]
            )
            # Both have the id `ses_1`: which one is meant is its place in the list.
            assert list(box.sessions) == list(gpu.sessions) == ["ses_1"]
            await choose(app, pilot, 2)
            await wait_until(lambda: said(app) == ["one"] and answered(app) == ["from box"])
            await say(app, pilot, "three")
            await wait_until(lambda: len(answered(app)) == 2 and not app.conversation.busy)
            assert [item.content for item in box.sessions["ses_1"].items if item.role == "user"] == ["one", "three"]
            assert [item.content for item in gpu.sessions["ses_1"].items if item.role == "user"] == ["two"]


async def test_one_that_dies_disturbs_no_other_and_is_there_again_when_it_comes_back(
    tmp_path: Path, wait_until
) -> None:
    async with (
        ScriptedDaemon([Script(deltas=["a", "b", "c", "d"], manual=True)]) as box,
        ScriptedDaemon([Script(deltas=["from gpu"])]) as gpu,
    ):
        app = ChatApp([server("box", box), server("gpu", gpu)], copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(all_connected(app))
            await say(app, pilot, "go")
            box.release(2)
            await wait_until(lambda: answered(app) == ["ab"])
            status = app.chat.status
            await gpu.stop()
            await wait_until(lambda: any("gpu  no connection" in line for line in listed(app)))
            assert app.chat.status == status
            assert app.chat.title_bar.view.phase == "connected"
            assert app.context.connected
            box.release(3)
            await wait_until(lambda: answered(app) == ["abcd"] and not app.conversation.busy)
            await gpu.start()
            app.daemons["gpu"].link.retry_now()
            await wait_until(all_connected(app))
            await wait_until(lambda: "gpu" in listed(app))


async def test_the_one_on_the_screen_dies_and_the_other_one_is_at_hand(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as box, ScriptedDaemon([Script(deltas=["from gpu"])]) as gpu:
        app = ChatApp([server("box", box), server("gpu", gpu)], copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(all_connected(app))
            await box.stop()
            await wait_until(lambda: not app.context.connected)
            await choose(app, pilot, 3)
            await wait_until(lambda: app.context.connected)
            assert app.chat.title_bar.view.connection == "connected"
            await say(app, pilot, "hello")
            await wait_until(lambda: answered(app) == ["from gpu"] and not app.conversation.busy)


async def test_a_wrong_key_of_one_is_said_beside_its_name_and_another_key_is_found(tmp_path: Path, wait_until) -> None:
    keys = {"gpu": "wrong"}
    async with ScriptedDaemon() as box, ScriptedDaemon(key="right") as gpu:
        app = ChatApp([server("box", box), Server("gpu", gpu.url, lambda: keys["gpu"])], copies=tmp_path)
        async with app.run_test(size=SIZE):
            await wait_until(lambda: app.is_running and "✕ gpu  wrong key" in listed(app))
            assert app.chat.status.kind == "idle"
            keys["gpu"] = "right"
            await wait_until(lambda: "gpu" in listed(app))


async def test_a_key_that_cannot_be_read_or_must_not_be_sent_is_the_trouble_of_its_server_alone(
    tmp_path: Path, wait_until
) -> None:
    def unreadable() -> str:
        raise ConfigError("others can read the key in box.key")

    async with ScriptedDaemon() as here:
        servers = [
            server("here", here),
            Server("box", here.url, unreadable),
            Server("far", "http://192.0.2.1:8790", lambda: "ck_secret"),
        ]
        app = ChatApp(servers, copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and {"✕ box  refused", "✕ far  refused"} < set(listed(app)))
            assert app.context.connected
            await choose(app, pilot, 3)
            await wait_until(lambda: app.chat.status.text == "others can read the key in box.key")
            await choose(app, pilot, 5)
            await wait_until(lambda: "not encrypted" in app.chat.status.text)


async def test_only_the_daemon_on_the_screen_is_asked_for_its_pool(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as box, ScriptedDaemon() as gpu:
        app = ChatApp([server("box", box), server("gpu", gpu)], copies=tmp_path)
        gpu.totals = p.PoolTotals(
            blocks=999,
            free=999,
            cached=0,
            active=0,
            shared=0,
            evictions=0,
            hit_rate=0.0,
            tok_s=0.0,
            running=0,
            waiting=0,
        )
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(all_connected(app))
            await wait_until(lambda: app.chat.meter.view.blocks == 256)
            assert not any(isinstance(command, p.PoolSubscribe) for command in gpu.commands)
            await choose(app, pilot, 3)
            await wait_until(lambda: app.chat.meter.view.blocks == 999)
            await wait_until(lambda: isinstance(box.commands[-1], p.PoolUnsubscribe))


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_a_name_is_shown_only_where_there_are_several(tmp_path: Path, wait_until, num_servers: int) -> None:
    async with ScriptedDaemon() as box, ScriptedDaemon() as gpu:
        app = ChatApp([server("box", box), server("gpu", gpu)][:num_servers], copies=tmp_path)
        async with app.run_test(size=SIZE):
            await wait_until(all_connected(app))
            assert app.chat.title_bar.view.server == ("" if num_servers == 1 else "box")
            assert len(listed(app)) == (1 if num_servers == 1 else 4)


async def test_a_command_goes_to_another_server_and_back_to_where_one_was(tmp_path: Path, wait_until) -> None:
    async with (
        ScriptedDaemon([Script(deltas=["from box"])]) as box,
        ScriptedDaemon([Script(deltas=["from gpu"])]) as gpu,
    ):
        app = ChatApp([server("box", box), server("gpu", gpu)], copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(all_connected(app))
            assert [row.text for row in app.chat.composer.suggest("/server g")] == ["/server gpu"]
            await say(app, pilot, "one")
            await wait_until(lambda: answered(app) == ["from box"] and not app.conversation.busy)
            await say(app, pilot, "/server gpu")
            await wait_until(lambda: app.link.name == "gpu" and not said(app))
            await say(app, pilot, "two")
            await wait_until(lambda: answered(app) == ["from gpu"] and not app.conversation.busy)
            await say(app, pilot, "/server box")
            await wait_until(lambda: answered(app) == ["from box"] and said(app) == ["one"])
            await say(app, pilot, "/server box")
            await wait_until(lambda: app.chat.status.text == "box is on the screen already")
            await say(app, pilot, "/server lab")
            await wait_until(
                lambda: app.chat.status == StatusView("warning", "there is no server 'lab'", "there are box, gpu")
            )


async def test_all_servers_are_shown_with_their_states_as_these_change(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as box, ScriptedDaemon([Script(deltas=["from gpu"])]) as gpu:
        app = ChatApp([server("box", box), server("gpu", gpu)], copies=tmp_path)

        def rows() -> list[str]:
            shown = app.screen.query_one(OptionList)
            return [str(shown.get_option_at_index(n).prompt).splitlines()[0] for n in range(shown.option_count)]

        async with app.run_test(size=SIZE) as pilot:
            await wait_until(all_connected(app))
            await say(app, pilot, "/server")
            await wait_until(lambda: isinstance(app.screen, ServerScreen))
            assert rows() == ["● box  connected · on the screen", "● gpu  connected"]
            await gpu.stop()
            await wait_until(lambda: rows()[1] == "◌ gpu  no connection")
            await pilot.press("down", "enter")
            await wait_until(lambda: app.screen is app.chat and app.link.name == "gpu")
            assert not app.context.connected

"""A search over all conversations shows where each has it, and opens the chosen one at that message."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import OptionList

from chatd import protocol as p
from chatd.config import Server
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession
from chatd_tui import servers as servers_module
from chatd_tui.app import ChatApp
from chatd_tui.screens.found import FoundScreen
from chatd_tui.status_text import ELSEWHERE

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]
SIZE = (120, 30)


def talked(ident: str, title: str, texts: list[str]) -> ScriptedSession:
    session = ScriptedSession(ident, title, None)
    for number, text in enumerate(texts):
        role = "assistant" if number % 2 else "user"
        parent = f"{ident}-{number - 1}" if number else None
        session.items.append(
            p.Item(id=f"{ident}-{number}", role=role, content=text, status="completed", parent=parent)  # type: ignore[arg-type]
        )
    return session


async def search(app: ChatApp, pilot: Pilot[None], wait_until: WaitUntil, query: str) -> list[str]:
    app.chat.composer.focus()
    app.chat.composer.load_text(f"/search {query}")
    await pilot.press("enter")
    await wait_until(lambda: isinstance(app.screen, FoundScreen))
    if not app.screen.query(OptionList):
        return []
    found = app.screen.query_one(OptionList)
    return [str(found.get_option_at_index(n).prompt) for n in range(found.option_count)]


async def test_each_result_has_its_passage_and_opens_at_that_message(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as daemon:
        texts = [f"text {number}" for number in range(90)]
        texts[10] = "the [bold]Needle[/] is\x1b[31m here"
        daemon.sessions["long"] = talked("long", "A long one", texts)
        daemon.sessions["other"] = talked("other", "Needle in the title", ["nothing", "else"])
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and app.context.connected)
            found = await search(app, pilot, wait_until, "needle")
            assert len(found) == 2
            (place,) = [n for n, text in enumerate(found) if "A long one" in text]
            assert found[place].splitlines()[2] == "  the [bold]Needle[/] is␛[31m here"
            assert len(found[1 - place].splitlines()) == 2
            app.screen.query_one(OptionList).highlighted = place
            await pilot.press("enter")
            await wait_until(lambda: app.screen is app.chat and app.chat.transcript.selected is not None)
            selected = app.chat.transcript.selected
            assert selected is not None
            assert selected.id == "long-10"
            message = next(m for m in app.chat.transcript.messages if m.item_id == "long-10")
            await wait_until(lambda: app.chat.transcript.region.contains_region(message.region))


async def test_what_is_in_another_branch_is_said_to_be_elsewhere(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as daemon:
        daemon.sessions["s"] = session = talked("s", "One", ["question", "the needle"])
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and app.context.connected)
            await search(app, pilot, wait_until, "needle")
            session.put(p.Item(id="again", role="assistant", content="hay", status="completed", parent="s-0"))
            await pilot.press("enter")
            await wait_until(lambda: app.chat.status == ELSEWHERE)
            assert [view.text for view in app.chat.transcript.views()] == ["question", "hay"]


async def test_every_server_that_is_there_is_searched_and_the_result_opens_there(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as box, ScriptedDaemon() as gpu, ScriptedDaemon() as gone:
        box.sessions["s"] = talked("s", "On box", ["a needle"])
        gpu.sessions["s"] = talked("s", "On gpu", ["another needle"])
        servers = [Server(name, daemon.url) for name, daemon in (("box", box), ("gpu", gpu), ("gone", gone))]
        app = ChatApp(servers, copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and all(daemon.is_connected for daemon in app.daemons))
            await gone.stop()
            await wait_until(lambda: not app.daemons["gone"].is_connected)
            found = await search(app, pilot, wait_until, "needle")
            assert [text.splitlines()[0] for text in found] == ["On box", "On gpu"]
            assert [text.splitlines()[1].split(" · ")[0].strip() for text in found] == ["box", "gpu"]
            app.screen.query_one(OptionList).highlighted = 1
            await pilot.press("enter")
            await wait_until(lambda: app.link.name == "gpu" and app.chat.transcript.selected is not None)
            assert [view.text for view in app.chat.transcript.views()] == ["another needle"]


async def test_a_server_that_goes_away_during_the_search_is_not_waited_for(
    tmp_path: Path, wait_until, monkeypatch
) -> None:
    monkeypatch.setattr(servers_module, "SEARCH_S", 0.05)
    async with ScriptedDaemon() as box, ScriptedDaemon() as silent:
        box.sessions["s"] = talked("s", "On box", ["a needle"])

        async def swallow(command: p.Command) -> bool:
            return isinstance(command, p.SessionList) and command.query is not None

        silent.on_command = swallow
        app = ChatApp([Server("box", box.url), Server("silent", silent.url)], copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and all(daemon.is_connected for daemon in app.daemons))
            assert len(await search(app, pilot, wait_until, "needle")) == 1


async def test_a_search_without_a_result_says_so(tmp_path: Path, wait_until) -> None:
    async with ScriptedDaemon() as daemon:
        app = ChatApp(daemon.url, copies=tmp_path)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(lambda: app.is_running and app.context.connected)
            assert await search(app, pilot, wait_until, "nothing") == []
            await pilot.press("escape")
            await wait_until(lambda: app.screen is app.chat)

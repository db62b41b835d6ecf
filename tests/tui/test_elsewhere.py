"""A conversation that is open elsewhere: seen in the list, joined in the middle of an answer, written in or watched."""

from collections.abc import Awaitable, Callable

from textual.pilot import Pilot

from chatd import protocol as p
from chatd.client import Client
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui import news_app
from chatd_tui.app import ChatApp
from chatd_tui.status_text import WATCHING
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.status import StatusView
from chatd_tui.widgets.versions import marker

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]
MakeApp = Callable[..., ChatApp]
SIZE = (120, 30)
WORDS = ["one ", "two ", "three ", "four ", "five "]


def connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and app.context.connected


def row(app: ChatApp, place: int = 1) -> list[str]:
    if app.chat.sessions.option_count <= place:
        return []
    return str(app.chat.sessions.get_option_at_index(place).prompt).splitlines()


def answers(app: ChatApp) -> list[str]:
    return [answer.text for answer in app.chat.query(AnswerMessage)]


async def choose(app: ChatApp, pilot: Pilot[None], place: int = 1) -> None:
    app.chat.sessions.focus()
    app.chat.sessions.highlighted = place
    await pilot.press("enter")


async def test_the_list_says_by_itself_what_runs_elsewhere_and_joining_streams_on(
    make_app: MakeApp, wait_until, monkeypatch
) -> None:
    monkeypatch.setattr(news_app, "LIST_S", 0.05)
    async with ScriptedDaemon([Script(deltas=WORDS, manual=True)]) as daemon, Client.connect(daemon.url) as other:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            session = await other.create_session(title="Elsewhere")
            await session.send("count")
            await wait_until(lambda: row(app)[:1] == ["● Elsewhere"])
            assert row(app)[1].startswith("  open elsewhere · ")
            daemon.release(2)
            await wait_until(lambda: daemon.sessions[session.id].items[-1].content == "one two ")
            await choose(app, pilot)
            await wait_until(lambda: answers(app) == ["one two "])
            daemon.release(2)
            await wait_until(lambda: answers(app) == ["one two three four "])
            daemon.abort()
            daemon.release(2)
            await wait_until(lambda: app.link.retry_now() or answers(app) == ["".join(WORDS)])
            await wait_until(lambda: not app.conversation.busy)
            await wait_until(lambda: row(app)[0] == "▸ Elsewhere")


async def test_who_else_has_it_open_is_said_and_who_comes_and_goes(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon() as daemon, Client.connect(daemon.url) as writer, Client.connect(daemon.url) as watcher:
        session = await writer.create_session(title="Shared")
        await watcher.attach(session.id, role="observer")
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await wait_until(lambda: row(app)[1:] and row(app)[1].startswith("  open 2× elsewhere"))
            await choose(app, pilot)
            await wait_until(
                lambda: app.chat.status == StatusView("notice", "open elsewhere: 1 can write, 1 only watch")
            )
            await watcher.detach(session.id)
            await wait_until(lambda: app.chat.status.text == "another screen left this conversation")
            await watcher.attach(session.id, role="observer")
            await wait_until(lambda: app.chat.status.hint == "it only watches")


async def test_who_watches_sees_why_nothing_is_sent(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=WORDS, manual=True)]) as daemon, Client.connect(daemon.url) as other:
        session = await other.create_session(title="Watched")
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await wait_until(lambda: bool(row(app)))
            await choose(app, pilot)
            await wait_until(lambda: app.link.session == session.id)
            app.chat.composer.load_text("/watch")
            await pilot.press("enter")
            await wait_until(lambda: app.chat.status == WATCHING)
            await wait_until(lambda: daemon.sessions[session.id].info(daemon.model).observers == 1)
            app.chat.composer.load_text("let me in")
            await pilot.press("enter")
            assert app.chat.status == WATCHING
            assert app.chat.composer.text == "let me in"
            await session.send("count")
            daemon.release(3)
            await wait_until(lambda: answers(app) == ["one two three "])
            assert not any(
                isinstance(command, p.UserMessage) and command.content == "let me in" for command in daemon.commands
            )


async def test_versions_made_elsewhere_while_the_connection_was_lost_are_marked_after_it(
    make_app: MakeApp, wait_until
) -> None:
    scripts = [Script(deltas=[word]) for word in ("first", "second", "third")]
    async with ScriptedDaemon(scripts) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await pilot.press(*"hi", "enter")
            await wait_until(lambda: answers(app) == ["first"] and not app.conversation.busy)
            ident = app.link.session
            assert ident is not None
            daemon.forget()
            daemon.abort()
            async with Client.connect(daemon.url) as other:
                session = await other.attach(ident)
                for _ in range(2):
                    async for _ in session.regenerate():
                        pass
                await session.select_branch(daemon.sessions[ident].items[0].id)
                leaves = [item.id for item in daemon.sessions[ident].tree.values() if item.role == "assistant"]
                await session.select_branch(leaves[1])
            await wait_until(lambda: app.link.retry_now() or answers(app) == ["second"])
            view = app.chat.transcript.views()[-1]
            assert str(marker(view.siblings)) == "‹2/3›"
            app.chat.transcript.select(view.id)
            app.chat.transcript.focus()
            await pilot.press("right")
            await wait_until(lambda: answers(app) == ["third"])

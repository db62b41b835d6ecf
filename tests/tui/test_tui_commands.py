"""Every command through the whole client, by typing, keys, the palette and the mouse, against a scripted daemon."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from textual import events
from textual.command import CommandPalette
from textual.pilot import Pilot

from chatd import protocol as p
from chatd.client import Client
from chatd.errors import EngineError
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd_tui.app import ChatApp
from chatd_tui.screens.found import FoundScreen
from chatd_tui.screens.help import ConfirmScreen, HelpScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.views import ItemView
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.status import StatusView
from chatd_tui.widgets.user_message import UserMessage

MakeApp = Callable[..., ChatApp]
SIZE = (100, 30)


def texts(app: ChatApp) -> list[str]:
    return [view.text for view in app.chat.transcript.views()]


def connected(app: ChatApp) -> Callable[[], bool]:
    return lambda: app.is_running and app.chat.title_bar.view.phase == "connected"


def idle(app: ChatApp, num_messages: int) -> Callable[[], bool]:
    return lambda: len(texts(app)) == num_messages and not app.conversation.busy and app.chat.status.kind != "busy"


async def type_line(pilot: Pilot[None], text: str) -> None:
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.chat.set_focus(app.chat.composer)
    app.chat.composer.load_text(text)
    await pilot.press("enter")


async def talk(app: ChatApp, pilot: Pilot[None], wait_until, *said: str) -> None:
    await wait_until(connected(app))
    for number, text in enumerate(said, 1):
        await type_line(pilot, text)
        await wait_until(idle(app, 2 * number))


def last(daemon: ScriptedDaemon, kind: type[p.Command]) -> p.Command:
    return next(command for command in reversed(daemon.commands) if isinstance(command, kind))


@pytest.fixture
def counting() -> ScriptedDaemon:
    scripts = [Script(deltas=[f"answer {n}"]) for n in range(1, 9)]
    return ScriptedDaemon(scripts)


async def test_an_edited_message_stands_beside_the_first_and_keys_switch_between_them(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one", "two")
            kept = app.chat.query(UserMessage).first()
            app.chat.composer.load_text("a draft")
            await pilot.press("tab", "up", "e")
            await wait_until(lambda: app.chat.composer.editing is not None)
            assert app.chat.composer.text == "two"
            await pilot.press("escape")
            assert (app.chat.composer.editing, app.chat.composer.text) == (None, "a draft")
            await pilot.press("tab", "e", *"!!", "enter")
            await wait_until(lambda: texts(app) == ["one", "answer 1", "two!!", "answer 3"])
            await wait_until(idle(app, 4))
            assert app.chat.composer.text == "a draft"
            edited = app.chat.transcript.views()[2]
            assert (edited.siblings.index, edited.siblings.count) == (2, 2)
            # What stays is not drawn anew.
            assert app.chat.query(UserMessage).first() is kept
            app.chat.composer.clear()
            await pilot.press("tab", "up", "left")
            await wait_until(lambda: texts(app) == ["one", "answer 1", "two", "answer 2"])
            assert app.chat.transcript.selected.text == "two"
            assert app.chat.query(UserMessage).first() is kept
            await pilot.press("left")
            await wait_until(lambda: app.chat.status.text == "this is the first of 2 versions")
            await pilot.press("right")
            await wait_until(lambda: texts(app)[2] == "two!!")
            await pilot.press("up", "right")
            await wait_until(lambda: app.chat.status.text == "this message has one version")
            await pilot.press("escape")
            assert app.chat.transcript.selected is None
            assert app.chat.composer.has_focus


async def test_an_answer_again_is_another_version_with_the_parameters_that_were_typed(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            await type_line(pilot, "/regenerate temperature=1 seed=7")
            await wait_until(lambda: texts(app) == ["one", "answer 2"])
            await wait_until(idle(app, 2))
            assert last(daemon, p.ResponseRegenerate).params == p.Params(temperature=1.0, seed=7)
            await pilot.press("tab", "r")
            await wait_until(lambda: texts(app) == ["one", "answer 3"])
            await wait_until(idle(app, 2))
            assert last(daemon, p.ResponseRegenerate).item is not None
            await pilot.press("escape")
            await type_line(pilot, "/branch previous")
            await wait_until(lambda: texts(app) == ["one", "answer 2"])
            await type_line(pilot, "/branch")
            await wait_until(lambda: texts(app) == ["one", "answer 3"])
            await type_line(pilot, "/regenerate warmth=1")
            await wait_until(lambda: app.chat.status.text == "'warmth' is not a parameter")
            assert app.chat.composer.text == "/regenerate warmth=1"


async def test_a_click_on_the_mark_shows_the_version_where_it_points(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            await type_line(pilot, "/regenerate")
            await wait_until(lambda: texts(app) == ["one", "answer 2"])
            # What is said of an ended answer may take a line more, and moves the mark.
            answer = app.chat.query(AnswerMessage).last()
            await wait_until(lambda: answer.settled)
            await pilot.pause()
            assert [line.plain for line in answer.lines[:2]] == ["answer 2", ""]
            assert answer.lines[2].plain.startswith("‹2/2› · ")
            await pilot.click(answer, offset=(2, 2))
            await wait_until(lambda: texts(app) == ["one", "answer 1"])
            await pilot.click(UserMessage)
            assert app.chat.transcript.selected.text == "one"


async def test_a_failed_edit_brings_back_the_branch_and_the_text(make_app: MakeApp, wait_until) -> None:
    scripts = [
        Script(deltas=["yes"]),
        Script(deltas=[], fail=EngineError("it died [bold]\x1b[2J", code="engine_error")),
    ]
    async with ScriptedDaemon(scripts) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            await type_line(pilot, "/edit")
            await wait_until(lambda: app.chat.composer.editing is not None)
            await type_line(pilot, "two")
            await wait_until(lambda: app.chat.status == StatusView("error", "it died [bold]␛[2J"))
            await wait_until(lambda: texts(app) == ["one", "yes"])
            assert app.chat.composer.text == "two"


async def test_a_fork_says_what_is_shared_and_is_shown(counting: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one", "two")
            origin = app.link.session
            await type_line(pilot, "/fork another [/b] way\x1b[2J")
            await wait_until(lambda: app.link.session != origin and app.chat.status.text.startswith("forked"))
            assert "tokens in 2 blocks are shared" in app.chat.status.text
            await wait_until(lambda: texts(app) == ["one", "answer 1", "two", "answer 2"])
            await wait_until(lambda: app.chat.title_bar.view.session == "another [/b] way␛[2J")
            assert app.chat.status.text.startswith("forked")
            await pilot.press("tab", "up", "up", "f")
            await wait_until(lambda: texts(app) == ["one", "answer 1"])
            assert len(daemon.sessions) == 3


async def test_completion_takes_the_marked_command_and_unknown_ones_are_not_sent(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await pilot.press(*"/se")
        await wait_until(lambda: len(app.chat.suggestions.view.rows) == 4)
        await pilot.press("down", "down", "tab")
        assert app.chat.composer.text == "/set "
        await pilot.press(*"temperature=1 top_k", "tab", "2", "enter")
        await wait_until(lambda: app.chat.status.text == "temperature=1.0 top_k=2")
        assert app.chat.composer.text == ""
        await wait_until(lambda: not app.chat.suggestions.view.rows)
        await type_line(pilot, "/frok it")
        assert app.chat.status == StatusView("warning", "there is no command /frok", "did you mean /fork?")
        await pilot.press("escape")
        await type_line(pilot, "/rename")
        assert app.chat.status.text == "/rename wants TITLE"
        await type_line(pilot, "//frok it")
        await wait_until(lambda: texts(app)[:1] == ["/frok it"])
        assert app.link.info.params == p.Params(temperature=1.0, top_k=2)


async def test_what_is_set_before_the_first_message_holds_from_it_on(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(connected(app))
        await type_line(pilot, "/system Be [brief].")
        await type_line(pilot, "/rename First")
        await type_line(pilot, "hi")
        await wait_until(idle(app, 3))
        assert texts(app)[:2] == ["Be [brief].", "hi"]
        await wait_until(lambda: app.chat.title_bar.view.session == "First")
        await type_line(pilot, "/system other")
        await wait_until(lambda: texts(app)[:1] == ["other"])
        assert app.chat.status == StatusView("notice", "the system prompt is set", "it holds from the next answer on")


async def test_sessions_are_renamed_pinned_archived_and_found(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=(120, 30)) as pilot:
            await talk(app, pilot, wait_until, "about rivers")
            first = app.link.session
            await type_line(pilot, "/rename Rivers [x]")
            await wait_until(lambda: app.chat.title_bar.view.session == "Rivers [x]")
            await type_line(pilot, "/pin")
            await wait_until(lambda: app.chat.status.text == "pinned")
            await type_line(pilot, '/set temperature=0.5 stop=["a b"]')
            await wait_until(lambda: daemon.sessions[first].params == p.Params(temperature=0.5, stop=("a b",)))
            await type_line(pilot, "/new")
            await wait_until(lambda: app.link.session is None)
            await talk(app, pilot, wait_until, "about lakes")
            await wait_until(lambda: app.chat.sessions.option_count == 3)
            assert app.chat.sessions.get_option_at_index(1).id == f"/{first}"
            await type_line(pilot, "/archive")
            await wait_until(lambda: app.chat.status.text.startswith("archived"))
            await wait_until(lambda: app.chat.sessions.option_count == 2)
            await type_line(pilot, "/search about")
            await wait_until(lambda: isinstance(app.screen, FoundScreen))
            await pilot.press("down", "enter")
            await wait_until(lambda: app.screen is app.chat and texts(app)[:1] == ["about lakes"])
            await wait_until(lambda: app.chat.title_bar.view.session == "about lakes")
            await type_line(pilot, "/archive")
            await wait_until(lambda: app.chat.status.text == "no longer archived")
            await type_line(pilot, "/search [/nothing]")
            await wait_until(lambda: isinstance(app.screen, FoundScreen))
            await pilot.press("escape")
            assert app.screen is app.chat


async def test_copies_are_of_the_selected_message_or_of_a_code_block(
    make_app: MakeApp, wait_until, tmp_path: Path
) -> None:
    async with ScriptedDaemon([Script(deltas=["a\n```\none\n```\nb\n```\ntwo\n```\n"])]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "code?")
            await type_line(pilot, "/copy code")
            await wait_until(lambda: app.chat.status.text == "sent code block 2 of 2 to the terminal's clipboard")
            assert app.clipboard == "two\n"
            await type_line(pilot, "/copy 1")
            await wait_until(lambda: app.clipboard == "one\n")
            await type_line(pilot, "/copy 3")
            await wait_until(lambda: app.chat.status.kind == "warning")
            assert app.chat.status.text == "there is no code block 3 in this message"
            app.chat.composer.clear()
            await pilot.press("tab", "up", "y")
            await wait_until(lambda: app.clipboard == "code?" and "message" in app.chat.status.text)
            assert (tmp_path / "copied.txt").read_text() == "code?"


async def test_exports_are_written_from_what_the_daemon_has(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until, tmp_path: Path
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            for name in ("a.md", "a.json", "a.html"):
                await type_line(pilot, f"/export {tmp_path / name}")
                await wait_until(lambda name=name: (tmp_path / name).exists())
            assert (tmp_path / "a.md").read_text() == "# one\n\n## You\n\n> one\n\n## Assistant\n\n> answer 1\n"
            assert "<h2>Assistant</h2><pre>answer 1</pre>" in (tmp_path / "a.html").read_text()
            await type_line(pilot, f"/export {tmp_path / 'a.md'}")
            await wait_until(lambda: "exists already" in app.chat.status.text)
            await type_line(pilot, f"/export {tmp_path / 'no' / 'a.md'}")
            await wait_until(lambda: "no such file" in app.chat.status.text)


async def test_who_watches_changes_nothing_until_taking_part_again(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            await type_line(pilot, "/watch")
            await wait_until(lambda: last(daemon, p.SessionAttach).role == "observer")
            await wait_until(idle(app, 2))
            assert "only watch" in app.chat.composer.placeholder
            await type_line(pilot, "two")
            assert app.chat.status.text == "you watch this conversation"
            await type_line(pilot, "/regenerate")
            assert app.chat.status.text == "/regenerate: you only watch this conversation"
            await type_line(pilot, "/watch")
            await wait_until(lambda: last(daemon, p.SessionAttach).role == "writer")
            await talk(app, pilot, wait_until)
            await type_line(pilot, "two")
            await wait_until(idle(app, 4))


async def test_an_older_daemon_and_an_answer_in_progress_grey_what_cannot_be_done(
    make_app: MakeApp, wait_until
) -> None:
    async with ScriptedDaemon([Script(), Script(manual=True)], caps=["pool.map"]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            await type_line(pilot, "/fork")
            assert app.chat.status.text == "/fork: this daemon is too old for that"
            assert app.chat.composer.text == "/fork"
            await pilot.press("escape", *"/fo")
            await wait_until(lambda: bool(app.chat.suggestions.view.rows))
            assert not app.chat.suggestions.view.rows[0].enabled
            hello = app.daemons.shown.hello
            app.daemons.shown.hello = msgspec.structs.replace(hello, caps=["branch"])
            await type_line(pilot, "two")
            await wait_until(lambda: app.conversation.busy)
            await type_line(pilot, "/edit")
            assert app.chat.status.text == "/edit: an answer is in progress"
            await type_line(pilot, "/stop")
            await wait_until(idle(app, 4))
            assert daemon.sessions[app.link.session].items[-1].reason == "cancelled"


async def test_the_palette_and_the_keys_reach_the_same_commands(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until, "one")
        await pilot.press("ctrl+p")
        await wait_until(lambda: isinstance(app.screen, CommandPalette))
        await pilot.press(*"memory pool")
        await wait_until(lambda: app.screen.query_one("CommandList").option_count > 0)
        await pilot.press("enter")
        await wait_until(lambda: isinstance(app.screen, PoolScreen))
        await pilot.press("ctrl+n", "f2")
        await wait_until(lambda: app.screen is app.chat)
        assert texts(app)[:1] == ["one"]
        await type_line(pilot, "/palette")
        await wait_until(lambda: isinstance(app.screen, CommandPalette))
        await pilot.press(*"rename")
        await wait_until(lambda: app.screen.query_one("CommandList").option_count > 0)
        await pilot.press("enter")
        await wait_until(lambda: app.screen is app.chat and app.chat.composer.text == "/rename ")
        for name, holds in (
            ("help", lambda: isinstance(app.screen, HelpScreen)),
            ("pool", lambda: isinstance(app.screen, PoolScreen)),
        ):
            await type_line(pilot, f"/{name}")
            await wait_until(holds)
            await pilot.press("escape")
            await wait_until(lambda: app.screen is app.chat)
        await type_line(pilot, "/conversations")
        await wait_until(lambda: app.chat.sessions.has_focus)
        await type_line(pilot, "/connect")
        await type_line(pilot, "/first")
        assert app.chat.transcript.scroll_y <= 0
        await type_line(pilot, "/quit")
        await wait_until(lambda: not app.is_running)


async def test_what_is_typed_among_the_messages_goes_to_the_input(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until, "one")
        await pilot.press("tab", "/", "f")
        await wait_until(lambda: app.chat.composer.text == "/f")
        assert app.chat.transcript.selected.text == "Hello **there**."
        await pilot.press("escape", "tab", "down")
        assert app.chat.composer.has_focus


async def test_where_the_memory_is_stands_in_the_meter_and_a_move_is_said(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=SIZE) as pilot:
        await talk(app, pilot, wait_until, "one")
        await wait_until(lambda: app.chat.meter.view.tier == "device")
        moved = p.SessionTier(session=app.link.session, tier="tokens", why="pressure")
        await daemon.send_everywhere(p.encode(moved))
        await wait_until(lambda: app.chat.meter.view.tier == "tokens")
        assert app.chat.status.text == "its memory was given up for want of memory"
        assert "text only" in app.chat.meter.render().plain


async def test_another_branch_keeps_the_place_that_is_read(
    daemon: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    app = make_app(daemon)
    async with app.run_test(size=(80, 20)) as pilot:
        await wait_until(connected(app))
        transcript = app.chat.transcript
        long = "\n".join(f"line {n}" for n in range(60))
        await transcript.show([ItemView("q", "user", "q"), ItemView("a", "user", long), ItemView("b", "user", long)])
        await pilot.pause()
        transcript.scroll_to(y=70, animate=False)
        await pilot.pause()
        await transcript.branch("a", [ItemView("c", "user", long), ItemView("d", "user", long)])
        await pilot.pause()
        assert transcript.scroll_y == 70
        assert [view.id for view in transcript.views()] == ["q", "a", "c", "d"]


async def test_an_answer_that_was_stopped_goes_on_beside_itself(make_app: MakeApp, wait_until) -> None:
    daemon = ScriptedDaemon([Script(deltas=["one ", "two"], manual=True), Script(deltas=["three"])])
    async with daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await type_line(pilot, "count")
            await wait_until(lambda: app.conversation.busy)
            daemon.release()
            await wait_until(lambda: texts(app)[-1:] == ["one "])
            await pilot.press("escape")
            await wait_until(idle(app, 2))
            await type_line(pilot, "/continue")
            await wait_until(lambda: texts(app)[-1:] == ["one three"] and not app.conversation.busy)
            assert app.chat.transcript.views()[-1].siblings.index == 2
            await type_line(pilot, "/continue")
            await wait_until(lambda: app.chat.status.text == "the answer is complete")


async def test_a_conversation_is_erased_once_that_is_confirmed(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "a secret")
            session = app.link.session
            for key in ("n", "y"):
                assert session in daemon.sessions
                await type_line(pilot, "/erase")
                await wait_until(lambda: isinstance(app.screen, ConfirmScreen))
                await pilot.press(key)
                await wait_until(lambda: app.screen is app.chat)
            await wait_until(lambda: session not in daemon.sessions)
            await wait_until(lambda: app.chat.status == StatusView("notice", "erased: 2 messages, 7 blocks of memory"))
            assert (texts(app), app.link.session) == ([], None)
            await talk(app, pilot, wait_until, "another")
            assert app.link.session in daemon.sessions


async def test_a_conversation_that_another_client_erases_is_left_and_so_is_an_edit_in_it(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "a secret")
            session = app.link.session
            await type_line(pilot, "/edit")
            await wait_until(lambda: app.chat.composer.editing is not None)
            async with Client.connect(daemon.url) as other:
                await other.attach(session)
                await other.erase_session(session)
            await wait_until(lambda: app.chat.status.text == "this conversation was erased")
            await wait_until(lambda: app.link.session is None)
            assert (app.chat.composer.editing, app.chat.composer.text) == (None, "")
            await talk(app, pilot, wait_until, "another")
            assert app.link.session in daemon.sessions


async def test_what_is_typed_is_told_only_while_type_ahead_is_on(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    def drafts() -> list[str | None]:
        return [command.content for command in daemon.commands if isinstance(command, p.Prefill)]

    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "hello")
            composer = app.chat.composer
            composer.load_text("nobody reads this before it is sent")
            await pilot.pause(0.3)
            assert drafts() == []
            await type_line(pilot, "/typeahead on")
            await wait_until(lambda: app.typing_ahead.is_on)
            composer.load_text("this is read while it is typed")
            await wait_until(lambda: drafts() == ["this is read while it is typed"])
            await wait_until(lambda: composer.border_subtitle == "type-ahead · 7 tokens ready")
            composer.load_text("/rename a command is nobody else's business")
            await wait_until(lambda: drafts()[1:] == [None])
            await type_line(pilot, "/typeahead off")
            await wait_until(lambda: not app.typing_ahead.is_on)
            assert not composer.border_subtitle


async def test_a_full_contexts_policy_is_shown_and_set(counting: ScriptedDaemon, make_app: MakeApp, wait_until) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await type_line(pilot, "/context drop-oldest")
            await talk(app, pilot, wait_until, "hello")
            session = daemon.sessions[app.link.session]
            assert session.context_policy == "drop_oldest"
            await type_line(pilot, "/context refuse")
            await wait_until(lambda: session.context_policy == "refuse")
            await type_line(pilot, "/context never")
            await wait_until(lambda: "neither refuse nor drop-oldest" in app.chat.status.text)
            await type_line(pilot, "/context")
            await wait_until(lambda: app.chat.status.text == "where the context is full, a message is refused")


async def test_messages_that_are_out_of_the_context_are_marked(make_app: MakeApp, wait_until) -> None:
    daemon = ScriptedDaemon([Script(deltas=["hello"])])
    async with daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one", "two")
            session = daemon.sessions[app.link.session]
            first = session.items[2].id
            last = p.Item(
                id="itm_x", role="assistant", content="", status="in_progress", parent=first, context_from=first
            )
            truncated = p.SessionTruncated(session=session.id, seq=0, ts=0.0, kept_from=first, dropped_items=2)
            await daemon._emit(session, truncated)
            await wait_until(lambda: "2 older messages left out of it" in app.chat.status.text)
            await daemon._emit(session, p.ResponseCreated(session=session.id, seq=0, ts=0.0, response="r", item=last))
            out = [True, True, False, False]
            await wait_until(lambda: [message.has_class("-out") for message in app.chat.transcript.messages] == out)
            assert [bool(message.border_title) for message in app.chat.transcript.messages] == [
                False,
                False,
                True,
                False,
            ]
            await pilot.pause()


async def test_a_closed_conversation_says_what_was_given_up_and_goes_on(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            session = app.link.session
            await type_line(pilot, "/close")
            said = ("closed: 7 blocks of memory given up", "2 stay, which others have too; the text stays")
            await wait_until(lambda: app.chat.status.text == said[0])
            assert app.chat.status.hint.startswith(said[1])
            await wait_until(lambda: any(session in attached for attached in daemon._attached.values()))
            await type_line(pilot, "two")
            await wait_until(lambda: texts(app) == ["one", "answer 1", "two", "answer 2"])
            # Another client closes it.
            async with Client(daemon.url) as other:
                assert (await other.close_session(session)).blocks == 7
            await wait_until(lambda: app.chat.status.text == said[0])
            await wait_until(lambda: any(session in attached for attached in daemon._attached.values()))
            await type_line(pilot, "three")
            await wait_until(lambda: texts(app)[-2:] == ["three", "answer 3"])


async def test_keys_that_come_in_one_burst_are_each_obeyed_where_they_belong(
    counting: ScriptedDaemon, make_app: MakeApp, wait_until
) -> None:
    def burst(app: ChatApp, *keys: str) -> None:
        driver = app._driver
        for key in keys:
            driver.process_message(events.Key(key, key if len(key) == 1 else None))

    async with counting as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await talk(app, pilot, wait_until, "one")
            burst(app, *"/pin", "enter", *"two", "enter", *"more")
            await wait_until(idle(app, 4))
            assert texts(app)[2] == "two"
            assert daemon.sessions[app.link.session].pinned
            assert app.chat.composer.text == "more"
            burst(app, "ctrl+u", *"less", "left", "left", "delete", *"a")
            await wait_until(lambda: app.chat.composer.text == "leas")
            burst(app, "tab", "up", "up")
            await wait_until(lambda: app.chat.transcript.selected is not None)
            await wait_until(lambda: app.chat.transcript.selected.text == "answer 1")
            assert app.chat.composer.text == "leas"


async def test_what_a_command_says_just_before_an_answer_ends_can_be_read(make_app: MakeApp, wait_until) -> None:
    async with ScriptedDaemon([Script(deltas=["a"], manual=True)]) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(connected(app))
            await type_line(pilot, "one")
            await wait_until(lambda: app.conversation.busy)
            await type_line(pilot, "/pin")
            await wait_until(lambda: app.chat.status.text == "pinned")
            daemon.release(2)
            await wait_until(idle(app, 2))
            assert app.chat.status.text == "pinned"

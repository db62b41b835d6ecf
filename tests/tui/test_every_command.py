"""Every command of the registry does what it says, and is refused with the reason where it cannot be done.

Each has an effect below and a line in `REFUSED`; one that has none fails here.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from chatd import protocol as p
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession
from chatd_tui.app import ChatApp
from chatd_tui.command_table import COMMANDS
from chatd_tui.screens.form import FormScreen
from chatd_tui.screens.found import FoundScreen
from chatd_tui.screens.help import ConfirmScreen, HelpScreen
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.screens.server_choice import ServerScreen
from chatd_tui.widgets.welcome import Welcome

WaitUntil = Callable[[Callable[[], bool]], Awaitable[None]]
SIZE = (110, 30)


@dataclass
class Stage:
    """The client in a conversation of one turn ("one", "answer 1") with a scripted daemon."""

    app: ChatApp
    pilot: Pilot[None]
    daemon: ScriptedDaemon
    wait_until: WaitUntil
    folder: Path

    @property
    def texts(self) -> list[str]:
        return [view.text for view in self.app.chat.transcript.views()]

    @property
    def session(self) -> ScriptedSession:
        return self.daemon.sessions[self.app.link.session]

    async def enter(self, text: str) -> None:
        """Type a line, and let what it begins begin."""
        self.app.chat.set_focus(self.app.chat.composer)
        self.app.chat.composer.load_text(text)
        await self.pilot.press("enter")

    async def say(self, text: str, *texts: str) -> None:
        """Enter a line, and wait for what is in the conversation at the end of the answer."""
        await self.enter(text)
        await self.wait_until(lambda: self.texts == list(texts) and not self.app.conversation.busy)

    async def told(self, text: str) -> None:
        """Wait until the line above the input says this."""
        await self.wait_until(lambda: text in self.app.chat.status.text)

    async def on_screen(self, kind: type) -> None:
        await self.wait_until(lambda: isinstance(self.app.screen, kind))


Effect = Callable[[Stage], Awaitable[None]]
EFFECTS: dict[str, tuple[Effect, Sequence[Script]]] = {}
ANSWERS = tuple(Script(deltas=[f"answer {number}"]) for number in range(1, 6))
HANGING = (ANSWERS[0], Script(deltas=["an ", "answer"], manual=True))


def of(name: str, scripts: Sequence[Script] = ANSWERS) -> Callable[[Effect], Effect]:
    """Register what a command does; `scripts` are the daemon's answers."""

    def register(effect: Effect) -> Effect:
        EFFECTS[name] = (effect, scripts)
        return effect

    return register


@of("edit")
async def _(stage: Stage) -> None:
    await stage.enter("/edit")
    await stage.wait_until(lambda: stage.app.chat.composer.editing is not None)
    assert stage.app.chat.composer.text == "one"
    await stage.say("two", "two", "answer 2")
    assert stage.app.chat.transcript.views()[0].siblings.count == 2


@of("regenerate")
async def _(stage: Stage) -> None:
    await stage.say("/regenerate temperature=1", "one", "answer 2")
    assert stage.app.chat.transcript.views()[1].siblings.count == 2


@of("continue", [*HANGING, Script(deltas=["end"])])
async def _(stage: Stage) -> None:
    await stage.enter("/continue")
    await stage.told("the answer is complete")
    await stage.enter("two")
    stage.daemon.release()
    await stage.wait_until(lambda: stage.texts[-1] == "an ")
    await stage.enter("/stop")
    await stage.wait_until(lambda: not stage.app.conversation.busy)
    await stage.say("/continue", "one", "answer 1", "two", "an end")


@of("branch")
async def _(stage: Stage) -> None:
    await stage.say("/regenerate", "one", "answer 2")
    await stage.say("/branch previous", "one", "answer 1")
    await stage.say("/branch next", "one", "answer 2")
    await stage.enter("/branch next")
    await stage.told("this is the last of 2 versions")


@of("fork")
async def _(stage: Stage) -> None:
    origin = stage.app.link.session
    await stage.enter("/fork Another way")
    await stage.told("forked")
    await stage.wait_until(lambda: stage.texts == ["one", "answer 1"])
    assert stage.app.link.session != origin
    assert stage.session.title == "Another way"


@of("copy")
async def _(stage: Stage) -> None:
    await stage.enter("/copy")
    await stage.told("sent the message")
    assert (stage.app.clipboard, (stage.folder / "copied.txt").read_text()) == ("answer 1", "answer 1")


@of("stop", HANGING)
async def _(stage: Stage) -> None:
    await stage.enter("two")
    stage.daemon.release()
    await stage.wait_until(lambda: stage.texts[-1] == "an ")
    await stage.enter("/stop")
    await stage.wait_until(lambda: not stage.app.conversation.busy)
    assert (stage.session.items[-1].content, stage.session.items[-1].reason) == ("an ", "cancelled")


@of("first", [Script(deltas=["line\n\n" * 40])])
async def _(stage: Stage) -> None:
    transcript = stage.app.chat.transcript
    await stage.wait_until(lambda: transcript.scroll_y > 0)
    await stage.enter("/first")
    await stage.wait_until(lambda: transcript.scroll_y == 0)


@of("new")
async def _(stage: Stage) -> None:
    await stage.enter("/new")
    await stage.wait_until(lambda: bool(stage.app.chat.query(Welcome)))
    assert stage.app.link.session is None
    await stage.say("other", "other", "answer 2")
    assert len(stage.daemon.sessions) == 2


@of("conversations")
async def _(stage: Stage) -> None:
    def num_lists() -> int:
        return sum(isinstance(command, p.SessionList) for command in stage.daemon.commands)

    before = num_lists()
    await stage.enter("/conversations")
    await stage.wait_until(lambda: stage.app.chat.sessions.has_focus and num_lists() == before + 1)
    await stage.pilot.press("f3")
    await stage.wait_until(lambda: not stage.app.chat.sessions.display and num_lists() == before + 2)


@of("server")
async def _(stage: Stage) -> None:
    await stage.enter("/server")
    await stage.on_screen(ServerScreen)
    await stage.pilot.press("escape")
    await stage.enter("/server gpu")
    await stage.told("there is no server 'gpu'")


@of("search")
async def _(stage: Stage) -> None:
    session = stage.app.link.session
    await stage.enter("/new")
    await stage.wait_until(lambda: stage.app.link.session is None)
    await stage.enter("/search answer 1")
    await stage.on_screen(FoundScreen)
    await stage.pilot.press("enter")
    await stage.wait_until(lambda: stage.app.link.session == session and stage.texts == ["one", "answer 1"])


@of("rename")
async def _(stage: Stage) -> None:
    await stage.enter("/rename Better")
    await stage.wait_until(lambda: stage.app.chat.title_bar.view.session == "Better")
    assert stage.session.title == "Better"


@of("pin")
async def _(stage: Stage) -> None:
    for pinned in (True, False):
        await stage.enter("/pin")
        await stage.wait_until(lambda pinned=pinned: stage.session.pinned is pinned)
        await stage.told("pinned" if pinned else "no longer pinned")


@of("archive")
async def _(stage: Stage) -> None:
    for archived, said in ((True, "archived; /search finds it"), (False, "no longer archived")):
        await stage.enter("/archive")
        await stage.told(said)
        assert stage.session.archived is archived


@of("system")
async def _(stage: Stage) -> None:
    await stage.enter("/system Be brief.")
    await stage.wait_until(lambda: stage.texts[:1] == ["Be brief."])
    assert stage.session.system == "Be brief."


@of("set")
async def _(stage: Stage) -> None:
    await stage.enter("/set temperature=0.5")
    await stage.told("temperature=0.5")
    assert stage.session.params == p.Params(temperature=0.5)
    await stage.enter("/set temperature=")
    await stage.told("no parameter is set")
    assert stage.session.params == p.Params()


@of("settings")
async def _(stage: Stage) -> None:
    await stage.enter("/settings")
    await stage.on_screen(FormScreen)


@of("context")
async def _(stage: Stage) -> None:
    await stage.enter("/context drop-oldest")
    await stage.told("the oldest messages are left out")
    assert stage.session.context_policy == "drop_oldest"


@of("typeahead")
async def _(stage: Stage) -> None:
    await stage.enter("/typeahead on")
    await stage.told("type-ahead is on")
    stage.app.chat.composer.load_text("read while it is typed")
    await stage.wait_until(lambda: any(isinstance(command, p.Prefill) for command in stage.daemon.commands))


@of("watch")
async def _(stage: Stage) -> None:
    for role, said in (("observer", "you watch this conversation"), ("writer", "you take part again")):
        await stage.enter("/watch")
        await stage.told(said)
        assert stage.app.link.role == role


@of("export")
async def _(stage: Stage) -> None:
    for name in ("a.md", "a.json", "a.html"):
        await stage.enter(f"/export {stage.folder / name}")
        await stage.told(f"{name}")
        assert "answer 1" in (stage.folder / name).read_text()


@of("close")
async def _(stage: Stage) -> None:
    await stage.enter("/close")
    await stage.told("closed: 7 blocks of memory given up")
    assert stage.texts == ["one", "answer 1"]


@of("erase")
async def _(stage: Stage) -> None:
    await stage.enter("/erase")
    await stage.on_screen(ConfirmScreen)
    await stage.pilot.press("y")
    await stage.told("erased: 2 messages")
    assert (stage.daemon.sessions, stage.texts) == ({}, [])


@of("pool")
async def _(stage: Stage) -> None:
    await stage.enter("/pool")
    await stage.on_screen(PoolScreen)


@of("palette")
async def _(stage: Stage) -> None:
    await stage.enter("/palette")
    await stage.on_screen(CommandPalette)


@of("help")
async def _(stage: Stage) -> None:
    await stage.enter("/help")
    await stage.on_screen(HelpScreen)


@of("connect")
async def _(stage: Stage) -> None:
    await stage.daemon.stop()
    await stage.wait_until(lambda: stage.app.chat.title_bar.view.phase == "waiting")
    await stage.daemon.start()
    await stage.enter("/connect")
    await stage.wait_until(lambda: stage.app.chat.title_bar.view.phase == "connected")


@of("theme")
async def _(stage: Stage) -> None:
    await stage.enter("/theme nord")
    await stage.told("the colors are those of nord")
    assert stage.app.theme == "nord"


@of("quit")
async def _(stage: Stage) -> None:
    await stage.enter("/quit")
    await stage.wait_until(lambda: not stage.app.is_running)


# Where a command is refused: without a connection, by a daemon that offers nothing beyond the basics, before the first
# message, for those who only watch, and while an answer is in progress.
OFFLINE, OLD, BEFORE, OBSERVER, ANSWERING = "offline", "old daemon", "before the first message", "observer", "answering"
REASONS = {
    OFFLINE: "there is no connection to the daemon yet",
    OLD: "this daemon is too old for that",
    BEFORE: "this conversation has no messages yet",
    OBSERVER: "you only watch this conversation",
    ANSWERING: "an answer is in progress",
}
REFUSED: dict[str, set[str]] = {
    "edit": {OFFLINE, OLD, BEFORE, OBSERVER, ANSWERING},
    "regenerate": {OFFLINE, OLD, BEFORE, OBSERVER, ANSWERING},
    "continue": {OFFLINE, OLD, BEFORE, OBSERVER, ANSWERING},
    "branch": {OFFLINE, OLD, BEFORE, OBSERVER, ANSWERING},
    "fork": {OFFLINE, OLD, BEFORE, OBSERVER},
    "copy": set(),
    "stop": {OFFLINE, OBSERVER},
    "first": set(),
    "new": set(),
    "conversations": set(),
    "server": set(),
    "search": {OFFLINE},
    "rename": {OFFLINE, OBSERVER},
    "pin": {OFFLINE, BEFORE, OBSERVER},
    "archive": {OFFLINE, BEFORE, OBSERVER},
    "system": {OFFLINE, OBSERVER},
    "set": {OFFLINE, OBSERVER},
    "settings": {OFFLINE},
    "context": {OFFLINE, OLD, OBSERVER},
    "typeahead": {OFFLINE, OLD, OBSERVER},
    "watch": {OFFLINE, BEFORE},
    "export": {OFFLINE, BEFORE},
    "close": {OFFLINE, BEFORE, OBSERVER, ANSWERING},
    "erase": {OFFLINE, OLD, BEFORE, OBSERVER},
    "pool": {OFFLINE},
    "palette": set(),
    "theme": set(),
    "help": set(),
    "connect": set(),
    "quit": set(),
}
NAMES = [command.name for command in COMMANDS]


async def _begin(stage: Stage) -> None:
    await stage.wait_until(lambda: stage.app.is_running and stage.app.chat.title_bar.view.phase == "connected")
    await stage.enter("one")
    await stage.wait_until(lambda: len(stage.texts) == 2 and not stage.app.conversation.busy)
    await stage.wait_until(lambda: stage.app.link.info is not None and bool(stage.app.daemons.shown.sessions))


async def _reach(condition: str, stage: Stage) -> None:
    """Bring the client to where the commands of this condition are refused."""
    if condition == OFFLINE:
        await stage.daemon.stop()
        await stage.wait_until(lambda: not stage.app.context.connected)
    elif condition == BEFORE:
        await stage.enter("/new")
        await stage.wait_until(lambda: stage.app.link.session is None)
    elif condition == OBSERVER:
        await stage.enter("/watch")
        await stage.told("you watch this conversation")
    elif condition == ANSWERING:
        await stage.enter("two")
        await stage.wait_until(lambda: stage.app.conversation.busy)


def test_the_tables_are_about_the_commands_that_there_are() -> None:
    assert sorted(EFFECTS) == sorted(NAMES), "each command needs an effect that is shown above, by its name"
    assert sorted(REFUSED) == sorted(NAMES), "each command needs a line that says where it is refused"


@pytest.mark.parametrize("name", NAMES)
async def test_a_command_does_what_it_says(name: str, make_app, wait_until: WaitUntil, tmp_path: Path) -> None:
    assert name in EFFECTS, f"no test shows what /{name} does"
    effect, scripts = EFFECTS[name]
    async with ScriptedDaemon(scripts) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            stage = Stage(app, pilot, daemon, wait_until, tmp_path)
            await _begin(stage)
            await effect(stage)


@pytest.mark.parametrize("condition", REASONS)
async def test_a_command_that_cannot_be_done_now_says_why_and_stays_in_the_input(
    condition: str, make_app, wait_until: WaitUntil, tmp_path: Path
) -> None:
    caps = [] if condition == OLD else [command.cap for command in COMMANDS if command.cap]
    async with ScriptedDaemon(HANGING, caps=caps) as daemon:
        app = make_app(daemon)
        async with app.run_test(size=SIZE) as pilot:
            stage = Stage(app, pilot, daemon, wait_until, tmp_path)
            await _begin(stage)
            await _reach(condition, stage)
            sent = len(daemon.commands)
            for command in COMMANDS:
                refused = condition in REFUSED.get(command.name, set())
                assert (command.unavailable(app.context) == REASONS[condition]) is refused, command.name
                if not refused:
                    continue
                typed = f"/{command.name} something" if command.needs_argument else f"/{command.name}"
                await stage.enter(typed)
                await stage.told(f"/{command.name}: {REASONS[condition]}")
                assert (app.chat.status.kind, app.chat.composer.text) == ("warning", typed)
            assert [type(command) for command in daemon.commands[sent:] if not isinstance(command, p.SessionList)] == []
            if condition == ANSWERING:
                daemon.release(3)
                await wait_until(lambda: not app.conversation.busy)

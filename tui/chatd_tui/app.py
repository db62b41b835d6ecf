"""The Textual client: carries out what the person wishes. What the daemons say is `news_app`'s."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.theme import Theme

from chatd.clean import clean, clean_line
from chatd.config import Server, input_history_path, state_dir
from chatd.errors import ChatdError
from chatd.protocol import AttachRole
from chatd_tui import messages
from chatd_tui.actions import Actions
from chatd_tui.attachments import completions
from chatd_tui.command_table import COMMANDS
from chatd_tui.commands import Command, Context, Suggestion, Typed, find, parse, similar, suggestions
from chatd_tui.copying import Copying
from chatd_tui.input_history import InputHistory
from chatd_tui.keymap import DEFAULT, LEAVE, Keymap, bindings
from chatd_tui.keymap_file import load_keymap
from chatd_tui.keys import recognize_alt_enter
from chatd_tui.news_app import NewsApp
from chatd_tui.palette import CommandProvider
from chatd_tui.screens.found import FoundScreen
from chatd_tui.screens.help import ConfirmScreen, HelpScreen, LinkScreen, help_lines
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.sending import Sending
from chatd_tui.terminal_size import forget_exported_size
from chatd_tui.theme import CHATD, check_theme, own_variables
from chatd_tui.theme_memory import ThemeMemory, first_theme, usual_memory
from chatd_tui.views import FoundRow, MeterView
from chatd_tui.widgets.status import StatusView

QUIT_WINDOW_S = 2.0


class ChatApp(NewsApp, inherit_bindings=False):
    """The terminal client of one daemon or several.

    Args:
        servers: The address of one, or all of them by name; the first one is on the screen at first.
        key: Sent as a bearer token to the one that an address names.
        copies: The folder that keeps the last copied answer.
        history: What was sent before; in memory only, where none is given.
        keymap: The keys of the commands.
        theme: Its name.
        chosen: Keeps another theme that is chosen; nothing does, where none is given.
    """

    TITLE = "chatd"
    # The palette's key is a command's, like all others.
    ENABLE_COMMAND_PALETTE = False
    COMMANDS = {CommandProvider}  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(),
        Binding(LEAVE, "leave", "Leave what is open", show=False),
        Binding("ctrl+c", "interrupt", "Copy, or quit", show=False, priority=True),
    ]

    def __init__(
        self,
        servers: str | Sequence[Server],
        key: str | None = None,
        *,
        copies: Path | None = None,
        history: InputHistory | None = None,
        keymap: Keymap = DEFAULT,
        theme: str = CHATD.name,
        chosen: ThemeMemory | None = None,
    ) -> None:
        super().__init__([Server("", servers, lambda: key)] if isinstance(servers, str) else servers, keymap)
        recognize_alt_enter()
        self.use_command_palette = True
        self.register_theme(CHATD)
        self.theme = self._known_theme = check_theme(theme)
        self._chosen_theme = chosen or ThemeMemory()
        self.keymap = keymap
        self.set_keymap(keymap.moved())
        self.chat.composer.suggest = self._suggest
        self.chat.composer.sent = self._sent = history or InputHistory()
        self._sending = Sending(self)
        self.copying = Copying(self, copies or state_dir())
        self._actions = Actions(self)
        self._interrupted_at = float("-inf")

    def on_mount(self) -> None:
        """Show the conversation and connect."""
        self.push_screen(self.chat)
        self.stay_connected()
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        self.run_worker(self._sent.load, group="history", thread=True)

    def _keep_theme(self, theme: Theme) -> None:
        """Have the next start begin with a theme that was chosen, by whichever way."""
        if theme.name != self._known_theme:
            self._known_theme = theme.name
            self.run_worker(partial(self._chosen_theme.keep, theme.name), group="theme", thread=True)

    # Wishes of the person.

    async def on_submitted(self, message: messages.Submitted) -> None:
        """Carry a typed command out, or send a message."""
        text = message.text
        if message.editing is None and self._sent.add(text):
            self.run_worker(lambda: self._sent.save(text), group="history", thread=True)
        typed = parse(text)
        if isinstance(typed, Typed):
            await self._run_typed(typed, text)
        else:
            await self._sending.send(typed, message.editing)

    async def _run_typed(self, typed: Typed, text: str) -> None:
        command = find(COMMANDS, typed.name)
        if command is None:
            near = [f"/{close.name}" for close in similar(COMMANDS, typed.name)] if typed.name else []
            hint = f"did you mean {' or '.join(near)}?" if near else "/help lists them; // begins a message with /"
            self.chat.status = StatusView("warning", f"there is no command /{clean_line(typed.name, 40)}", hint)
            self.chat.composer.take_command_back(text)
        elif command.needs_argument and not typed.argument:
            self.chat.status = StatusView("warning", f"/{command.name} wants {command.hint}", command.help)
            self.chat.composer.take_command_back(text)
        elif not await self.run_command(command, typed.argument):
            self.chat.composer.take_command_back(text)

    # Commands.

    @property
    def context(self) -> Context:
        """What can be done now."""
        hello = self.daemons.shown.hello
        return Context(
            connected=self.daemons.shown.is_connected,
            caps=frozenset(hello.caps if hello is not None else ()),
            answering=self.conversation.busy,
            observer=self.link.role == "observer",
            exists=self.link.session is not None,
            servers=self.daemons.names if self.daemons.are_several else (),
        )

    def unavailable(self, command: Command) -> str:
        """Return why a command cannot be carried out now, "" where it can."""
        return command.unavailable(self.context)

    def _suggest(self, text: str) -> list[Suggestion]:
        return suggestions(COMMANDS, text, self.context) or completions(text, Path())

    async def run_command(self, command: Command, argument: str = "") -> bool:
        """Carry a command out where it can be; False where it cannot."""
        if self.screen is not self.chat and not command.anywhere:
            return False
        reason = command.unavailable(self.context)
        if reason:
            self.chat.status = StatusView("warning", f"/{command.name}: {reason}")
            return False
        if command.needs_argument and not argument:
            self.chat.write()
            self.chat.composer.begin_command(f"/{command.name} ")
            return False
        try:
            await command.run(self._actions, argument)
        except ChatdError as error:
            self.show_error(error)
            return False
        return True

    def stays(self, widget: DOMNode) -> bool:
        """Whether a widget gets keys as they come, which is faster, and passes those on that are another's by then."""
        return self.screen is self.chat and widget is self.chat.composer

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Give a theme that is not ours the colors that our styles name."""
        return own_variables(self.current_theme)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave a command's key to the page that is open, unless the command works there."""
        if action != "command" or self.screen is self.chat:
            return True
        command = find(COMMANDS, str(parameters[0]))
        is_pools = isinstance(self.screen, PoolScreen) and parameters == ("pool",)
        return is_pools or (command is not None and command.anywhere and not self.screen.is_modal)

    async def action_command(self, name: str) -> None:
        """Carry out the command of a key; the pool's key closes its page too."""
        command = find(COMMANDS, name)
        assert command is not None, f"{name} is bound and is no command"
        if isinstance(self.screen, PoolScreen) and name == "pool":
            self.screen.dismiss()
        else:
            await self.run_command(command)

    def pop_screen(self) -> AwaitComplete:
        """Close what lies over the conversation; never the conversation, whatever is told to close twice."""
        return AwaitComplete() if self.screen is self.chat else super().pop_screen()

    async def action_leave(self) -> None:
        """Leave what is open or selected; where nothing is, stop the answer."""
        if (self.screen is not self.chat or not self.chat.leave()) and self.keymap.stops():
            await self.action_command("stop")

    async def on_command_chosen(self, message: messages.CommandChosen) -> None:
        """Carry out what was chosen at a message."""
        command = find(COMMANDS, message.name)
        if command is not None:
            await self.run_command(command, message.argument)

    async def on_branch_chosen(self, message: messages.BranchChosen) -> None:
        """Show another version, where branches can be shown now."""
        command = find(COMMANDS, "branch")
        assert command is not None
        reason = self.unavailable(command)
        if reason:
            self.chat.status = StatusView("warning", f"/branch: {reason}")
        else:
            self._actions.show_branch(message.leaf)

    # What commands do to the screen.

    async def on_session_chosen(self, message: messages.SessionChosen) -> None:
        """Show another session, or a new one."""
        await self.open_session(message.session, server=message.server)

    async def open_session(
        self,
        session: str | None,
        role: AttachRole = "writer",
        *,
        server: str | None = None,
        item: str | None = None,
    ) -> None:
        """Show another session, or a new one for None; of the daemon on the screen where no other one is named.

        `item` is the message to go to, once it is there.
        """
        self.wanted_item = item
        self.typing_ahead.forget()
        await self.conversation.clear(empty=session is None)
        self.chat.close_overlay()
        # At once, so that keys that are typed right after go there.
        self.chat.set_focus(self.chat.composer)
        if server is not None and server != self.link.name:
            await self.daemons.show(server)
            self.meter = MeterView()
            self.draw_connection(self.daemons.shown.state)
            self.draw_meter(context_max=self.chat.transcript.welcome.context or None)
        await self.link.open(session, role)
        self.draw_sessions()
        self.draw_title(None)

    def show_found(self, query: str, found: Sequence[FoundRow]) -> None:
        """List what a search found, and open what is chosen at the message that was found."""

        async def chosen(row: FoundRow | None) -> None:
            if row is not None:
                await self.open_session(row.session.id, server=row.server, item=row.item)

        self.push_screen(FoundScreen(clean_line(query), found), chosen)

    def open_pool(self) -> None:
        """Open the pool page."""
        hello = self.daemons.shown.hello
        assert hello is not None, "there is no pool without a daemon"

        async def closed(_: None) -> None:
            await self.link.unwatch_page()

        page = PoolScreen(hello.model.block_size, hello.caps, self.link.watch_page, self.link.inspect_cell, self.keymap)
        self.push_screen(page, closed)

    def open_help(self) -> None:
        """List the commands and keys."""
        if not isinstance(self.screen, HelpScreen):
            on_pool_page = isinstance(self.screen, PoolScreen)
            self.push_screen(HelpScreen(partial(help_lines, self.context, self.keymap, on_pool_page=on_pool_page)))

    def on_link_chosen(self, message: messages.LinkChosen) -> None:
        """Ask before a link is opened, and open nothing but web pages."""
        href = message.href
        is_plain = href == clean(href) and not any(character.isspace() for character in href)
        if not is_plain or not href.lower().startswith(("http://", "https://")):
            self.chat.status = StatusView(
                "warning", f"not opened: {clean_line(href, 80)}", "only http and https links are"
            )
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.open_url(href)

        self.push_screen(LinkScreen(href), answered)

    async def action_interrupt(self) -> None:
        """Copy the selection, if there is one; pressed twice, quit."""
        composer = self.chat.composer
        selected = composer.selected_text or self.screen.get_selected_text()
        if selected:
            await self.copying.copy("the selection", selected)
            return
        now = time.monotonic()
        if now - self._interrupted_at < QUIT_WINDOW_S:
            self.exit()
            return
        self._interrupted_at = now
        self.chat.status = StatusView("notice", "press Ctrl+C once more to quit", "answers in progress go on")

    def ask(
        self,
        question: str,
        about: str,
        verb: str,
        then: Callable[[], None],
        otherwise: Callable[[], None] = lambda: None,
    ) -> None:
        """Have something confirmed before it is done; `otherwise` is called where it is not to be."""

        def answered(yes: bool | None) -> None:
            (then if yes else otherwise)()

        self.push_screen(ConfirmScreen(question, about, verb), answered)


def run_app(
    servers: str | Sequence[Server],
    key: str | None = None,
    *,
    keymap: Keymap | None = None,
    theme: str | None = None,
    mouse: bool = True,
    on_exit: Callable[[], None] | None = None,
) -> None:
    """Run the client in this terminal until the person quits, then call `on_exit`; arguments as for `ChatApp`.

    Args:
        keymap: Of the usual file, where none is given.
        theme: That of `CHATD_THEME`, else the one that was chosen last, else our own, where none is given.
        mouse: Take the mouse; else the terminal has it, and selects text with it.

    Raises:
        ConfigError: The usual keymap file is wrong, or there is no such theme.
    """
    keymap = keymap or load_keymap()
    theme = first_theme(theme)
    forget_exported_size()
    try:
        history = InputHistory(input_history_path())
        app = ChatApp(servers, key, history=history, keymap=keymap, theme=theme, chosen=usual_memory())
        app.run(mouse=mouse)
    finally:
        if on_exit is not None:
            on_exit()

"""`chatd top`: the pool page alone, without a conversation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from chatd.client import ConnectionPhase
from chatd.config import Server
from chatd.errors import ChatdError
from chatd_tui import messages
from chatd_tui.background import run_beside
from chatd_tui.fault_report import FaultReport
from chatd_tui.keymap import DEFAULT, Keymap, bindings, pool_bindings
from chatd_tui.keymap_file import load_keymap
from chatd_tui.link import DaemonLink
from chatd_tui.screens.help import HelpScreen, pool_help_lines
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.status_text import connection_text
from chatd_tui.terminal_size import forget_exported_size
from chatd_tui.theme import CHATD, check_theme, own_variables
from chatd_tui.theme_memory import first_theme

QUITS = ("quit", "pool", "pool.close")
"""What of the keymap ends this: there is nothing to go back to."""


class PoolApp(FaultReport, App[ChatdError | None]):
    """Shows one daemon's pool until the person quits; returns why, where the daemon refused.

    Args:
        url: Of the daemon.
        key: Sent as a bearer token.
        keymap: The keys of the pool page, and those of the commands that work here.
        theme: Its name.
    """

    TITLE = "chatd top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "quit", "Quit", show=False),
        *(
            replace(binding, action="help" if binding.id == "help" else "quit")
            for binding in (*bindings(), *pool_bindings())
            if binding.id in (*QUITS, "help")
        ),
    ]

    def __init__(self, url: str, key: str | None = None, keymap: Keymap = DEFAULT, theme: str = CHATD.name) -> None:
        super().__init__()
        self.keymap = keymap
        self.set_keymap(keymap.moved())
        self.register_theme(CHATD)
        self.theme = check_theme(theme)
        self.link = DaemonLink(Server("", url, lambda: key), self.post_message)
        self.page: PoolScreen | None = None

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Give a theme that is not ours the colors that our styles name."""
        return own_variables(self.current_theme)

    def compose(self) -> ComposeResult:
        """Lay out what is there before the page."""
        yield Static("connecting", id="connection", markup=False)

    def on_mount(self) -> None:
        """Connect."""
        run_beside(self, self.link.run, group="link")

    async def on_unmount(self) -> None:
        """End what the link still runs."""
        await self.link.stop()

    def on_connection_changed(self, message: messages.ConnectionChanged) -> None:
        """Open the page once there is a daemon, and say on it where the connection stands."""
        state, hello = message.state, message.hello
        if state.phase is ConnectionPhase.CLOSED and state.error is not None:
            self.exit(state.error)
            return
        if self.page is None and hello is not None:
            link = self.link
            self.page = PoolScreen(
                hello.model.block_size, hello.caps, link.watch_page, link.inspect_cell, self.keymap, leave="quit"
            )
            self.push_screen(self.page, lambda _: self.exit())
        text = connection_text(state)
        if self.page is None:
            self.query_one("#connection", Static).update(text)
        else:
            self.page.show_connection("" if state.phase is ConnectionPhase.CONNECTED else text)

    def on_pool_changed(self, message: messages.PoolChanged) -> None:
        """Draw the pool."""
        if self.page is not None:
            self.page.show(message.state)

    def action_help(self) -> None:
        """List the keys."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(partial(pool_help_lines, self.keymap)))


def run_pool(url: str, key: str | None = None, keymap: Path | None = None) -> None:
    """Show the pool in this terminal until the person quits.

    Args:
        url: Of the daemon.
        key: Sent as a bearer token.
        keymap: The file that moves keys; the usual one, where none is named.

    Raises:
        ChatdError: The daemon refused, the keymap file is wrong, or there is no theme of the name in `CHATD_THEME`.
    """
    app = PoolApp(url, key, load_keymap(keymap), first_theme())
    forget_exported_size()
    error = app.run()
    if error is not None:
        raise error

"""The commands in Textual's palette."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from chatd_tui.command_table import COMMANDS
from chatd_tui.commands import Command

if TYPE_CHECKING:
    from chatd_tui.app import ChatApp


class CommandProvider(Provider):
    """Offers every command; one that needs an argument begins in the input."""

    @property
    def _chat_app(self) -> ChatApp:
        from chatd_tui.app import ChatApp

        assert isinstance(self.app, ChatApp)
        return self.app

    def _help(self, command: Command) -> str:
        keys = ", ".join(self._chat_app.keymap.names(command))
        return self._chat_app.unavailable(command) or (f"{command.help} ({keys})" if keys else command.help)

    async def discover(self) -> Hits:
        """Offer them all."""
        for command in COMMANDS:
            faint = "$faint" if self._chat_app.unavailable(command) else ""
            yield DiscoveryHit(
                Content.styled(command.usage, faint),
                partial(self._chat_app.run_command, command),
                command.usage,
                self._help(command),
            )

    async def search(self, query: str) -> Hits:
        """Offer those whose name or help is like `query`."""
        matcher = self.matcher(query.removeprefix("/"))
        for command in COMMANDS:
            score = max(matcher.match(command.name), 0.9 * matcher.match(command.help))
            if score > 0:
                run = partial(self._chat_app.run_command, command)
                yield Hit(score, matcher.highlight(command.usage), run, command.usage, self._help(command))

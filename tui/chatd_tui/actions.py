"""What each command does. A handler gets what was typed after the command's name, "" from a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

from chatd import typed_params
from chatd.clean import clean_line
from chatd.config import theme_name
from chatd.errors import ChatdError, InvalidRequest
from chatd.protocol import ContextPolicy, Params
from chatd.transcript_file import Format
from chatd_tui import status_text
from chatd_tui.background import run_beside
from chatd_tui.export import code_blocks, rendered, wished, write_new
from chatd_tui.form_fields import FIELDS
from chatd_tui.screens.server_choice import ServerScreen
from chatd_tui.settings_form import open_form
from chatd_tui.theme import check_theme
from chatd_tui.views import ItemView
from chatd_tui.widgets.status import StatusView

if TYPE_CHECKING:
    from chatd_tui.app import ChatApp

MAX_TITLE = 200

P = ParamSpec("P")


class Actions:
    """The handlers of the commands.

    Args:
        app: What they act on.
    """

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    def _say(self, text: str, hint: str = "", kind: str = "notice") -> None:
        self._app.chat.status = StatusView(kind, text, hint)

    def _start(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Carry something out that waits for the daemon, and say why where it refuses."""

        async def guarded() -> None:
            try:
                await work(*args, **kwargs)
            except ChatdError as error:
                self._app.show_error(error)

        run_beside(self._app, guarded, group="commands")

    # Messages.

    async def edit(self, _: str) -> None:
        """Put the selected message of the user's, or the one before what is selected, into the input."""
        views = self._upto_selected()
        said = next((view for view in reversed(views) if view.role == "user"), None)
        if said is None:
            self._say("there is no message of yours to edit")
            return
        self._app.chat.transcript.select(said.id)
        self._app.chat.composer.begin_edit(said.id, said.text)
        self._app.chat.write()

    async def regenerate(self, argument: str) -> None:
        """Ask for another answer."""
        params = typed_params.changed(Params(), argument) if argument else None
        selected = self._app.chat.transcript.selected
        item = selected.id if selected is not None and selected.role != "system" else None
        self._say("asking again", kind="busy")
        self._start(self._app.link.regenerate, item, params)

    async def go_on(self, _: str) -> None:
        """Go on from an answer that was cut short."""
        selected = self._app.chat.transcript.selected
        item = selected.id if selected is not None and selected.role == "assistant" else None
        views = self._app.chat.transcript.views()
        answer = next((view for view in reversed(views) if view.role == "assistant" and item in (None, view.id)), None)
        if answer is not None and answer.done and not answer.trouble:
            self._say("the answer is complete", "/regenerate has it again")
            return
        self._say("going on", kind="busy")
        self._start(self._app.link.go_on, item)

    async def branch(self, argument: str) -> None:
        """Show the version before or after."""
        if argument not in ("", "previous", "next"):
            self._say(f"{clean_line(argument, 40)!r} is neither previous nor next", kind="warning")
            return
        selected = self._app.chat.transcript.selected
        views = [selected] if selected is not None else self._app.chat.transcript.views()
        siblings = next((view.siblings for view in reversed(views) if view.siblings is not None), None)
        if siblings is None:
            self._say("this message has one version" if selected else "no message here has several versions")
            return
        leaf = siblings.next if argument == "next" else siblings.previous
        if not argument:
            leaf = siblings.next or siblings.previous
        if leaf is None:
            self._say(f"this is the {'last' if argument == 'next' else 'first'} of {siblings.count} versions")
            return
        self.show_branch(leaf)

    def show_branch(self, leaf: str) -> None:
        """Show the branch that ends at a message."""
        self._start(self._app.link.select_branch, leaf)

    async def fork(self, argument: str) -> None:
        """Make a conversation of the messages up to here, and show it."""
        at = self._app.chat.transcript.selected
        if at is not None and at.role == "system":
            at = None
        if (at is None and self._app.context.answering) or (at is not None and not at.done):
            # What is in progress cannot be shared.
            ended = [view for view in self._app.chat.transcript.views() if view.done and view.role != "system"]
            at = ended[-1] if ended else None
        info = self._app.link.info
        title = argument or (f"{info.title[: MAX_TITLE - 20]} (fork)" if info is not None and info.title else None)
        self._start(self._fork, at, title[:MAX_TITLE] if title else None)

    async def _fork(self, at: ItemView | None, title: str | None) -> None:
        link = self._app.link
        created = await link.fork(at.id if at is not None else None, title)
        await self._app.open_session(created.session.id, server=link.name)
        self._app.chat.status = status_text.forked(created)

    async def copy(self, argument: str) -> None:
        """Copy a message or one of its code blocks to the clipboard and to a file."""
        selected = self._app.chat.transcript.selected
        text = selected.text if selected is not None else self._app.conversation.last_answer()
        what = "the message"
        if not text:
            self._say("there is no answer to copy yet")
            return
        if argument:
            blocks = code_blocks(text)
            number = len(blocks) if argument == "code" else int(argument) if argument.isdecimal() else 0
            if not 1 <= number <= len(blocks):
                have = f"it has {len(blocks)}" if blocks else "it has none"
                self._say(f"there is no code block {clean_line(argument, 20)} in this message", have, "warning")
                return
            text, what = blocks[number - 1], f"code block {number} of {len(blocks)}"
        await self._app.copying.copy(what, text)

    async def stop(self, _: str) -> None:
        """End the answer in progress."""
        if self._app.context.answering:
            self._say("stopping", kind="busy")
            self._app.link.cancel()

    async def first(self, _: str) -> None:
        """Go to the first message."""
        self._app.chat.show_first_messages()

    def _upto_selected(self) -> list[ItemView]:
        views, selected = self._app.chat.transcript.views(), self._app.chat.transcript.selected
        place = next((n for n, view in enumerate(views) if selected is not None and view.id == selected.id), None)
        return views if place is None else views[: place + 1]

    # Conversations.

    async def new(self, _: str) -> None:
        """Begin a conversation."""
        await self._app.open_session(None)

    async def conversations(self, _: str) -> None:
        """Show or hide the list, as it is now: another screen may have begun or ended some."""
        self._app.chat.toggle_sessions()
        self._app.daemons.refresh_soon()

    async def server(self, argument: str) -> None:
        """Go to another daemon, to where one was there; show them all where none is named."""
        daemons = self._app.daemons

        async def go(name: str | None) -> None:
            if name is not None and name != daemons.shown.name:
                session, role = daemons[name].left
                await self._app.open_session(session, role, server=name)

        if not argument:
            self._app.push_screen(ServerScreen(daemons.places), go)
        elif argument not in daemons.names:
            known = f"there are {', '.join(daemons.names)}" if daemons.are_several else "servers.toml names more"
            self._say(f"there is no server {clean_line(argument, 40)!r}", known, "warning")
        elif argument == daemons.shown.name:
            self._say(f"{argument} is on the screen already")
        else:
            await go(argument)

    async def search(self, argument: str) -> None:
        """Find conversations."""
        self._start(self._search, argument[:MAX_TITLE])

    async def _search(self, query: str) -> None:
        self._app.show_found(query, await self._app.daemons.search(query))

    async def rename(self, argument: str) -> None:
        """Give a title."""
        title = clean_line(argument, MAX_TITLE)
        if not self._app.context.exists:
            self._app.link.draft = replace(self._app.link.draft, title=title)
            self._say(f"it will be called {title}")
            return
        self._start(self._update, f"called {title} now", title=title)

    async def pin(self, _: str) -> None:
        """Pin, or no longer."""
        info = self._app.link.info
        pinned = not (info is not None and info.pinned)
        self._start(self._update, "pinned" if pinned else "no longer pinned", pinned=pinned)

    async def archive(self, _: str) -> None:
        """Archive, or no longer."""
        info = self._app.link.info
        archived = not (info is not None and info.archived)
        done = "archived; /search finds it" if archived else "no longer archived"
        self._start(self._update, done, archived=archived)

    async def _update(self, done: str, **changes: Any) -> None:
        await self._app.link.update(**changes)
        self._say(done)
        await self._app.link.refresh_sessions()

    async def erase(self, _: str) -> None:
        """Remove the conversation for good, once that is confirmed."""
        info = self._app.link.info
        title = clean_line(info.title, 80) if info is not None and info.title else "this conversation"
        self._app.ask(
            "Erase this conversation and everything that was kept of it? It cannot be brought back.",
            title,
            "erase it",
            lambda: self._start(self._erase),
        )

    async def _erase(self) -> None:
        receipt = await self._app.link.erase()
        await self._app.open_session(None)
        self._app.chat.status = status_text.erased(receipt)
        await self._app.link.refresh_sessions()

    async def context(self, argument: str) -> None:
        """Show or set what becomes of a turn that does not fit."""
        link = self._app.link
        policies: dict[str, ContextPolicy] = {"refuse": "refuse", "drop-oldest": "drop_oldest"}
        if not argument:
            policy = link.info.context_policy if link.info is not None else link.draft.context_policy or "refuse"
            self._say(status_text.CONTEXT_POLICIES[policy])
            return
        chosen = policies.get(argument)
        if chosen is None:
            self._say(f"{clean_line(argument, 40)!r} is neither refuse nor drop-oldest", kind="warning")
        elif self._app.context.exists:
            self._start(self._update, status_text.CONTEXT_POLICIES[chosen], context_policy=chosen)
        else:
            link.draft = replace(link.draft, context_policy=chosen)
            self._say(status_text.CONTEXT_POLICIES[chosen])

    async def typeahead(self, argument: str) -> None:
        """Turn type-ahead on or off."""
        typing = self._app.typing_ahead
        if argument not in ("", "on", "off"):
            self._say(f"{clean_line(argument, 40)!r} is neither on nor off", kind="warning")
            return
        typing.turn(not typing.is_on if not argument else argument == "on", self._app.chat.composer.message)
        if typing.is_on:
            self._say("type-ahead is on: what you type is read before you send it", "/typeahead off stops that")
        else:
            self._say("type-ahead is off")

    async def system(self, argument: str) -> None:
        """Set the system prompt, in the form where none is given."""
        link = self._app.link
        if not argument:
            open_form(self._app, "system")
        elif self._app.context.exists:
            self._start(self._set_system, argument)
        else:
            link.draft = replace(link.draft, system=argument)
            self._say("the conversation will begin with this system prompt")

    async def _set_system(self, system: str) -> None:
        info = await self._app.link.update(system=system)
        await self._app.open_session(info.id)
        self._say("the system prompt is set", "it holds from the next answer on")

    async def set(self, argument: str) -> None:
        """Set parameters, in the form where none are given."""
        if not argument:
            open_form(self._app, FIELDS[0].name)
            return
        link = self._app.link
        current = link.info.params if link.info is not None else link.draft.params
        params = typed_params.changed(current, argument)
        done = clean_line(typed_params.shown(params), 300) or "no parameter is set"
        if self._app.context.exists:
            self._start(self._update, done, params=params)
        else:
            link.draft = replace(link.draft, params=params)
            self._say(done, "from the first message on")

    async def settings(self, _: str) -> None:
        """Show all settings of the conversation, in the form."""
        open_form(self._app, "system")

    async def close(self, _: str) -> None:
        """Give up the conversation's memory and keep its text; what that was is told to all who have it open."""
        self._start(self._close)

    async def _close(self) -> None:
        await self._app.link.close()
        await self._app.link.refresh_sessions()

    async def watch(self, _: str) -> None:
        """Become an observer, or a writer again."""
        link = self._app.link
        role = "writer" if link.role == "observer" else "observer"
        await self._app.open_session(link.session, role)  # type: ignore[arg-type]
        self._app.chat.status = (
            status_text.WATCHING if role == "observer" else StatusView("notice", "you take part again")
        )

    async def export(self, argument: str) -> None:
        """Write the conversation to a file."""
        self._start(self._export, *wished(argument))

    async def _export(self, name: str, file_format: Format) -> None:
        info, items = await self._app.link.history()
        try:
            path = await asyncio.to_thread(lambda: write_new(name, rendered(file_format, info, items)))
        except FileExistsError:
            raise InvalidRequest(f"{name} exists already", hint="name another file") from None
        except (OSError, ValueError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InvalidRequest(f"cannot write {name}: {reason.lower()}") from None
        self._say(f"written to {clean_line(str(path))}", f"{len(items)} messages")

    # Going about.

    async def pool(self, _: str) -> None:
        """Open the pool page."""
        self._app.open_pool()

    async def palette(self, _: str) -> None:
        """Open the palette."""
        self._app.action_command_palette()

    async def theme(self, argument: str) -> None:
        """Take a theme, or show them all to choose from."""
        if not argument:
            self._app.search_themes()
            return
        self._app.theme = check_theme(argument)
        begins = (
            f"CHATD_THEME has it begin with {named}" if (named := theme_name()) else "the client begins with them now"
        )
        self._say(f"the colors are those of {argument}", clean_line(begins, 80))

    async def help(self, _: str) -> None:
        """List the commands and keys."""
        self._app.open_help()

    async def connect(self, _: str) -> None:
        """Connect at once."""
        self._app.link.retry_now()

    async def quit(self, _: str) -> None:
        """Leave."""
        self._app.exit()

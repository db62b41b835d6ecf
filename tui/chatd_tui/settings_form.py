"""Opens the form of a conversation's settings, and carries out what was changed there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatd.clean import clean_line
from chatd.errors import InvalidRequest
from chatd.protocol import Params
from chatd_tui.commands import TOO_OLD
from chatd_tui.form_fields import Changes, FormView
from chatd_tui.screens.form import FormScreen
from chatd_tui.widgets.status import StatusView

if TYPE_CHECKING:
    from chatd_tui.app import ChatApp

SAVED = StatusView("notice", "the settings are saved", "they hold from the next answer on")


def open_form(app: ChatApp, focus: str) -> None:
    """Show the settings of the conversation on the screen, or of the new one that its first message begins."""
    session = app.link.session

    async def save(changed: Changes) -> None:
        if app.link.session != session:
            raise InvalidRequest("this conversation is no longer on the screen", code="no_session")
        if session is None:
            _draft(app, changed)
        else:
            await _update(app, session, changed)
        if changed.typeahead is not None:
            app.typing_ahead.turn(changed.typeahead, app.chat.composer.text)
        app.chat.status = SAVED

    app.push_screen(FormScreen(_view(app), save, focus))


def _view(app: ChatApp) -> FormView:
    link, context, hello = app.link, app.context, app.daemons.shown.hello
    info, draft = link.info, link.draft
    locked = "you only watch this conversation: nothing can be changed here" if context.observer else ""
    if context.exists and info is None:
        locked = "this conversation is still being read"

    return FormView(
        title=clean_line(app.daemons.shown.title(), 80),
        system=(info.system if info is not None else draft.system) or "",
        params=info.params if info is not None else draft.params,
        context_policy=info.context_policy if info is not None else draft.context_policy or "refuse",
        typeahead=app.typing_ahead.is_on,
        defaults=hello.model.params if hello is not None else None,
        max_bytes=hello.limits.frame_bytes if hello is not None else 0,
        locked=locked,
        no_policy="" if "context" in context.caps else TOO_OLD,
        no_typeahead="" if "prefill" in context.caps else TOO_OLD,
    )


async def _update(app: ChatApp, session: str, changed: Changes) -> None:
    """Change what was changed, and leave alone what others may have changed meanwhile."""
    info = app.link.info
    updates: dict[str, Any] = {}
    if changed.system is not None:
        updates["system"] = changed.system
    if changed.params:
        updates["params"] = changed.over(info.params if info is not None else Params())
    if changed.context_policy is not None:
        updates["context_policy"] = changed.context_policy
    if updates:
        await app.link.update(**updates)
    if changed.system is not None:
        # It stands above the messages.
        await app.open_session(session)


def _draft(app: ChatApp, changed: Changes) -> None:
    draft = app.link.draft
    app.link.draft = replace(
        draft,
        system=draft.system if changed.system is None else changed.system or None,
        params=changed.over(draft.params),
        context_policy=changed.context_policy or draft.context_policy,
    )

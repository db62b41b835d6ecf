"""The settings of a conversation as a form: system prompt, parameters, a full context, type-ahead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar, Literal

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Checkbox, Input, Static, TextArea

from chatd.clean import clean, clean_line
from chatd.errors import ChatdError
from chatd.protocol import Params
from chatd_tui.form_fields import FIELDS, Changes, Field, FormView, changes, mistakes, text_of
from chatd_tui.screens.page import Dialog, Page
from chatd_tui.views import short_number
from chatd_tui.widgets.key_line import KeyLine

WIDE = 80
TINY = 56
"""Below that there is no room for ranges: the last line has that of the field with the keyboard."""
LOW = 14
KEYS = (("^S", "save"), ("Tab", "next"), ("F5", "this field's default"), ("Esc", "back"))
LOCKED_KEYS = (("Esc", "back"), ("↑↓", "scroll"))
FRAME_OVERHEAD_BYTES = 1024


class FieldRow(Horizontal):
    """A parameter: its name, what is typed, and its default and range, or what is wrong.

    Where it `is_short`, the default is in the empty field alone, and of what is wrong there is a mark.
    """

    DEFAULT_CSS = """
    FieldRow {
        height: 1;
        & .label { width: 22; color: $muted; }
        & Input { width: 18; background: $surface; }
        & Input:focus { background: $panel; }
        & Input:disabled { color: $faint; }
        & .note { width: 1fr; padding: 0 0 0 2; color: $muted; }
        & .note.-wrong { color: $error; }
    }
    """

    def __init__(self, field: Field, text: str, defaults: Params | None, *, locked: bool) -> None:
        super().__init__()
        default = field.default(defaults)
        parts = [f"default {default}", field.range_text]
        self.field = field
        self._about = self.note = " · ".join(part for part in parts if part)
        self.is_wrong = self.is_short = False
        self._input = Input(text, placeholder=default, compact=True, id=field.name, disabled=locked)
        self._note = Static(self._about, classes="note", markup=False)

    def compose(self) -> ComposeResult:
        """Lay out."""
        yield Static(self.field.label, classes="label", markup=False)
        yield self._input
        yield self._note

    @property
    def text(self) -> str:
        """What is typed."""
        return self._input.value.strip()

    def show(self, wrong: str) -> None:
        """Say what is wrong, else what the default is."""
        self.is_wrong = bool(wrong)
        self.note = f"✕ {clean_line(wrong)}" if wrong else self._about
        self._note.update(Content(("✕" if wrong else self.field.range_text) if self.is_short else self.note))
        self._note.set_class(bool(wrong), "-wrong")


class Choice(Checkbox):
    """A box that is checked or empty, in any colors."""

    BUTTON_LEFT = "["
    BUTTON_RIGHT = "]"
    BUTTON_INNER = " "

    def watch_value(self) -> None:
        """Show a mark, or none."""
        self.BUTTON_INNER = "x" if self.value else " "
        super().watch_value()


class LeaveScreen(Dialog[Literal["save", "drop"] | None]):
    """Asks what becomes of changes that are not saved."""

    DEFAULT_CSS = """
    LeaveScreen {
        align: center middle;
        & > Vertical {
            width: 60; max-width: 100%; height: auto; padding: 1 3; border: round $warning; background: $surface;
        }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,enter", "answer('save')", "Save"),
        Binding("d", "answer('drop')", "Drop"),
        Binding("escape", "answer(None)", "Go on"),
    ]

    def compose(self) -> ComposeResult:
        """Lay out."""
        keys = (("s", " save them   "), ("d", " drop them   "), ("Esc", " go on here"))
        with Vertical():
            yield Static("There are changes that are not saved.\n", markup=False)
            yield Static(Content("").join(Content.assemble((key, "bold"), meaning) for key, meaning in keys))

    def action_answer(self, answer: Literal["save", "drop"] | None) -> None:
        """Give the answer."""
        self.dismiss(answer)


class FormScreen(Page[None]):
    """Edits a conversation's settings; nothing is changed before it is saved.

    Args:
        view: What it begins with.
        save: Carries the changes out; what it raises is shown, and the form stays.
        focus: The field to begin at: "system", or a parameter's name.
    """

    DEFAULT_CSS = """
    FormScreen {
        & #title { height: 1; padding: 0 1; background: $panel; }
        & VerticalScroll { padding: 1 2; scrollbar-size-vertical: 1; }
        & TextArea { height: 7; border: round $line; background: $surface; padding: 0 1; margin: 0 0 1 0; }
        & TextArea:focus { border: round $primary; }
        & TextArea.-wrong { border: round $error; }
        & Checkbox { height: 1; border: none; padding: 0; background: transparent; width: auto; }
        & .about { height: auto; color: $muted; margin: 0 0 1 0; }
        & #rows { height: auto; margin: 0 0 1 0; }
        & #status { height: 1; padding: 0 2; }
        & #status.-wrong { color: $error; }
        &.-low #title, &.-low KeyLine { display: none; }
        &.-low VerticalScroll { padding: 0 1; }
        &.-narrow FieldRow {
            & .note { width: 12; }
            & .label { width: 23; }
            & Input { width: 1fr; }
        }
        &.-tiny FieldRow {
            & .note { display: none; }
            & .label { width: 1fr; max-width: 22; }
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        # Behind what is typed before them: none of it may be missing in what is saved.
        Binding("ctrl+s", "save", "Save", show=False),
        Binding("f5", "default", "Default", show=False),
        Binding("escape", "leave", "Back", show=False),
    ]

    def __init__(self, view: FormView, save: Callable[[Changes], Awaitable[None]], focus: str = "system") -> None:
        super().__init__()
        self._view = view
        self._save = save
        self._first = focus
        is_locked = bool(view.locked)
        self._system = TextArea(clean(view.system), id="system", read_only=is_locked, soft_wrap=True)
        self._rows = [FieldRow(f, text_of(view.params, f.name), view.defaults, locked=is_locked) for f in FIELDS]
        self._policy = Choice(
            _label("leave the oldest messages out where the context is full", view.no_policy),
            view.context_policy == "drop_oldest",
            id="policy",
            disabled=is_locked or bool(view.no_policy),
        )
        self._typeahead = Choice(
            _label("read what is typed before it is sent", view.no_typeahead),
            view.typeahead,
            id="typeahead",
            disabled=is_locked or bool(view.no_typeahead),
        )

    def compose(self) -> ComposeResult:
        """Lay out."""
        what = self._view.title or "a new conversation"
        yield Static(Content.assemble(("Settings", "bold $primary"), (f"  {what}", "$muted")), id="title")
        with VerticalScroll(can_focus=bool(self._view.locked)):
            self._system.border_title = "System prompt"
            yield self._system
            yield Static("An empty field is the default. What is saved holds from the next answer on.", classes="about")
            with Vertical(id="rows"):
                yield from self._rows
            yield self._policy
            yield self._typeahead
        yield Static("", id="status", markup=False)
        yield KeyLine(LOCKED_KEYS if self._view.locked else KEYS)

    def on_mount(self) -> None:
        """Begin at the wanted field."""
        if self._view.locked:
            self._say(self._view.locked)
            self.query_one(VerticalScroll).focus()
        else:
            self.query_one(f"#{self._first}").focus()
        self._check()

    # What is typed.

    def on_input_changed(self) -> None:
        """Look at what is typed."""
        self._check()

    def on_text_area_changed(self) -> None:
        """Likewise."""
        self._check()

    def on_resize(self, event: events.Resize) -> None:
        """Say what is at the side in the last line, where there is no room for it, and keep the field in sight."""
        is_narrow, is_tiny = event.size.width < WIDE, event.size.width < TINY
        self.set_class(is_narrow, "-narrow")
        self.set_class(is_tiny, "-tiny")
        for row in self._rows:
            row.is_short = is_narrow and not is_tiny
        self.set_class(event.size.height < LOW, "-low")
        self._check()
        if self.focused is not None:
            self.call_after_refresh(self.focused.scroll_visible, animate=False)

    def on_descendant_focus(self) -> None:
        """Likewise."""
        self._say_note()

    def _say_note(self) -> None:
        """Say what stands beside the field that has the keyboard, where there may be no room for it."""
        row = self.focused.parent if self.focused is not None else None
        if not isinstance(row, FieldRow):
            self._say(self._view.locked)
        elif row.is_wrong or self.has_class("-narrow"):
            self._say(row.note, is_wrong=row.is_wrong)
        else:
            self._say("")

    def on_input_submitted(self) -> None:
        """Go on to the next field."""
        self.focus_next()

    @property
    def changes(self) -> Changes:
        """What is not saved yet."""
        texts = {row.field.name: row.text for row in self._rows}
        return changes(
            self._view,
            self._system.text,
            texts,
            drops_oldest=self._policy.value,
            typeahead=self._typeahead.value,
        )

    def _check(self) -> dict[str, str]:
        """Say what is wrong where it is, and return it by field."""
        wrong = mistakes({row.field.name: row.text for row in self._rows})
        for row in self._rows:
            row.show(wrong.get(row.field.name, ""))
        text = self._system.text
        num_bytes = len(msgspec.json.encode(text)) + FRAME_OVERHEAD_BYTES
        limit = self._view.max_bytes
        self._system.border_subtitle = f"{short_number(len(text))} character{'' if len(text) == 1 else 's'}"
        if limit and num_bytes > limit:
            wrong["system"] = f"the system prompt makes a frame of {num_bytes} bytes, the limit is {limit}"
            self._system.border_subtitle = wrong["system"]
        self._system.set_class("system" in wrong, "-wrong")
        self._say_note()
        return wrong

    def _say(self, text: str, *, is_wrong: bool = False) -> None:
        status = self.query_one("#status", Static)
        status.update(Content(clean_line(text, 300)))
        status.set_class(is_wrong, "-wrong")

    # What the keys do.

    async def action_save(self) -> None:
        """Save and go back; where something is wrong, go to it and stay."""
        if self._view.locked:
            return
        wrong = self._check()
        if wrong:
            name, said = next(iter(wrong.items()))
            self._say(said, is_wrong=True)
            self.query_one(f"#{name}").focus()
            return
        changed = self.changes
        if changed == Changes():
            self.dismiss()
            return
        self._say("saving")
        try:
            await self._save(changed)
        except ChatdError as error:
            self._say(f"not saved: {error.message}{f' ({error.hint})' if error.hint else ''}", is_wrong=True)
            return
        self.dismiss()

    def action_default(self) -> None:
        """Empty the field that has the keyboard: its default holds."""
        focused = self.focused
        if isinstance(focused, Input):
            focused.value = ""
        elif focused is self._system and not self._view.locked:
            self._system.load_text("")
            self._check()

    def action_leave(self) -> None:
        """Go back; where something is not saved, ask first."""
        if self._view.locked or self.changes == Changes():
            self.dismiss()
            return

        async def answered(answer: str | None) -> None:
            if answer == "save":
                await self.action_save()
            elif answer == "drop":
                self.dismiss()

        self.app.push_screen(LeaveScreen(), answered)

    def on_key(self, event: events.Key) -> None:
        """Go from field to field with ↑ and ↓ as well; in the system prompt they move the cursor."""
        if event.key in ("up", "down") and isinstance(self.focused, Input | Checkbox):
            event.stop()
            if event.key == "up":
                self.focus_previous()
            else:
                self.focus_next()


def _label(text: str, reason: str) -> Content:
    return Content(f"{text} ({reason})" if reason else text)

"""The daemons that the client is connected to, to go to another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from chatd_tui.screens.choice import ChoiceDialog, prompt
from chatd_tui.views import ServerPlace
from chatd_tui.widgets.session_list import PHASES

LOOK_AGAIN_S = 0.5


class ServerScreen(ChoiceDialog[str | None]):
    """Lists daemons with their states as these change; Enter gives the name of one, Escape none.

    Args:
        places: Returns them as they are now, always the same ones in the same order.
    """

    def __init__(self, places: Callable[[], Sequence[ServerPlace]]) -> None:
        super().__init__()
        self._places = places
        self._shown = tuple(places())
        self._list = OptionList(*(Option(_prompt(place)) for place in self._shown), markup=False)

    def compose(self) -> ComposeResult:
        """Lay out."""
        number = len(self._shown)
        more = "" if number > 1 else "  servers.toml, or --server, names more"
        with Vertical():
            yield Static(
                Content.assemble((f"{number} server{'' if number == 1 else 's'}", "bold"), (more, "$muted")),
                markup=False,
            )
            yield self._list
            yield Static(Content.styled("Enter goes there, Esc stays here", "$faint"), markup=False)

    def on_mount(self) -> None:
        """Begin at the one on the screen, and follow the others."""
        self._list.highlighted = next((n for n, place in enumerate(self._shown) if place.is_shown), 0)
        self.set_interval(LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        before, self._shown = self._shown, tuple(self._places())
        for n, place in enumerate(self._shown):
            if place != before[n]:
                self._list.replace_option_prompt_at_index(n, _prompt(place))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Give the chosen one."""
        self.dismiss(self._shown[event.option_index].name)


def _prompt(place: ServerPlace) -> Content:
    mark, style = PHASES.get(place.phase, ("◌ ", "$warning"))
    name = place.name or place.url
    here = " · on the screen" if place.is_shown else ""
    first = Content.assemble((mark or "● ", style or "$success"), (name, "bold"), (f"  {place.state}{here}", "$muted"))
    return prompt([first, Content.styled(f"  {place.detail}", "$muted")])

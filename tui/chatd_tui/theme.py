"""The colors: our own theme, Textual's, and of these what our styles need beside Textual's variables."""

from __future__ import annotations

from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

from chatd.clean import clean_line
from chatd.errors import ConfigError

CHATD = Theme(
    name="chatd",
    primary="#7aa2f7",
    secondary="#9d7cd8",
    accent="#e0af68",
    foreground="#d5d9e3",
    background="#12141a",
    surface="#1a1d26",
    panel="#22262f",
    success="#5fcf9a",
    warning="#e5b567",
    error="#f0707b",
    dark=True,
    variables={
        "muted": "#8c94a8",
        "faint": "#5a6172",
        "line": "#353b49",
        "scrollbar": "#353b49",
        "scrollbar-hover": "#4a5265",
        "scrollbar-active": "#7aa2f7",
        "scrollbar-background": "#12141a",
        "scrollbar-background-hover": "#12141a",
        "scrollbar-background-active": "#12141a",
        "scrollbar-corner-color": "#12141a",
    },
)

THEMES = (CHATD.name, *sorted(BUILTIN_THEMES))
"""Those whose names begin with "ansi" have the terminal's own 16 colors."""


def check_theme(name: str) -> str:
    """Return the name of a theme.

    Raises:
        ConfigError: There is none of this name.
    """
    if name not in THEMES:
        raise ConfigError(
            f"there is no theme {clean_line(name, 40)!r}", param="theme", hint=f"one of {', '.join(THEMES)}"
        )
    return name


def own_variables(theme: Theme) -> dict[str, str]:
    """Return the variables of our styles for a theme that does not know them."""
    if theme.ansi:
        return {"muted": "ansi_default", "faint": "ansi_bright_black", "line": "ansi_bright_black"}
    colors = theme.to_color_system().generate()
    front, back = Color.parse(colors["foreground"]), Color.parse(colors["background"])
    return {name: back.blend(front, part).hex6 for name, part in (("muted", 0.65), ("faint", 0.45), ("line", 0.25))}

"""The colors."""

from __future__ import annotations

from textual.theme import Theme

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

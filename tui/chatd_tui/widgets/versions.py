"""The mark ‹2/3› of a message that has other versions, and what a click on it shows."""

from __future__ import annotations

from textual.content import Content

from chatd.protocol import Siblings


def marker(siblings: Siblings | None) -> Content:
    """Return ‹2/3›, an arrow faint where it leads nowhere; nothing where there is one version."""
    if siblings is None:
        return Content("")
    back = "bold $accent" if siblings.previous else "$faint"
    on = "bold $accent" if siblings.next else "$faint"
    return Content.assemble(("‹", back), (f"{siblings.index}/{siblings.count}", "$muted"), ("›", on))


def leaf_at(siblings: Siblings | None, x: int) -> str | None:
    """Return the branch that a click in column `x` of the mark asks for: its left half goes back, the right one on."""
    width = marker(siblings).cell_length
    if siblings is None or not 0 <= x < width:
        return None
    return siblings.previous if x < (width + 1) // 2 else siblings.next

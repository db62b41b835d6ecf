"""The keys of the pool page: what its bindings, its bottom line, F1 and the docs' table are made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageKey:
    """One thing that a key does on a page, where nothing can be typed.

    Attributes:
        name: In the keymap file.
        help: One line.
        action: Of the page, as Textual takes it.
        keys: Work while the page is open; a keymap may have others.
        short: A word for the bottom line, where those of one word stand together; none keeps it out.
        cap: The daemon must offer this, or the key does nothing.
    """

    name: str
    help: str
    action: str
    keys: tuple[str, ...]
    short: str = ""
    cap: str = ""

    @property
    def binding(self) -> str:
        """The binding's id, by which a keymap moves it."""
        return f"pool.{self.name}"


POOL_KEYS: tuple[PageKey, ...] = (
    PageKey("left", "point at the cell to the left", "point(-1, 0)", ("left",), "point", "pool.map"),
    PageKey("up", "point at the cell above; without a map scroll", "point(0, -1)", ("up",), "point", "pool.map"),
    PageKey("down", "point at the cell below; without a map scroll", "point(0, 1)", ("down",), "point", "pool.map"),
    PageKey("right", "point at the cell to the right", "point(1, 0)", ("right",), "point", "pool.map"),
    PageKey("look", "look into the cell", "look", ("enter",), "look inside", "pool.inspect"),
    PageKey("pause", "pause, and go on", "pause", ("space",), "pause"),
    PageKey("earlier", "pause, and go back by a moment", "step(-1)", ("[", ","), "step"),
    PageKey("later", "go on by a moment", "step(1)", ("]", "."), "step"),
    PageKey("far-earlier", "pause, and go back by ten moments", "step(-10)", ("{",)),
    PageKey("far-later", "go on by ten moments", "step(10)", ("}",)),
    PageKey("scroll-up", "scroll the tables up, or the open cell", "scroll_tables(-1)", ("pageup",), "scroll"),
    PageKey("scroll-down", "scroll the tables down, or the open cell", "scroll_tables(1)", ("pagedown",), "scroll"),
    PageKey("close", "close the page at once", "close_page", ("q",)),
)

"""Remote text made safe to draw, character by character, so that text split anywhere cannot evade it (S19).

Kept: everything but C0 controls other than newline and tab, DEL, C1 controls, bidirectional controls and surrogates.
C0 and DEL become their visible pictures ("␛"), C1 and lone surrogates U+FFFD; carriage returns and bidirectional
controls vanish; Unicode's line and paragraph separators and next-line become a newline, which they mean.
"""

from __future__ import annotations

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))


def _table() -> dict[int, str | None]:
    table: dict[int, str | None] = {code: chr(0x2400 + code) for code in range(0x20)}
    del table[0x09], table[0x0A]
    table[0x0D] = None
    table[0x7F] = "\u2421"
    table.update(dict.fromkeys(range(0x80, 0xA0), "\ufffd"))
    table.update({0x85: "\n", 0x2028: "\n", 0x2029: "\n"})
    table.update(dict.fromkeys(_BIDI))
    table.update(dict.fromkeys(range(0xD800, 0xE000), "\ufffd"))
    return table


_TABLE = _table()


def clean(text: str) -> str:
    """Return `text` without characters that a terminal would obey."""
    return text if text.isascii() and text.isprintable() else text.translate(_TABLE)


def clean_line(text: str, limit: int = 200) -> str:
    """Return cleaned text on one line of at most `limit` characters, blanks collapsed: titles, reasons, addresses."""
    line = " ".join(clean(text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"

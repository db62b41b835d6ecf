"""Full-text search over messages and titles: the index that helps to find which texts have which words.

A text is found by a query if it has every word of the query somewhere, inside of words too, whatever the case; so it
works in languages that put no blanks between words. The index maps three characters to the texts that have them, which
leaves few texts to look at. What it says is a hint: whatever is returned was compared, and belongs to who asked. So
its order and its contents tell nobody about others' texts.

The time of a search may: owners whose numbers are the same modulo `NUM_PARTS` share a part, whose list of the texts
with three characters is stepped over to those of who asks, at most once for each of these. An owner of one's own in
each entry would end that, at six times the time to write a text and two and a half times the size (measured).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_INDEXED_CHARS = 2**16
"""Of each text so many are searched: entries of a large one take seconds, in which nobody's changes are written."""

NUM_PARTS = 16
"""Tables that the index is made of, by owner: an erasure rewrites one of them."""

_GRAM = 3
_MAX_GRAMS = 24
_FIRST_PRIVATE, _NUM_PRIVATE = 0xE000, 6400


def part_of(owner: int) -> int:
    """Return which part of the index has an owner's texts."""
    return owner % NUM_PARTS


def _add(connection: sqlite3.Connection, rowid: int, owner: int, text: str) -> None:
    """Make a text known; an empty one is never found, and is not kept."""
    if text:
        connection.execute(_STATEMENTS[part_of(owner)].add, (rowid, _indexed_text(owner, text)))


def _remove(connection: sqlite3.Connection, rowid: int, owner: int, text: str) -> None:
    """Take out a text, exactly as it was added. What it was stays in the index's pages until `merge_index` is done."""
    if text:
        connection.execute(_STATEMENTS[part_of(owner)].remove, (rowid, _indexed_text(owner, text)))


def change_index(connection: sqlite3.Connection, rowid: int, owner: int, old: str, new: str) -> None:
    """Put a text in the place of another that was added."""
    _remove(connection, rowid, owner, old)
    _add(connection, rowid, owner, new)


def is_index_damaged(error: BaseException | None) -> bool:
    """Tell whether an error says that a part of the index is to be made anew."""
    # The second, without saying which constraint, comes of a table of the index's own: ours say which.
    damage = (sqlite3.SQLITE_CORRUPT_VTAB, sqlite3.SQLITE_CONSTRAINT)
    return getattr(error, "sqlite_errorcode", None) in damage


def rebuild_index(connection: sqlite3.Connection, part: int) -> None:
    """Make a part of the index anew from what the database has, inside of a transaction."""
    connection.execute(_STATEMENTS[part].clear)
    texts = (
        "SELECT pk, owner, content FROM messages WHERE owner % ?1 = ?2"
        " UNION ALL SELECT -pk, owner, title FROM sessions WHERE owner % ?1 = ?2"
    )
    for rowid, owner, text in connection.execute(texts, (NUM_PARTS, part)).fetchall():
        _add(connection, rowid, owner, text)


def merge_index(connection: sqlite3.Connection, part: int, *, is_first: bool, num_pages: int = 256) -> bool:
    """Rewrite a bit of a part without what was taken out; return whether there is more to do."""
    before = connection.total_changes
    connection.execute(_STATEMENTS[part].merge, (-num_pages if is_first else num_pages,))
    # SQLite's documentation: fewer than two rows were changed where nothing was left to do.
    return connection.total_changes - before >= 2


def candidates(connection: sqlite3.Connection, owner: int, words: Sequence[str], *, titles: bool) -> Iterator[int]:
    """Yield the numbers of an owner's texts that may have the words, the latest first.

    Args:
        titles: Of sessions rather than messages.
    """
    wanted = [_owner_code(owner), *_grams(words)]
    expression = " AND ".join('"' + gram.replace('"', '""') + '"' for gram in wanted)
    statements = _STATEMENTS[part_of(owner)]
    for row in connection.execute(statements.find_titles if titles else statements.find_messages, (expression,)):
        yield int(row[0])


class _Statements(NamedTuple):
    """What is said to one part of the index."""

    add: str
    remove: str
    merge: str
    clear: str
    find_titles: str
    find_messages: str


def _statements(part: int) -> _Statements:
    name = f"search_{part}"
    return _Statements(
        add=f"INSERT INTO {name} (rowid, text) VALUES (?, ?)",  # noqa: S608
        remove=f"INSERT INTO {name} ({name}, rowid, text) VALUES ('delete', ?, ?)",  # noqa: S608
        clear=f"INSERT INTO {name} ({name}) VALUES ('delete-all')",  # noqa: S608
        merge=f"INSERT INTO {name} ({name}, rank) VALUES ('merge', ?)",  # noqa: S608
        find_titles=f"SELECT rowid FROM {name} WHERE {name} MATCH ? AND rowid < 0 ORDER BY rowid",  # noqa: S608
        find_messages=f"SELECT rowid FROM {name} WHERE {name} MATCH ? AND rowid > 0 ORDER BY rowid DESC",  # noqa: S608
    )


_STATEMENTS = tuple(map(_statements, range(NUM_PARTS)))


def _indexed_text(owner: int, text: str) -> str:
    # SQLite's tokenizer ends at a zero character.
    return f"{_owner_code(owner)} {text[:MAX_INDEXED_CHARS].casefold()}".replace("\0", " ")


def _owner_code(owner: int) -> str:
    """Return three characters of the private use area: one entry of the index, and no letter of any language."""
    digits = (owner // _NUM_PRIVATE**2, owner // _NUM_PRIVATE % _NUM_PRIVATE, owner % _NUM_PRIVATE)
    return "".join(chr(_FIRST_PRIVATE + digit) for digit in digits)


def _grams(words: Sequence[str]) -> list[str]:
    """Return entries of the index that every text with these words has; none where the words are too short."""
    grams = dict.fromkeys(word[i : i + _GRAM] for word in words for i in range(len(word) - _GRAM + 1))
    # SQLite ends a query at a zero character, and takes no half of a surrogate pair.
    usable = [gram for gram in grams if "\0" not in gram and gram.isprintable()]
    return usable[:: max(1, -(-len(usable) // _MAX_GRAMS))]

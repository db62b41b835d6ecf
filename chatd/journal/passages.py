"""What a text must have to be found by a query, and the passage of it that shows why it was."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WORDS = 16
MAX_PASSAGE_CHARS = 160
_CHARS_BEFORE = 48


def words_of(query: str) -> list[str]:
    """Return what a text must have to be found: at most `MAX_WORDS` words, without their case."""
    return list(dict.fromkeys(query.casefold().split()))[:MAX_WORDS]


def has_words(text: str, words: Sequence[str]) -> bool:
    """Tell whether a text has all of them."""
    folded = text.casefold()
    return all(word in folded for word in words)


def passage(text: str, words: Sequence[str]) -> str:
    """Return the place where the first of the words stands and what is around it, on one line.

    At most `MAX_PASSAGE_CHARS` of the text, with `…` where it was cut.
    """
    place = _place(text, words)
    start = max(0, min(place - _CHARS_BEFORE, len(text) - MAX_PASSAGE_CHARS))
    if start > 0:
        # From the beginning of a word, where one begins before the place.
        blank = text.find(" ", start, place)
        start = blank + 1 if blank >= 0 else start
    end = start + MAX_PASSAGE_CHARS
    cut = " ".join(text[start:end].split())
    return f"{'… ' if start else ''}{cut}{' …' if end < len(text) else ''}"


def _place(text: str, words: Sequence[str]) -> int:
    """Return where the first of the words begins in a text, 0 where none does."""
    folded = text.casefold()
    places = [place for word in words if (place := folded.find(word)) >= 0]
    place = min(places, default=0)
    if len(folded) == len(text):
        return place
    # Characters such as ß are several without their case.
    num_folded = 0
    for index, character in enumerate(text):
        if num_folded >= place:
            return index
        num_folded += len(character.casefold())
    return len(text)

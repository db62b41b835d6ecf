"""The passage of a text that shows why a search found it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatd.journal.passages import MAX_PASSAGE_CHARS, MAX_WORDS, has_words, passage, words_of

LONG = " ".join(f"word{n}" for n in range(400))


@pytest.mark.parametrize(
    ("text", "query", "expected"),
    [
        ("about the pool", "POOL", "about the pool"),
        ("one\n\n  two\tthree", "two", "one two three"),
        ("no such thing", "elsewhere", "no such thing"),
        ("", "x", ""),
        ("Straße " * 40 + "ziel", "ziel", "… " + "Straße " * 22 + "ziel"),
    ],
)
def test_it_is_what_stands_around_the_first_word_on_one_line(text: str, query: str, expected: str) -> None:
    assert passage(text, words_of(query)) == expected


def test_a_long_text_is_cut_on_both_sides_and_begins_with_a_word() -> None:
    shown = passage(LONG, ["word200"])
    assert shown.startswith("… word19")
    assert shown.endswith(" …")
    assert " word200 " in shown
    assert len(shown) <= MAX_PASSAGE_CHARS + 4


@given(st.text(max_size=400), st.text("abßİ x\n", max_size=6), st.integers(0, 400))
def test_it_has_the_word_wherever_that_is(text: str, word: str, at: int) -> None:
    words = words_of(word)[:1]
    whole = text[:at] + word + text[at:]
    shown = passage(whole, words)
    assert len(shown) <= MAX_PASSAGE_CHARS + 4
    assert "\n" not in shown
    if words and has_words(whole, words):
        assert has_words(shown, words)


def test_a_query_has_few_words() -> None:
    assert len(words_of(LONG)) == MAX_WORDS

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from chatd.clean import clean, clean_line

BIDI = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}


def test_every_control_goes_but_newline_and_tab() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0)):
        drawn = clean(f"a{chr(code)}b")
        if chr(code) in "\n\t":
            assert drawn == f"a{chr(code)}b"
        else:
            assert chr(code) not in drawn
            assert all(unicodedata.category(character) != "Cc" or character == "\n" for character in drawn)


def test_bidirectional_controls_and_surrogates_go() -> None:
    for character in BIDI:
        assert clean(f"a{character}b") == "ab"
    assert clean("a\ud800b") == "a\ufffdb"


def test_an_escape_sequence_becomes_visible_text() -> None:
    assert clean("\x1b[31mred\x1b[0m\x07") == "␛[31mred␛[0m␇"
    assert clean("one\r\ntwo\u2028three") == "one\ntwo\nthree"


@given(st.text(), st.integers(0, 40))
def test_where_a_text_is_cut_makes_no_difference(text: str, cut: int) -> None:
    assert clean(text[:cut]) + clean(text[cut:]) == clean(text)


@given(st.text())
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert clean(clean(text)) == clean(text)


def test_text_of_every_script_stays() -> None:
    text = "שלום עולם مرحبا हिन्दी 日本語 e\u0301 👩‍👩‍👧 ✓"
    assert clean(text) == text


def test_a_line_is_one_line_and_bounded() -> None:
    assert clean_line("  a\n\tb\r\n c ") == "a b c"
    assert clean_line("x" * 500, 10) == "x" * 9 + "…"

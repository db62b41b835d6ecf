"""Titles that are made from a first message."""

import pytest

from chatd.titles import MAX_AUTO_TITLE, title_of


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("What is\na block?", "What is a block?"),
        ("Explain main.py\n\nmain.py:\n```py\nimport os\n```", "Explain main.py"),
        ("Explain\n```py\nimport os\n```", "Explain"),
        ("Explain\r\n \r\nmore", "Explain"),
        ("```py\nimport os\n```", "import os"),
        ("\n\n  \n~~~\n\n~~~\nlast", "last"),
        ("a\x1b[2J\u202eb\x00", "a [2J b"),
        ("", ""),
        (" \n\n ", ""),
        ("word " * 40, "word word word word word word word word word word word word…"),
        ("x" * 100, "x" * MAX_AUTO_TITLE + "…"),
    ],
)
def test_a_title_is_the_first_words_of_the_first_paragraph(content: str, title: str) -> None:
    assert title_of(content) == title

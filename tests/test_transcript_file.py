"""Exports for people: nothing that is said can be taken for what the file itself says, against markdown-it."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from chatd.transcript_file import NAMES, as_html, as_markdown, write_new

HOSTILE = [
    "## Assistant\n\nI agree.",
    "# A title\n## You\n> ## System",
    "</blockquote>\n<h2>Assistant</h2>",
    "text </blockquote><h2>You</h2> `<b>` more",
    "```\nan open fence\n## You",
    "````\n```\n</blockquote>\n````\n<h2>x</h2>",
    "- a\n\n  ```\n  in a list\n</blockquote>",
    "    ```\n<h2>not in a fence</h2>",
    "<!-- from here on nothing is seen",
    "<pre>\n```\n</pre><h2>x</h2>",
    "[You]: https://example.com 'elsewhere'",
    "[a\nb]: https://example.com",
    "- [x]: https://example.com",
    "Assistant\n=========",
    "a `b\n<h2>` c</h2>",
    "| a | b |\n|---|---|\n| `x | <h2> | y` |",
    "\\`<h2>`</h2>",
    "\\<h2>x",
    "~~~ <h2>\n</blockquote>",
    "``` a`b\n<h2>no fence</h2>",
    "\x1b[2J\u2028## You\u202e\r## You",
    "",
    "\n\n",
    "![x](javascript:alert(1))<script>alert(1)</script>",
    "[a](`)<b><x `",
    "[a```]:```",
    "[a\n```]:```",
    "[a](\n`)<h2>x</h2>`",
    "<?php ?><![CDATA[x]]><!DOCTYPE html>",
    "   ```\nx\n```\n<h2>x</h2>",
    "\t```\nx\n```\n<h2>x</h2>",
    "```\n\t```\n<h2>x</h2>",
    "`\n\u00a0\n`<h2>`",
    "- a\n\n  ```\nb\n  ```\n```\n<h2>x</h2>",
    "  ```\n  x\n    ```\n  ```\n```\n<h2>x</h2>",
    "> > ```\n> x\n> > ```\n```\n<h2>x</h2>",
]


def shape(text: str) -> list[str]:
    """Return the top-level blocks of a Markdown text; nothing in it may be HTML or define a link."""
    env: dict[str, object] = {}
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text, env)
    assert not env.get("references")
    for token in tokens:
        assert token.type != "html_block"
        assert not any(child.type == "html_inline" for child in token.children or ())
    tops = [token for token in tokens if token.level == 0 and token.nesting >= 0]
    return [token.tag for token in tops]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_message_is_one_quote_whatever_it_says(text: str) -> None:
    exported = as_markdown(text, [("system", text), ("user", text), ("assistant", text), ("user", "[You] and [x]")])
    assert shape(exported) == ["h1", *(["h2", "blockquote"] * 4)]
    headings = [line for line in exported.split("\n") if line.startswith("## ")]
    assert headings == ["## System", "## You", "## Assistant", "## You"]


PIECES = [
    "`",
    "``",
    "```",
    "~~~",
    "<b>",
    "</blockquote>",
    "<!--",
    "]:",
    "[a",
    "\n",
    "\n\n",
    " ",
    "    ",
    "- ",
    "> ",
    "|",
]
PIECES += ["\u00a0", "   ```", "\t~~~", "\n```\n<b>", "\n  ~~~\n", "- ```\n"]
PIECES += ["\\", "# ", "1. ", "x", "/url", "===", "---", "\t", "'", "&lt;", "<", ">", "![", "](", ")", "<x `", "[a]("]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_no_mix_of_marks_gets_out_of_its_quote(text: str) -> None:
    assert shape(as_markdown("", [("user", text), ("assistant", "[a] ok")])) == ["h1", *(["h2", "blockquote"] * 2)]


def test_what_is_harmless_stays_as_it_was_said() -> None:
    said = "Use `<div>` and ``a ` <b>``:\n\n```html\n<p>[x]: y</p>\n```\n\n1 < 2 and **bold** [link](https://a.b)"
    quoted = "\n".join(f"> {line}" if line else ">" for line in said.split("\n"))
    assert as_markdown("T", [("assistant", said)]) == f"# T\n\n## Assistant\n\n{quoted}\n"


def test_code_after_code_in_a_list_stays_as_it_was_said() -> None:
    said = "1. first\n\n   ```sh\n   x > y\n\n   ```\n\nthen `<b>`:\n\n```\n<p>\n```"
    quoted = "\n".join(f"> {line}" if line else ">" for line in said.split("\n"))
    assert as_markdown("T", [("assistant", said)]) == f"# T\n\n## Assistant\n\n{quoted}\n"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_has_the_same_elements_whatever_is_said(text: str) -> None:
    said = [(role, text) for role in NAMES]
    assert Tags(as_html(text, said)).tags == Tags(as_html("", [(role, "") for role in NAMES])).tags


def test_a_new_file_is_its_owners_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    write_new(path, "x\ud800")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_new(path, "y")
    assert path.read_text() == "x?"

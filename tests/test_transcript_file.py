"""Exports for people: nothing that is said can be taken for what the file itself says, against markdown-it."""

import re
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
    "![x](https://evil.example/?q=secret)",
    "a![x](https://evil.example 'title')[![y](//evil.example)](z)",
    "\\![x](https://evil.example) \\\\![x](https://evil.example)",
    "![a `b` c](https://evil.example) ![x][You] ![You] ![![x](y)](z)",
    "| ![x](https://evil.example) |\n|---|\n| ![x](https://evil.example) |",
    "`a\n![x](https://evil.example)`",
    "- ```\n\n![x](https://evil.example)",
    "![[https://evil.example/x.png]]",
    '```mermaid\ngraph TD\nA@{ img: "https://evil.example" }\n```',
    "~~~~ Mermaid title=x\nx\n~~~~",
    "1. ```mermaid\n   x\n   ```",
    "> ~~~mermaid\n> x",
    "``` {=html}\n<img src=//evil.example>\n```",
    "```{python}\nimport os\n```",
]


def shown_as_code(info: str) -> bool:
    return bool(re.fullmatch(r"[\w+#.-]*", info.strip())) and info.strip().lower() != "mermaid"


def shape(text: str) -> list[str]:
    """Return the top-level blocks of a Markdown text; nothing in it may be HTML or an image, or define a link."""
    env: dict[str, object] = {}
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text, env)
    assert not env.get("references")
    for token in tokens:
        assert token.type != "html_block"
        assert not any(child.type in ("html_inline", "image") for child in token.children or ())
        assert token.type != "fence" or shown_as_code(token.info)
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
PIECES += ["!", "!\\", "![x](y)", "```mermaid\n", "~~~{=html}\n"]
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


def exported(said: str) -> str:
    """Return the lines of one message as a file has them."""
    lines = as_markdown("T", [("assistant", said)]).removeprefix("# T\n\n## Assistant\n\n").splitlines()
    return "\n".join(line.removeprefix(">").removeprefix(" ") for line in lines)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("see ![a whale](https://evil.example)!", "see !\\[a whale](https://evil.example)!"),
        ("`![x](y)` and ``![z]``", "`![x](y)` and ``![z]``"),
        ("```rust\n#![allow(dead_code)]\n```", "```rust\n#![allow(dead_code)]\n```"),
        ("```c++\nx\n```", "```c++\nx\n```"),
        ("```mermaid\nx\n```", "```text\nx\n```"),
        ("~~~ {.vega width=3}\nx\n~~~", "~~~text\nx\n~~~"),
        ('```python exec="1" title=x\nx\n```', "```python\nx\n```"),
        ("```\n```mermaid\n```", "```\n```mermaid\n```"),
        ("say ```mermaid``` in a line", "say ```mermaid``` in a line"),
        ("`<img src=//evil.example>`{=html} a", "`<img src=//evil.example>`\\{=html} a"),
        ("`a | b`{=html}", "`a | b`\\{=html}"),
    ],
)
def test_what_a_reader_would_fetch_draw_or_run_is_text_or_code(said: str, written: str) -> None:
    assert exported(said) == written


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

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from chatd_tui.highlighting import Highlighter
from chatd_tui.markdown_lines import LONG_BLOCK, make_parser, render, split_growing
from chatd_tui.widgets.markdown_view import MarkdownView

SOURCE = """\
# Title

A **bold** and *soft* line with `code` that is too long for the width.

- one
- two
  - inner
    second line

1. first
2. second

   own paragraph

> quoted

```python
x = 1
```

| a | b |
|---|---|
| 1 | two |

---
"""

EXPECTED = [
    "Title",
    "",
    "A bold and soft line with code",
    "that is too long for the",
    "width.",
    "",
    "• one",
    "• two",
    "  ◦ inner second line",
    "",
    "1. first",
    "",
    "2. second",
    "",
    "   own paragraph",
    "",
    "▌ quoted",
    "",
    "",
    "  x = 1",
    "",
    "",
    "a     b",
    "────  ────",
    "1     two",
    "",
    "──────────────────────────────",
]

PIECES = st.sampled_from(
    [
        "word ",
        "**b** ",
        "\n",
        "\n\n",
        "\n- ",
        "\n  - ",
        "\n1. ",
        "\n> ",
        "\n# ",
        "\n---\n",
        "===",
        "\n    code",
        "\n```py\nx\n```\n",
        "\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        "[l](http://h)",
        "日本",
        "`",
        "\\",
        "<b>",
    ]
)


def plain(code: str, language: str) -> Content:
    return Content(code)


def texts(lines: list[Content]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def test_each_kind_of_block_has_its_look() -> None:
    assert texts(render(SOURCE, 30, plain)) == EXPECTED


@given(st.lists(PIECES, max_size=30).map("".join), st.integers(1, 60))
def test_no_line_is_wider_than_the_width(text: str, width: int) -> None:
    # Deeply nested blocks keep a width of eight cells each, and are cut by the widget.
    for line in render(text, width, plain):
        assert "\n" not in line.plain
        if "  " not in text and "> " not in text:
            assert line.cell_length <= max(8, width) + 4


@given(st.lists(PIECES, max_size=30).map("".join))
def test_blocks_begin_where_the_parser_of_everything_has_them_begin(source: str) -> None:
    tokens = make_parser().parse(source)
    begins = sorted({token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0} - {0})
    places = [0, *(sum(len(line) + 1 for line in source.split("\n")[:begin]) for begin in begins), len(source)]
    assert [text for text, _ in split_growing(source)] == [source[a:b] for a, b in itertools.pairwise(places)]


@given(st.lists(PIECES, max_size=30), st.integers(10, 60))
def test_an_answer_in_pieces_is_drawn_as_if_it_had_come_at_once(pieces: list[str], width: int) -> None:
    growing = MarkdownView()
    growing._lay_out_all(width)
    growing.refresh = lambda *_, **__: growing  # type: ignore[method-assign]
    for piece in pieces:
        growing.append(piece)
    assert growing.source == "".join(pieces)
    whole = MarkdownView("".join(pieces))
    whole._lay_out_all(width)
    assert texts(growing.lines) == texts(whole.lines)


def test_another_width_lays_everything_out_anew() -> None:
    view, fresh = MarkdownView(SOURCE), MarkdownView(SOURCE)
    view._lay_out_all(60)
    view._lay_out_all(20)
    fresh._lay_out_all(20)
    assert texts(view.lines) == texts(fresh.lines)


def test_a_growing_document_is_cut_where_its_last_block_starts() -> None:
    assert split_growing("a\n\n- x\n- y\n\nb\n") == [("a\n\n", False), ("- x\n- y\n\n", False), ("b\n", False)]
    assert split_growing("") == [("", False)]


def test_a_long_list_is_cut_at_its_last_item_and_a_long_paragraph_at_a_space() -> None:
    items = "- item\n" * (LONG_BLOCK // 6)
    assert split_growing(items) == [(items[:-7], False), ("- item\n", True)]
    words = "word " * (LONG_BLOCK // 4) + "en"
    assert split_growing(words) == [(words[:-2], False), ("en", True)]
    code = "```\n" + "x y\n" * LONG_BLOCK + "```\n"
    assert split_growing(code) == [(code, False)]


def test_html_is_text() -> None:
    lines = texts(render("<b onclick=x>hi</b> <script>1</script>\n\n<div>\nblock\n</div>", 60, plain))
    assert lines == ["<b onclick=x>hi</b> <script>1</script>", "", "<div> block </div>"]


def test_script_and_file_addresses_are_no_links() -> None:
    for source in ("[a](javascript:alert(1))", "[b](data:text/html,x)", "[c](file:///etc/passwd)"):
        (line,) = render(source, 60, plain)
        assert line.plain == source
        assert not any(getattr(span.style, "meta", None) for span in line.spans)
    assert make_parser().options["html"] is False


def test_a_wide_table_shrinks_its_widest_columns() -> None:
    source = f"| a | b |\n|---|---|\n| {'word ' * 12} | x |\n"
    lines = render(source, 24, plain)
    assert max(line.cell_length for line in lines) <= 24
    assert len(lines) > 4


@pytest.mark.parametrize("width", [1, 2, 8, 40])
def test_code_is_folded_and_padded_to_the_width(width: int) -> None:
    lines = render("```\n" + "x" * 50 + "\n```", width, plain)
    assert all(line.cell_length == max(8, width) for line in lines)
    assert "".join(line.plain.strip() for line in lines) == "x" * 50


async def test_long_code_is_plain_at_once_and_colored_in_a_thread() -> None:
    highlight = Highlighter()
    code = "\n".join(f"value_{n} = {n}" for n in range(40))
    assert not highlight(code, "python").spans
    assert highlight.wants
    assert await highlight.color_wanted()
    assert highlight(code, "python").spans
    assert highlight(code, "python").plain == code
    assert highlight("x = 1", "python").spans
    assert not highlight("x = 1", "").spans
    assert highlight("x = 1", "no-such-language").plain == "x = 1"


def test_an_open_fence_grows_as_it_would_be_drawn_whole() -> None:
    code = "def f():\n\treturn 1\n\n" + "long " * 20 + "\nlast"
    view, whole = MarkdownView("before\n"), MarkdownView("before\n")
    for each in (view, whole):
        each.refresh = lambda *_, each=each, **__: each  # type: ignore[method-assign]
        each._lay_out_all(30)
    for end in range(len(code) + 1):
        view.append("", code[:end])
    whole.append("", code)
    assert texts(view.lines) == texts(whole.lines)
    view.append("```\nx\n```\n", None)
    assert texts(view.lines) == ["before", "", "", "  x", ""]


@pytest.mark.parametrize("piece", ["**b** ", "- item\n", "word\n", "> q\n", "1. n\n", "[" * 9, "日本語", "a\n\n"])
def test_text_without_an_end_is_laid_out_in_stretches(piece: str) -> None:
    view = MarkdownView()
    view.refresh = lambda *_, **__: view  # type: ignore[method-assign]
    view._lay_out_all(50)
    for _ in range(20):
        view.append(piece * 300)
    assert view.source == piece * 6000
    assert all(len(part.source) <= 4 * LONG_BLOCK for part in view._settled)

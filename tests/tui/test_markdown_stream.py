from hypothesis import given
from hypothesis import strategies as st

from chatd_tui.markdown_stream import FenceSplitter

LINES = st.sampled_from(
    [
        "```\n",
        "```py\n",
        "````\n",
        "~~~\n",
        "  ```\n",
        "text ``` more\n",
        "``inline`` x\n",
        "\n",
        "a",
        "`",
        "~~",
        "- item\n",
    ]
)


def feed_all(splitter: FenceSplitter, pieces: list[str]) -> tuple[str, list[str]]:
    markdown, fences = "", []
    for piece in pieces:
        out = splitter.feed(piece)
        markdown += out.markdown
        fences.append(out.open_fence)
    return markdown, fences


def test_a_fence_is_held_back_until_it_closes() -> None:
    splitter = FenceSplitter()
    assert splitter.feed("Look:\n\n``").markdown == "Look:\n\n"
    opened = splitter.feed("`python\nx = ")
    assert (opened.markdown, opened.open_fence) == ("", "```python\nx = ")
    assert splitter.feed("1\n``").open_fence == "```python\nx = 1\n``"
    closed = splitter.feed("`\nDone")
    assert (closed.markdown, closed.open_fence) == ("```python\nx = 1\n```\nDone", "")


def test_an_unclosed_fence_comes_out_at_the_end() -> None:
    splitter = FenceSplitter()
    assert feed_all(splitter, ["```\nabc"]) == ("", ["```\nabc"])
    assert splitter.end().markdown == "```\nabc"


def test_backticks_inside_a_line_do_not_open_a_fence() -> None:
    splitter = FenceSplitter()
    assert splitter.feed("use ```x``` here\n```not a fence``` \n").markdown == "use ```x``` here\n```not a fence``` \n"


def test_a_shorter_or_other_marker_does_not_close_a_fence() -> None:
    splitter = FenceSplitter()
    markdown, fences = feed_all(splitter, ["````\n```\n~~~~\n````x\n"])
    assert (markdown, fences) == ("", ["````\n```\n~~~~\n````x\n"])
    assert splitter.feed("````\n").markdown == "````\n```\n~~~~\n````x\n````\n"


def test_an_endless_opening_line_is_text() -> None:
    text = "```" + "x" * 300
    assert FenceSplitter().feed(text).markdown == text


@given(st.lists(LINES, max_size=12).map("".join), st.lists(st.integers(1, 7), max_size=60))
def test_markdown_is_a_prefix_of_the_answer_wherever_it_is_cut(text: str, sizes: list[int]) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    whole, cut = FenceSplitter(), FenceSplitter()
    once = whole.feed(text)
    markdown, fences = feed_all(cut, pieces)
    assert markdown == once.markdown
    assert fences[-1] == once.open_fence
    assert markdown + cut.end().markdown == text

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.sessions.stop_strings import StopMatch, StopStrings

SMALL = st.text(alphabet="ab\n", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def first_completed(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The stop string that is completed first, and where it starts; the longest of those completed together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return longest, end - len(longest)
    return None


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    text = draw(SMALL)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    bounds = [0, *cuts, len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@settings(deadline=None)
@given(chunked(), STOPS)
def test_the_outcome_is_that_of_a_search_in_the_whole_text_however_it_is_cut(
    chunks: list[str], stops: list[str]
) -> None:
    text = "".join(chunks)
    watcher = StopStrings(stops)
    sent = [watcher.push(chunk) for chunk in chunks]
    expected = first_completed(text, stops)
    if expected is None:
        assert watcher.match is None
        assert "".join(sent) + watcher.flush() == text
        return
    stop, start = expected
    completing = next(i for i in range(len(chunks)) if first_completed("".join(chunks[: i + 1]), stops))
    assert watcher.match == StopMatch(stop, num_tokens=completing + 1, num_chars=start)
    assert "".join(sent) + watcher.flush() == text[:start]


@settings(deadline=None)
@given(chunked(), STOPS)
def test_no_part_of_a_stop_string_that_comes_to_be_matched_is_ever_sent(chunks: list[str], stops: list[str]) -> None:
    expected = first_completed("".join(chunks), stops)
    watcher = StopStrings(stops)
    num_sent = 0
    for chunk in chunks:
        num_sent += len(watcher.push(chunk))
        assert expected is None or num_sent <= expected[1]


@settings(deadline=None)
@given(chunked(), STOPS)
def test_only_what_can_become_a_stop_string_is_held_back(chunks: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    text = ""
    for chunk in chunks:
        watcher.push(chunk)
        text += chunk
        if watcher.match is not None:
            break
        starts = [stop[:length] for stop in stops for length in range(1, len(stop))]
        assert watcher.held == max((start for start in starts if text.endswith(start)), key=len, default="")


def test_a_repeating_stop_string_is_found_after_a_false_start() -> None:
    watcher = StopStrings(["aab"])
    assert [watcher.push(char) for char in "aaab"] == ["", "", "a", ""]
    assert watcher.match == StopMatch("aab", num_tokens=4, num_chars=1)


def test_tokens_that_add_no_text_are_counted() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("so", 1) == "so"
    assert watcher.push("", 2) == ""
    assert watcher.push(" EN", 1) == " "
    assert watcher.push("D and more", 1) == ""
    assert watcher.match == StopMatch("END", num_tokens=5, num_chars=3)


def test_nothing_is_sent_after_a_match() -> None:
    watcher = StopStrings(["."])
    assert watcher.push("One. Two.") == "One"
    assert watcher.push("Three") == ""
    assert watcher.flush() == ""


def test_text_passes_at_once_where_there_are_no_stop_strings() -> None:
    watcher = StopStrings([])
    assert watcher.push("anything") == "anything"
    assert watcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])

"""Tokens to text: I17 and I27, whatever the steps in which tokens come."""

from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.sessions.stop_strings import StopStrings
from chatd.sessions.turn import AnswerText
from chatd.testing.sessions import END_OF_TEXT, STOP_IDS, TURN_END, ByteVocabulary, encode_text

VOCABULARY = ByteVocabulary()
TEXT = st.text(st.sampled_from("ab.é🙂\n "), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("ab.é\n"), min_size=1, max_size=4), max_size=3)


def answer_text(stops: tuple[str, ...] = ()) -> AnswerText:
    return AnswerText(
        VOCABULARY.detokenizer(), stops, STOP_IDS, lambda i: VOCABULARY.token_bytes[i].decode(errors="replace")
    )


def feed(ids: list[int], cuts: list[int], stops: tuple[str, ...], *, logprobs: bool = False):
    text = answer_text(stops)
    deltas = []
    position = 0
    for cut in [*cuts, len(ids)]:
        part = ids[position : position + cut]
        position += len(part)
        if part:
            delta = text.push(part, [(-1.0, []) for _ in part] if logprobs else None)
            if delta is not None:
                deltas.append(delta)
    last = text.flush()
    if last is not None:
        deltas.append(last)
    return text, deltas


@settings(max_examples=300, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(1, 5), max_size=30), st.sampled_from([(), (TURN_END,), (END_OF_TEXT,)]))
def test_the_text_and_the_ids_do_not_depend_on_the_steps(
    said: str, stops: list[str], cuts: list[int], end: tuple[int, ...]
) -> None:
    ids = [*encode_text(said), *end]
    whole, _ = feed(ids, [len(ids)], tuple(stops))
    text, deltas = feed(ids, cuts, tuple(stops))
    joined = "".join(delta.text for delta in deltas)
    ends = [(said.find(stop) + len(stop), -len(stop)) for stop in stops if stop in said]
    if ends:
        stop_end, minus_length = min(ends)
        assert text.is_stopped
        assert joined == said[: stop_end + minus_length]
        assert text.ids.tolist() == encode_text(said[:stop_end])
    else:
        assert not text.is_stopped
        assert joined == said
        assert text.ids.tolist() == ids
    assert text.ids == whole.ids
    assert sum(delta.num_tokens for delta in deltas) <= len(text.ids)
    assert all("\ufffd" not in delta.text for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=12), st.lists(st.integers(1, 3), max_size=12))
def test_invalid_bytes_give_the_same_replacement_characters_in_any_steps(ids: list[int], cuts: list[int]) -> None:
    _, deltas = feed(ids, cuts, ())
    assert "".join(delta.text for delta in deltas) == bytes(ids).decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(1, 5), max_size=30))
def test_log_probabilities_never_tell_of_a_stop_string(said: str, stops: list[str], cuts: list[int]) -> None:
    ids = encode_text(said)
    _, deltas = feed(ids, cuts, tuple(stops), logprobs=True)
    shown = [entry.token for delta in deltas for entry in delta.logprobs or ()]
    joined = "".join(delta.text for delta in deltas)
    tokens = [VOCABULARY.token_bytes[i].decode(errors="replace") for i in ids]
    assert shown == tokens[: len(shown)]
    assert len(shown) <= len(joined.encode()) + 3
    if not any(stop in said for stop in stops):
        assert len(shown) == len(ids) or joined == ""


def test_no_prefix_of_a_matched_stop_string_is_sent() -> None:
    text = answer_text(("STOP",))
    sent = [text.push([token]) for token in encode_text("xSTO")]
    assert [delta.text for delta in sent if delta] == ["x"]
    assert text.push(encode_text("P")) is None
    assert text.is_stopped
    assert text.push(encode_text("more")) is None
    assert text.flush() is None
    assert text.ids.tolist() == encode_text("xSTOP")


def test_what_was_held_back_comes_at_the_end() -> None:
    text = answer_text(("STOP",))
    assert text.push(encode_text("ST")) is None
    assert text.flush().text == "ST"


def test_a_stop_id_counts_and_has_no_text() -> None:
    text = answer_text()
    delta = text.push([*encode_text("hi"), TURN_END])
    assert (delta.text, delta.num_tokens) == ("hi", 3)
    assert text.ids.tolist() == [*encode_text("hi"), TURN_END]


def test_a_stop_string_longer_than_everything_holds_everything_back() -> None:
    stops = StopStrings(("aaaa",))
    assert stops.push("aaa") == ""
    text = answer_text(("aaaa",))
    assert text.push(encode_text("aaa")) is None
    assert text.push(encode_text("b")).text == "aaab"

"""A conversation's tree and its logs, beside a plain model: lists of ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.engine.sampling import SamplingParams
from chatd.protocol import Item, Message, Timings, Usage
from chatd.sessions.conversation import (
    Conversation,
    Node,
    common_length,
    last_answer,
    log_between,
    log_of,
    path_to,
    pending_after,
)

SAMPLING = SamplingParams(max_tokens=9)


def answered(conversation: Conversation, parent: Node | None, prompt: list[int], ids: list[int]) -> Node:
    node = conversation.begin_answer(f"n{len(conversation)}", parent, prompt, SAMPLING, ())
    node.ids.extend(ids)
    return node


IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
STEPS = st.lists(st.tuples(st.integers(0, 10_000), st.booleans(), IDS, IDS), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 60))
def test_logs_are_the_ids_of_the_answers_on_the_path(steps: list, one: int, two: int, start: int) -> None:
    conversation = Conversation()
    nodes: list[Node | None] = [None]
    logs: dict[Node | None, list[int]] = {None: []}
    paths: dict[Node | None, list[Node]] = {None: []}
    for choice, is_answer, prompt, ids in steps:
        parent = nodes[choice % len(nodes)]
        if is_answer:
            node = answered(conversation, parent, prompt, ids)
        else:
            node = conversation.add_message(f"n{len(conversation)}", "user", "x", parent)
        nodes.append(node)
        logs[node] = logs[parent] + (prompt + ids if is_answer else [])
        paths[node] = [*paths[parent], node]
        assert conversation.head is node
    for node in nodes:
        assert log_of(node).tolist() == logs[node]
        assert path_to(node) == paths[node]
        assert (0 if node is None else node.num_tokens) == len(logs[node])
        assert log_between(node, start) == logs[node][start:]
        answers = [each for each in paths[node] if each.is_answer]
        assert last_answer(node) is (answers[-1] if answers else None)
        after = paths[node].index(answers[-1]) + 1 if answers else 0
        assert pending_after(last_answer(node), node) == paths[node][after:]
    a, b = nodes[one % len(nodes)], nodes[two % len(nodes)]
    shared = [x for x, y in zip(paths[a], paths[b], strict=False) if x is y]
    assert common_length(a, b) == (len(logs[shared[-1]]) if shared else 0)


def test_a_failed_turn_leaves_no_trace() -> None:
    conversation = Conversation("sys")
    first = conversation.add_message("u1", "user", "hello", None)
    kept = answered(conversation, first, [1, 2], [3])
    asked = conversation.add_message("u2", "user", "more", kept)
    answered(conversation, asked, [4], [5])
    conversation.remove_from(asked, kept)
    assert conversation.head is kept
    assert [node.id for node in conversation] == ["u1", kept.id]
    assert conversation.get("u2") is None
    assert conversation.log().tolist() == [1, 2, 3]


def test_only_a_turn_on_the_path_can_be_taken_out() -> None:
    conversation = Conversation()
    one = conversation.add_message("u1", "user", "a", None)
    conversation.add_message("u2", "user", "b", None)
    with pytest.raises(AssertionError, match="u1 is not on the path"):
        conversation.remove_from(one, None)


def test_an_answer_ends_once() -> None:
    conversation = Conversation()
    answer = answered(conversation, None, [1], [2])
    usage = Usage.of(1, 0, 1)
    timings = Timings(queue_ms=0.0, ttft_ms=0.0, prefill_tok_s=0.0, decode_tok_s=0.0, preemptions=0)
    conversation.end_answer(answer, status="completed", reason="stop", usage=usage, timings=timings)
    assert answer.to_item() == Item(
        id=answer.id, role="assistant", content="", status="completed", reason="stop", usage=usage, timings=timings
    )
    with pytest.raises(AssertionError, match="ends twice"):
        conversation.end_answer(answer, status="completed", reason="stop", usage=usage, timings=timings)


def test_a_path_is_shared_by_a_conversation_that_starts_from_it() -> None:
    conversation = Conversation("sys")
    asked = conversation.add_message("u1", "user", "hello", None)
    answer = answered(conversation, asked, [1, 2], [3])
    other = Conversation("sys", answer)
    other.add_message("u2", "user", "more", answer)
    assert [node.id for node in other.path()] == ["u1", answer.id, "u2"]
    assert [node.id for node in conversation.path()] == ["u1", answer.id]
    assert other.path()[0] is conversation.path()[0]


def test_text_is_what_was_appended() -> None:
    conversation = Conversation()
    answer = answered(conversation, None, [], [])
    for part in ("a", "é", "", "🙂"):
        answer.append_text(part)
        assert answer.to_message() == Message(role="assistant", content=answer.content)
    assert answer.content == "aé🙂"

"""A conversation's tree and its logs, beside a plain model: lists of ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.engine.sampling import SamplingParams
from chatd.protocol import Item, Message, Siblings, Timings, Usage
from chatd.sessions.conversation import Conversation
from chatd.sessions.logs import (
    Node,
    common_length,
    common_prefix,
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


def naive_item(conversation: Conversation, node: Node) -> Item:
    """An item whose siblings are found by looking at every message."""
    beside = [other for other in conversation if other.parent is node.parent]
    if len(beside) < 2:
        return node.to_item()
    at = beside.index(node)
    item = conversation.item_of(node)
    for other, leaf in ((at - 1, item.siblings.previous), (at + 1, item.siblings.next)):
        if not 0 <= other < len(beside):
            assert leaf is None
            continue
        end = conversation.get(leaf)
        assert beside[other] in path_to(end)
        assert not [child for child in conversation if child.parent is end]
    siblings = Siblings(index=at + 1, count=len(beside), previous=item.siblings.previous, next=item.siblings.next)
    return node.to_item(siblings)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "select", "fail"]), st.integers(0, 1000)), max_size=30))
def test_siblings_lead_to_the_ends_of_the_other_branches(steps: list) -> None:
    conversation = Conversation()
    number = 0
    for kind, choice in steps:
        nodes = [None, *conversation]
        node = nodes[choice % len(nodes)]
        seen = conversation.head
        if kind == "select" and node is not None:
            conversation.select(node)
            assert conversation.path() == path_to(node)
        elif kind != "select":
            number += 1
            added = conversation.add_message(f"n{number}", "user", "x", node)
            if kind == "fail":
                conversation.remove_from(added, seen)
                assert conversation.head is seen
        for each in conversation:
            assert conversation.item_of(each) == naive_item(conversation, each)
    assert conversation.num_bytes == sum(node.num_bytes for node in conversation)


def test_a_branch_is_seen_again_where_it_was_left() -> None:
    conversation = Conversation()
    a = conversation.add_message("a", "user", "x", None)
    for name in ("a1", "a2"):
        conversation.add_message(name, "assistant", "x", a)
    conversation.select(conversation.get("a1"))
    b = conversation.add_message("b", "user", "x", None)
    assert conversation.item_of(b).siblings == Siblings(index=2, count=2, previous="a1")
    conversation.select(conversation.get("a2"))
    conversation.select(b)
    assert conversation.item_of(b).siblings.previous == "a2"


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


@pytest.mark.parametrize(
    ("old", "new", "shared"),
    [
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3, 4], [1, 2], 1),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [9], 0),
        ([], [1], 0),
        ([1], [1], 0),
    ],
)
def test_two_answers_to_one_message_share_all_of_the_prompt_but_one_id(
    old: list[int], new: list[int], shared: int
) -> None:
    conversation = Conversation()
    begun = answered(conversation, None, [7, 7], [8])
    asked = conversation.add_message("u", "user", "x", begun)
    first = answered(conversation, asked, old, [5, 5])
    second = answered(conversation, asked, new, [])
    assert common_prefix(first, second) == 3 + shared
    # To go on after the first, all of it is there.
    more = answered(conversation, first, [6], [])
    assert common_prefix(first, more) == 3 + len(old) + 2
    assert common_prefix(None, second) == 0


def test_text_is_what_was_appended() -> None:
    conversation = Conversation()
    answer = answered(conversation, None, [], [])
    for part in ("a", "é", "", "🙂"):
        answer.append_text(part)
        assert answer.to_message() == Message(role="assistant", content=answer.content)
    assert answer.content == "aé🙂"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30), st.integers(0, 10_000))
def test_what_is_read_again_shows_what_was_shown_when_it_was_added(parents: list[int], head: int) -> None:
    live, again = Conversation(), Conversation()
    for number, place in enumerate(parents):
        for conversation in (live, again):
            add = live.add_message if conversation is live else again.add_stored
            before = None if number == 0 else conversation.get(f"n{place % number}")
            add(f"n{number}", "user", str(number), before if place % 7 else None)
    name = f"n{head % len(parents)}"
    live.select(live.get(name))
    again.show(again.get(name))
    assert [again.item_of(node) for node in again] == [live.item_of(node) for node in live]
    assert [node.id for node in again.path()] == [node.id for node in live.path()]


def test_two_long_branches_that_take_turns_are_read_in_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = []
    select = Conversation.select
    monkeypatch.setattr(Conversation, "select", lambda self, node: ways.append(node) or select(self, node))
    conversation = Conversation()
    ends: list[Node | None] = [None, None]
    for number in range(200):
        ends[number % 2] = conversation.add_stored(f"n{number}", "user", "x", ends[number % 2])
    conversation.show(ends[0])
    assert len(ways) == 1
    assert len(conversation.path()) == 100

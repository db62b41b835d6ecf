"""What waits for a socket: merged where it may be, bounded, in order within a session."""

import asyncio

import pytest

from chatd.protocol import Logprob, OutputTextDelta, Pong, SessionDetached, decode_event, encode
from chatd.server.outbox import EventEncoder, Outbox


def delta(seq: int, text: str, session: str = "s", item: str = "i", **fields) -> OutputTextDelta:
    return OutputTextDelta(session=session, seq=seq, ts=1.0, item_id=item, delta=text, n_tokens=1, **fields)


def make(high_water_bytes: int = 10_000, timeout_s: float = 5.0) -> tuple[Outbox, list[str]]:
    overloads: list[str] = []
    outbox = Outbox(
        EventEncoder(),
        high_water_bytes=high_water_bytes,
        timeout_s=timeout_s,
        on_overload=lambda: overloads.append("overload"),
    )
    return outbox, overloads


def drain(outbox: Outbox) -> list:
    events = []
    while (text := outbox.next()) is not None:
        events.append(decode_event(text))
    return events


async def test_adjacent_deltas_of_one_answer_merge() -> None:
    outbox, _ = make()
    for i, text in enumerate("abc"):
        outbox.put(delta(i + 1, text))
    [event] = drain(outbox)
    assert (event.delta, event.n_tokens, event.seq_from, event.seq) == ("abc", 3, 1, 3)
    assert outbox.num_bytes == 0


async def test_deltas_of_other_sessions_between_do_not_prevent_merging() -> None:
    outbox, _ = make()
    for seq in (1, 2, 3):
        for session in ("s", "t"):
            outbox.put(delta(seq, f"{session}{seq}", session))
    events = drain(outbox)
    assert [(event.session, event.delta, event.seq) for event in events] == [("s", "s1s2s3", 3), ("t", "t1t2t3", 3)]


async def test_a_delta_does_not_jump_over_another_event_of_its_session() -> None:
    outbox, _ = make()
    outbox.put(delta(1, "a"))
    outbox.put(SessionDetached(session="s"))
    outbox.put(delta(2, "b"))
    assert [type(event) for event in drain(outbox)] == [OutputTextDelta, SessionDetached, OutputTextDelta]


@pytest.mark.parametrize("second", [delta(3, "b"), delta(2, "b", item="j")])
async def test_a_gap_or_another_answer_is_not_merged(second) -> None:
    outbox, _ = make()
    outbox.put(delta(1, "a"))
    outbox.put(second)
    assert len(drain(outbox)) == 2


async def test_a_delta_that_was_taken_is_not_merged_into() -> None:
    outbox, _ = make()
    outbox.put(delta(1, "a"))
    assert outbox.next() is not None
    outbox.put(delta(2, "b"))
    [event] = drain(outbox)
    assert (event.delta, event.seq_from) == ("b", None)


async def test_merged_deltas_keep_their_log_probabilities_and_merge_again() -> None:
    outbox, _ = make()
    outbox.put(delta(1, "ab", seq_from=None, logprobs=[Logprob(token="a", logprob=-1.0)]))
    outbox.put(delta(4, "cd", seq_from=2, logprobs=[Logprob(token="c", logprob=-2.0)]))
    outbox.put(delta(5, "e"))
    [event] = drain(outbox)
    assert (event.delta, event.seq_from, event.seq) == ("abcde", 1, 5)
    assert [entry.token for entry in event.logprobs] == ["a", "c"]


async def test_a_long_merge_concatenates_to_the_same_text() -> None:
    outbox, _ = make(10**7)
    texts = [f"{i} é " for i in range(1000)]
    for i, text in enumerate(texts):
        outbox.put(delta(i + 1, text))
    [event] = drain(outbox)
    assert event.delta == "".join(texts)
    assert event.n_tokens == 1000


async def test_of_the_pool_only_the_latest_is_sent_and_made_when_its_turn_comes() -> None:
    outbox, _ = make()
    made = []
    for number in (1, 2, 3):
        outbox.put_pool(lambda number=number: made.append(number) or Pong(t=number))
    outbox.put(Pong(t=0))
    assert made == []
    assert [event.t for event in drain(outbox)] == [0, 3]
    assert made == [3]
    outbox.put_pool(lambda: Pong(t=4))
    outbox.drop_pool()
    assert drain(outbox) == []


async def test_staying_above_the_mark_is_an_overload_once() -> None:
    outbox, overloads = make(100, timeout_s=0.02)
    outbox.put(delta(1, "x" * 200))
    async with asyncio.timeout(5):
        while not overloads:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    outbox.put(delta(2, "y"))
    assert outbox.next() is None
    assert overloads == ["overload"]


async def test_coming_below_the_mark_stops_the_clock() -> None:
    outbox, overloads = make(100, timeout_s=0.02)
    outbox.put(delta(1, "x" * 200))
    waiting = asyncio.create_task(outbox.wait_below())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert outbox.next() is not None
    await waiting
    await asyncio.sleep(0.03)
    assert overloads == []


async def test_far_above_the_mark_is_an_overload_at_once_but_one_large_frame_is_not() -> None:
    outbox, overloads = make(100)
    outbox.put(delta(1, "x" * 100_000))
    outbox.put(Pong(t=1))
    assert overloads == []
    for seq in range(100):
        outbox.put(SessionDetached(session=f"s{seq}"))
    assert overloads == ["overload"]
    assert outbox.num_bytes == 0


async def test_waiting_ends_when_something_is_put() -> None:
    outbox, _ = make()
    waiting = asyncio.create_task(outbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(Pong(t=1))
    await waiting


def test_an_event_for_many_is_encoded_once() -> None:
    encoder = EventEncoder()
    event = Pong(t=1)
    assert encoder.encode(event) == encode(event)
    assert encoder.encode(event) is encoder.encode(event)
    assert encoder.encode(Pong(t=2)) == encode(Pong(t=2))

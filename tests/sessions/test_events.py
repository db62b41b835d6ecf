"""The ring of a session's transcript events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatd.protocol import Item, ItemAdded, Logprob, OutputTextDelta, Params, SessionUpdated
from chatd.sessions.events import EVENT_OVERHEAD_BYTES, EventRing, Subscription, event_bytes
from chatd.testing.protocol_values import make_info
from chatd.testing.sessions import RecordingSubscriber


def delta(seq: int, text: str = "x", ts: float = 0.0) -> OutputTextDelta:
    return OutputTextDelta(session="s", seq=seq, ts=ts, item_id="i", delta=text, n_tokens=1)


def ring_of(num_events: int, **bounds: float) -> EventRing:
    settings = {"max_events": 4, "max_bytes": 10**6, "ttl_s": 100.0, **bounds}
    ring = EventRing(**settings)
    for seq in range(1, num_events + 1):
        ring.append(delta(seq))
    return ring


def test_what_was_missed_is_given_exactly() -> None:
    ring = ring_of(3)
    assert [event.seq for event in ring.after(0)] == [1, 2, 3]
    assert [event.seq for event in ring.after(2)] == [3]
    assert ring.after(3) == []


def test_what_the_ring_no_longer_has_is_not_guessed() -> None:
    ring = ring_of(6)
    assert ring.after(1) is None
    assert [event.seq for event in ring.after(2)] == [3, 4, 5, 6]


def test_a_client_from_the_future_is_not_given_an_exact_replay() -> None:
    assert ring_of(3).after(4) is None
    assert ring_of(0).after(1) is None
    assert ring_of(0).after(0) == []


def test_bytes_are_bounded_even_by_one_event() -> None:
    ring = EventRing(max_events=100, max_bytes=3 * EVENT_OVERHEAD_BYTES, ttl_s=100.0)
    ring.append(delta(1))
    ring.append(delta(2))
    assert len(ring) == 2
    ring.append(delta(3, "y" * 10_000))
    assert (len(ring), ring.num_bytes, ring.head_seq) == (0, 0, 3)
    assert ring.after(2) is None
    assert ring.after(3) == []


@pytest.mark.parametrize(
    "fields", [{"system": "s" * 9_000}, {"metadata": {"k": "v" * 9_000}}, {"params": Params(stop=("x" * 9_000,))}]
)
def test_what_clients_decide_of_an_event_counts(fields: dict) -> None:
    info = make_info(**fields)
    assert event_bytes(SessionUpdated(session="s", seq=1, ts=0.0, info=info)) > 9_000


def test_old_events_expire() -> None:
    ring = EventRing(max_events=100, max_bytes=10**6, ttl_s=10.0)
    ring.append(delta(1, ts=0.0))
    ring.append(delta(2, ts=5.0))
    ring.append(delta(3, ts=12.0))
    assert ring.after(0) is None
    assert [event.seq for event in ring.after(1)] == [2, 3]
    ring.expire(30.0)
    assert (len(ring), ring.num_bytes) == (0, 0)


def test_a_gap_is_a_broken_invariant() -> None:
    ring = ring_of(1)
    with pytest.raises(AssertionError, match="event 3 after 1"):
        ring.append(delta(3))


def test_text_and_log_probabilities_count_as_bytes() -> None:
    plain = event_bytes(delta(1, "abc"))
    rich = OutputTextDelta(
        session="s", seq=1, ts=0.0, item_id="i", delta="abc", n_tokens=1, logprobs=[Logprob(token="a", logprob=-1.0)]
    )
    assert event_bytes(rich) > plain
    item = Item(id="i", role="user", content="z" * 5000, status="completed")
    assert event_bytes(ItemAdded(session="s", seq=1, ts=0.0, item=item)) > 5000


@given(st.lists(st.integers(0, 400), max_size=60), st.integers(1, 12), st.integers(300, 3000))
def test_the_ring_has_exactly_the_latest_events_within_its_bounds(sizes: list[int], events: int, size: int) -> None:
    ring = EventRing(max_events=events, max_bytes=size, ttl_s=100.0)
    sent = []
    for seq, length in enumerate(sizes, start=1):
        sent.append(delta(seq, "x" * length))
        ring.append(sent[-1])
        assert ring.num_bytes <= size
        assert len(ring) <= events
        kept = sent[len(sent) - len(ring) :]
        assert ring.num_bytes == sum(event_bytes(event) for event in kept)
        for after in range(seq + 1):
            expected = sent[after:] if after >= seq - len(ring) else None
            assert ring.after(after) == expected


def test_a_held_subscription_keeps_the_order() -> None:
    subscriber = RecordingSubscriber()
    subscription = Subscription(subscriber, "writer", [delta(1), delta(2)])
    subscription.deliver(delta(3))
    assert subscriber.events == []
    subscription.start()
    subscription.deliver(delta(4))
    subscription.start()
    assert [event.seq for event in subscriber.events] == [1, 2, 3, 4]

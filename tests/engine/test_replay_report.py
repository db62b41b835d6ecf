"""What a replay tells a person: sums by tenant, reasons of waiting, and one request's life."""

import functools

import pytest

from chatd.engine.decision_log import Call, Header
from chatd.engine.messages import Cancel
from chatd.engine.plan import RequestId
from chatd.engine.recording import RecordingCore
from chatd.engine.replay import Replay
from chatd.engine.replay_report import Life, Tally
from chatd.testing import engine
from chatd.testing.engine import EngineHarness, engine_config, sampling_params


class Kept:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def open(self, header: Header) -> "Kept":
        self.header = header
        return self

    def write(self, call: Call) -> None:
        self.calls.append(call)

    def close(self) -> None: ...


@pytest.fixture
def crowded() -> Kept:
    """Two tenants in a pool for little more than one of them; each step takes a quarter of a second."""
    kept = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "EngineCore", functools.partial(RecordingCore, make_writer=kept.open))
        run = EngineHarness(config=engine_config(num_blocks=12, max_model_len=40))
    for request, tenant in ((1, "acme"), (2, "blue"), (3, "blue")):
        run.submit(request, [request] * 17, tenant=tenant, params=sampling_params(12))
    for _ in range(400):
        if not run.core.has_work:
            break
        run.step()
        run.clock.advance(0.25)
    run.submit(4, [1] * 17, tenant="acme", params=sampling_params(3))
    run.step()
    run.send(Cancel(RequestId(4)))
    assert run.core.scheduler.num_preemptions > 0
    return kept


def replayed(kept: Kept, *observers: Tally | Life) -> None:
    assert Replay(kept.header).run(kept.calls, observers) is None


def test_sums_are_by_tenant(crowded: Kept) -> None:
    tally = Tally()
    replayed(crowded, tally)
    acme, blue = tally.tenants["acme"], tally.tenants["blue"]
    assert (acme.submitted, blue.submitted) == (2, 2)
    assert acme.ended == {"max_output_tokens": 1, "cancelled": 1}
    assert blue.ended == {"max_output_tokens": 2}
    assert (acme.prompt_tokens, acme.cached_tokens) == (34, 4)
    assert blue.output_tokens == 24
    assert acme.preemptions + blue.preemptions == tally.total().preemptions > 0
    assert tally.num_steps == sum(len(call.runs) for call in crowded.calls)
    assert tally.seconds == pytest.approx(crowded.calls[-1].now - crowded.calls[0].now)


def test_time_is_counted_by_what_was_waited_for(crowded: Kept) -> None:
    tally = Tally()
    replayed(crowded, tally)
    waited = tally.total().waited_s
    assert waited["no_blocks"] > 1.0
    # Nobody waits longer than there was time, and nobody for what nobody lacked.
    assert sum(waited.values()) <= 3 * tally.seconds
    assert "slots" not in waited
    assert sum(tally.waited_s.values()) == pytest.approx(sum(waited.values()))
    longest = max(tally.waited_s, key=lambda request: tally.waited_s[request])
    assert f"longest waits: request {longest} {tally.waited_s[longest]:.3f} s, request " in tally.lines()[-1]


def test_the_summary_is_text(crowded: Kept) -> None:
    tally = Tally()
    replayed(crowded, tally)
    text = "\n".join(tally.lines())
    assert "acme: 2 requests, ended: 1 cancelled, 1 max_output_tokens\n  34 prompt tokens, hit rate 11.8%" in text
    assert "\nall: 4 requests" in text
    assert "waited: no_blocks " in text


def test_what_lies_before_the_first_step_is_not_counted(crowded: Kept) -> None:
    whole, late = Tally(), Tally(first_step=10)
    replayed(crowded, whole, late)
    assert late.num_steps < whole.num_steps
    assert late.tenants["acme"].submitted == 1
    assert late.seconds < whole.seconds


def test_a_life_is_told_from_submission_to_end(crowded: Kept) -> None:
    lives = {request: Life(RequestId(request)) for request in (1, 2, 3, 4, 99)}
    replayed(crowded, *lives.values())
    told = {request: life.lines() for request, life in lives.items()}
    for request in (1, 2, 3):
        first, *_, last = told[request]
        assert "submitted for" in first
        assert "17 tokens after 0 of lease" in first
        assert "ended as max_output_tokens with 12 tokens of answer" in last
        assert any("admitted with 0 tokens computed already; its first chunk has " in line for line in told[request])
    preempted = [request for request in (1, 2, 3) if any("preempted for request" in line for line in told[request])]
    assert preempted
    for request in preempted:
        text = "\n".join(told[request])
        assert " s for no_blocks, in place" in text
        assert "computed tokens, and they are given up" in text
        winner = text.partition("preempted for request ")[2].partition(":")[0]
        if winner != str(request):
            assert f"request {request} is preempted for it" in "\n".join(told[int(winner)])
    assert "started: 4 of 17 prompt tokens were cached" in "\n".join(told[4])
    assert "ended as cancelled" in told[4][-1]
    assert told[99] == ["request 99 does not appear; the last one is 4"]


def test_a_life_tells_what_was_saved_below_the_pool_and_loaded_again() -> None:
    kept = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "EngineCore", functools.partial(RecordingCore, make_writer=kept.open))
        config = engine_config(num_blocks=12, max_model_len=40, host_slots=12, preemption="swap", digest_key=b"k" * 32)
        run = EngineHarness(config=config)
    for request, tenant in ((1, "acme"), (2, "blue")):
        run.submit(request, [request] * 17, tenant=tenant, params=sampling_params(20))
    for _ in range(400):
        if not run.core.has_work:
            break
        run.step()
        run.clock.advance(0.25)
    assert run.core.scheduler.num_preemptions > 0
    lives = [Life(RequestId(request)) for request in (1, 2)]
    replayed(kept, *lives)
    told = "\n".join(line for life in lives for line in life.lines())
    assert "full blocks of them are kept below the pool" in told
    assert "s for swap_in, in place 1 of its tenant's queue" in told
    assert "blocks from below the pool, up to token" in told

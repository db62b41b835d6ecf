"""The pool's last minute, and going back in it."""

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd import protocol as p
from chatd.client import PoolState
from chatd.testing.engine import FakeClock
from chatd_tui.pool_moments import MAX_MOMENTS, MAX_ROWS, WINDOW_S, PoolHistory, PoolMoment, PoolPlayer


def state(step: int = 0, **totals) -> PoolState:
    fields = {
        "blocks": 100,
        "free": 60,
        "cached": 0,
        "active": 40,
        "shared": 0,
        "evictions": 0,
        "hit_rate": 0.0,
        "tok_s": 0.0,
        "running": 0,
        "waiting": 0,
        "wanted_again": 0,
    }
    return PoolState(step=step, totals=p.PoolTotals(**{**fields, **totals}), tenants=())


def history(*moments: tuple[float, PoolState]) -> PoolHistory:
    made = PoolHistory()
    for at_s, told in moments:
        made.add(PoolMoment(told, at_s, 0.0))
    return made


def test_a_value_holds_until_the_next_frame() -> None:
    made = history((100.0, state(waiting=3)), (110.0, state(waiting=1)))
    queue = made.past(119.5).queue
    assert len(queue) == WINDOW_S
    assert queue[-20:] == (3.0,) * 10 + (1.0,) * 10
    assert set(queue[:-20]) == {0.0}


def test_a_peak_within_a_second_is_seen() -> None:
    made = history((0.0, state(waiting=1)), (0.25, state(waiting=9)), (0.5, state(waiting=0)))
    assert made.past(0.9).queue[-1] == 9.0
    assert made.past(1.9).queue[-2:] == (9.0, 0.0)


def test_counters_are_told_by_what_they_grew_and_a_new_daemon_s_is_no_negative_one() -> None:
    made = history(
        (0.0, state(evictions=10, wanted_again=1)),
        (2.0, state(evictions=16, wanted_again=3)),
        (3.0, state(evictions=1, wanted_again=0)),
        (4.0, state(evictions=5, wanted_again=0)),
    )
    past = made.past(4.0)
    assert past.evictions[-5:] == (0.0, 0.0, 6.0, 0.0, 4.0)
    assert past.wanted_again[-5:] == (0.0, 0.0, 2.0, 0.0, 0.0)


def test_a_daemon_that_does_not_count_what_is_wanted_again_has_no_line_of_it() -> None:
    assert history((0.0, state(wanted_again=None))).past(0.0).wanted_again == ()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 20.0), st.integers(0, 9)), min_size=1, max_size=80))
def test_all_that_was_counted_within_the_minute_is_in_it(frames) -> None:
    now_s, total, made, seen = 0.0, 0, PoolHistory(), []
    for gap_s, grown in frames:
        now_s += gap_s
        total += grown
        made.add(PoolMoment(state(evictions=total), now_s, 0.0))
        seen.append((now_s, grown))
    within = sum(grown for at_s, grown in seen[1:] if now_s - at_s < WINDOW_S)
    assert sum(made.past(now_s).evictions) == within


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=600))
def test_moments_are_bounded_apart_from_each_other_and_end_with_the_latest(gaps) -> None:
    made, now_s = PoolHistory(), 0.0
    for step, gap_s in enumerate(gaps):
        now_s += gap_s
        made.add(PoolMoment(state(step), now_s, 0.0))
        assert made.moments[-1] is made.latest
        assert made.latest.state.step == step
    assert len(made.moments) <= MAX_MOMENTS
    times = [moment.at_s for moment in made.moments]
    assert times == sorted(times)
    assert all(later - earlier >= 0.19 for earlier, later in pairwise(times[:-1]))
    assert len(made._totals) <= 600


def test_with_many_sessions_fewer_moments_are_kept() -> None:
    row = p.SessionBlocks(session="s", title="", held=0, shared=0, tokens=0, tier="device", active=False)
    crowded = msgspec.structs.replace(state(), sessions=(row,) * (MAX_ROWS // 4))
    made = history(*((float(at_s), crowded) for at_s in range(9)))
    assert [moment.at_s for moment in made.moments] == [5.0, 6.0, 7.0, 8.0]
    huge = msgspec.structs.replace(state(), sessions=(row,) * (MAX_ROWS + 1))
    made.add(PoolMoment(huge, 9.0, 0.0))
    assert [moment.at_s for moment in made.moments] == [9.0]


def player(num_moments: int) -> tuple[PoolPlayer, FakeClock]:
    clock = FakeClock()
    made = PoolPlayer(clock, lambda: 1_000_000.0 + clock.now)
    for step in range(num_moments):
        clock.now = float(step)
        made.add(state(step), clock.now)
    return made, clock


def shown(made: PoolPlayer) -> int:
    assert made.shown is not None
    return made.shown.state.step


def test_a_pause_keeps_what_is_shown_while_the_pool_goes_on() -> None:
    made, clock = player(3)
    made.toggle()
    clock.now = 10.0
    made.add(state(9), clock.now)
    assert (made.is_paused, shown(made)) == (True, 2)
    assert "8 s ago, step 2 (3/4)" in made.words()
    made.toggle()
    assert (made.is_paused, shown(made), made.words()) == (False, 9, "")


def test_one_goes_back_and_on_through_the_moments_to_their_ends() -> None:
    made, _ = player(4)
    made.step(-1)
    assert (made.is_paused, shown(made)) == (True, 2)
    made.step(-9)
    assert (shown(made), made.position) == (0, (1, 4))
    made.step(1)
    assert shown(made) == 1
    made.step(9)
    assert (shown(made), made.is_paused) == (3, True)


def test_a_moment_that_is_kept_no_more_stays_shown_and_the_way_on_is_to_the_oldest() -> None:
    made, clock = player(3)
    made.step(-9)
    for step in range(3, 3 + MAX_MOMENTS):
        clock.now = float(step)
        made.add(state(step), clock.now)
    assert (shown(made), made.position) == (0, (0, MAX_MOMENTS))
    made.step(1)
    assert shown(made) == 3


def test_before_the_first_frame_there_is_nothing_to_pause_at() -> None:
    made = PoolPlayer(FakeClock())
    made.toggle()
    made.step(-1)
    assert (made.is_paused, made.shown, made.words()) == (False, None, "")


def test_a_live_page_grows_older_and_a_paused_one_does_not() -> None:
    made, clock = player(3)
    clock.now = 10.0
    assert made.elapsed_s == 8.0
    made.toggle()
    assert made.elapsed_s == 0.0


def test_the_minute_of_a_pause_ends_with_it_and_goes_on_otherwise() -> None:
    made, clock = player(3)
    made.toggle()
    before = made.past
    clock.now = 40.0
    assert made.past == before
    made.toggle()
    assert made.past != before

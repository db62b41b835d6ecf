"""Benchmarks of the engine core run on small sizes, and what they count is right."""

import pytest

from chatd.bench.ahead import ahead_figures
from chatd.bench.fork import fork_figures
from chatd.bench.pool import pool_figures, tenant_figures
from chatd.bench.prefix import machinery_figures
from chatd.bench.turn import turn_work


def test_forks_share_all_blocks_and_copy_one_when_they_go_on():
    figures = fork_figures(num_tokens=100, repeats=3)
    # 200 tokens in 13 blocks; a fork at 100 shares 7, and its first append copies the seventh.
    assert (figures["blocks_before"], figures["blocks_after_forks"]) == (13, 13)
    assert figures["blocks_after_appends"] == 13 + 3
    assert figures["blocks_without_sharing"] == 13 + 3 * 7
    assert figures["copies_per_append"] == 1
    assert 0 < figures["median_ms"] <= figures["p95_ms"]


def test_a_turn_costs_the_same_whatever_its_history():
    short, long = turn_work(64, 20, 5), turn_work(1024, 20, 5)
    assert {**short, "bytes sent": 0} == {**long, "bytes sent": 0}
    assert short["rows"] == 1 + 20 + 4
    assert short["messages"] == 1 + 1 + 5 + 1


def test_operations_of_the_pool_are_timed():
    assert all(value > 0 for value in pool_figures(1000).values())
    assert all(value > 0 for value in machinery_figures(num_blocks=16).values())


@pytest.mark.parametrize("num_tenants", [1, 10])
@pytest.mark.parametrize("with_floors", [False, True])
def test_eviction_is_timed_with_tenants(num_tenants, with_floors):
    assert tenant_figures(1000, num_tenants, with_floors=with_floors) > 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_a_device_waits_for_is_measured(steps_in_flight):
    figures = ahead_figures(4, 1e-4, steps_in_flight, num_steps=5)
    assert figures["cpu_ms"] > 0
    assert 0 <= figures["idle_ms"] <= figures["idle_p90_ms"]

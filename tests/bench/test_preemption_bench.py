"""Copies, episodes and the load of `bench preemption` run on small sizes of the real model."""

import json
import subprocess
import sys

import pytest

from chatd.bench.tables import crossing_block_size


def test_the_crossing_is_the_least_block_size_at_which_copies_win():
    sizes = [
        {"block_size": 1, "out_s": 2.0, "in_s": 2.0, "disk_out_s": 9.0, "disk_in_s": 9.0, "recompute_s": 3.0},
        {"block_size": 16, "out_s": 1.0, "in_s": 1.0, "disk_out_s": 9.0, "disk_in_s": 9.0, "recompute_s": 3.0},
        {"block_size": 64, "out_s": 0.5, "in_s": 0.5, "disk_out_s": 9.0, "disk_in_s": 9.0, "recompute_s": 3.0},
    ]
    assert crossing_block_size(sizes, "host") == 16
    assert crossing_block_size(sizes, "disk") is None


@pytest.mark.model
def test_both_kinds_of_victims_are_timed_both_ways():
    command = [sys.executable, "-m", "chatd.bench", "preemption", "--in-child", "episodes"]
    done = subprocess.run([*command, "--victim", "640", "--repeats", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    slot, blocks = json.loads(done.stdout).values()
    assert (slot["auto_swapped"], slot["forced"]) == (0, "swap")
    assert slot["auto_move_s"] == pytest.approx(0, abs=1e-3)
    assert slot["forced_move_s"] > 0
    assert (blocks["auto_swapped"], blocks["forced"]) == (1, "recompute")
    assert blocks["auto_move_s"] > 0

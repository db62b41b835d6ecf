"""Waste is counted by slots and seconds."""

import json

import pytest

from chatd.bench.lengths import Lengths, Turn
from chatd.bench.waste import Conversations, main


def waste(conversations, block_size, num_shared=0):
    held = Conversations(Lengths(conversations, num_shared), block_size, step_s=1.0, pause_s=50.0, gap_s=10.0)
    held.run()
    return held


def test_a_session_that_fills_its_blocks_wastes_nothing_while_it_pauses():
    # 30 tokens and 3 drawn: the last one is not stored, so 32 slots of two blocks are full in the pause.
    held = waste([[Turn(30, 3)]], 16)
    assert held.slots.empty == pytest.approx(2 * 1 + 1 * 1)
    assert held.slots.waste < 0.02


def test_one_token_beyond_a_block_wastes_the_rest_of_the_next():
    held = waste([[Turn(32, 2)]], 16)
    assert held.slots.waste == pytest.approx(15 / 48, rel=0.05)
    assert held.in_first_turn.waste == held.slots.waste


def test_larger_blocks_waste_more():
    conversations = [[Turn(20 + 7 * n, 30 + 3 * n), Turn(15, 40)] for n in range(10)]
    shares = [waste(conversations, size).slots.waste for size in (16, 32, 64)]
    assert shares == sorted(shares)


def test_what_is_shared_is_allocated_once():
    conversations = [[Turn(40, 4)] for _ in range(8)]
    alone, shared = waste(conversations, 16), waste(conversations, 16, num_shared=32)
    assert shared.slots.allocated < alone.slots.allocated
    assert shared.slots.empty <= alone.slots.empty


def test_the_command_writes_a_row_for_each_block_size(tmp_path):
    lengths, out = tmp_path / "lengths.json", tmp_path / "waste.json"
    lengths.write_text(json.dumps({"num_shared": 16, "conversations": [[[30, 20], [10, 9]]] * 3}))
    assert main(["--lengths", str(lengths), "--cut", "8", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [row["block_size"] for row in figures["blocks"]] == [16, 32, 64] * 2
    assert [row["mean_output"] for row in figures["blocks"]] == [14.5] * 3 + [8] * 3
    assert figures["machine"]["num_cpus"] >= 1

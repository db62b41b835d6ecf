"""The servers that `bench memory` compares account for every slot."""

import json

import pytest

from chatd.bench.contiguous import FirstFit
from chatd.bench.lengths import Turn
from chatd.bench.memory import KINDS, Usage, Work, main, run_contiguous, run_paged, workload


def test_a_slot_is_of_one_kind():
    usage = Usage(num_slots=100)
    usage.add(iter([(10, 20, 32), (5, 5, 16)]))
    figures = usage.figures()
    assert figures["tokens"] == pytest.approx(0.15)
    assert figures["reserved"] == pytest.approx(0.10)
    assert figures["internal"] == pytest.approx(0.23)
    assert figures["external"] == pytest.approx(0.52)
    assert figures["running"] == 2


def test_reserved_slots_of_a_paged_sequence_end_with_its_last_block():
    usage = Usage(num_slots=100)
    usage.add(iter([(10, 50, 16)]))
    assert usage.figures()["reserved"] == pytest.approx(0.06)
    assert usage.figures()["internal"] == 0


def test_a_turn_has_its_history_as_prompt_and_is_cut_at_the_longest_sequence():
    works = workload([[Turn(10, 20), Turn(5, 100)]], rate=0.5, max_len=64, repeats=2)
    assert sorted((work.num_prompt, work.num_output) for work in works) == [(10, 20), (10, 20), (35, 29), (35, 29)]
    assert [work.arrival for work in works] == sorted(work.arrival for work in works)


def test_a_contiguous_server_counts_what_a_pencil_does():
    # Requests of 4 stored tokens in 6 slots go one at a time, two steps each; at step 2 nobody waits.
    usage = run_contiguous(FirstFit(6), [Work(0, 3, 2), Work(0, 3, 2), Work(3, 3, 2)])
    assert (usage.steps, usage.running) == (3, 3)
    assert (usage.tokens, usage.reserved, usage.internal) == (3 + 4 + 4, 1, 0)


def test_paged_memory_holds_more_tokens_of_the_same_requests():
    works = [Work(number // 4, 20 + number % 13, 10 + number % 29) for number in range(120)]
    paged, _ = run_paged(1024, 16, 512, works)
    contiguous = run_contiguous(FirstFit(1024, fixed_size=512), works)
    assert paged.figures()["tokens"] > 4 * contiguous.figures()["tokens"]


def test_the_command_writes_shares_that_sum_to_one(tmp_path):
    lengths, out = tmp_path / "lengths.json", tmp_path / "memory.json"
    turns = [[[20 + n, 30], [10, 40]] for n in range(12)]
    lengths.write_text(json.dumps({"num_shared": 0, "conversations": turns}))
    small = ["--slots", "512", "--max-len", "256", "--rate", "2", "--repeats", "3"]
    assert main([*small, "--lengths", str(lengths), "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert len(figures["servers"]) == 4
    for row in figures["servers"]:
        assert sum(row[kind] for kind in KINDS) == pytest.approx(1)
        assert all(row[kind] >= 0 for kind in KINDS), row

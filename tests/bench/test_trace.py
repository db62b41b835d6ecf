"""The trace is found again as its block ids say."""

import json

import pytest

from chatd.bench.trace import (
    BLOCK,
    TraceRequest,
    TraceRun,
    ideal_hit_rate,
    load_trace,
    main,
    plain_lru_hit_rate,
    simulated_ids,
)

A = TraceRequest(0.0, 1100, 64, (0, 1, 2))
B = TraceRequest(10.0, 1600, 64, (0, 1, 3, 4))
C = TraceRequest(20.0, 600, 32, (9, 8))


def test_the_ideal_counts_whole_blocks_that_begin_an_earlier_prompt():
    assert ideal_hit_rate([A, B, C]) == pytest.approx(1024 / 3300)
    assert ideal_hit_rate([C, C]) == pytest.approx(512 / 1200)


def test_a_plain_lru_forgets_what_does_not_fit():
    assert plain_lru_hit_rate([A, B], 100) == ideal_hit_rate([A, B])
    assert plain_lru_hit_rate([A, C, A], 1) == 0


def test_a_simulated_prompt_spells_its_blocks_and_ends_with_a_partial_one():
    ids = simulated_ids(A, 0)
    assert len(ids) == 2 * BLOCK + 3
    assert ids[: 2 * BLOCK] == simulated_ids(B, 1)[: 2 * BLOCK]
    assert ids[2 * BLOCK :] != simulated_ids(B, 1)[3 * BLOCK :][:3]
    assert simulated_ids(TraceRequest(0.0, 1023, 1, (5, 6)), 2)[BLOCK:] == [2**30 + 2] * (BLOCK - 1)


def test_a_large_pool_finds_what_the_ideal_finds():
    requests = [A, B, C, TraceRequest(30.0, 2000, 40, (0, 1, 3, 7))]
    run = TraceRun(requests, 200)
    run.run()
    assert run.hit_rate == pytest.approx(ideal_hit_rate(requests))
    assert (run.num_failed, run.num_evictions) == (0, 0)


def test_a_small_pool_finds_less():
    requests = [
        TraceRequest(10.0 * n, 1600, 32, (n % 3 * 10, n % 3 * 10 + 1, n % 3 * 10 + 2, 99 + n)) for n in range(9)
    ]
    run = TraceRun(requests, 5)
    run.run()
    assert run.hit_rate < ideal_hit_rate(requests)
    assert run.num_failed == 0


def test_the_command_reads_the_trace_and_writes_a_row_for_each_pool(tmp_path):
    lines = [
        {"timestamp": int(1000 * r.arrival_s), "input_length": r.num_prompt, "output_length": r.num_output}
        | {"hash_ids": r.hash_ids}
        for r in (A, B, C)
    ]
    trace, out = tmp_path / "mooncake_conversation_trace.jsonl", tmp_path / "trace.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_trace(tmp_path, first=2) == [A, B]
    assert main(["--data", str(tmp_path), "--blocks", "8", "64", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [row["blocks"] for row in figures["pools"]] == [8, 64]
    assert figures["pools"][1]["hit_rate"] == pytest.approx(figures["ideal"])

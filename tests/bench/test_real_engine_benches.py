"""The benchmarks that time the real engine run on small sizes."""

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "chatd.bench", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.model
def test_equal_prompts_compute_what_they_have_in_common_once(tmp_path):
    out = tmp_path / "join.json"
    bench("join", "--requests", "4", "--prompt", "64", "--tail", "5", "--json", str(out))
    figures = json.loads(out.read_text())
    assert (figures["equal"]["rows"], figures["equal"]["joins"]) == (64 + 4 * 5, 3)
    assert (figures["different"]["rows"], figures["different"]["joins"]) == (4 * 69, 0)


@pytest.mark.model
def test_a_quiet_tenant_is_timed_alone_and_beside_a_flood(tmp_path):
    out = tmp_path / "neighbor.json"
    small = ["--turns", "2", "--prompt", "20", "--output", "2", "--pause-s", "0.01"]
    bench("neighbor", *small, "--flood", "3", "--flood-prompt", "32", "--flood-output", "4", "--json", str(out))
    figures = json.loads(out.read_text())
    assert figures["flood"] == 3
    for row in (figures["alone"], figures["flooded"]):
        assert row["turns"] == 2
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"]
        assert 1 <= row["steps_p50"] <= row["steps_max"]


@pytest.mark.model
def test_a_system_prompt_is_found_by_its_tenant_and_by_all_where_it_is_public(tmp_path):
    out = tmp_path / "prefix.json"
    small = ["--system", "96", "--user", "5", "--repeats", "1", "--steps", "4"]
    bench("prefix", *small, "--json", str(out))
    figures = json.loads(out.read_text())
    assert figures["ttft"]["cached_tokens"] == {"uncached": 0, "cached": 96, "public": 96}
    assert all(seconds > 0 for seconds in figures["ttft"]["ttft_s"].values())
    assert 0 < figures["share"]["of_prefill"] < 0.5
    assert 0 < figures["share"]["of_decode"] < 0.5

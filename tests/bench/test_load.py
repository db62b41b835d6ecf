"""The load command: what counts as growth, what is shown, and one minute of it on the small real model."""

import json

import pytest

from chatd.bench import load

FIGURES = {
    "counts": {"turns": 3},
    "seconds": 60.0,
    "output_tok_s": 1.0,
    "ttft_p50_s": 0.1,
    "ttft_p95_s": 0.2,
    "itl_p50_s": 0.01,
    "itl_p99_s": 0.02,
    "began": dict.fromkeys(("blocks", "tasks", "descriptors"), 1.0),
    "ended": dict.fromkeys(("blocks", "tasks", "descriptors"), 1.0),
    "memory_growth": {"front": 0.01},
}


def test_growth_is_counted_from_after_the_warm_up():
    # It grows while it warms up, and then no more.
    samples = [(float(at), 100 + min(at, 24)) for at in range(60)]
    assert load.growth(samples, 60.0) == 0.0
    leaking = [(float(at), 1000 + 10 * at) for at in range(60)]
    assert load.growth(leaking, 60.0) > load.MAX_GROWTH
    assert load.growth([], 60.0) == 0.0


@pytest.mark.parametrize(("problems", "exit_code"), [([], 0), (["tasks were 7, are 8"], 1)])
def test_the_exit_code_says_whether_anything_was_wrong(problems, exit_code, monkeypatch, capsys, tmp_path):
    async def pretend(shape, seconds, process):
        assert (shape.url, shape.streams, seconds) == ("http://127.0.0.1:1", 16, 120.0)
        return FIGURES | {"problems": problems}

    monkeypatch.setattr(load, "run_load", pretend)
    path = tmp_path / "load.json"
    assert load.main(["--url", "http://127.0.0.1:1", "--minutes", "2", "--json", str(path)]) == exit_code
    assert json.loads(path.read_text())["problems"] == problems
    out = capsys.readouterr().out
    for problem in problems:
        assert problem in out


@pytest.mark.model
def test_a_minute_of_load_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    """16 streams over 64 sessions beside 200 idle sockets; turns are cancelled and connections lost at random."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "load.json"
    assert load.main(["--minutes", "1", "--json", str(path), "--log", str(tmp_path / "log")]) == 0, (
        capsys.readouterr().out + (tmp_path / "log").read_text()[-4000:]
    )
    figures = json.loads(path.read_text())
    counts = figures["counts"]
    assert counts["idle connections"] == 200
    for what in ("turns", "turns cancelled", "connections lost", "answers read again"):
        assert counts[what] > 0, f"nothing of {what}: {counts}"
    assert figures["ended"]["blocks"] == 0

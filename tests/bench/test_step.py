import json
import subprocess
import sys

import pytest


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "chatd.bench", *arguments], capture_output=True, text=True, check=False
    )


def test_the_benchmarks_are_listed_where_none_is_named():
    for arguments in ((), ("unknown",)):
        done = run(*arguments)
        assert done.returncode == 2
        assert "usage: python -m chatd.bench NAME" in done.stderr
        assert "where the time of one decode step goes" in done.stderr


@pytest.mark.model
def test_the_parts_of_a_step_add_up_to_the_step(tmp_path):
    path = tmp_path / "step.json"
    done = run("step", "--quantization", "int8", "--batch", "3", "--context", "40", "--steps", "8", "--json", str(path))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())
    assert (result["quantization"], result["batch"], result["neighbor"]) == ("int8", 3, False)
    assert sum(result["parts_ms"].values()) == pytest.approx(result["step_ms"], rel=0.2)
    assert all(value >= 0 for value in result["parts_ms"].values())
    assert "| int8, batch 3 |" in done.stdout

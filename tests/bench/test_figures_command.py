"""The figures of the pages are taken by one command."""

import sys
from pathlib import Path

import pytest

from chatd.bench import figures
from chatd.bench.__main__ import BENCHMARKS
from chatd.bench.report import SECTIONS


def test_every_figure_of_a_page_has_its_command():
    assert set(figures.RUNS) == {*SECTIONS, "lengths"}
    assert {run[0] for run in figures.RUNS.values()} <= set(BENCHMARKS)


def test_lengths_come_before_what_reads_them():
    names = list(figures.RUNS)
    assert names.index("lengths") < min(names.index("memory"), names.index("waste"))


def test_a_command_names_the_data_and_where_its_figures_go():
    run = figures.command("trace", Path("/data"), Path("/out"))
    assert run == [sys.executable, "-m", "chatd.bench", "trace", "--data", "/data", "--json", "/out/trace.json"]
    assert "/data/mt_bench_questions.jsonl" in figures.command("samples", Path("/data"), Path("/out"))


def test_what_needs_data_is_left_out_without_it():
    assert figures.command("trace", None, Path("/out")) is None
    assert figures.command("turn", None, Path("/out")) is not None


def test_the_command_runs_what_was_asked_for(tmp_path, capsys):
    assert figures.main(["--only", "turn", "trace", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["turn.json"]
    assert "trace: kept, it needs --data" in capsys.readouterr().out


def test_an_unknown_figure_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        figures.main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err

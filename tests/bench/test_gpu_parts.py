"""Which parts of the GPU's benchmark run, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatd.bench.gpu import script
from chatd.bench.gpu.parts import Bench, NotHere, Part, Row, run_parts, table
from chatd.bench.gpu.script import PARTS, is_right, main
from chatd_kernels.stream import InterpretedStream


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def part(name: str, seconds: float, clock: Clock, takes: float, *rows: Row, error: str | None = None) -> Part:
    def run(bench: Bench) -> Iterator[Row]:
        yield from rows
        clock.now += takes
        if error is not None:
            raise RuntimeError(error)

    return Part(name, name, seconds, run)


def test_a_part_starts_only_if_its_time_fits_and_a_shorter_one_after_it_still_does() -> None:
    clock = Clock()
    parts = [
        part("a", 40.0, clock, 50.0, {"x": 1}),
        part("b", 15.0, clock, 1.0),
        part("c", 10.0, clock, 10.0, {"x": 2}),
        part("d", 1.0, clock, 1.0),
    ]
    outcomes = list(run_parts(parts, Bench(InterpretedStream()), 60.0, clock))
    assert [outcome.skipped for outcome in outcomes] == [
        None,
        "takes about 15 s, 10 s are left",
        None,
        "takes about 1 s, 0 s are left",
    ]
    assert [(outcome.rows, outcome.seconds) for outcome in outcomes[::2]] == [([{"x": 1}], 50.0), ([{"x": 2}], 10.0)]


def test_a_part_that_fails_keeps_its_rows_and_lets_the_others_run() -> None:
    clock = Clock()
    parts = [part("a", 1.0, clock, 2.0, {"x": 1}, error="no memory"), part("b", 1.0, clock, 1.0, {"x": 2})]
    first, second = run_parts(parts, Bench(InterpretedStream()), 60.0, clock)
    assert (first.rows, first.error, first.seconds) == ([{"x": 1}], "RuntimeError: no memory", 2.0)
    assert (second.rows, second.error) == ([{"x": 2}], None)


def test_a_part_that_takes_longer_than_there_is_time_ends_after_a_row() -> None:
    clock = Clock()

    def run(bench: Bench) -> Iterator[Row]:
        for number in range(9):
            clock.now += 4.0
            yield {"x": number}

    [outcome] = run_parts([Part("a", "a", 5.0, run)], Bench(InterpretedStream()), 10.0, clock)
    assert (len(outcome.rows), outcome.error, outcome.skipped) == (3, None, "the rest of it: no time is left")


def test_what_is_not_on_a_machine_is_skipped_with_the_reason() -> None:
    def run(bench: Bench) -> Iterator[Row]:
        yield {"x": 1}
        raise NotHere("no such library")

    [outcome] = run_parts([Part("a", "a", 1.0, run)], Bench(InterpretedStream()), 10.0, Clock())
    assert (outcome.rows, outcome.error, outcome.skipped) == ([{"x": 1}], None, "no such library")


def test_a_failed_check_is_wrong_and_figures_are_not() -> None:
    clock = Clock()
    parts = [part("a", 1.0, clock, 0.0, {"ok": True}, {"ok": False}), part("b", 1.0, clock, 0.0, {"µs": 2.0})]
    assert [is_right(outcome) for outcome in run_parts(parts, Bench(InterpretedStream()), 9.0, clock)] == [False, True]


def test_a_table_is_aligned_to_the_right() -> None:
    assert table([{"a": 1, "long": "xy"}, {"a": 1234.5678, "long": None}]) == "   a  long\n   1    xy\n1235  None"
    assert table([]) == ""


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    assert main(["--only", "copies"]) == 2
    assert capsys.readouterr().err == "no GPU is visible to torch here\n"


class LostStream(InterpretedStream):
    def synchronize(self) -> None:
        raise RuntimeError("illegal access")


def test_after_a_device_is_lost_another_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clock = Clock()
    parts = [part(name, 0.0, clock, 0.0, {"x": 1}, error="fault" if name == "b" else None) for name in "abcd"]
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        commands.append(command)
        Path(command[-1]).write_text(json.dumps({"parts": {"c": {"rows": [2]}, "d": {"rows": [3]}}}))

    monkeypatch.setattr(script, "PARTS", parts)
    monkeypatch.setattr(script, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "GpuStream", LostStream)
    monkeypatch.setattr(script.subprocess, "run", run)
    assert main(["--json", str(tmp_path / "gpu.json")]) == 1
    [command] = commands
    assert command[2:5] == ["chatd.bench", "gpu", "--minutes"]
    assert command[6:9] == ["--only", "c", "d"]
    figures = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: one["rows"] for name, one in figures.items()} == {
        "a": [{"x": 1}],
        "b": [{"x": 1}],
        "c": [2],
        "d": [3],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
    printed = capsys.readouterr()
    assert "\nb: RuntimeError: fault, " in printed.out
    assert printed.err.startswith("Traceback")


def test_all_parts_fit_eight_minutes() -> None:
    assert len({one.name for one in PARTS}) == len(PARTS)
    assert sum(one.seconds for one in PARTS) <= 8 * 60

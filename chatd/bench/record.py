"""What every benchmark's JSON says beside its figures, and how it is written."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

from chatd_kernels.cpus import available_cpus


def machine() -> dict[str, Any]:
    """Return where and when a benchmark runs: date, processor, the CPUs that it may use, Python."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _processor(),
        "num_cpus": available_cpus(),
        "python": platform.python_version(),
    }


def machine_line(where: dict[str, Any]) -> str:
    """Return `machine()` as one line for a picture."""
    cpus = f"{where['num_cpus']} CPU" + ("s" if where["num_cpus"] != 1 else "")
    return f"{where['date']}, {where['cpu']}, {cpus}"


def write_json(path: Path | None, bench: str, figures: dict[str, Any]) -> None:
    """Write a benchmark's figures, with the machine beside them; nothing where `path` is None."""
    if path is not None:
        path.write_text(json.dumps({"bench": bench, "machine": machine(), **figures}, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""How many CPUs this process may use: those of its affinity, within its cgroup's quota (version 2, or 1). No torch.

A process in a container sees the whole machine in /proc; its limits stand in the files of its cgroup and of that
cgroup's parents, and the smallest of them holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_cpus(root: Path = ROOT) -> int:
    """Return the CPUs of this process's affinity, cut to its cgroup's quota; at least 1.

    Args:
        root: Where /proc and /sys are found.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([affinity, *(math.floor(quota) for quota in quotas)]))


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup folder and its parents, for one controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup"
        if controllers:
            base = base / controller
        # Inside a container the path may be the host's, which is not mounted here; then the mount's root is ours.
        folder = base / path.strip("/")
        while not folder.is_dir() and folder != base:
            folder = folder.parent
        while True:
            yield folder
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _cpu_quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)

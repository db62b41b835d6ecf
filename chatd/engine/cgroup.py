"""What this process may use of the machine: CPUs and memory, within its cgroup's limits (version 2, or 1). No torch.

A process in a container sees the whole machine in /proc and in psutil; its limits stand in the files of its cgroup and
of that cgroup's parents, and the smallest of them holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory in bytes that this process may use.

    Attributes:
        limit: In all: the machine's memory, or the smallest limit of the cgroup and its parents.
        available: Of that, what is free or can be taken from the file cache.
    """

    limit: int
    available: int


def available_cpus(root: Path = ROOT) -> int:
    """Return the CPUs of this process's affinity, cut to its cgroup's quota; at least 1.

    Args:
        root: Where /proc and /sys are found.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([affinity, *(math.floor(quota) for quota in quotas)]))


def memory_room(root: Path = ROOT, machine: MemoryRoom | None = None) -> MemoryRoom:
    """Return how much memory this process may use, and how much of it is left.

    Args:
        root: Where /proc and /sys are found.
        machine: The machine's own memory; asked of psutil where None.
    """
    if machine is None:
        physical = psutil.virtual_memory()
        machine = MemoryRoom(physical.total, physical.available)
    limit, available = machine.limit, machine.available
    for folder in _folders(root, "memory"):
        room = _memory(folder)
        if room is not None:
            limit = min(limit, room.limit)
            available = min(available, room.available)
    return MemoryRoom(limit, max(0, available))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup folder and its parents, for one controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
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


def _memory(folder: Path) -> MemoryRoom | None:
    """Return a cgroup's limit and what is left of it; None where it has no limit."""
    try:
        if (folder / "memory.max").exists():
            text = (folder / "memory.max").read_text().strip()
            if text == "max":
                return None
            limit, used, prefix = int(text), int((folder / "memory.current").read_text()), ""
        else:
            limit = int((folder / "memory.limit_in_bytes").read_text())
            used, prefix = int((folder / "memory.usage_in_bytes").read_text()), "total_"
        cache = _file_cache(folder / "memory.stat", prefix)
    except (OSError, ValueError):
        return None
    return MemoryRoom(limit, limit - used + cache)


def _file_cache(path: Path, prefix: str) -> int:
    """Return the bytes that the kernel gives back under pressure: file pages not in use, and half of those in use."""
    values = dict(line.split() for line in path.read_text().splitlines())
    return int(values.get(f"{prefix}inactive_file", 0)) + int(values.get(f"{prefix}active_file", 0)) // 2

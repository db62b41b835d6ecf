"""How much of the machine's memory this process may use, within its cgroup's limits (version 2, or 1). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from chatd_kernels.cpus import ROOT, cgroup_folders


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory in bytes that this process may use.

    Attributes:
        limit: In all: the machine's memory, or the smallest limit of the cgroup and its parents.
        available: Of that, what is free or can be taken from the file cache.
    """

    limit: int
    available: int


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
    for folder in cgroup_folders(root, "memory"):
        room = _memory(folder)
        if room is not None:
            limit = min(limit, room.limit)
            available = min(available, room.available)
    return MemoryRoom(limit, max(0, available))


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

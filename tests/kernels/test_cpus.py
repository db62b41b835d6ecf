"""The CPUs that a process may use: its affinity, cut to the smallest quota on the path of its cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatd_kernels import cpus
from chatd_kernels.cpus import available_cpus

GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a\n", f"{GROUPS}/a/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a\n", f"{GROUPS}/a/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a\n", f"{GROUPS}/a/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{GROUPS}/a/b/cpu.max": "max 100000\n",
                f"{GROUPS}/a/cpu.max": "250000 100000\n",
                f"{GROUPS}/cpu.max": "400000 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n2:cpu,cpuacct:/a\n",
                f"{GROUPS}/cpu/a/cpu.cfs_quota_us": "300000",
                f"{GROUPS}/cpu/a/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/kubepods/xyz\n", f"{GROUPS}/cpu.max": "500000 100000\n"}, 5),
        ({"proc/self/cgroup": ""}, 8),
        ({"proc/self/cgroup": "0::/\n"}, 8),
        ({"proc/self/cgroup": "garbage\n"}, 8),
        ({}, 8),
    ],
)
def test_cpus_are_the_affinity_cut_to_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert available_cpus(tmp_path) == expected


def test_this_machine_has_a_cpu() -> None:
    assert available_cpus() >= 1

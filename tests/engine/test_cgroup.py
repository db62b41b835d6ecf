from pathlib import Path

from chatd.engine.cgroup import MemoryRoom, memory_room

MIB = 2**20
MACHINE = MemoryRoom(16_000 * MIB, 9_000 * MIB)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_cgroups_the_machine_is_the_limit(tmp_path):
    assert memory_room(tmp_path, MACHINE) == MACHINE


def test_version_2_takes_the_smallest_limit_on_the_path(tmp_path):
    group = "sys/fs/cgroup/user.slice/chatd.scope"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/chatd.scope\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "1\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{2000 * MIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{1500 * MIB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {100 * MIB}\nactive_file {60 * MIB}\n",
        },
    )
    assert memory_room(tmp_path, MACHINE) == MemoryRoom(2000 * MIB, 630 * MIB)


def test_version_1_counts_its_file_cache_as_free(tmp_path):
    group = "sys/fs/cgroup/memory/docker/abc"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
            f"{group}/memory.limit_in_bytes": f"{1000 * MIB}",
            f"{group}/memory.usage_in_bytes": f"{900 * MIB}",
            f"{group}/memory.stat": f"total_inactive_file {200 * MIB}\ntotal_active_file 0\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5000 * MIB}",
            "sys/fs/cgroup/memory/memory.stat": "",
        },
    )
    assert memory_room(tmp_path, MACHINE) == MemoryRoom(1000 * MIB, 300 * MIB)


def test_in_a_container_the_root_of_the_mount_is_read_where_the_path_is_the_hosts(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod12/xyz\n",
            "sys/fs/cgroup/memory.max": f"{512 * MIB}",
            "sys/fs/cgroup/memory.current": f"{500 * MIB}",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
    )
    assert memory_room(tmp_path, MACHINE) == MemoryRoom(512 * MIB, 12 * MIB)


def test_usage_above_the_limit_leaves_nothing_and_not_less(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100",
            "sys/fs/cgroup/memory.current": "120",
            "sys/fs/cgroup/memory.stat": "",
        },
    )
    assert memory_room(tmp_path, MACHINE).available == 0


def test_this_machine_has_memory():
    room = memory_room()
    assert 0 < room.available <= room.limit

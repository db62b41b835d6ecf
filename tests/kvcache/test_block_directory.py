import os
import stat
import subprocess
import sys

import pytest

from chatd.errors import EnvironmentProblem
from chatd.kvcache.block_directory import KEY_BYTES, BlockDirectory, DirectoryInUse, load_key

SIZE = 10


@pytest.fixture
def root(tmp_path):
    return tmp_path / "state" / "kv"


@pytest.fixture
def directory(root):
    directory = BlockDirectory(root)
    yield directory
    directory.close()


def digest(number):
    return number.to_bytes(32, "big")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def put(directory, number, content=b"x" * SIZE, used_at=None):
    directory.writing.write_bytes(content)
    directory.publish(digest(number))
    if used_at is not None:
        os.utime(directory.path(digest(number)), (used_at, used_at))


def test_a_directory_is_made_for_this_user_alone(root, directory):
    put(directory, 1)
    for path in (root, root / "blocks-1", root / "blocks-1" / "00"):
        assert mode(path) == 0o700
    assert mode(root / "lock") == 0o600


def test_a_file_is_named_by_its_digest_and_nothing_else(root, directory):
    name = bytes(range(32))
    assert directory.path(name) == root / "blocks-1" / "00" / f"{name.hex()}.kv"
    for wrong in (b"", b"../../../etc/passwd", bytes(31), bytes(33)):
        with pytest.raises(AssertionError, match="32 bytes"):
            directory.path(wrong)


def test_a_second_user_is_refused_until_the_first_is_gone(root):
    first = BlockDirectory(root)
    with pytest.raises(DirectoryInUse, match="disk tier of another daemon") as refused:
        BlockDirectory(root)
    assert refused.value.error_code == "disk_tier_in_use"
    assert refused.value.param == "engine.disk_directory"
    first.close()
    BlockDirectory(root).close()


def test_a_process_that_is_killed_leaves_no_lock(root):
    command = (
        "import sys, pathlib\n"
        "from chatd.kvcache.block_directory import BlockDirectory\n"
        "kept = BlockDirectory(pathlib.Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", command, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(DirectoryInUse):
            BlockDirectory(root)
        child.kill()
        child.wait()
    BlockDirectory(root).close()


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(root, bits):
    root.mkdir(parents=True)
    root.chmod(bits)
    with pytest.raises(EnvironmentProblem, match="you alone can write to") as refused:
        BlockDirectory(root)
    assert refused.value.param == "engine.disk_directory"
    root.chmod(0o755)
    BlockDirectory(root).close()


def test_a_folder_of_blocks_that_others_may_write_to_is_refused_and_the_lock_let_go(root):
    BlockDirectory(root).close()
    (root / "blocks-1").chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="you alone can write to"):
        BlockDirectory(root)
    (root / "blocks-1").chmod(0o700)
    BlockDirectory(root).close()


def test_what_cannot_be_a_directory_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"cannot keep the disk tier: .* \(engine.disk_directory\)"):
        BlockDirectory(tmp_path / "file")
    with pytest.raises(EnvironmentProblem, match="cannot keep the disk tier"):
        BlockDirectory(tmp_path / "file" / "below")


def test_a_lock_that_is_a_link_is_refused(root, tmp_path):
    root.mkdir(parents=True, mode=0o700)
    (root / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match="cannot keep the disk tier"):
        BlockDirectory(root)
    assert not (tmp_path / "elsewhere").exists()


def test_publishing_gives_the_written_file_its_name(directory):
    put(directory, 7, b"first")
    put(directory, 7, b"second")
    assert directory.path(digest(7)).read_bytes() == b"second"
    assert not directory.writing.exists()


def test_removing_twice_is_removing_once(directory):
    put(directory, 7)
    directory.remove(digest(7))
    directory.remove(digest(7))
    assert not directory.path(digest(7)).exists()


def test_a_scan_finds_whole_files_the_longest_unused_first(directory):
    for number, used_at in ((3, 300), (1, 100), (2, 200)):
        put(directory, number, used_at=used_at)
    assert directory.scan(SIZE) == [digest(1), digest(2), digest(3)]


def test_a_scan_removes_what_is_no_block_of_this_size(root, directory):
    put(directory, 1)
    folder = root / "blocks-1"
    strays = [
        directory.path(digest(2)),  # of another size
        folder / "00" / ("zz" * 32 + ".kv"),
        folder / "00" / "notes.txt",
        folder / "00" / (digest(3).hex() + ".kv.tmp"),
        folder / "00" / (digest(3).hex().replace("0", "A") + ".kv"),
        folder / "00" / (bytes([9] * 32).hex() + ".kv"),  # in the folder of another digest
        folder / (digest(4).hex() + ".kv"),  # beside the folders
        directory.writing,
    ]
    for stray in strays:
        stray.write_bytes(b"x" * (SIZE + (stray == strays[0])))
    (folder / "00" / (digest(5).hex() + ".kv")).symlink_to(directory.path(digest(1)))
    assert directory.scan(SIZE) == [digest(1)]
    assert [path.name for path in (folder / "00").iterdir()] == [digest(1).hex() + ".kv"]
    assert [path.name for path in folder.iterdir()] == ["00"]


def test_a_scan_leaves_alone_what_is_outside_its_folders(root, directory):
    (root / "precious.txt").write_text("mine")
    (root / "00").mkdir()
    (root / "00" / "precious.txt").write_text("mine")
    inside = root / "blocks-1" / "not a fan-out"
    inside.mkdir()
    (inside / "precious.txt").write_text("mine")
    (root / "blocks-1" / "00").mkdir()
    (root / "blocks-1" / "00" / "folder").mkdir()
    assert directory.scan(SIZE) == []
    assert len(list(root.rglob("precious.txt"))) == 3
    assert (root / "blocks-1" / "00" / "folder").is_dir()


def test_the_key_is_made_once_and_is_this_users_alone(root, directory):
    key = load_key(root)
    assert len(key) == KEY_BYTES
    assert load_key(root) == key
    assert mode(root / "key") == 0o600
    assert (root / "key").read_bytes() == key
    assert sorted(path.name for path in root.iterdir()) == ["blocks-1", "key", "lock"]


def test_two_directories_have_two_keys(tmp_path):
    (tmp_path / "other").mkdir()
    assert load_key(tmp_path) != load_key(tmp_path / "other")


@pytest.mark.parametrize("damage", ["short", "readable"])
def test_a_key_that_is_damaged_or_known_is_replaced(root, directory, damage):
    key = load_key(root)
    if damage == "short":
        (root / "key").write_bytes(key[:-1])
    else:
        (root / "key").chmod(0o640)
    replaced = load_key(root)
    assert replaced != key
    assert load_key(root) == replaced
    assert mode(root / "key") == 0o600


def test_somebodys_file_of_that_name_is_not_lost(root, directory):
    (root / "key").write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----")
    with pytest.raises(EnvironmentProblem, match="is no key of a disk tier, and is left as it is"):
        load_key(root)
    assert (root / "key").read_bytes() == b"-----BEGIN OPENSSH PRIVATE KEY-----"


def test_a_key_that_a_crash_left_unfinished_is_made_again(root, directory):
    (root / "key.new").write_bytes(b"half")
    key = load_key(root)
    assert load_key(root) == key
    assert not (root / "key.new").exists()


def test_a_key_that_cannot_be_read_is_said(root, directory, tmp_path):
    (root / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem, match=r"the key in .* cannot be read"):
        load_key(root)

import os
import random
import stat

import pytest
import xxhash

from chatd.errors import InvalidRequest
from chatd.kvcache.block_file import HEADER_BYTES, Origin, RefusedBlock, file_bytes, read_block, write_block
from chatd.kvcache.prefix_index import Namespace

BLOCK_BYTES = 3000
ACME = Namespace("sha256:1", "fp16", "float16", 1, None, "acme")
ORIGIN = Origin(ACME.frame(), bytes(range(32)), bytes(range(64)))
LENGTHS_END, CHECKSUM_END = 32, 48


def payload(seed=0):
    return memoryview(bytearray(random.Random(seed).randbytes(BLOCK_BYTES)))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "block"
    write_block(path, ORIGIN, payload())
    return path


def refusal(path, origin=ORIGIN, size=BLOCK_BYTES):
    """Why a file is refused; nothing of it may be in the slot then."""
    slot = memoryview(bytearray(size))
    with pytest.raises(RefusedBlock) as refused:
        read_block(path, origin, slot)
    assert slot == bytes(size)
    return str(refused.value)


def test_what_was_written_is_read(path):
    slot = memoryview(bytearray(b"x" * BLOCK_BYTES))
    read_block(path, ORIGIN, slot)
    assert slot == payload()


def test_only_the_user_can_read_a_file(tmp_path):
    before = os.umask(0)
    try:
        write_block(tmp_path / "block", ORIGIN, payload())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "block").stat().st_mode) == 0o600


def test_the_header_is_what_the_module_says(path):
    data = path.read_bytes()
    assert len(data) == file_bytes(BLOCK_BYTES) == HEADER_BYTES + BLOCK_BYTES
    assert data[:8] == b"chatdkv\x01"
    lengths = [int.from_bytes(data[at : at + 4], "little") for at in (8, 12, 16, 20)]
    assert lengths == [len(ORIGIN.namespace), 32, 64, 0]
    assert int.from_bytes(data[24:32], "little") == BLOCK_BYTES
    assert data[32:48] == xxhash.xxh3_128_digest(data[:32] + data[48:])
    body = b"".join(ORIGIN)
    assert data[48:HEADER_BYTES] == body + bytes(HEADER_BYTES - 48 - len(body))
    assert data[HEADER_BYTES:] == payload()


BODY_END = CHECKSUM_END + sum(map(len, ORIGIN))
# First byte, last and one between, of every region.
FLIPS = {
    "magic": (0, 5, 7),
    "length of the namespace": (8, 11),
    "length of the parent": (12, 15),
    "length of the tokens": (16, 19),
    "zeros after the lengths": (20, 23),
    "length of the payload": (24, 28, 31),
    "checksum": (32, 40, 47),
    "namespace": (48, 60, 48 + len(ORIGIN.namespace) - 1),
    "parent": (BODY_END - 96, BODY_END - 80, BODY_END - 65),
    "tokens": (BODY_END - 64, BODY_END - 40, BODY_END - 1),
    "zeros to the page": (BODY_END, 3000, HEADER_BYTES - 1),
    "payload": (HEADER_BYTES, HEADER_BYTES + 1499, HEADER_BYTES + BLOCK_BYTES - 1),
}


@pytest.mark.parametrize(("region", "offsets"), FLIPS.items(), ids=list(FLIPS))
def test_a_flipped_bit_is_refused_wherever_it_is(path, region, offsets):
    whole = path.read_bytes()
    for offset in offsets:
        for bit in range(8):
            data = bytearray(whole)
            data[offset] ^= 1 << bit
            path.write_bytes(data)
            why = refusal(path)
            expected = {"magic": "not a block", "checksum": "checksum", "payload": "checksum"}
            assert why == expected.get(region, "other content")


def test_any_flipped_bit_at_random_is_refused(path):
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        refusal(path)


@pytest.mark.parametrize(
    "size",
    [0, 1, 7, 8, 31, 32, 47, 48, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + BLOCK_BYTES - 1],
)
def test_a_file_that_was_cut_is_refused(path, size):
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(path) == "size"


def test_a_file_that_is_too_long_is_refused(path):
    with path.open("ab") as file:
        file.write(b"\0")
    assert refusal(path) == "size"


def test_a_file_that_is_cut_while_it_is_read_is_refused(path, monkeypatch):
    original = os.readv

    def cutting(descriptor, buffers):
        os.truncate(path, HEADER_BYTES + 10)
        return original(descriptor, buffers)

    monkeypatch.setattr(os, "readv", cutting)
    assert refusal(path) == "checksum"


OTHERS = {
    "tenant": ORIGIN._replace(namespace=Namespace("sha256:1", "fp16", "float16", 1, None, "other").frame()),
    "public": ORIGIN._replace(namespace=Namespace("sha256:1", "fp16", "float16", 1, None, None).frame()),
    "weights": ORIGIN._replace(namespace=Namespace("sha256:2", "fp16", "float16", 1, None, "acme").frame()),
    "format": ORIGIN._replace(namespace=Namespace("sha256:1", "int8", "float16", 1, None, "acme").frame()),
    "layout": ORIGIN._replace(namespace=Namespace("sha256:1", "fp16", "float16", 2, None, "acme").frame()),
    "adapter": ORIGIN._replace(namespace=Namespace("sha256:1", "fp16", "float16", 1, "acme", None).frame()),
    "parent": ORIGIN._replace(parent=bytes(32)),
    "tokens": ORIGIN._replace(tokens=bytes(64)),
    "fewer tokens": ORIGIN._replace(tokens=ORIGIN.tokens[:-4]),
}


@pytest.mark.parametrize("origin", OTHERS.values(), ids=list(OTHERS))
def test_a_whole_file_of_another_content_is_refused(tmp_path, origin):
    path = tmp_path / "block"
    write_block(path, origin, payload())
    assert refusal(path) == "other content"
    slot = memoryview(bytearray(BLOCK_BYTES))
    read_block(path, origin, slot)
    assert slot == payload()


def test_no_field_can_be_taken_for_its_neighbor(tmp_path):
    path = tmp_path / "block"
    write_block(path, Origin(b"ab", b"c", b"d"), payload())
    for origin in (Origin(b"a", b"bc", b"d"), Origin(b"ab", b"cd", b""), Origin(b"abcd", b"", b"")):
        assert refusal(path, origin) == "other content"


def test_zeros_at_the_end_of_tokens_are_told_from_the_zeros_after_them(tmp_path):
    path = tmp_path / "block"
    write_block(path, ORIGIN._replace(tokens=bytes(64)), payload())
    assert refusal(path, ORIGIN._replace(tokens=bytes(60))) == "other content"


def test_a_block_of_another_size_is_refused(path):
    assert refusal(path, size=BLOCK_BYTES - 1) == "size"
    assert refusal(path, size=BLOCK_BYTES + 1) == "size"


def test_a_link_is_not_followed(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read_block(link, ORIGIN, memoryview(bytearray(BLOCK_BYTES)))
    with pytest.raises(OSError, match="symbolic links"):
        write_block(link, ORIGIN, payload())


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "size"


def test_a_write_goes_on_where_the_system_took_a_part(tmp_path, monkeypatch):
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, part: original(descriptor, part[:700]))
    write_block(tmp_path / "block", ORIGIN, payload())
    slot = memoryview(bytearray(BLOCK_BYTES))
    original_read = os.readv
    monkeypatch.setattr(os, "readv", lambda descriptor, buffers: original_read(descriptor, [buffers[0][:900]]))
    read_block(tmp_path / "block", ORIGIN, slot)
    assert slot == payload()


def test_a_shorter_file_replaces_a_longer_one(tmp_path):
    path = tmp_path / "block"
    write_block(path, ORIGIN, payload())
    write_block(path, ORIGIN, payload(1)[:100])
    slot = memoryview(bytearray(100))
    read_block(path, ORIGIN, slot)
    assert slot == payload(1)[:100]


def test_reading_notes_the_use(path):
    os.utime(path, (1, 1))
    read_block(path, ORIGIN, memoryview(bytearray(BLOCK_BYTES)))
    assert path.stat().st_mtime > 1_000_000


def test_an_origin_that_does_not_fit_is_refused_and_writes_nothing(tmp_path):
    origin = ORIGIN._replace(namespace=bytes(HEADER_BYTES))
    with pytest.raises(InvalidRequest, match="the limit is 4048"):
        write_block(tmp_path / "block", origin, payload())
    assert not (tmp_path / "block").exists()


def test_no_descriptor_stays_open(path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_block(path, ORIGIN, memoryview(bytearray(BLOCK_BYTES)))
        refusal(path, ORIGIN._replace(parent=b""))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_of_another_user_is_neither_read_nor_filled(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert refusal(path) == "owner"
    with pytest.raises(PermissionError, match="another user's file"):
        write_block(path, ORIGIN, payload())
    assert path.stat().st_size == 0

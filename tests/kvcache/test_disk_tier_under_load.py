"""The disk tier against a model of it, without waiting between operations, and killed at any moment."""

import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.kvcache.block_file import HEADER_BYTES, Origin
from chatd.kvcache.disk_tier import DiskTier

BLOCK_BYTES = 512
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
NUM_SLOTS = 8
FOREVER = 30.0


def digest(number):
    return random.Random(number).randbytes(32)


def content(number):
    return random.Random(~number).randbytes(BLOCK_BYTES)


def origin(number):
    return Origin(b"namespace", b"parent", number.to_bytes(64, "little"))


def open_tier(root, num_blocks, buffer):
    return DiskTier(root, num_blocks * FILE_BYTES, BLOCK_BYTES, memoryview(buffer))


def slot_of(buffer, slot):
    return memoryview(buffer)[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]


CAPACITY = 3
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "forget", "damage", "lose", "restart"]), st.integers(0, 5)),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_it_holds_what_a_list_of_the_last_used_would_hold(operations):
    with TemporaryDirectory() as folder:
        root, buffer = Path(folder) / "kv", bytearray(BLOCK_BYTES)
        tier = open_tier(root, CAPACITY, buffer)
        held, damaged, used_at = OrderedDict(), set(), 0

        def path(number):
            name = digest(number).hex()
            return root / "blocks-1" / name[:2] / f"{name}.kv"

        def result(number):
            assert tier.settle(FOREVER)
            ((verb, found, slot, why),) = tier.poll()
            assert (found, slot) == (digest(number), 0)
            return verb, why

        for operation, number in operations:
            if operation == "write":
                buffer[:] = content(number)
                assert tier.write(digest(number), origin(number), 0)
                assert result(number) == ("written", "")
                if number not in held and len(held) == CAPACITY:
                    held.popitem(last=False)
                held[number] = None
                held.move_to_end(number)
            elif operation == "read":
                assert tier.read(digest(number), origin(number), 0)
                verb, why = result(number)
                if number not in held:
                    assert (verb, why) == ("failed", "gone")
                elif number in damaged:
                    assert (verb, why) == ("failed", "checksum")
                    del held[number]
                elif not path(number).exists():
                    assert (verb, why) == ("failed", "gone")
                    del held[number]
                else:
                    assert (verb, why) == ("read", "")
                    assert buffer == content(number)
                    held.move_to_end(number)
            elif operation == "forget":
                tier.forget(digest(number))
                assert tier.settle(FOREVER)
                held.pop(number, None)
            elif operation in ("damage", "lose") and number in held and path(number).exists():
                if operation == "lose":
                    path(number).unlink()
                elif number not in damaged:
                    data = bytearray(path(number).read_bytes())
                    data[-1] ^= 1
                    path(number).write_bytes(data)
                    damaged.add(number)
            elif operation == "restart":
                tier.close()
                for lost in [number for number in held if not path(number).exists()]:
                    del held[lost]
                # As a clock that is fine enough would have it.
                for kept in held:
                    used_at += 1
                    os.utime(path(kept), (used_at, used_at))
                tier = open_tier(root, CAPACITY, buffer)
            damaged &= held.keys()
            assert [number for number in range(6) if digest(number) in tier] == sorted(held)
            assert tier.num_used == len(held)
            assert set(root.rglob("*.kv")) == {path(number) for number in held if path(number).exists()}
        tier.close()


@pytest.mark.parametrize("seed", range(3))
def test_each_that_was_taken_gets_one_result_and_a_read_block_is_the_right_one(tmp_path, seed):
    rng = random.Random(seed)
    buffer = bytearray(NUM_SLOTS * BLOCK_BYTES)
    tier = open_tier(tmp_path / "kv", 10, buffer)
    free = list(range(NUM_SLOTS))
    waiting, num_taken, num_results, num_read = {}, 0, 0, 0

    def take_in():
        nonlocal num_results, num_read
        for verb, found, slot, why in tier.poll():
            asked, number = waiting.pop(slot)
            assert found == digest(number)
            assert verb == {"write": "written", "read": "read"}[asked] or (
                verb == "failed" and why in ("gone", "forgotten")
            )
            if verb == "read":
                assert slot_of(buffer, slot) == content(number)
                num_read += 1
            free.append(slot)
            num_results += 1

    for _ in range(6000):
        number = rng.randrange(14)
        operation = rng.choice(["write", "read", "read", "forget"])
        if operation == "forget":
            if not rng.randrange(4):
                tier.forget(digest(number))
        elif free:
            slot = free.pop(rng.randrange(len(free)))
            slot_of(buffer, slot)[:] = content(number) if operation == "write" else bytes(BLOCK_BYTES)
            waiting[slot] = (operation, number)
            taken = getattr(tier, operation)(digest(number), origin(number), slot)
            assert taken
            num_taken += 1
        else:
            assert tier.settle(FOREVER)
        take_in()
    assert tier.settle(FOREVER)
    take_in()
    assert (num_results, len(waiting)) == (num_taken, 0)
    assert num_read > 100
    assert tier.num_refused == 0
    assert tier.num_used == len(list((tmp_path / "kv").rglob("*.kv"))) <= 10
    tier.close()


WRITER = """
import sys, pathlib
sys.path.insert(0, str(pathlib.Path(sys.argv[2]).parent))
from test_disk_tier_under_load import *
buffer = bytearray(BLOCK_BYTES)
tier = open_tier(pathlib.Path(sys.argv[1]), 20, buffer)
for number in range(10**9):
    buffer[:] = content(number % 50)
    tier.write(digest(number % 50), origin(number % 50), 0)
    tier.settle(FOREVER)
    tier.forget(digest((number + 30) % 50))
    if number == 60:
        print("busy", flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks_and_nothing_else(tmp_path):
    buffer = bytearray(BLOCK_BYTES)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "kv"), __file__], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout.readline() == "busy\n"
            child.kill()
        tier = open_tier(tmp_path / "kv", 20, buffer)
        assert 0 < tier.num_used <= 20
        for number in range(50):
            if digest(number) in tier:
                assert tier.read(digest(number), origin(number), 0)
                assert tier.settle(FOREVER)
                assert tier.poll()[0].verb == "read"
                assert buffer == content(number)
        files = [path for path in (tmp_path / "kv" / "blocks-1").rglob("*") if path.is_file()]
        assert len(files) == tier.num_used
        tier.close()

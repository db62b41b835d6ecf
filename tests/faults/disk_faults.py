"""Faults of the disk tier, and of what the model's runner moves between pool and host."""

from __future__ import annotations

from seeded_fault import Edit, Fault, fault

MODEL_RUNNER = "chatd/engine/model_runner.py"
BLOCK_FILE = "chatd/kvcache/block_file.py"
DISK_TIER = "chatd/kvcache/disk_tier.py"
TEST_BLOCK_FILE = "tests/kvcache/test_block_file.py::test_"
TEST_DISK_TIER = "tests/kvcache/test_disk_tier.py::test_"
TEST_MOVES = "tests/engine/test_block_moves_on_the_model.py::test_"

SAVE = """        if plan.stores:
            store_blocks(cache, self._slots, _pairs(plan.stores))
"""

DISK_FAULTS = (
    fault(
        "the checksum is not compared",
        "a bit that flipped on the disk becomes somebody's answer",
        BLOCK_FILE,
        "if not is_whole or found[_CHECKSUM] != _checksum(found, payload):",
        "if not is_whole:",
        TEST_BLOCK_FILE + "a_flipped_bit_is_refused_wherever_it_is",
        says="DID NOT RAISE",
    ),
    fault(
        "a file is served for its name alone",
        "a file of another tenant that was moved under this name is read",
        BLOCK_FILE,
        "        if found != expected:",
        "        if not found.startswith(_MAGIC):",
        TEST_BLOCK_FILE + "a_whole_file_of_another_content_is_refused",
        says="DID NOT RAISE",
    ),
    fault(
        "a refused payload stays in its slot",
        "bytes that nobody vouches for are where a block is expected",
        BLOCK_FILE,
        "            payload[:] = bytes(len(payload))\n",
        "",
        TEST_BLOCK_FILE + "a_flipped_bit_is_refused_wherever_it_is",
    ),
    fault(
        "others can read the files",
        "every user of the machine reads everybody's conversations",
        BLOCK_FILE,
        "os.open(path, _WRITE_FLAGS, 0o600)",
        "os.open(path, _WRITE_FLAGS, 0o644)",
        TEST_BLOCK_FILE + "only_the_user_can_read_a_file",
    ),
    fault(
        "the disk drops what was used last",
        "the disk is full of what nobody comes back to",
        DISK_TIER,
        "oldest, _ = self._stored.popitem(last=False)",
        "oldest, _ = self._stored.popitem()",
        TEST_DISK_TIER + "what_was_not_used_for_longest_goes_first",
    ),
    fault(
        "a read from the disk is no use",
        "what is needed again and again is dropped like what is not",
        DISK_TIER,
        "            self._stored.move_to_end(digest)\n            self._reads.append",
        "            self._reads.append",
        TEST_DISK_TIER + "what_was_not_used_for_longest_goes_first",
    ),
    fault(
        "a forgotten block keeps its file",
        "what was erased is still on the disk",
        DISK_TIER,
        "            del self._stored[digest]\n            self._unwanted[digest] = None\n",
        "            del self._stored[digest]\n",
        TEST_DISK_TIER + "forgetting_removes_the_file",
    ),
    fault(
        "a block that is forgotten while it is written is kept",
        "what was erased comes back a moment later",
        DISK_TIER,
        '            if job.is_forgotten:\n                return "forgotten"  # and',
        '            if job is None:\n                return "forgotten"  # and',
        TEST_DISK_TIER + "what_is_forgotten_while_it_is_written_is_removed",
    ),
    fault(
        "files that cannot be removed take no room",
        "the disk fills beyond what it was given",
        DISK_TIER,
        "return len(self._stored) + len(self._unwanted | self._undeletable)",
        "return len(self._stored)",
        TEST_DISK_TIER + "files_that_cannot_be_removed_are_counted_until_they_are",
    ),
    fault(
        "two daemons share a directory",
        "each removes files that the other counts on",
        "chatd/kvcache/block_directory.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "tests/kvcache/test_block_directory.py::test_a_second_user_is_refused_until_the_first_is_gone",
        says="DID NOT RAISE",
    ),
    fault(
        "neighbors on one side are moved as one",
        "the host gets another block than the one that was saved",
        "kernels/chatd_kernels/swap_blocks/__init__.py",
        "(runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (block, slot)",
        "runs[-1][0] + runs[-1][2] == block",
        "tests/kernels/test_swap_blocks.py::test_moves_are_those_of_the_reference_bit_for_bit",
    ),
    Fault(
        "blocks are saved after the step's copies",
        "what is saved is what the plan has just written over it",
        (
            Edit(MODEL_RUNNER, SAVE + "        stored =", "        stored ="),
            Edit(MODEL_RUNNER, "        copied =", SAVE + "        copied ="),
        ),
        (TEST_MOVES + "stores_come_before_copies_and_loads_and_these_before_the_forward",),
    ),
)

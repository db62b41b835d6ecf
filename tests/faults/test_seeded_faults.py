"""The list of seeded faults stays true to the source, and a few of them are really applied and caught."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from seeded_faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]

QUICK = ("hits never match everything", "a released block is freed though it is shared", "the copy is skipped")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_faults_old_text_is_in_its_file_once_and_its_tests_exist(fault):
    for edit in fault.edits:
        text = (ROOT / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r}"
        assert edit.new != edit.old
    assert fault.tests
    for test in fault.tests:
        path, name = test.split("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_faults_have_names_of_their_own_and_are_many():
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    assert len(FAULTS) >= 30


def test_a_few_faults_are_really_applied_and_caught():
    runner = Path(__file__).with_name("fault_runner.py")
    ended = subprocess.run([sys.executable, str(runner), *QUICK], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(QUICK)} of {len(QUICK)} faults are caught" in ended.stdout

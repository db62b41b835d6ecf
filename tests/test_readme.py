"""What the README says is true: its commands exist, its example runs, and its links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    assert re.findall(r"^make \w+", first_screen, re.M) == ["make chat", "make test"]


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"make ([a-z]+)\b(?=`|\s{2,}|$)", page, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_link_to_a_file_leads_to_one() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

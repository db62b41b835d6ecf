"""Tables in README and docs are those that the figures make."""

from pathlib import Path

import pytest

from chatd.bench.report import PAGES, SECTIONS, rendered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_its_figures(page: Path) -> None:
    text = page.read_text()
    assert "<!-- figures:" in text
    assert rendered(text) == text


def test_every_section_has_a_place() -> None:
    places = "".join(page.read_text() for page in PAGES)
    for name in SECTIONS:
        assert f"<!-- figures: {name} -->" in places

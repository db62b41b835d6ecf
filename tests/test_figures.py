"""Tables in README and docs, and pictures, are those that the figures make."""

import json
from pathlib import Path

import pytest

from chatd.bench.pictures import PICTURES, digest_of, drawn_from, render_svg
from chatd.bench.report import FIGURES, PAGES, SECTIONS, load_figures, rendered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_its_figures(page: Path) -> None:
    text = page.read_text()
    assert "<!-- figures:" in text
    assert rendered(text) == text


def test_every_section_has_a_place() -> None:
    places = "".join(page.read_text() for page in PAGES)
    for name in SECTIONS:
        assert f"<!-- figures: {name} -->" in places


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_its_figures_and_on_a_page(name: str) -> None:
    svg = (FIGURES / f"{name}.svg").read_text()
    assert drawn_from(svg) == digest_of(FIGURES / f"{name}.json"), "python -m chatd.bench report draws it anew"
    assert any(f"figures/{name}.svg" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_drawn_again_to_the_same_bytes(name: str) -> None:
    figures = load_figures(name)
    assert render_svg(name, figures, "0" * 16) == render_svg(name, json.loads(json.dumps(figures)), "0" * 16)


def test_figures_of_pages_are_all_there_and_no_others() -> None:
    used = {*SECTIONS, *PICTURES, "lengths"}
    assert {path.stem for path in FIGURES.glob("*.json")} == used

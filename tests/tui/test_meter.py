from dataclasses import replace

import pytest

from chatd_tui.views import MeterView, duration_ms, percent, rate, short_number
from chatd_tui.widgets.meter import bar, meter_line

FULL = MeterView(
    blocks=4096,
    active=2499,
    cached=900,
    hit_rate=0.87,
    tok_s=38.2,
    last_tok_s=41.0,
    ttft_ms=120,
    turn_hit=0.93,
    context_used=1234,
    context_max=8192,
)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (90, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% turn 93% · 38 tok/s, last 41 · TTFT 120 ms · ctx █░░░░ 1.2k/8.2k"),
        (89, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% turn 93% · 38 tok/s · TTFT 120 ms · ctx █░░░░ 1.2k/8.2k"),
        (80, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · TTFT 120 ms · ctx █░░░░ 1.2k/8.2k"),
        (64, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · ctx █░░░░ 1.2k/8.2k"),
        (54, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · ctx 1.2k/8.2k"),
        (44, "KV ▓▓▓▓▓▒▒░ 61% · 38 tok/s · ctx 1.2k/8.2k"),
        (30, "KV ▓▓▓▓▓▒▒░ 61% · 38 tok/s"),
        (20, "KV 61% · 38 tok/s"),
        (10, "KV 61%"),
        (3, "KV 61%"),
    ],
)
def test_the_meter_drops_what_matters_least_where_there_is_no_room(width: int, expected: str) -> None:
    line = meter_line(FULL, width)
    assert line.plain == expected
    assert line.cell_length <= max(width, 6)


@pytest.mark.parametrize(
    ("tier", "width", "expected"),
    [
        ("device", 102, "1.2k/8.2k · in memory"),
        ("device", 101, "1.2k/8.2k"),
        ("disk", 65, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · ctx 1.2k/8.2k · on disk"),
        ("tokens", 30, "KV ▓▓▓▓▓▒▒░ 61% · 38 tok/s"),
        ("\x1b[2J", 120, "1.2k/8.2k · ␛[2J"),
    ],
)
def test_where_the_memory_is_matters_more_when_it_is_elsewhere(tier: str, width: int, expected: str) -> None:
    assert meter_line(replace(FULL, tier=tier), width).plain.endswith(expected)


@pytest.mark.parametrize(
    ("used", "expected", "style"),
    [
        (0, "ctx ░░░░░ 0/1k", "$success"),
        (1, "ctx █░░░░ 1/1k", "$success"),
        (700, "ctx ████░ 700/1k", "$success"),
        (701, "ctx ████░ 701/1k !", "$warning"),
        (900, "ctx ████░ 900/1k !", "$warning"),
        (901, "ctx █████ 901/1k !!", "$error"),
        (1000, "ctx █████ 1k/1k !!", "$error"),
    ],
)
def test_a_context_that_fills_is_marked_by_color_and_without(used: int, expected: str, style: str) -> None:
    line = meter_line(MeterView(context_used=used, context_max=1000), 80)
    assert line.plain == expected
    assert style in {str(span.style) for span in line.spans}
    # It stays where there is room for little else.
    short = meter_line(replace(FULL, context_used=used, context_max=1000), 28).plain
    assert ("!" in short) == ("!" in expected)


def test_the_speed_is_that_of_the_answer_in_progress_and_else_of_the_last() -> None:
    assert "38 tok/s, last 41" in meter_line(FULL, 100).plain
    assert "last 41 tok/s" in meter_line(replace(FULL, tok_s=None), 100).plain
    assert "last" not in meter_line(replace(FULL, last_tok_s=None), 100).plain
    assert meter_line(MeterView(turn_hit=0.5), 80).plain == "turn hit 50%"


def test_nothing_known_is_an_empty_line() -> None:
    assert meter_line(MeterView(), 80).plain == ""


@pytest.mark.parametrize(
    ("active", "cached", "expected"),
    [(0, 0, "░" * 8), (1, 0, "▓" + "░" * 7), (0, 1, "▒" + "░" * 7), (4096, 0, "▓" * 8), (2048, 2048, "▓▓▓▓▒▒▒▒")],
)
def test_the_bar_shows_at_least_a_cell_of_what_exists(active: int, cached: int, expected: str) -> None:
    assert bar(MeterView(blocks=4096, active=active, cached=cached)).plain == expected


def test_numbers_are_short() -> None:
    assert [short_number(n) for n in (0, 999, 1000, 1234, 9999, 65536, 999_499, 1_500_000, 2e9)] == [
        "0",
        "999",
        "1k",
        "1.2k",
        "10k",
        "66k",
        "999k",
        "1.5M",
        "2.0G",
    ]
    assert [percent(f) for f in (0, 0.001, 0.5, 0.999, 1)] == ["0%", "<1%", "50%", ">99%", "100%"]
    assert [rate(r) for r in (0.0, 3.14159, 9.96, 38.2)] == ["0.0", "3.1", "10", "38"]
    assert [duration_ms(d) for d in (12.3, 999, 1500)] == ["12 ms", "999 ms", "1.5 s"]

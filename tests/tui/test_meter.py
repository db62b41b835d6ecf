from dataclasses import replace

import pytest

from chatd_tui.views import MeterView, duration_ms, percent, rate, short_number
from chatd_tui.widgets.meter import bar, meter_line

FULL = MeterView(
    blocks=4096, active=2499, cached=900, hit_rate=0.87, tok_s=38.2, ttft_ms=120, context_used=1234, context_max=8192
)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (80, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · TTFT 120 ms · ctx 1.2k/8.2k"),
        (64, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · ctx 1.2k/8.2k"),
        (50, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s"),
        (30, "KV ▓▓▓▓▓▒▒░ 61% · 38 tok/s"),
        (16, "KV ▓▓▓▓▓▒▒░ 61%"),
        (10, "KV 61%"),
    ],
)
def test_the_meter_drops_what_matters_least_where_there_is_no_room(width: int, expected: str) -> None:
    line = meter_line(FULL, width)
    assert line.plain == expected
    assert line.cell_length <= width


@pytest.mark.parametrize(
    ("tier", "width", "expected"),
    [
        ("device", 80, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · TTFT 120 ms · ctx 1.2k/8.2k · in memory"),
        ("device", 70, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · TTFT 120 ms · ctx 1.2k/8.2k"),
        ("disk", 50, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · on disk"),
        ("tokens", 30, "KV ▓▓▓▓▓▒▒░ 61% · 38 tok/s"),
        ("\x1b[2J", 80, "KV ▓▓▓▓▓▒▒░ 61% · hit 87% · 38 tok/s · TTFT 120 ms · ctx 1.2k/8.2k · ␛[2J"),
    ],
)
def test_where_the_memory_is_matters_more_when_it_is_elsewhere(tier: str, width: int, expected: str) -> None:
    assert meter_line(replace(FULL, tier=tier), width).plain == expected


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

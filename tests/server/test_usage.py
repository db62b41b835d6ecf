"""`GET /v1/usage`: whose it shows, to whom, and from when to when."""

from __future__ import annotations

import asyncio
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatd.journal.journal import Journal
from chatd.journal.records import CountUsage

DAYS = date(2026, 1, 31), date(2026, 2, 1)


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    journal = Journal.open(tmp_path / "journal")
    await journal.commit(
        [
            CountUsage("acme", "k1", DAYS[0], 100, 40, 7),
            CountUsage("acme", "k1", DAYS[0], 10, 0, 1),
            CountUsage("acme", "k2", DAYS[1], 5, 5, 5),
            CountUsage("beta", "k3", DAYS[1], 1, 0, 1),
        ]
    )
    yield journal
    await journal.close()


async def ask(running: Any, user: str, query: str = "") -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        return await http.get(f"/v1/usage{query}", headers=running.headers(running.keys[user]))


def seen(answer: httpx.Response) -> list[tuple[str, str, str]]:
    assert answer.status_code == 200, answer.text
    return [(row["tenant"], row["key_id"], row["day"]) for row in answer.json()["data"]]


ACME = [("acme", "k1", "2026-01-31"), ("acme", "k2", "2026-02-01")]
BETA = [("beta", "k3", "2026-02-01")]


async def test_a_key_sees_its_own_tenants_usage_and_the_operators_all(start: Any, journal: Journal) -> None:
    async with start() as running:
        running.daemon.usage = journal.usage
        assert seen(await ask(running, "bob")) == ACME
        assert seen(await ask(running, "eve")) == BETA
        assert seen(await ask(running, "ann")) == ACME + BETA
        assert seen(await ask(running, "ann", "?tenant=beta")) == BETA
        assert seen(await ask(running, "bob", "?tenant=acme&from=2026-02-01")) == ACME[1:]
        assert seen(await ask(running, "bob", "?to=2026-01-31")) == ACME[:1]
        (row, _) = (await ask(running, "bob")).json()["data"]
        assert row == {
            "object": "usage",
            "tenant": "acme",
            "key_id": "k1",
            "day": "2026-01-31",
            "requests": 2,
            "input_tokens": 110,
            "cached_tokens": 40,
            "output_tokens": 8,
        }


@pytest.mark.parametrize(
    ("user", "query", "status", "param"),
    [
        ("bob", "?tenant=beta", 403, "tenant"),
        ("bob", "?tenant=", 403, "tenant"),
        ("bob", "?from=yesterday", 400, "from"),
        ("bob", "?to=2026-02-30", 400, "to"),
        ("bob", "?form=2026-02-01", 400, "form"),
        ("bob", "?to=2026-02-01&to=2026-02-02", 400, "to"),
    ],
)
async def test_what_is_not_ones_own_or_no_day_is_refused(
    start: Any, journal: Journal, user: str, query: str, status: int, param: str
) -> None:
    async with start() as running:
        running.daemon.usage = journal.usage
        answer = await ask(running, user, query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_nobody_sees_usage_without_a_key(start: Any, journal: Journal) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        running.daemon.usage = journal.usage
        assert (await http.get("/v1/usage")).status_code == 401


async def test_a_daemon_that_keeps_nothing_says_so(start: Any) -> None:
    async with start() as running:
        answer = await ask(running, "bob")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert "journal.enabled" in answer.json()["error"]["message"]


async def test_a_daemon_that_is_loading_says_so(start: Any) -> None:
    async with start(is_open=False) as running:
        answer = await ask(running, "bob")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        running.backend.gate.set()
        await asyncio.sleep(0)

"""A search goes on in pieces, and a tenant has one of them at a time."""

from __future__ import annotations

import asyncio

import pytest

from chatd.protocol import SessionCreate, SessionList, UserMessage
from chatd.sessions import listing
from chatd.sessions.conversation import Owner
from chatd.sessions.manager import SessionManager
from chatd.testing.sessions import ScriptedEngine, make_manager

ANN, BOB, EVE = Owner("acme", "ann"), Owner("acme", "bob"), Owner("other", "eve")


async def open_many(manager: SessionManager, owner: Owner, count: int) -> None:
    for number in range(count):
        session = await manager.create(owner, SessionCreate(title=f"whale {number}"))
        await manager.user_message(session, UserMessage(session=session.id, content="x" * 100, respond=False))


async def test_a_search_lets_the_loop_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_CHARS_AT_ONCE", 10 * (listing.TITLE_CHARS + 100))
    manager = make_manager(ScriptedEngine(lambda _log: ()))
    await open_many(manager, ANN, 50)
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    listed = await manager.list(ANN, SessionList(query="WHALE 49"))
    counting.cancel()
    assert [row.title for row in listed.sessions] == ["whale 49"]
    assert num_turns >= 5


async def test_a_tenant_has_one_search_at_a_time_and_holds_up_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_CHARS_AT_ONCE", 1)
    manager = make_manager(ScriptedEngine(lambda _log: ()))
    for owner in (ANN, BOB, EVE):
        await open_many(manager, owner, 5)
    ended: list[str] = []

    async def search(owner: Owner, query: str) -> None:
        await manager.list(owner, SessionList(query=query))
        ended.append(owner.user)

    # Eve's begins last and is over while the second of the other tenant waits for the first.
    searches = [search(ANN, "nothing"), search(BOB, "nothing"), search(EVE, "nothing")]
    await asyncio.gather(*searches)
    assert ended == ["ann", "eve", "bob"]


async def test_a_plain_page_waits_for_no_search() -> None:
    manager = make_manager(ScriptedEngine(lambda _log: ()))
    await open_many(manager, ANN, 2)
    async with manager._lists._searching.setdefault(ANN.tenant, asyncio.Lock()):
        listed = await manager.list(ANN, SessionList())
    assert [row.title for row in listed.sessions] == ["whale 1", "whale 0"]

"""Two tenants, and two users of one, look at everything that the pool tells, over websockets and a real engine core."""

import pytest

from chatd.client.pool import apply_frame
from chatd.protocol import (
    Params,
    PoolDelta,
    PoolInspect,
    PoolInspected,
    PoolSnapshot,
    PoolSubscribe,
    ResponseCompleted,
    ResponseIncomplete,
    SessionCreate,
    SessionFork,
    UserMessage,
    encode,
)
from chatd.server import pool_cells
from chatd.testing.ticking_core import TickingCore

END = (ResponseCompleted, ResponseIncomplete)
NUM_BLOCKS = 96


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Tenants are answered as often as the operator here: how often is another test's."""
    monkeypatch.setattr(pool_cells, "TENANT_MAX_HZ", 1000.0)
    monkeypatch.setattr(pool_cells, "MAX_HZ", 1000.0)


async def converse(talk, title: str, text: str) -> str:
    session = (await talk.ask(SessionCreate(id=f"new-{title}", title=title))).session.id
    await talk.send(UserMessage(session=session, content=text, params=Params(max_tokens=8)))
    await talk.until(END)
    return session


async def look(talk) -> tuple[str, list]:
    """Return all that a caller is told of the pool: frames of every detail, and every cell at two foldings."""
    told = []
    for detail in ("summary", "sessions", "map"):
        told.append(await talk.ask(PoolSubscribe(id=f"w-{detail}", hz=10, detail=detail, cells=NUM_BLOCKS)))
    blocks = []
    for size in (1, 8):
        for cell in range(NUM_BLOCKS // size + 2):
            answer = await talk.ask(PoolInspect(id=f"c-{size}-{cell}", cell=cell, blocks_per_cell=size))
            assert isinstance(answer, PoolInspected)
            told.append(answer)
            blocks += answer.blocks if size == 1 else []
    return "\n".join(encode(event) for event in told), blocks


async def test_nobody_is_told_of_others_but_the_operator_and_nobody_s_words_are_told(start) -> None:
    async with (
        start(engine=TickingCore(num_blocks=NUM_BLOCKS)) as running,
        running.chat(running.keys["ann"]) as ann,
        running.chat(running.keys["bob"]) as bob,
        running.chat(running.keys["eve"]) as eve,
    ):
        sessions = {
            "ann": await converse(ann, "canary-ann", "the same words at first, then ann's"),
            "bob": await converse(bob, "canary-bob", "the same words at first, then bob's"),
            "eve": await converse(eve, "canary-eve", "the same words at first, then eve's"),
        }
        seen = {name: await look(talk) for name, talk in (("ann", ann), ("bob", bob), ("eve", eve))}

        for name, (text, blocks) in seen.items():
            assert f"canary-{name}" in text, f"{name} is not told of its own session"
            assert blocks, f"{name} sees no block"
            for other in sessions:
                if other != name:
                    assert f"canary-{other}" not in text, f"{name} reads {other}'s title"
                    assert (f'"{sessions[other]}"' in text) == (name == "ann"), f"{name} and the session of {other}"
        assert ("beta" in seen["bob"][0], "acme" in seen["eve"][0]) == (False, False)

        # Everybody's own blocks are all there, each once, and no more.
        pool = running.engine.core.pool
        for name, tenant in (("bob", "acme"), ("eve", "beta")):
            account = pool.account(tenant)
            assert [block.block for block in seen[name][1]] == list(range(account.num_resident))
        assert [block.block for block in seen["ann"][1]] == [
            number for number, state in enumerate(pool.states) if state
        ]
        # Bob is told that his tenant's other user shares blocks with him, and not who that is.
        assert any(block.others and block.holders for block in seen["bob"][1])
        assert {holder.session for block in seen["bob"][1] for holder in block.holders} == {sessions["bob"]}


async def test_what_a_tenant_is_told_stays_the_same_when_another_one_comes(start) -> None:
    """Every answer and frame of eve's, before and after ann and bob fill what is free of the pool."""
    async with (
        start(engine=TickingCore(num_blocks=NUM_BLOCKS)) as running,
        running.chat(running.keys["ann"]) as ann,
        running.chat(running.keys["eve"]) as eve,
    ):
        await converse(eve, "hers", "a few words of eve's that take some blocks")

        def without_time(blocks) -> list:
            return [(b.block, b.state, b.references, b.place, b.tokens, b.registered, b.others) for b in blocks]

        before = without_time((await look(eve))[1])
        for number in range(3):
            await converse(ann, f"flood-{number}", f"{number}" * 200)
        assert without_time((await look(eve))[1]) == before


async def test_the_bills_that_a_user_is_shown_are_its_tenant_s_blocks(start) -> None:
    async with start(engine=TickingCore(num_blocks=NUM_BLOCKS)) as running, running.chat(running.keys["eve"]) as eve:
        session = await converse(eve, "one", "words that both have, and then some more")
        forked = (await eve.ask(SessionFork(id="f", session=session))).session.id
        await eve.send(UserMessage(session=forked, content="and more", params=Params(max_tokens=8)))
        await eve.until(END)
        first = await eve.ask(PoolSubscribe(id="w", hz=10, detail="map", cells=NUM_BLOCKS))
        state = apply_frame(None, first)
        assert isinstance(first, PoolSnapshot | PoolDelta)
        assert len(state.sessions) == 2
        assert state.totals.shared > 0
        assert sum(row.bill for row in state.sessions) == pytest.approx(state.totals.active)

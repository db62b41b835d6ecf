"""Questions about blocks: one at a time, each with its own answer, and few beside a large pool."""

import asyncio

import pytest

from chatd.engine.messages import InspectBlocks, Inspected
from chatd.errors import Unavailable
from chatd.sessions.inspections import INTERVAL_S_PER_BLOCK, Inspections
from chatd.testing.engine import FakeClock
from chatd.testing.sessions import ScriptedEngine


class Asked:
    """Inspections over an engine that keeps what it is sent."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.engine = ScriptedEngine(lambda log: log, is_ready=is_ready)
        self.clock = FakeClock()
        self.slept: list[float] = []
        self.inspections = Inspections(self.engine, self.clock, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    @property
    def sent(self) -> list[InspectBlocks]:
        return [message for message in self.engine.sent if isinstance(message, InspectBlocks)]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_question_at_a_time_is_with_the_engine_and_each_gets_its_own_answer() -> None:
    asked = Asked()
    first = asyncio.create_task(asked.inspections.ask(0, 1, None))
    second = asyncio.create_task(asked.inspections.ask(5, 2, "acme"))
    await settle()
    assert asked.sent == [InspectBlocks(1, 0, 1, None)]
    asked.inspections.on_inspected(Inspected(1, 10, []))
    await settle()
    assert asked.sent[1:] == [InspectBlocks(2, 5, 2, "acme")]
    asked.inspections.on_inspected(Inspected(2, 11, []))
    assert [(await first).step, (await second).step] == [10, 11]


async def test_a_tenant_that_asks_much_holds_up_another_by_one_question() -> None:
    asked = Asked()
    owners = ["acme", "acme", "acme", "other", None]
    asking = [asyncio.create_task(asked.inspections.ask(cell, 1, owner)) for cell, owner in enumerate(owners)]
    for question in range(1, 6):
        await settle()
        asked.inspections.on_inspected(Inspected(question, 1, []))
    await asyncio.gather(*asking)
    assert [(message.tenant, message.first) for message in asked.sent] == [
        ("acme", 0),
        ("other", 3),
        (None, 4),
        ("acme", 1),
        ("acme", 2),
    ]


async def test_the_larger_the_tables_the_fewer_questions() -> None:
    asked = Asked()
    asked.inspections.num_held = 100_000
    for question in (1, 2):
        asking = asyncio.create_task(asked.inspections.ask(0, 1, None))
        await settle()
        asked.inspections.on_inspected(Inspected(question, 1, []))
        await asking
    assert asked.slept == [pytest.approx(100_000 * INTERVAL_S_PER_BLOCK)]


async def test_a_question_is_refused_while_no_engine_serves_and_the_next_one_is_asked() -> None:
    asked = Asked(is_ready=False)
    with pytest.raises(Unavailable):
        await asked.inspections.ask(0, 1, None)
    asked.engine.ready = Asked().engine.ready
    asking = asyncio.create_task(asked.inspections.ask(0, 1, None))
    await settle()
    asked.inspections.on_inspected(Inspected(2, 1, []))
    assert (await asking).question == 2


async def test_a_question_that_is_given_up_lets_the_next_one_through() -> None:
    asked = Asked()
    given_up = asyncio.create_task(asked.inspections.ask(0, 1, None))
    following = asyncio.create_task(asked.inspections.ask(1, 1, None))
    await settle()
    given_up.cancel()
    await settle()
    asked.inspections.on_inspected(Inspected(1, 1, []))
    asked.inspections.on_inspected(Inspected(2, 3, []))
    assert (await following).step == 3


async def test_whoever_waits_when_the_engine_ends_is_told() -> None:
    asked = Asked()
    asking = asyncio.create_task(asked.inspections.ask(0, 1, None))
    await settle()
    asked.inspections.on_died()
    with pytest.raises(Unavailable):
        await asking

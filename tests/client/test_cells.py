"""What is in a cell of the pool's map, asked through the client."""

import asyncio

import pytest

from chatd import protocol as p
from chatd.client import Client
from chatd.errors import RateLimited
from chatd.testing.scripted_daemon import ScriptedDaemon

BLOCK = p.CellBlock(
    block=6, state="shared", references=2, public=False, registered=True, place=1, tokens=16, age_s=3.0, holders=[],
    others=2,
)  # fmt: skip


async def test_a_cell_is_asked_for_as_the_map_folds_it() -> None:
    async with ScriptedDaemon() as daemon, Client(daemon.url, wait_s=10) as client:
        daemon.blocks = {3: [BLOCK]}
        inspected = await client.inspect_cell(3, 2)
        assert (inspected.cell, inspected.blocks_per_cell, inspected.blocks) == (3, 2, [BLOCK])
        assert [(c.cell, c.blocks_per_cell) for c in daemon.commands if isinstance(c, p.PoolInspect)] == [(3, 2)]


async def test_a_refusal_is_raised_with_its_code() -> None:
    async with ScriptedDaemon() as daemon, Client(daemon.url, wait_s=10) as client:

        async def refuse(command: p.Command) -> bool:
            body = p.ErrorBody(type="rate_limit_error", code="busy", message="busy", retry_after_ms=1000)
            await daemon.send_everywhere(p.encode(p.Error(error=body, re=command.id)))
            return True

        daemon.on_command = refuse
        with pytest.raises(RateLimited) as refused:
            await client.inspect_cell(0)
        assert (refused.value.error_code, refused.value.retry_after_ms) == ("busy", 1000)


async def test_a_question_is_asked_again_after_a_lost_connection() -> None:
    async with ScriptedDaemon() as daemon, Client(daemon.url, wait_s=10, backoff=lambda _: 0.0) as client:
        asked = asyncio.Event()

        async def lose(_: p.Command) -> bool:
            asked.set()
            return True

        daemon.on_command = lose
        asking = asyncio.create_task(client.inspect_cell(5))
        await asked.wait()
        daemon.on_command = None
        daemon.abort()
        assert (await asking).cell == 5

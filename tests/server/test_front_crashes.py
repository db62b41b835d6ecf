"""A fault in native code ends the daemon itself: it starts again, and again, and then without what ended it."""

import asyncio

from chatd.client import Client
from chatd.protocol import Params
from chatd.testing.kills import Script, Seen, client_of, converse, run_scripts
from chatd.testing.ports import free_port
from chatd.testing.toy_daemon import ToyFarm

SIGSEGV = -11
INNOCENT = [
    Script(f"be patient {number}", [f"say much, {number}"], Params(max_tokens=400 + number)) for number in range(2)
]


async def test_an_answer_that_ends_the_daemon_at_each_start_does_not_keep_it_from_starting(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ToyFarm(tmp_path) as farm:
        running = farm.start(port, pace_s=0.0)
        expected = await run_scripts(url, INNOCENT, Seen())
        await asyncio.to_thread(farm.stop, running)
        running = farm.start(port, pace_s=0.005, fault="poison")
        talks = [asyncio.create_task(talk(url, script)) for script in INNOCENT]
        async with Client(url, wait_s=60.0) as client:
            session = await client.create_session(system="be short")
            await until_all_answer(client)
            asking = asyncio.create_task(session.send("poison"))
            # The first time with all others, then alone.
            for _ in range(2):
                assert await asyncio.to_thread(farm.wait, running) == SIGSEGV
                running = farm.start(port, pace_s=0.002, fault="poison")
            async with asyncio.timeout(60):
                said = await asyncio.gather(*talks)
                await asyncio.wait((asking,))
            assert said == expected
            _, items = await client.get_session(session.id)
            assert [(item.role, item.content, item.status) for item in items] == [("user", "poison", "completed")]
            other = await client.create_session()
            assert "".join([delta async for delta in other.stream("and on", params=Params(max_tokens=5))])
        assert "has ended the daemon 2 times" in farm.log


async def talk(url, script):
    async with client_of(url) as client:
        return await converse(client, script, Seen())


async def until_all_answer(client):
    """Return once every script's answer has begun."""
    async with asyncio.timeout(30):
        while sum(row.busy for row in await client.list_sessions()) < len(INNOCENT):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

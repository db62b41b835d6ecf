"""A daemon that is killed in the middle of answers: the real client shows each as if nothing had happened."""

import asyncio
import random
import socket
from pathlib import Path

import pytest

from chatd.client import Client
from chatd.protocol import OutputTextDelta, Params
from chatd.testing.toy_daemon import ToyFarm

NUM_TURNS = 3
PARAMS = Params(max_tokens=120, ignore_eos=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def talk(client: Client, number: int) -> list[tuple[str, str | None, int]]:
    """Have a conversation and return what was shown of each answer, by its deltas."""
    session = await client.create_session(title=f"session {number}")
    told = []
    for turn in range(NUM_TURNS):
        asked = session.say(f"{number} says {turn}", params=PARAMS)
        shown = [event.delta async for event in asked if isinstance(event, OutputTextDelta)]
        assert asked.item is not None
        assert "".join(shown) == asked.text == asked.item.content
        told.append((asked.text, asked.reason, asked.usage.output_tokens if asked.usage else -1))
    return told


def journal_of(folder: Path, name: str) -> dict[str, object]:
    return {"directory": str(folder / name)}


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_client_shows_the_same_answers_however_often_the_daemon_is_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    port = free_port()
    with ToyFarm(tmp_path) as farm:
        pid = farm.start(port, pace_s=0.0, journal=journal_of(tmp_path, "calm"))
        async with Client(f"http://127.0.0.1:{port}", wait_s=30.0) as client:
            calm = await asyncio.gather(*(talk(client, number) for number in range(3)))
        farm.kill(pid)
        journal = journal_of(tmp_path, "killed")
        pid = farm.start(port, pace_s=0.004, journal=journal)
        async with Client(f"http://127.0.0.1:{port}", wait_s=30.0, backoff=lambda _attempt: 0.02) as client:
            talking = asyncio.gather(*(talk(client, number) for number in range(3)))
            num_kills = 0
            while not talking.done() and num_kills < 12:
                await asyncio.wait([talking], timeout=rng.uniform(0.1, 0.4))
                if not talking.done():
                    await asyncio.to_thread(farm.kill, pid)
                    pid = await asyncio.to_thread(lambda: farm.start(port, pace_s=0.004, journal=journal))
                    num_kills += 1
            assert await talking == calm
            assert num_kills > 1
        assert "Traceback" not in farm.log

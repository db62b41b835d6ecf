"""What an engine's process has put on the disk is there for the next one."""

import asyncio
import stat

from chatd.engine.client import EngineClient
from chatd.engine.messages import Done, PoolFrame, Submit, Tier, WatchPool
from chatd.engine.options import EngineOptions
from chatd.engine.sampling import SamplingParams

MIB = 2**20
TIMEOUT_S = 120.0
PROMPT = [(7 * i * i + 5 * i + 3) % 509 + 3 for i in range(200)]


async def ask(client, messages):
    client.send(Submit(1, 1, "acme", 0, PROMPT, SamplingParams(max_tokens=6)))
    client.send(WatchPool(0.01))
    done = frame = None
    async with asyncio.timeout(TIMEOUT_S):
        async for message in messages:
            if isinstance(message, Done):
                done = message
            elif isinstance(message, PoolFrame):
                frame = message
            # Twelve blocks of the prompt and one that the answer has filled, or none if all of them came from there.
            if done is not None and frame is not None and disk(frame).num_used == 12:
                return done, frame
    raise AssertionError("the engine is gone")


def disk(frame):
    return next(row for row in frame.tiers if row.tier is Tier.DISK)


async def test_a_prompt_is_found_on_the_disk_by_the_next_process(tiny_model, tmp_path):
    options = EngineOptions(
        model_id="tiny",
        model_path=str(tiny_model),
        model_digest="d",
        kv_memory_bytes=8 * MIB,
        disk_space_bytes=8 * MIB,
        disk_directory=str(tmp_path / "kv"),
    )
    found = []
    for _ in range(2):
        client = EngineClient(options)
        ready = await client.start(lambda *_: None)
        assert any(note.startswith(f"{tmp_path / 'kv'} keeps") for note in ready.notes)
        done, frame = await ask(client, client.messages())
        found.append((done.num_cached_tokens, disk(frame).num_stored, disk(frame).num_loaded, disk(frame).num_refused))
        await client.close()
    assert found == [(0, 12, 0, 0), (192, 0, 12, 0)]
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert sum(path.suffix == ".kv" for path in files) == 12

"""What an engine's process has put on the disk is there for the next one."""

import asyncio
import os
import signal
import stat

from chatd.engine.client import EngineClient
from chatd.engine.messages import Done, PoolFrame, Ready, Submit, Tier, WatchPool
from chatd.engine.options import EngineOptions
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.block_directory import BlockDirectory

MIB = 2**20
TIMEOUT_S = 120.0
PROMPT = [(7 * i * i + 5 * i + 3) % 509 + 3 for i in range(200)]


async def ask(client, messages):
    client.send(Submit(1, 1, "acme", 0, PROMPT, SamplingParams(max_tokens=6)))
    client.send(WatchPool(0.01))
    done = None
    async with asyncio.timeout(TIMEOUT_S):
        async for message in messages:
            if isinstance(message, Done):
                done = message
            elif isinstance(message, PoolFrame):
                row = disk(message)
                # The prompt has twelve full blocks: they are written, or all of them come from there.
                if done is not None and row.num_stored + row.num_loaded == 12:
                    return done.num_cached_tokens, row.num_stored, row.num_loaded, row.num_refused
    raise AssertionError("the engine is gone")


def disk(frame):
    return next(row for row in frame.tiers if row.tier is Tier.DISK)


async def test_a_prompt_is_found_on_the_disk_after_the_engine_was_killed(tiny_model, tmp_path):
    root = tmp_path / "kv"
    options = EngineOptions(
        model_id="tiny",
        model_path=str(tiny_model),
        model_digest="d",
        kv_memory_bytes=8 * MIB,
        disk_space_bytes=8 * MIB,
        disk_directory=str(root),
    )
    client = EngineClient(options, first_backoff_s=0.01)
    ready = await client.start(lambda *_: None)
    assert any(note.startswith(f"{root} keeps") for note in ready.notes)
    messages = client.messages()
    found = [await ask(client, messages)]
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT_S):
        ready = await anext(message async for message in messages if isinstance(message, Ready))
    assert any(note.endswith(", 12 from before") for note in ready.notes)
    found.append(await ask(client, messages))
    # Cached tokens of the prompt, and what the disk has stored, loaded and refused.
    assert found == [(0, 12, 0, 0), (192, 0, 12, 0)]
    await client.close()
    BlockDirectory(root).close()  # nobody has it any more
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert sum(path.suffix == ".kv" for path in files) == 12

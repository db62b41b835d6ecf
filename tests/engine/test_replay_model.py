"""A real engine's life, recorded and lived again without the model."""

import asyncio

import numpy as np
import pytest

from chatd.engine.client import EngineClient
from chatd.engine.core import EngineConfig
from chatd.engine.decision_log import LogReader, LogWriter
from chatd.engine.messages import Cancel, Done, Fork, Submit, Trim
from chatd.engine.options import EngineOptions
from chatd.engine.recording import RecordingCore
from chatd.engine.replay import Replay, replay_file
from chatd.engine.sampling import SamplingParams
from chatd.testing.engine import NAMESPACE

MIB = 2**20


def test_a_real_engine_is_replayed_to_the_same_decisions(load_tiny, real_engine, tmp_path):
    path = tmp_path / "log"
    engine = real_engine(load_tiny("fp16"), {"num_blocks": 24, "max_num_batched_tokens": 64})
    values = {"num_blocks": 24, "namespace": NAMESPACE, "max_model_len": 300, "max_num_batched_tokens": 64}
    engine.core = RecordingCore(
        EngineConfig(**values), engine.runner, engine.clock, make_writer=lambda header: LogWriter(path, header, MIB)
    )
    rng = np.random.default_rng(5)
    for request in range(8):
        ids = rng.integers(3, 512, 20 + 11 * request).tolist()
        kind = {"temperature": 0.9, "seed": request} if request % 2 else {"logprobs": 3}
        engine.submit(request, ids, tenant=("acme", "blue")[request % 2], max_tokens=30, **kind)
    for _ in range(9):
        engine.step()
    engine.send(Cancel(3))
    engine.send(Fork(1, 100, 25))
    engine.submit(20, [4, 5, 6], lease=100, base_len=25, tenant="blue")
    engine.run()
    engine.send(Trim(2, 10))
    engine.submit(21, [7], lease=2, base_len=10)
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    engine.core.close()
    with LogReader(path) as log:
        replay = Replay(log.header)
        assert replay.run(log.calls()) is None
        assert log.end == "closed"
    assert replay.core.scheduler.step == engine.core.scheduler.step
    assert replay.core.stats() == engine.core.stats()


async def test_an_engine_process_writes_a_log_that_replays(tiny_model, tmp_path):
    path = tmp_path / "engine.log"
    options = EngineOptions(
        model_id="tiny",
        model_path=str(tiny_model),
        model_digest="d",
        kv_memory_bytes=8 * MIB,
        host_memory_bytes=MIB,
        disk_space_bytes=8 * MIB,
        disk_directory=str(tmp_path / "kv"),
        decision_log=str(path),
    )
    client = EngineClient(options)
    await client.start(lambda phase, progress: None)
    for request in (1, 2):
        client.send(Submit(request, request, "acme", 0, [request] * 40, SamplingParams(max_tokens=6)))
    ended = 0
    async with asyncio.timeout(120):
        async for message in client.messages():
            ended += isinstance(message, Done)
            if ended == 2:
                break
        # The idle engine copies blocks down, and asks the disk how far it is.
        while not list((tmp_path / "kv").rglob("*.kv")):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await client.close()
    with LogReader(path) as log:
        asked = [answer.asked for call in log.calls() for answer in call.disk]
    assert {"write", "poll", "contains"} <= set(asked)
    report = replay_file(path)
    assert report.is_same
    assert "acme: 2 requests, ended: 2 max_output_tokens" in report.lines
    assert report.lines[-1].startswith("every decision and message is the same")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.model
def test_the_real_model_is_replayed_to_the_same_decisions(load_smollm2, real_engine, tmp_path):
    path = tmp_path / "log"
    engine = real_engine(load_smollm2("fp16"))
    values = {"num_blocks": 64, "namespace": NAMESPACE, "max_model_len": 512}
    engine.core = RecordingCore(
        EngineConfig(**values), engine.runner, engine.clock, make_writer=lambda header: LogWriter(path, header, MIB)
    )
    for request in range(4):
        engine.submit(request, list(range(10, 50 + request)), max_tokens=8)
    engine.run()
    engine.core.close()
    assert replay_file(path).is_same

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from chatd.engine import process
from chatd.engine.client import EngineClient, EngineDied
from chatd.engine.messages import Done, FinishReason, LeaseLost, Loading, Ready, StartFailed, Submit, decode_engine
from chatd.engine.options import STACKS_SIGNAL, EngineOptions, TenantShare
from chatd.engine.pipe import EnginePipe, FrameReader
from chatd.engine.sampling import SamplingParams

MIB = 2**20
TIMEOUT_S = 120.0


def options_for(folder, **fields):
    values = {"model_id": "tiny", "model_path": str(folder), "model_digest": "d", "kv_memory_bytes": 8 * MIB}
    return EngineOptions(**(values | fields))


def submit(request, ids, *, lease=1, base_len=0):
    return Submit(request, lease, "acme", base_len, ids, SamplingParams(max_tokens=6))


async def next_of(messages, kind, **fields):
    async with asyncio.timeout(TIMEOUT_S):
        async for message in messages:
            if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                return message
    raise AssertionError(f"no {kind.__name__} before the end")


async def test_it_loads_serves_ignores_signals_is_replaced_and_leaves_nothing(tiny_model, tmp_path):
    phases = []
    log = tmp_path / "engine.log"
    with log.open("wb") as stderr:
        client = EngineClient(
            options_for(tiny_model, tenants={"acme": TenantShare(2.0, 0.25)}), stderr=stderr, first_backoff_s=0.01
        )
        ready = await client.start(lambda phase, progress: phases.append(phase))
        messages = client.messages()
        assert list(dict.fromkeys(phases)) == [
            "importing",
            "loading weights",
            "compiling kernels",
            "allocating the KV pool",
            "trying a step",
            "ready",
        ]
        assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (1365, 16, 1024)
        assert ready.vocab_size == 512
        assert ready.notes == ["1365 blocks = 21,840 tokens = 21 full-length chats"]

        first = client.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(first, number)
        client.send(submit(1, [5, 6, 7]))
        done = await next_of(messages, Done, request=1)
        assert (done.reason, done.num_output_tokens) == (FinishReason.MAX_OUTPUT_TOKENS, 6)

        async with asyncio.timeout(TIMEOUT_S):
            while "in receive" not in log.read_text():
                os.kill(first, STACKS_SIGNAL)  # An idle engine is elsewhere for moments: it looks over its state.
                await asyncio.sleep(0.01)
        client.send(submit(4, [5]))
        await next_of(messages, Done, request=4)

        os.kill(first, signal.SIGKILL)
        await next_of(messages, EngineDied, exit_code=-9)
        await next_of(messages, Ready)
        client.send(submit(2, [8], base_len=9))
        assert (await next_of(messages, LeaseLost)).request == 2
        client.send(submit(3, [5, 6, 7]))
        await next_of(messages, Done, request=3)

        second = psutil.Process(client.pid)
        await client.close()
        assert not second.is_running()
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [event["event"] for event in events] == ["engine.ready", "engine.ready"]
    assert {"logger", "level", "timestamp", "start_s"} <= events[0].keys()


def test_it_ends_when_the_front_is_killed(tiny_model):
    front = f"""
import asyncio
from chatd.engine.client import EngineClient
from chatd.engine.options import EngineOptions

async def main():
    client = EngineClient(EngineOptions(model_id="t", model_path={str(tiny_model)!r}, model_digest="d",
                                        kv_memory_bytes={8 * MIB}))
    start = asyncio.create_task(client.start())
    while client.pid is None:
        await asyncio.sleep(0.01)
    print(client.pid, flush=True)
    await start
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", front], stdout=subprocess.PIPE, text=True) as running:
        engine = psutil.Process(int(running.stdout.readline()))
        assert running.stdout.readline() == "ready\n"
        running.kill()
        psutil.wait_procs([engine], timeout=TIMEOUT_S)
        assert not engine.is_running()


@pytest.fixture
def start():
    """Run start-up on a pipe; return its exit code and what it said."""

    def run(options):
        front, theirs = socket.socketpair()
        with front:
            pipe = EnginePipe(theirs)
            exit_code = process._start(options, pipe)
            front.settimeout(TIMEOUT_S)
            data = b"".join(iter(lambda: front.recv(1 << 20), b""))
        return exit_code, [decode_engine(body) for body in FrameReader().feed(data)]

    return run


@pytest.mark.parametrize(
    ("fields", "exit_code", "code", "words"),
    [
        ({"kv_memory_bytes": 10**15}, 3, "no_room_for_pool", "--kv-memory"),
        ({"kv_memory_bytes": 1000}, 3, "no_room_for_pool", "a context of 256 tokens needs 17 blocks"),
        ({"max_model_len": 5000}, 2, "config_error", "max_model_len is 5000, the model's context has 1024 tokens"),
        ({"max_num_seqs": 900}, 2, "config_error", "max_num_batched_tokens is 512, the least is 900"),
        ({"tenants": {"acme": TenantShare(1.0, 0.6)}}, 2, "config_error", "tenants' floors"),
        ({"model_path": "/does/not/exist"}, 4, "model_no_config", "/does/not/exist has no config.json"),
    ],
)
def test_what_cannot_start_says_why_with_the_commands_exit_code(start, tiny_model, fields, exit_code, code, words):
    got, said = start(options_for(tiny_model, **fields))
    assert got == exit_code
    assert all(isinstance(message, Loading) for message in said[:-1])
    assert isinstance(said[-1], StartFailed)
    assert (said[-1].exit_code, said[-1].code) == (exit_code, code)
    assert words in said[-1].message


def test_weights_that_do_not_fit_the_configuration_are_named(start, tiny_model, tmp_path):
    folder = tmp_path / "damaged"
    folder.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    (folder / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    exit_code, said = start(options_for(folder))
    assert exit_code == 4
    assert "lacks model.layers.3." in said[-1].message


def test_a_fault_of_its_own_is_told_and_logged(start, tiny_model, monkeypatch, caplog):
    monkeypatch.setattr("chatd.engine.startup.load_model", lambda *_: 1 / 0)
    exit_code, said = start(options_for(tiny_model))
    assert exit_code == 1
    assert said[-1] == StartFailed("engine_start_failed", "ZeroDivisionError: division by zero", 1)
    assert "engine.start_failed" in caplog.messages


# An engine whose model never comes back from a certain token, with the interpreter's lock held, as a bad kernel does.
STUCK_AT = 13
STUCK_ENGINE = f"""
import ctypes, sys
from chatd.engine import process
from chatd.engine.model_runner import ModelRunner
execute = ModelRunner.execute
def stuck(self, plan):
    if any({STUCK_AT} in chunk.token_ids for chunk in plan.chunks):
        ctypes.PyDLL(None).pause()
    return execute(self, plan)
ModelRunner.execute = stuck
sys.exit(process.main(sys.argv[1:]))
"""


async def test_an_engine_that_never_comes_back_from_its_kernel_is_replaced(tiny_model):
    client = EngineClient(
        options_for(tiny_model), first_backoff_s=0.01, hang_timeout_s=2.0, command=(sys.executable, "-c", STUCK_ENGINE)
    )
    await client.start()
    messages = client.messages()
    client.send(submit(1, [5, STUCK_AT, 7]))
    died = await next_of(messages, EngineDied)
    assert died.reason.startswith("no sign of life for 2.0 s, in a step that should take 0.")
    await next_of(messages, Ready)
    client.send(submit(2, [5, 6, 7]))
    assert (await next_of(messages, Done)).request == 2
    await client.close()

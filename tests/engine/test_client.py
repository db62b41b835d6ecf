import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from chatd.engine import client as client_module
from chatd.engine.client import EngineClient, EngineDied, EngineState
from chatd.engine.messages import Cancel, Fork, Loading, Ready, Release, SetTenant, Submit, Tokens, WatchPool
from chatd.engine.options import EngineOptions, TenantShare
from chatd.engine.sampling import SamplingParams
from chatd.errors import EnvironmentProblem, Unavailable

SCRIPT = Path(__file__).parent / "scripted_engine.py"
STUCK = ("waits", "spins", "waits with the lock", "spins with the lock", "works long")  # As the script has them.
TIMEOUT_S = 20.0


def options(behavior="serve", **fields):
    return EngineOptions(model_id=behavior, model_path="/models/none", model_digest="0", **fields)


def submit(request, num_tokens):
    return Submit(request, 1, "acme", 0, [1] * num_tokens, SamplingParams(max_tokens=4))


class Inbox:
    """Everything that arrived, and a way to wait for one of it."""

    def __init__(self):
        self.batches = []
        self._changed = asyncio.Event()

    def __call__(self, batch):
        self.batches.append(batch)
        self._changed.set()

    @property
    def messages(self):
        return [message for batch in self.batches for message in batch]

    async def wait_for(self, predicate):
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for message in self.messages:
                    if predicate(message):
                        return message
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def engine(behavior="serve", *, num_threads=0, **fields):
    inbox = Inbox()
    client = EngineClient(
        options(behavior, num_threads=num_threads),
        on_messages=inbox,
        first_backoff_s=0.01,
        command=(sys.executable, str(SCRIPT)),
        **fields,
    )
    try:
        yield client, inbox
    finally:
        await client.close(timeout_s=1.0)


def is_a(kind, **fields):
    return lambda message: isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items())


async def test_it_starts_reports_its_phases_and_serves():
    phases = []
    async with engine(num_threads=3) as (client, inbox):
        ready = await client.start(lambda phase, progress: phases.append((phase, progress)))
        assert phases == [("weights", 0.5), ("ready", 1.0)]
        assert ready.max_model_len == 3  # the script tells the threads that its environment allows
        assert client.state is EngineState.READY
        assert client.pid == ready.num_blocks
        client.send(submit(5, 200))
        await inbox.wait_for(is_a(Tokens, step=199))
        tokens = [m for m in inbox.messages if isinstance(m, Tokens)]
        assert [m.step for m in tokens] == list(range(200))


async def test_messages_that_arrive_together_are_handed_over_together():
    async with engine() as (client, inbox):
        await client.start()
        client.send(submit(5, 100))
        await inbox.wait_for(is_a(Tokens, step=99))
        assert sum(isinstance(batch[0], Tokens) for batch in inbox.batches) <= 2


async def test_an_engine_that_takes_nothing_gets_no_more_work_but_is_told_what_ends(monkeypatch):
    async with engine() as (client, inbox):
        await client.start()
        with monkeypatch.context() as patched:
            patched.setattr(client_module, "MAX_UNSENT_BYTES", -1)
            with pytest.raises(Unavailable, match="the engine takes no messages"):
                client.send(submit(5, 1))
            client.send(Cancel(7))
        died = await inbox.wait_for(is_a(EngineDied))
        assert died.exit_code == 7  # what the script does when it is told to cancel


async def test_closing_leaves_no_process():
    async with engine() as (client, _):
        await client.start()
        process = psutil.Process(client.pid)
        await client.close()
        assert not process.is_running()
        assert client.state is EngineState.CLOSED
        await client.close()
        with pytest.raises(Unavailable):
            client.send(submit(1, 1))


async def test_a_process_that_will_not_end_is_killed():
    async with engine("deaf") as (client, _):
        await client.start()
        process = psutil.Process(client.pid)
        await client.close(timeout_s=0.1)
        assert not process.is_running()


async def test_a_refusal_to_start_is_raised_as_the_error_it_is():
    async with engine("refuse") as (client, _):
        with pytest.raises(EnvironmentProblem, match="12 MiB are free") as caught:
            await client.start()
        assert caught.value.error_code == "no_room_for_pool"
        assert client.state is EngineState.FAILED


async def test_a_process_that_dies_while_it_loads_is_a_startup_error():
    async with engine("exit at start") as (client, _):
        with pytest.raises(EnvironmentProblem, match="its process ended with exit code 9"):
            await client.start()


async def test_a_command_that_does_not_exist_is_a_startup_error():
    client = EngineClient(options(), command=("/does/not/exist",))
    with pytest.raises(EnvironmentProblem, match="cannot be started"):
        await client.start()


async def test_cancelling_the_start_leaves_no_process(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text(
        "import sys, socket\nsocket.socket(fileno=int(sys.argv[1])).recv(1); input_ = socket.socketpair()[0].recv(1)"
    )
    client = EngineClient(options(), command=(sys.executable, str(script)))
    start = asyncio.create_task(client.start())
    async with asyncio.timeout(TIMEOUT_S):
        while client.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    process = psutil.Process(client.pid)
    start.cancel()
    closing = asyncio.create_task(client.close(timeout_s=0.1))
    with pytest.raises(asyncio.CancelledError):
        await start
    await closing
    assert not process.is_running()


@pytest.mark.parametrize(
    ("how", "reason", "exit_code"),
    [
        ("kill", "its process was ended by SIGKILL (out of memory?)", -9),
        ("exit 7", "its process ended with exit code 7", 7),
        ("exit 71", "its process ended with exit code 71 (the device does not answer any more, its log", 71),
        ("nonsense", "it sent nonsense", -9),
        ("stop", "no sign of life for 0.4 s", -9),
    ],
)
async def test_a_death_is_told_once_after_everything_sent_before_and_another_serves(how, reason, exit_code):
    async with engine(hang_timeout_s=0.4 if how == "stop" else 30.0) as (client, inbox):
        first = await client.start()
        client.send(submit(1, 3))
        await inbox.wait_for(is_a(Tokens, step=2))
        match how:
            case "kill":
                os.kill(client.pid, signal.SIGKILL)
            case "exit 7" | "exit 71":
                client.send(Cancel(exit_code))
            case "nonsense":
                client.send(Release(1))
            case "stop":
                os.kill(client.pid, signal.SIGSTOP)
        died = await inbox.wait_for(is_a(EngineDied))
        assert died.reason.startswith(reason)
        assert died.exit_code == exit_code
        with pytest.raises(Unavailable, match="the engine is restarting"):
            client.send(submit(2, 1))
        client.send(Cancel(1))  # about a request that died: dropped
        second = await inbox.wait_for(lambda m: isinstance(m, Ready) and m.num_blocks != first.num_blocks)
        client.send(submit(2, 1))
        await inbox.wait_for(lambda m: isinstance(m, Tokens) and m.deltas[0].request == 2)
        assert client.pid == second.num_blocks
        assert client.num_restarts == 1
        assert sum(isinstance(m, EngineDied) for m in inbox.messages) == 1


async def test_a_start_that_hangs_is_begun_again(tmp_path, caplog):
    phases = []
    async with engine(f"hang {tmp_path} until 2", start_hang_timeout_s=0.3) as (client, inbox):
        ready = await client.start(lambda phase, progress: phases.append(phase))
        assert client.pid == ready.num_blocks
        assert client.num_restarts == 1
    reason = "its start made no progress for 0.3 s after 'weights'"
    assert phases == ["weights", f"restarting: {reason}", "weights", "ready"]
    assert caplog.messages == [f"the engine is started again in 0.0 s: {reason}"]
    assert not any(isinstance(m, EngineDied) for m in inbox.messages)


async def test_starts_that_always_hang_are_a_startup_error(tmp_path):
    async with engine(f"hang {tmp_path}", start_hang_timeout_s=0.2) as (client, _):
        with pytest.raises(EnvironmentProblem, match=r"its start made no progress for 0\.2 s after 'weights'"):
            await client.start()
        assert client.state is EngineState.FAILED
    assert len(list(tmp_path.iterdir())) == client_module.MAX_HUNG_STARTS


async def test_a_step_that_was_said_to_be_long_is_no_hang_and_no_stall():
    phases = []
    async with engine(hang_timeout_s=0.4, busy_timeout_s=0.8) as (client, inbox):
        await client.start(lambda phase, progress: phases.append(phase))
        client.send(Fork(1, 2, STUCK.index("works long")))
        end = await inbox.wait_for(lambda m: isinstance(m, EngineDied) or is_a(Loading, phase="went on")(m))
        assert not isinstance(end, EngineDied), end.reason
        assert phases == ["weights", "ready", "went on"]


async def test_an_engine_that_is_busy_and_silent_stalls_and_goes_on():
    states = []
    async with engine(hang_timeout_s=0.4) as (client, inbox):
        await client.start(lambda phase, progress: states.append((client.state, phase)))
        client.send(WatchPool(5.0))
        await inbox.wait_for(is_a(Loading, phase="was busy"))
        async with asyncio.timeout(TIMEOUT_S):
            while client.state is not EngineState.READY:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert client.num_restarts == 0
    assert (EngineState.STALLED, "no progress for 0.4 s") in states


@pytest.mark.parametrize("how", STUCK[:4])
async def test_a_step_without_an_end_is_seen_and_its_engine_replaced(how):
    seen = []
    async with engine(hang_timeout_s=0.4, busy_timeout_s=0.8) as (client, inbox):
        first = await client.start(lambda phase, progress: seen.append((client.state, phase)))
        client.send(Fork(1, 2, STUCK.index(how)))
        died = await inbox.wait_for(is_a(EngineDied))
        seconds = 0.8 if "spins" in how else 0.4
        assert died.reason.startswith(f"no sign of life for {seconds} s, in a step that should take 0.02 s")
        await inbox.wait_for(lambda m: isinstance(m, Ready) and m.num_blocks != first.num_blocks)
    stalled = (EngineState.STALLED, "no progress for 0.4 s, in a step that should take 0.02 s")
    assert (stalled in seen) == ("spins" in how)
    # It is said before the process is gone.
    assert (EngineState.RESTARTING, f"restarting: {died.reason}") in seen


async def test_what_is_sent_to_a_stalled_engine_waits_for_it():
    async with engine(hang_timeout_s=0.3) as (client, inbox):
        await client.start()
        client.send(WatchPool(5.0))
        async with asyncio.timeout(TIMEOUT_S):
            while client.state is not EngineState.STALLED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client.send(submit(1, 2))
        await inbox.wait_for(is_a(Tokens, step=1))


async def test_the_pool_is_watched_again_after_a_restart():
    async with engine() as (client, inbox):
        await client.start()
        client.send(WatchPool(0.5))
        await inbox.wait_for(is_a(Loading, phase="watching"))
        os.kill(client.pid, signal.SIGKILL)
        await inbox.wait_for(is_a(EngineDied))
        inbox.batches.clear()
        await inbox.wait_for(is_a(Loading, phase="watching", progress=0.5))


async def test_messages_can_be_iterated_until_the_client_is_closed():
    client = EngineClient(options(), command=(sys.executable, str(SCRIPT)))
    await client.start()
    client.send(submit(1, 50))
    steps = []
    async with asyncio.timeout(TIMEOUT_S):
        async for message in client.messages():
            if isinstance(message, Tokens):
                steps.append(message.step)
                if message.step == 49:
                    await client.close()
    assert steps == list(range(50))


async def test_an_iterator_that_lags_stops_the_reading_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(client_module, "MAX_UNREAD_BATCHES", 2)
    client = EngineClient(options(), command=(sys.executable, str(SCRIPT)), hang_timeout_s=0.2)
    await client.start()
    for request in range(20):
        client.send(submit(request, 4000))
    process = client._process
    async with asyncio.timeout(TIMEOUT_S):
        while not process.is_paused:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):  # longer than a silent engine would live
            await asyncio.wait_for(asyncio.shield(process.closed), 0.5)
        assert process.is_paused
        received = 0
        async for message in client.messages():
            received += isinstance(message, Tokens)
            if received == 20 * 4000:
                await client.close()
    assert received == 20 * 4000
    assert client.num_restarts == 0


def test_the_front_imports_no_torch_no_numba_and_no_transformers():
    heavy = {"torch", "numba", "transformers", "numpy"}
    code = f"import sys, chatd.engine.client; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_limits_that_changed_are_told_to_each_new_process(monkeypatch):
    sent = []
    encode = client_module.encode
    monkeypatch.setattr(client_module, "encode", lambda message: sent.append(message) or encode(message))
    async with engine() as (client, inbox):
        client._options = msgspec.structs.replace(client._options, tenants={"acme": TenantShare(floor=0.4)})
        first = await client.start()
        client.send(SetTenant("blue", 1.0, 0.4))
        client.send(SetTenant("acme", 2.0, 0.1))
        sent.clear()
        client.send(Cancel(1))  # The script ends when it is told to cancel.
        await inbox.wait_for(lambda message: isinstance(message, Ready) and message.num_blocks != first.num_blocks)
    # A floor that is lowered makes room for one that is raised.
    assert [m for m in sent if isinstance(m, SetTenant)] == [SetTenant("acme", 2.0, 0.1), SetTenant("blue", 1.0, 0.4)]

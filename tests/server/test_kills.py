"""`kill -9` at any moment: what was acknowledged is there, and every answer ends as it would have ended."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time

import psutil
import pytest

from chatd.client import Client
from chatd.local_daemon import LocalDaemon, readiness
from chatd.protocol import OutputTextDelta, Params
from chatd.testing.kills import Script, Seen, run_scripts, run_under_kills
from chatd.testing.ports import free_port
from chatd.testing.toy_daemon import ToyFarm

NUM_TOY_KILLS = 200
# Short answers, so that kills come at their beginnings and ends, and long ones that several daemons compute.
TOY_SCRIPTS = [
    Script(f"be {length}", [f"turn {turn} of {length}" for turn in range(3)], Params(max_tokens=length))
    for length in (1, 4, 9, 80)
]
PACE_S = 0.001


async def kill_toys(folder, num_kills, seed):
    """Kill a front with its journal so often; a part of the kills are in the middle of its start."""
    rng = random.Random(seed)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ToyFarm(folder) as farm:
        running = farm.start(port, pace_s=PACE_S)

        async def kill():
            nonlocal running
            if rng.random() < 0.8:
                await until_it_listens(port)
            await asyncio.sleep(rng.uniform(0.0, 0.25))
            farm.kill(running)
            running = farm.start(port, pace_s=PACE_S)

        try:
            expected = await run_scripts(url, TOY_SCRIPTS, Seen())
            seen = await run_under_kills(url, TOY_SCRIPTS, expected, itertools.repeat(kill, num_kills))
        except BaseException as error:
            error.add_note(farm.log[-4000:])
            raise
        assert "Traceback" not in farm.log, farm.log[-4000:]
        return seen


async def until_it_listens(port):
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.01)


async def test_two_hundred_kills_of_front_and_journal_change_no_token(tmp_path):
    seen = await kill_toys(tmp_path, NUM_TOY_KILLS, seed=1)
    assert seen.counts["kills"] == NUM_TOY_KILLS
    assert seen.counts["turns"] > 0


async def test_an_answer_that_a_stopping_daemon_does_not_wait_for_goes_on_in_the_next(tmp_path):
    script = Script("be long", ["say much"], Params(max_tokens=300))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = {"drain_timeout_s": 0.05}
    states = []
    with ToyFarm(tmp_path) as farm:
        running = farm.start(port, pace_s=0.0, server=server)
        [expected] = await run_scripts(url, [script], Seen())
        await asyncio.to_thread(farm.stop, running)
        running = farm.start(port, pace_s=0.005, server=server)
        async with Client(url, wait_s=30.0, on_state=states.append) as client:
            session = await client.create_session(system=script.system)
            turn = session.say(script.messages[0], params=script.params)
            pieces = []
            async for event in turn:
                if isinstance(event, OutputTextDelta):
                    pieces.append(event.delta)
                    if len(pieces) == 5:
                        assert await asyncio.to_thread(farm.stop, running) == 0
                        running = farm.start(port, pace_s=0.0, server=server)
        assert len(pieces) > 5
        assert ("".join(pieces), str(turn.reason)) == (expected[0].answer, expected[0].reason)
    # 1012: whoever is closed with it comes back.
    assert "restarting" in {state.error.error_code for state in states if state.error is not None}


@pytest.mark.night
@pytest.mark.parametrize("seed", range(2, 12))
async def test_two_thousand_kills_of_front_and_journal_change_no_token(tmp_path, seed):
    await kill_toys(tmp_path, NUM_TOY_KILLS, seed)


REAL_SCRIPTS = [
    Script(
        "You are brief.",
        ["Tell me about rivers.", "And about the sea?"],
        Params(max_tokens=36, temperature=0.0),
    ),
    Script("You are a poet.", ["A verse on blocks."], Params(max_tokens=48, temperature=0.9, seed=11)),
    Script(
        "You are exact.",
        ["Count to twenty in words."],
        Params(max_tokens=48, temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.6, frequency_penalty=0.4),
    ),
]


class RealDaemon:
    """`chatd serve` with the small model, killed and started again."""

    def __init__(self, folder, port, rng):
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._rng = rng
        self._daemon = None

    def start(self):
        self._daemon = LocalDaemon(
            self.url,
            ["--no-auth", "--kv-memory", "64MiB", "--log-level", "warning"],
            log_path=self._folder / "serve.log",
        )
        self._daemon.start()

    async def until_ready(self):
        await asyncio.to_thread(self._daemon.wait_ready, lambda phase, done: None)

    def until_not_ready(self):
        while (state := readiness(self.url)) is not None and state["status"] == "ready":
            time.sleep(0.02)

    @property
    def log(self):
        return (self._folder / "serve.log").read_text()

    def stop(self):
        if self._daemon is not None:
            self._daemon.stop()

    def kill(self, what, delays_s=(0.5, 2.5)):
        """Return what kills the daemon, the engine, or both, in the middle of answers."""

        async def kill():
            process = psutil.Process(self._daemon.pid)
            engine = None
            # On a machine full of other work an engine may be given up, and started again, on its own.
            while engine is None:
                await self.until_ready()
                await asyncio.sleep(self._rng.uniform(*delays_s))
                engine = next((child for child in process.children(recursive=True) if is_engine(child)), None)
            if what != "engine":
                os.kill(process.pid, signal.SIGKILL)
            if what != "daemon":
                os.kill(engine.pid, signal.SIGKILL)
            if what == "engine":
                await asyncio.to_thread(self.until_not_ready)
            else:
                self._daemon.stop()
                self.start()

        return kill


def is_engine(process):
    with contextlib.suppress(psutil.Error):
        return "chatd.engine.process" in process.cmdline()
    return False


async def kill_real(folder, kinds, seed, delays_s=(0.5, 2.5)):
    daemon = RealDaemon(folder, free_port(), random.Random(seed))
    daemon.start()
    try:
        await daemon.until_ready()
        expected = await run_scripts(daemon.url, REAL_SCRIPTS, Seen())
        return await run_under_kills(
            daemon.url, REAL_SCRIPTS, expected, [daemon.kill(kind, delays_s) for kind in kinds]
        )
    except BaseException as error:
        error.add_note(daemon.log[-4000:])
        raise
    finally:
        daemon.stop()


@pytest.fixture
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.model
@pytest.mark.usefixtures("own_state")
async def test_kills_of_daemon_engine_and_both_change_no_token_of_the_real_model(tmp_path):
    seen = await kill_real(tmp_path, ["engine", "daemon", "both"], seed=3)
    assert seen.counts["kills"] == 3


@pytest.mark.night
@pytest.mark.model
@pytest.mark.usefixtures("own_state")
async def test_two_hundred_kills_of_everything_change_no_token_of_the_real_model(tmp_path):
    rng = random.Random(4)
    kinds = [rng.choice(("daemon", "engine", "both")) for _ in range(200)]
    # An answer that two engines die under before it gets on fails by design, so each has time for that.
    seen = await kill_real(tmp_path, kinds, seed=5, delays_s=(4.0, 8.0))
    assert seen.counts["kills"] == 200

"""Connections to several daemons at once: whatever happens to one, the others do not notice."""

import asyncio
from contextlib import AsyncExitStack

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatd import protocol as p
from chatd.client import Client, ConnectionPhase, ConnectionState
from chatd.testing.scripted_daemon import Script, ScriptedDaemon

NUM_DAEMONS = 3
WORDS = [f"w{number} " for number in range(6)]
ACTIONS = ("release", "release", "abort", "drop", "forget", "restart")
Schedule = list[tuple[int, str]]


class Watched:
    """One daemon, a client of it, and one answer on its way."""

    def __init__(self, name: str) -> None:
        self.daemon = ScriptedDaemon([Script(deltas=[f"{name}:{word}" for word in WORDS], manual=True)])
        self.states: list[ConnectionState] = []
        self.text = "".join(f"{name}:{word}" for word in WORDS)
        self.seqs: list[int] = []
        self.harmed = False

    async def begin(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.daemon)
        self.client = await stack.enter_async_context(
            Client.connect(self.daemon.url, backoff=lambda _: 0.001, on_state=self.states.append)
        )
        self.session = await self.client.create_session()
        self.turn = self.session.say("go")
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.turn:
            if isinstance(event, p.OutputTextDelta):
                self.seqs.append(event.seq)

    async def do(self, action: str) -> None:
        match action:
            case "release":
                self.daemon.release(1)
            case "abort":
                self.daemon.abort()
            case "drop":
                await self.daemon.drop()
            case "forget":
                self.daemon.forget(f"{self.daemon.boot}+")
                self.daemon.abort()
            case "restart":
                await self.daemon.stop_listening()
                await self.daemon.start()
        self.harmed |= action != "release"


async def _run(schedule: Schedule) -> None:
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        watched = [Watched("abc"[number]) for number in range(NUM_DAEMONS)]
        for each in watched:
            await each.begin(stack)
        for number, action in schedule:
            await watched[number].do(action)
            await asyncio.sleep(0)
        for each in watched:
            each.daemon.release(len(WORDS) + 1)
        for each in watched:
            await each.reading
            assert each.turn.text == each.text
            assert each.seqs == sorted(set(each.seqs))
            assert each.client.state.phase is ConnectionPhase.CONNECTED
            if not each.harmed:
                assert each.daemon.num_connections == 1
                assert [state.phase for state in each.states] == [ConnectionPhase.CONNECTING, ConnectionPhase.CONNECTED]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, NUM_DAEMONS - 1), st.sampled_from(ACTIONS)), max_size=14))
def test_every_answer_is_whole_whatever_happens_to_each_daemon(schedule: Schedule) -> None:
    asyncio.run(_run(schedule))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(ACTIONS), max_size=14))
def test_daemons_to_which_nothing_happens_keep_their_first_connection(actions: list[str]) -> None:
    asyncio.run(_run([(1, action) for action in actions]))

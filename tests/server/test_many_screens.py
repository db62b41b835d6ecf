"""Several clients on one session: the same transcript on every screen, whatever becomes of their connections."""

import asyncio
import random
from collections import Counter

from chatd.bench.load_traffic import LoadClient
from chatd.errors import ChatdError, Conflict
from chatd.protocol import (
    ClientAttached,
    ClientLeft,
    ItemAdded,
    OutputTextDelta,
    Params,
    ResponseCreated,
    SessionAttached,
)
from chatd.testing.sessions import encode_text
from chatd.testing.ticking_core import TickingCore

from .conftest import eventually

NUM_MESSAGES = 12


class Screen:
    """A client that shows a session as it is told."""

    def __init__(self, client, session):
        self.client = client
        self.session = session
        self.texts = {}
        self.order = []
        self.present = set()
        self.is_attached = asyncio.Event()

    async def follow(self, role):
        async for event in self.client.follow(self.session, role=role):
            match event:
                case SessionAttached():
                    self.is_attached.set()
                    if event.snapshot is not None and event.replay != "exact":
                        self.order = [item.id for item in event.snapshot.items]
                        self.texts = {item.id: item.content for item in event.snapshot.items}
                case ItemAdded() | ResponseCreated():
                    self._add(event.item)
                case OutputTextDelta():
                    self.texts[event.item_id] += event.delta
                case ClientAttached():
                    self.present.add(event.connection)
                case ClientLeft():
                    self.present.discard(event.connection)

    def _add(self, item):
        assert item.id not in self.texts, f"{item.id} came twice"
        self.order.append(item.id)
        self.texts[item.id] = item.content


async def test_two_writers_and_an_observer_lose_and_double_nothing(start):
    rng = random.Random(3)
    engine = TickingCore(pace_s=0.001, num_blocks=512, answer_ids=encode_text("abcdefgh "))
    async with start(engine=engine, context=4096) as running:
        options = {"key": running.key, "backoff": lambda _attempt: 0.01}
        async with (
            LoadClient(running.url, **options) as first,
            LoadClient(running.url, **options) as second,
            LoadClient(running.url, **options) as watcher,
        ):
            ident = (await first.create_session()).id
            screens = [Screen(client, ident) for client in (first, second, watcher)]
            following = [
                asyncio.create_task(screen.follow("observer" if screen.client is watcher else "writer"))
                for screen in screens
            ]
            await asyncio.gather(*(screen.is_attached.wait() for screen in screens))
            sent = []
            refused = Counter()

            async def write(client, name):
                for number in range(NUM_MESSAGES):
                    content = f"{name} {number}"
                    while True:
                        session = client.session(ident)
                        turn = session.say(content, params=Params(max_tokens=10))
                        lose = asyncio.get_running_loop().call_later(rng.random() * 0.02, client.lose_connection)
                        try:
                            async for _ in turn:
                                pass
                        except Conflict as error:
                            # One turn at a time: the other one's is in progress.
                            refused[error.error_code] += 1
                            await asyncio.sleep(rng.random() * 0.01)
                        else:
                            sent.append(content)
                            break
                        finally:
                            lose.cancel()

            async with asyncio.timeout(60):
                await asyncio.gather(write(first, "one"), write(second, "two"))
            assert list(refused) == ["session_busy"]
            _, items = await watcher.get_session(ident)
            kept = [(item.id, item.content) for item in items]
            await eventually(lambda: all(list(screen.texts.items()) == kept for screen in screens))
            written = [item.content for item in items if item.role == "user"]
            assert sorted(written) == sorted(sent)
            assert len(set(written)) == 2 * NUM_MESSAGES
            assert [screen.order for screen in screens] == [[ident for ident, _ in kept]] * 3
            for task in following:
                task.cancel()
            ended = await asyncio.gather(*following, return_exceptions=True)
            assert not [error for error in ended if isinstance(error, ChatdError | AssertionError)]


async def test_who_is_there_is_told_to_all(start):
    async with start() as running:
        options = {"key": running.key, "backoff": lambda _attempt: 0.01}
        async with LoadClient(running.url, **options) as first, LoadClient(running.url, **options) as second:
            ident = (await first.create_session()).id
            screen = Screen(first, ident)
            following = asyncio.create_task(screen.follow("writer"))
            await screen.is_attached.wait()
            await second.attach(ident, role="observer")
            await eventually(lambda: len(screen.present) > 0)
            others = set(screen.present)
            second.lose_connection()
            # It comes back by itself, as another connection.
            await eventually(lambda: bool(screen.present) and screen.present.isdisjoint(others))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

"""Pictures of the screens at three sizes, from fixed data, without a daemon and without a clock."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from chatd import protocol as p
from chatd.client import CellMap, ConnectionPhase, ConnectionState, PoolState
from chatd_tui.app import ChatApp
from chatd_tui.messages import ConnectionChanged, PoolChanged, SessionNews, SessionsListed
from chatd_tui.pool_moments import PoolHistory
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.widgets.answer import AnswerMessage

SIZES = [(80, 24), (120, 36), (44, 18)]
ANSWER = """\
A **KV cache** keeps the *keys* and *values* of the tokens before, so the next one costs one step:

1. the prompt is read once
2. each new token adds one row

```python
def attend(query, keys, values):
    return softmax(query @ keys.T) @ values
```

See [the paper](https://arxiv.org/abs/2309.06180) on `PagedAttention`.
"""
HELLO = p.Hello(
    protocol="chatd.v1",
    server="0.1.0",
    boot="b",
    connection="c",
    tenant="acme",
    user="ada",
    model=p.ModelInfo(id="smollm2-135m", context=8192, block_size=16, blocks=512),
    caps=["fork", "branch", "pool.map"],
    limits=p.Limits(frame_bytes=262144, sessions=64, inflight=8, replay_events=8192, replay_ttl_s=300),
    heartbeat_s=20,
)


def info(ident: str, title: str, used: int, busy: bool = False) -> p.SessionInfo:
    return p.SessionInfo(
        id=ident,
        title=title,
        model="smollm2-135m",
        created_at=0,
        updated_at=0,
        num_items=2,
        context_used=used,
        context_max=8192,
        busy=busy,
        tier="device",
    )


def pool_state(step: int) -> PoolState:
    rng = random.Random(3)
    counts: list[tuple[int, int, int, int]] = []
    while len(counts) < 512:
        cell = rng.choice([(1, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
        counts += [cell] * rng.randint(2, 24)
    counts = counts[:512]
    free, cached, held, shared = (sum(cell[state] for cell in counts) for state in range(4))
    totals = p.PoolTotals(
        blocks=512,
        free=free,
        cached=cached,
        active=held + shared - step,
        shared=shared,
        evictions=7 * step,
        hit_rate=0.87,
        tok_s=30.0 + step % 5,
        running=3,
        waiting=step % 4,
    )
    rows = (
        p.SessionBlocks(
            session="s1", title="Paged memory", held=70, shared=16, tokens=1120, tier="device", active=True
        ),
        p.SessionBlocks(session="s2", title="Dinner", held=12, shared=4, tokens=190, tier="device", active=False),
    )
    return PoolState(step=step, totals=totals, tenants=(), sessions=rows, cells=CellMap(1, tuple(counts)))


class StillApp(ChatApp):
    """The client with nothing behind it and nothing that blinks."""

    def __init__(self, folder: Path) -> None:
        super().__init__("http://127.0.0.1:1", copies=folder)

        async def run() -> None:
            return None

        self.link.run = run  # type: ignore[method-assign]
        self.link.watch_page = lambda cells: None  # type: ignore[method-assign]
        self.link._session = "s1"

    async def begin(self, pilot: Pilot[None]) -> None:
        self.chat.composer.cursor_blink = False
        self.post_message(ConnectionChanged(ConnectionState(ConnectionPhase.CONNECTED), HELLO))
        self.post_message(PoolChanged(pool_state(30)))
        await pilot.pause()


async def welcome(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillApp)
    await app.begin(pilot)


async def conversation(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillApp)
    await app.begin(pilot)
    app.post_message(SessionsListed([info("s1", "Paged memory", 1234, True), info("s2", "Dinner", 190)]))
    question = p.Item(id="q", role="user", content="What is a KV cache?", status="completed")
    begun = p.Item(id="a", role="assistant", content="", status="in_progress", parent="q")
    ended = p.Item(id="a", role="assistant", content=ANSWER, status="completed", parent="q", reason="stop")
    common = {"session": "s1", "ts": 0.0}
    usage = p.Usage.of(640, 592, 90)
    timings = p.Timings(queue_ms=1, ttft_ms=120, prefill_tok_s=400, decode_tok_s=38.2, preemptions=0)
    for event in (
        p.ItemAdded(seq=1, item=question, **common),
        p.ResponseCreated(seq=2, response="r", item=begun, **common),
        p.ResponseCompleted(seq=3, response="r", item=ended, reason="stop", usage=usage, timings=timings, **common),
        p.SessionUsage(session="s1", context_used=1234, context_max=8192, blocks_held=78, blocks_shared=16),
    ):
        app.post_message(SessionNews("s1", event))
    while not (app.chat.query(AnswerMessage) and app.chat.query_one(AnswerMessage).settled):
        await pilot.pause()
    await pilot.pause()


async def versions(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillApp)
    await conversation(pilot)
    again = p.Item(
        id="b",
        role="assistant",
        content="It remembers.",
        status="completed",
        parent="q",
        siblings=p.Siblings(index=2, count=3, previous="a", next="c"),
    )
    app.post_message(
        SessionNews("s1", p.BranchSelected(session="s1", seq=9, ts=0, leaf="b", parent="q", items=[again]))
    )
    app.post_message(SessionNews("s1", p.SessionTier(session="s1", tier="disk", why="pressure")))
    await pilot.pause()
    app.chat.transcript.select("b")
    app.chat.composer.load_text("/re")
    await pilot.pause()
    await pilot.pause()


async def commands(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillApp)
    await app.begin(pilot)
    await pilot.press("f1")
    await pilot.pause()


async def settings(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillApp)
    await app.begin(pilot)
    app.link._session = None
    await pilot.press("f4")
    await pilot.press(*"Be brief.", "tab", "7")
    system = app.screen.query_one(TextArea)
    system.cursor_blink = False
    app.screen.query_one("#temperature", Input).cursor_blink = False
    await pilot.pause()


async def pool(pilot: Pilot[None]) -> None:
    app = pilot.app
    assert isinstance(app, StillApp)
    await app.begin(pilot)
    await pilot.press("f2")
    while not isinstance(app.screen, PoolScreen):
        await pilot.pause()
    app.screen.player.history = PoolHistory()
    app.screen.player.clock = lambda: 39.0
    for step in range(40):
        app.screen.show(pool_state(step), float(step))
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES, ids=["80x24", "120x36", "44x18"])
@pytest.mark.parametrize("scene", [welcome, conversation, versions, commands, settings, pool])
def test_the_screen_looks_as_it_did(
    snap_compare, tmp_path: Path, size: tuple[int, int], scene: Callable[[Pilot[None]], Awaitable[None]]
) -> None:
    assert snap_compare(StillApp(tmp_path), terminal_size=size, run_before=scene)

"""Pictures of the screens at three sizes, from fixed data, without a daemon and without a clock."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from chatd import protocol as p
from chatd.client import CellMap, ConnectionPhase, ConnectionState, PoolState
from chatd.errors import Unavailable
from chatd.testing.protocol_values import make_hello, make_info
from chatd_tui.app import ChatApp
from chatd_tui.messages import ConnectionChanged, PoolChanged, SessionNews, SessionsListed
from chatd_tui.pool_moments import PoolHistory
from chatd_tui.screens.pool import PoolScreen
from chatd_tui.status_text import WATCHING
from chatd_tui.widgets.answer import AnswerMessage
from chatd_tui.widgets.pool_map import PoolMap

SIZES = [(60, 18), (100, 30), (160, 48)]
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
HELLO = make_hello(
    caps=["fork", "branch", "continue", "erase", "context", "prefill", "pool.map", "pool.inspect"],
    limits=p.Limits(frame_bytes=262144, sessions=64, inflight=8, replay_events=8192, replay_ttl_s=300),
)


def info(ident: str, title: str, used: int, busy: bool = False) -> p.SessionInfo:
    return make_info(ident, title, context_used=used, busy=busy)


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
        self.chat.composer.cursor_blink = False
        for daemon in self.daemons:
            daemon.link.run = nothing  # type: ignore[method-assign]
        self.link.watch_page = lambda cells: None  # type: ignore[method-assign]
        self.link.inspect_cell = self.inspect_cell  # type: ignore[method-assign]
        self.link._session = "s1"

    async def inspect_cell(self, cell: int, blocks_per_cell: int) -> p.PoolInspected:
        """Answer as the daemon would."""
        holders = [
            p.CellHolder(session="s1", title="Paged memory", own=True, tenant="acme", tokens=16),
            p.CellHolder(session="s2", title="Dinner", own=True, tenant="acme", tokens=16),
        ]
        blocks = [block(cell, "shared", holders, others=1)]
        return p.PoolInspected(cell=cell, blocks_per_cell=blocks_per_cell, blocks=blocks)

    def hear(self, *events: p.Event) -> None:
        """Take what a daemon says of the session on the screen."""
        for event in events:
            self.post_message(SessionNews("s1", event))


async def nothing() -> None:
    return None


def block(number: int, state: str, holders: list[p.CellHolder], others: int = 0) -> p.CellBlock:
    return p.CellBlock(
        block=number,
        state=state,
        references=len(holders) + others,
        tenant="acme",
        public=False,
        registered=True,
        place=3,
        tokens=16,
        age_s=94.0,
        hit_age_s=12.0,
        holders=holders,
        others=others,
    )


@pytest.fixture(autouse=True)
def _usual_keymap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help names the file, wherever this runs."""
    monkeypatch.setattr("chatd_tui.screens.help.keymap_path", lambda: Path.home() / ".config/chatd/keymap.toml")


COMMON = {"session": "s1", "ts": 0.0}
LISTED = [info("s1", "Paged memory", 1234, True), info("s2", "Dinner for four, without onions or garlic", 190)]
QUESTION = p.Item(id="q", role="user", content="What is a KV cache?", status="completed")
BEGUN = p.Item(id="a", role="assistant", content="", status="in_progress", parent="q")
ENDED = p.Item(id="a", role="assistant", content=ANSWER, status="completed", parent="q", reason="stop")


async def welcome(app: StillApp, pilot: Pilot[None]) -> None:
    app.post_message(ConnectionChanged(ConnectionState(ConnectionPhase.CONNECTED), HELLO))
    app.post_message(PoolChanged(pool_state(30)))
    await pilot.pause()


async def asked(app: StillApp, pilot: Pilot[None]) -> None:
    """A question was said, and nothing came of it yet."""
    await welcome(app, pilot)
    app.post_message(SessionsListed(LISTED))
    app.hear(p.ItemAdded(seq=1, item=QUESTION, **COMMON))
    await pilot.pause()


async def waiting(app: StillApp, pilot: Pilot[None]) -> None:
    await asked(app, pilot)
    app.hear(p.ResponseQueued(session="s1", position=3, why="no_blocks"))
    await pilot.pause()


async def streaming(app: StillApp, pilot: Pilot[None]) -> None:
    await asked(app, pilot)
    text = ANSWER[: ANSWER.index("    return")]
    app.hear(
        p.ResponseCreated(seq=2, response="r", item=BEGUN, **COMMON),
        p.OutputTextDelta(seq=3, item_id="a", delta=text, n_tokens=60, **COMMON),
    )
    while not (app.chat.query(AnswerMessage) and "each new token" in app.chat.query_one(AnswerMessage).source):
        await pilot.pause()
    await pilot.pause()


async def conversation(app: StillApp, pilot: Pilot[None]) -> None:
    await asked(app, pilot)
    usage = p.Usage.of(640, 592, 90)
    timings = p.Timings(queue_ms=1, ttft_ms=120, prefill_tok_s=400, decode_tok_s=38.2, preemptions=0)
    app.hear(
        p.ResponseCreated(seq=2, response="r", item=BEGUN, **COMMON),
        p.ResponseCompleted(seq=3, response="r", item=ENDED, reason="stop", usage=usage, timings=timings, **COMMON),
        p.SessionUsage(session="s1", context_used=6234, context_max=8192, blocks_held=78, blocks_shared=16),
    )
    while not (app.chat.query(AnswerMessage) and app.chat.query_one(AnswerMessage).settled):
        await pilot.pause()
    await pilot.pause()


async def versions(app: StillApp, pilot: Pilot[None]) -> None:
    """A version of several is selected, and a command is begun."""
    await conversation(app, pilot)
    siblings = p.Siblings(index=2, count=3, previous="a", next="c")
    again = p.Item(id="b", role="assistant", content="It remembers.", status="completed", parent="q", siblings=siblings)
    app.hear(
        p.BranchSelected(seq=9, leaf="b", parent="q", items=[again], **COMMON),
        p.SessionTier(session="s1", tier="disk", why="pressure"),
    )
    await pilot.pause()
    app.chat.transcript.select("b")
    app.chat.composer.load_text("/re")
    await pilot.pause()
    await pilot.pause()


async def observer(app: StillApp, pilot: Pilot[None]) -> None:
    await conversation(app, pilot)
    app.link._role = "observer"
    app.chat.status = WATCHING
    app.draw_title(None)
    await pilot.pause()


async def disconnected(app: StillApp, pilot: Pilot[None]) -> None:
    await conversation(app, pilot)
    away = Unavailable("the daemon is away", code="unavailable")
    app.post_message(ConnectionChanged(ConnectionState(ConnectionPhase.WAITING, 3, 4.0, away), None))
    await pilot.pause()


async def commands(app: StillApp, pilot: Pilot[None]) -> None:
    await welcome(app, pilot)
    await pilot.press("f1")
    await pilot.pause()


async def palette(app: StillApp, pilot: Pilot[None]) -> None:
    await conversation(app, pilot)
    await pilot.press("ctrl+p")
    await pilot.press(*"co")
    while not app.screen.query("CommandList") or not app.screen.query_one("CommandList").option_count:
        await pilot.pause()
    app.screen.query_one("CommandInput").cursor_blink = False
    await pilot.pause()


async def form(app: StillApp, pilot: Pilot[None]) -> None:
    app.link._session = None
    await welcome(app, pilot)
    app.link.draft = replace(app.link.draft, system="You are brief.", params=p.Params(temperature=0.7, stop=("END",)))
    await pilot.press("f4")
    await pilot.pause()
    for field in (*app.screen.query(Input), *app.screen.query(TextArea)):
        field.cursor_blink = False
    await pilot.pause()


async def pool(app: StillApp, pilot: Pilot[None]) -> None:
    await welcome(app, pilot)
    await pilot.press("f2")
    while not isinstance(app.screen, PoolScreen):
        await pilot.pause()
    app.screen.player.history = PoolHistory()
    app.screen.player.clock = lambda: 39.0
    for step in range(40):
        app.screen.show(pool_state(step), float(step))
    await pilot.pause()


async def pool_cell(app: StillApp, pilot: Pilot[None]) -> None:
    """A cell is pointed at and looked into."""
    await pool(app, pilot)
    cells = app.screen.query_one(PoolMap)
    counts = pool_state(39).cells.counts
    await pilot.press("right")
    cells.move(counts.index((0, 0, 0, 1)), 0)
    await pilot.press("enter")
    await pilot.pause()
    await pilot.pause()


Scene = Callable[[StillApp, Pilot[None]], Awaitable[None]]
SCENES: list[Scene] = [
    *(welcome, form),
    *(waiting, streaming, conversation, versions, observer, disconnected),
    *(commands, palette, pool, pool_cell),
]


def drawn(scene: Scene) -> Callable[[Pilot[None]], Awaitable[None]]:
    """Return what brings the client to a scene before its picture is taken."""

    async def draw(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, StillApp)
        await scene(pilot.app, pilot)

    return draw


@pytest.mark.parametrize("size", SIZES, ids=["60x18", "100x30", "160x48"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_screen_looks_as_it_did(snap_compare, tmp_path: Path, size: tuple[int, int], scene: Scene) -> None:
    assert snap_compare(StillApp(tmp_path), terminal_size=size, run_before=drawn(scene))


@pytest.mark.parametrize("scene", [conversation, pool], ids=lambda scene: scene.__name__)
def test_without_colors_it_can_be_read_all_the_same(
    snap_compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(StillApp(tmp_path), terminal_size=SIZES[1], run_before=drawn(scene))


@pytest.mark.parametrize("scene", [conversation, pool], ids=lambda scene: scene.__name__)
def test_with_the_terminals_own_colors_it_can_be_read_all_the_same(snap_compare, tmp_path: Path, scene: Scene) -> None:
    app = StillApp(tmp_path)
    app.theme = "ansi-dark"
    assert snap_compare(app, terminal_size=SIZES[1], run_before=drawn(scene))

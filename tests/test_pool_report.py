"""`chatd top --once`: one reading of the pool, for scripts and as tables."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from chatd import protocol as p
from chatd.client import PoolState
from chatd.errors import AuthenticationError
from chatd.pool_report import as_builtins, as_tables, bills, lease, read_pool
from chatd.testing.scripted_daemon import ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with ScriptedDaemon() as running:
        session = ScriptedSession("ses_a", "Rivers", None, tier="host")
        session.items.append(p.Item(id="itm_1", role="user", content="x" * 400, status="completed"))
        running.sessions = {"ses_b": ScriptedSession("ses_b", "Tea", None), "ses_a": session}
        yield running


def row(**changes: object) -> p.SessionBlocks:
    fields = {"session": "s", "title": "", "held": 0, "shared": 0, "tokens": 0, "tier": "device", "active": False}
    return p.SessionBlocks(**{**fields, **changes})  # type: ignore[arg-type]


async def test_json_has_the_blocks_by_state_and_the_sessions_that_hold_most_first(daemon: ScriptedDaemon) -> None:
    read = as_builtins(*await read_pool(daemon.url, None))
    assert read["model"] == {"id": "smollm2-135m", "context": 8192, "block_size": 16, "blocks": 256}
    assert read["totals"] == {
        "blocks": 256,
        "free": 100,
        "cached": 60,
        "active": 96,
        "shared": 16,
        "evictions": 3,
        "hit_rate": 0.87,
        "tok_s": 38.0,
        "running": 1,
        "waiting": 0,
        "public": 2,
        "wanted_again": 1,
    }
    assert read["tenants"] == [
        {
            "tenant": "local",
            "active": 96,
            "cached": 60,
            "running": 1,
            "waiting": 0,
            "weight": 1.0,
            "share": 256.0,
            "floor": 0,
            "evicted": 3,
            "wanted_again": 1,
        }
    ]
    assert read["bills"] == {"sessions": 5.0, "public": 2, "others": 89.0}
    assert [session["session"] for session in read["sessions"]] == ["ses_a", "ses_b"]
    assert read["sessions"][0] == {
        "session": "ses_a",
        "title": "Rivers",
        "held": 7,
        "shared": 4,
        "exclusive": 3,
        "tokens": 104,
        "tier": "host",
        "active": False,
        "bill": 5.0,
        "lease": "idle",
        "idle_s": 90.0,
        "release_s": None,
        "tenant": "local",
    }


def test_what_keeps_a_session_s_blocks() -> None:
    assert [lease(row(held=2, active=True)), lease(row(held=2)), lease(row())] == ["answering", "idle", "none"]
    queued, attached = row(held=2, active=True, lease="queued"), row(held=2, lease="attached")
    assert [lease(queued), lease(attached), lease(row(lease="idle"))] == ["queued", "attached", "none"]


async def test_a_daemon_that_tells_no_bills_has_none(daemon: ScriptedDaemon) -> None:
    _, state = await read_pool(daemon.url, None)
    assert state.sessions is not None
    older = msgspec.structs.replace(state, sessions=(msgspec.structs.replace(state.sessions[0], bill=None),))
    assert bills(older) is None
    assert bills(msgspec.structs.replace(state, totals=msgspec.structs.replace(state.totals, public=None))) is None


async def test_tables_have_no_control_characters_and_no_markup(daemon: ScriptedDaemon) -> None:
    hello, state = await read_pool(daemon.url, None)
    hostile = PoolState(
        step=7,
        totals=state.totals,
        tenants=(p.TenantBlocks(tenant="[red]\x1b[2J", active=1, cached=0, running=0, waiting=0),),
        tiers=(p.TierBlocks(tier="disk\x07", blocks=100, used=12),),
        sessions=(row(session="ses_x", title="a\x1b]52;c;eA==\x07 [/foo] \u202eb", held=3, shared=1),),
    )
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(as_tables(hello, hostile))
    shown = out.getvalue()
    assert not any(ord(character) < 32 and character != "\n" for character in shown)
    assert "\u202e" not in shown
    for text in ("256 blocks of 16 tokens, step 7", "[red]␛[2J", "disk␇ 12 of 100 blocks", "[/foo]", "hit rate 87%"):
        assert text in shown
    (line,) = [line for line in shown.splitlines() if "ses_x" in line]
    assert line.replace("│", " ").split()[:7] == ["ses_x", "3", "1", "2", "–", "0", "device"]


async def test_a_key_that_is_not_known_is_refused() -> None:
    async with ScriptedDaemon(key="right") as guarded:
        with pytest.raises(AuthenticationError):
            await read_pool(guarded.url, "wrong")


def top(*arguments: str, home: Path, columns: int = 120) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CHATD_", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-m", "chatd.cli", "top", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**clean, "HOME": str(home), "COLUMNS": str(columns)},
        check=False,
    )


async def test_the_command_prints_one_line_of_json(daemon: ScriptedDaemon, tmp_path: Path) -> None:
    daemon.sessions["ses_b"].title = "caf\u00e9\x7f"
    done = await asyncio.to_thread(top, "--once", "--json", "--url", daemon.url, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert done.stdout[:-1].isascii()
    assert done.stdout[:-1].isprintable()
    assert json.loads(done.stdout)["sessions"][1]["title"] == "caf\u00e9\x7f"


def test_what_cannot_be_shown_says_what_to_do(tmp_path: Path) -> None:
    done = top("--json", home=tmp_path)
    assert done.returncode == 2
    assert "add --once" in done.stderr
    done = top(home=tmp_path)
    assert done.returncode == 3
    assert "chatd top --once" in done.stderr
    done = top("--once", "--url", "http://127.0.0.1:9", home=tmp_path)
    assert done.returncode == 3
    assert "no daemon answers" in done.stderr


def test_a_reading_needs_no_terminal_library() -> None:
    code = "import sys, chatd.pool_report, chatd.asking; print('textual' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "False False\n"
    )


async def test_little_that_is_held_is_not_said_to_be_nothing(daemon: ScriptedDaemon) -> None:
    hello, state = await read_pool(daemon.url, None)
    for active, said in ((0, "(0%)"), (1, "(<1%)"), (128, "(50%)")):
        totals = msgspec.structs.replace(state.totals, active=active)
        out = io.StringIO()
        Console(file=out, width=120).print(as_tables(hello, msgspec.structs.replace(state, totals=totals)))
        assert f"active {active} {said}" in out.getvalue()


LONG_ID = "ses_0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(None, set()), (100, set()), (80, {"tokens", "own"}), (72, {"tokens", "own", "tier"}), (40, None)],
)
async def test_an_id_is_whole_and_what_does_not_fit_beside_it_is_left_out(
    daemon: ScriptedDaemon, width: int | None, left_out: set[str] | None
) -> None:
    hello, state = await read_pool(daemon.url, None)
    title = "河" * 10 + " and the rivers of the north"
    state = msgspec.structs.replace(state, sessions=(row(session=LONG_ID, title=title, held=31, shared=10, bill=20.5),))
    out = io.StringIO()
    Console(file=out, width=width or 4096).print(as_tables(hello, state, width))
    shown = out.getvalue().splitlines()
    (names,) = [line.split() for line in shown if line.split()[:1] == ["session"]]
    (line,) = [line for line in shown if LONG_ID in line]
    columns = ["session", "held", "shared", "own", "bill", "tokens", "tier", "lease", "title"]
    if left_out is None:
        assert names == ["session", "held"]
    else:
        assert names == [name for name in columns if name not in left_out]
        assert "河河" in line
        assert line.rstrip().endswith("…")
    assert cell_len(line) <= (width or 4096)


async def test_a_pipe_gets_whole_lines_however_narrow_the_terminal(daemon: ScriptedDaemon, tmp_path: Path) -> None:
    daemon.sessions[LONG_ID] = ScriptedSession(LONG_ID, "A title", None)
    done = await asyncio.to_thread(top, "--once", "--url", daemon.url, home=tmp_path, columns=40)
    (line,) = [line for line in done.stdout.splitlines() if LONG_ID in line]
    assert line.rstrip().endswith("A title")

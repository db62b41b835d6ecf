"""What is on the terminal after a fault of the client's own."""

import sys

import pytest

PROGRAM = """
import sys
from chatd_tui.link import DaemonLink

async def fail(self, key):
    content = "what somebody said"
    raise RuntimeError("a fault\\x1b]0;of mine\\x07")

DaemonLink._stay_connected = fail
"""
CHAT = "from chatd_tui.app import ChatApp as Client"
TOP = "from chatd_tui.top import PoolApp as Client"


@pytest.mark.parametrize("client", [CHAT, TOP])
async def test_a_fault_is_shown_without_keys_conversations_or_controls(client: str, make_terminal, wait_until) -> None:
    run = f"{PROGRAM}\n{client}\nClient('http://127.0.0.1:1', 'ck_' + 'canary').run()"
    async with make_terminal([sys.executable, "-c", run]) as terminal:
        await wait_until(lambda: terminal.process is not None and terminal.process.returncode is not None)
        written = terminal.output
    assert b"RuntimeError" in written
    assert b"chatd_tui" in written
    assert b"ck_canary" not in written
    assert b"what somebody said" not in written
    assert b"\x1b]0;" not in written

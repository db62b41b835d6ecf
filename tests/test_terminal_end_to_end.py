"""The terminal client as a whole: in a real terminal, against a real daemon with the real model."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatd.client import Client
from chatd.local_daemon import readiness
from chatd.protocol import Params
from chatd.testing.tmux import Terminal, Tmux, has_tmux

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not has_tmux(), reason="needs tmux, a real terminal to drive"),
]

CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris"
STORY = "Tell me about whales in three sentences."
START_TIMEOUT_S = 240.0
"""Kernels that were never compiled here take a while."""
CLIENT = [sys.executable, "-m", "chatd_tui.cli"]
ENDED = r"\d+ tokens · [\d.]+ tok/s"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prose(screen: str) -> str:
    """Return a screen's text without line ends, so that what is wrapped can be found."""
    return " ".join(screen.split())


class Place:
    """A state folder, a daemon that may run in it, and what a client needs to find that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.variables = {
            "XDG_STATE_HOME": str(folder),
            "CHATD_SERVER__PORT": str(self.port),
            "CHATD_URL": self.url,
            "LANG": "C.UTF-8",
        }
        self.daemon: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start a daemon as a person does, and wait until it is ready."""
        command = [sys.executable, "-m", "chatd.cli", "serve", "--port", str(self.port), "--kv-memory", "256MiB"]
        with (self.folder / "log").open("ab") as log:
            self.daemon = subprocess.Popen(
                command, env={**os.environ, **self.variables}, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while (readiness(self.url) or {}).get("status") != "ready":
            assert self.daemon.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the daemon as `kill -9` does; its engine ends by itself."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait(10)

    def stop(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.terminate()
            self.daemon.wait(30)

    def client(self) -> Client:
        """Return a client of the daemon, as an app has one."""
        return Client.connect(self.url, key=(self.folder / "chatd" / "local.key").read_text().strip())


@pytest.fixture(scope="module")
def tmux() -> Iterator[Tmux]:
    with Tmux() as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    served = Place(tmp_path_factory.mktemp("served"))
    try:
        served.serve()
        yield served
    finally:
        served.stop()


class Screens:
    """Opens terminals with the client of one daemon."""

    def __init__(self, tmux: Tmux, place: Place, folder: Path) -> None:
        self._tmux = tmux
        self._place = place
        self.folder = folder

    def open(self, *set_up: str, columns: int = 90, rows: int = 40) -> Terminal:
        # A size that a shell exported once must not hold.
        variables = {**self._place.variables, "COLUMNS": "70", "LINES": "20"}
        terminal = self._tmux.open(CLIENT, environment=variables, folder=self.folder, columns=columns, rows=rows)
        terminal.wait_for("● connected")
        for command in set_up:
            carry_out(terminal, command)
        return terminal


@pytest.fixture
def screens(tmux: Tmux, place: Place, tmp_path: Path) -> Screens:
    return Screens(tmux, place, tmp_path)


def carry_out(terminal: Terminal, command: str) -> None:
    """Type a command, and wait until it has left the input."""
    terminal.type(command)
    terminal.wait_until(lambda screen: command[-16:] in prose(screen), "what was typed")
    terminal.press("Enter")
    terminal.wait_for("│ Ask something")


def ask(terminal: Terminal, question: str, *answer: str) -> str:
    """Ask, and return the screen when the answer has ended."""
    terminal.enter(question)
    return terminal.wait_for(rf"(?s){re.escape(question)}.*{ENDED}", "│ Ask something", *answer)


def title_line(screen: str) -> str:
    return screen.splitlines()[0]


def test_the_first_start_has_a_daemon_for_as_long_as_the_client_is_open(tmux: Tmux, tmp_path: Path) -> None:
    place = Place(tmp_path)
    terminal = tmux.open(CLIENT, environment=place.variables)
    terminal.wait_for("Start one here, for as long as you chat")
    terminal.press("Enter")
    # One screen explains what answers, the keys, and where the rest is said.
    terminal.wait_for(
        "● connected", "Ask smollm2-135m anything", "Esc +stop the answer", "F1 +all keys", timeout_s=START_TIMEOUT_S
    )
    ask(terminal, CAPITAL, PARIS)
    terminal.press("C-q")
    terminal.wait_for("ended with 0")
    assert readiness(place.url) is None


def test_an_answer_streams_is_stopped_and_goes_on(screens: Screens) -> None:
    terminal = screens.open("/set temperature=0 ignore_eos=true max_tokens=400")
    terminal.enter(STORY)
    begun = terminal.wait_for("◐ answering · Esc stops it", r"Whales \w+ \w+")
    terminal.wait_until(lambda screen: len(prose(screen)) > len(prose(begun)) + 80, "more text")
    terminal.press("Escape")
    stopped = terminal.wait_for("cancelled · ", ENDED)
    carry_out(terminal, "/set max_tokens=24")
    terminal.enter("/continue")
    longer = prose(terminal.wait_for("‹2/2›", "reached the token limit"))
    text = prose(stopped[stopped.index("Whales") : stopped.index("cancelled")])
    assert text in longer
    assert len(longer) > len(prose(stopped))


def test_versions_of_an_answer_and_of_a_message_stand_beside_each_other(screens: Screens) -> None:
    terminal = screens.open("/set temperature=0")
    ask(terminal, CAPITAL, PARIS)
    terminal.press("Tab")
    terminal.wait_for("↑↓ select")
    terminal.press("r")
    terminal.wait_for("‹2/2›", PARIS, ENDED)
    terminal.press("Escape")
    terminal.enter("/edit")
    terminal.wait_for("another version of this message", r"│ What is the capital of France\?")
    # In one burst, as over a slow line.
    terminal.press(*["BSpace"] * len("France?"), *"Spain?", "Enter")
    terminal.wait_for(r"What is the capital of Spain\?", "Salvador", ENDED)
    terminal.press("Tab")
    terminal.wait_for("↑↓ select")
    terminal.press("Up", "Left")
    terminal.wait_for(r"What is the capital of France\?", PARIS, "‹1/2›")
    terminal.press("Right")
    terminal.wait_for("Salvador", "‹2/2›")
    terminal.press("Escape")
    assert "Ask something" in terminal.wait_for("│ Ask something")


def test_a_conversation_is_forked_named_pinned_found_archived_and_erased(screens: Screens) -> None:
    terminal = screens.open("/set temperature=0")
    ask(terminal, "Name a river in Egypt.", "Nile")
    terminal.enter("/rename About rivers")
    terminal.wait_for("called About rivers now")
    terminal.enter("/pin")
    terminal.wait_for("• pinned")
    terminal.enter("/fork Other rivers")
    terminal.wait_for(r"forked: \d+ tokens in \d+ blocks are shared", "Nile")
    terminal.wait_until(lambda screen: "Other rivers" in title_line(screen), "the fork")
    ask(terminal, "And one in Germany?")
    terminal.enter("/archive")
    terminal.wait_for("archived; /search finds it")
    terminal.press("F3")
    listed = terminal.wait_for("▎", "About rivers", "pinned · 2 msg")
    assert "Other rivers" not in listed.partition("\n")[2]
    terminal.press("Escape")
    terminal.wait_until_gone("pinned · 2 msg")
    terminal.enter("/search egypt")
    terminal.wait_for("2 conversations with egypt", "About rivers", "archived · 4 msg")
    terminal.press("Enter")
    terminal.wait_until_gone("with egypt")
    terminal.wait_until(lambda screen: "About rivers" in title_line(screen), "the one that was found")
    terminal.enter("/search egypt")
    terminal.wait_for("2 conversations with egypt")
    terminal.press("Down", "Enter")
    terminal.wait_until_gone("with egypt")
    terminal.wait_until(lambda screen: "Other rivers" in title_line(screen), "the archived one")
    terminal.wait_for("And one in Germany")
    terminal.enter("/erase")
    terminal.wait_for("cannot be brought back", "y erase it")
    terminal.press("y")
    terminal.wait_for(r"erased: \d messages, \d+ blocks? of memory", "Ask smollm2-135m anything")
    terminal.enter("/search egypt")
    terminal.wait_for("1 conversation with egypt", "pinned · 2 msg")
    terminal.press("Enter")
    terminal.wait_until_gone("with egypt")
    terminal.wait_for("Nile", "│ Ask something")
    terminal.enter("/pin")
    terminal.wait_for("no longer pinned")


def test_what_is_exported_and_copied_is_what_the_daemon_has(screens: Screens, place: Place, tmp_path: Path) -> None:
    terminal = screens.open("/set temperature=0", "/rename Paris")
    ask(terminal, CAPITAL, PARIS)
    for name in ("a.md", "a.json", "a.html"):
        terminal.enter(f"/export {name}")
        terminal.wait_for(rf"written to .*{re.escape(name)}")
    assert f"{CAPITAL}\n" in (tmp_path / "a.md").read_text()
    assert f"{PARIS}.\n" in (tmp_path / "a.md").read_text()
    kept = json.loads((tmp_path / "a.json").read_text())
    assert [item["content"] for item in kept["items"]] == [CAPITAL, f"{PARIS}."]
    assert "<!doctype html>" in (tmp_path / "a.html").read_text()
    assert PARIS in (tmp_path / "a.html").read_text()
    terminal.press("C-y")
    terminal.wait_for("terminal's clipboard")
    assert terminal.clipboard() == (place.folder / "chatd" / "copied.txt").read_text() == f"{PARIS}."


def test_a_file_goes_with_a_message_once_that_is_confirmed(screens: Screens) -> None:
    (screens.folder / "notes.txt").write_text("The secret word is marmalade.\n")
    terminal = screens.open("/set temperature=0 max_tokens=16")
    terminal.type("Repeat this: @no")
    terminal.wait_for("▸ notes.txt")
    terminal.press("Tab", "Enter")
    terminal.wait_for(r"notes\.txt \(30 bytes\)", "y send")
    terminal.press("y")
    terminal.wait_for("The secret word is marmalade", ENDED)


def test_a_system_prompt_and_parameters_hold_for_the_conversation(screens: Screens, place: Place) -> None:
    terminal = screens.open("/set temperature=0 max_tokens=8 seed=7", "/system You are a pirate.")
    terminal.enter("/set")
    terminal.wait_for("You are a pirate", r"temperature +0\.0 ", r"longest answer +8 ", r"seed +7 ")
    terminal.press("Escape")
    terminal.wait_for("│ Ask something")
    terminal.enter("Hello there")
    terminal.wait_for("You are a pirate.", "Hello there", "reached the token limit · 8 tokens")
    carry_out(terminal, "/set max_tokens=4")
    terminal.enter("Go on")
    terminal.wait_for("reached the token limit · 4 tokens")

    async def newest() -> Params:
        async with place.client() as client:
            sessions = await client.list_sessions(limit=100)
            newest = max(sessions, key=lambda info: info.created_at)
            return (await client.get_session(newest.id))[0].params

    assert asyncio.run(newest()) == Params(temperature=0.0, max_tokens=4, seed=7)


def test_a_second_client_watches_and_then_takes_part(screens: Screens) -> None:
    first = screens.open("/set temperature=0 ignore_eos=true max_tokens=300", "/rename Both see it")
    second = screens.open()
    first.enter(STORY)
    first.wait_for("answering", "Whales")
    second.enter("/search Both see it")
    second.wait_for("1 conversation with")
    second.press("Enter")
    second.wait_for("answering · Esc stops it", "Whales")
    second.enter("/watch")
    second.wait_for("you watch this conversation|answering")
    ended = [terminal.wait_for("reached the token limit · 300 tokens") for terminal in (first, second)]
    shown = [prose(screen[screen.index("Whales") : screen.index("reached")]) for screen in ended]
    assert shown[0] == shown[1]
    second.enter("May I?")
    second.wait_for("you watch this conversation · /watch to take part")
    second.press("C-u")
    second.enter("/watch")
    second.wait_for("you take part again")
    carry_out(second, "/set max_tokens=8")
    second.enter("And about dolphins?")
    for terminal in (first, second):
        terminal.wait_for(r"And about dolphins\?", "reached the token limit · 8 tokens")


def test_a_terminal_that_changes_its_size_while_an_answer_streams_stays_whole(screens: Screens) -> None:
    terminal = screens.open("/set temperature=0 ignore_eos=true max_tokens=160")
    terminal.enter(STORY)
    terminal.wait_for("answering", "Whales")
    for columns, rows in ((40, 10), (160, 48), (60, 18), (40, 10)):
        terminal.resize(columns, rows)
        # The whole screen is drawn at this size: the meter is on its last line or above the keys, the input is closed.
        terminal.wait_until(
            lambda screen, columns=columns: (
                re.search(r"^.*╭─{10,}╮\n.*\n.*╰─+╯\n KV [▓▒░]", screen, re.M)
                and max(map(len, screen.splitlines())) <= columns
                and any(len(line) == columns and line.endswith("╯") for line in screen.splitlines())
            ),
            f"{columns} columns",
        )
    terminal.resize(90, 40)
    terminal.wait_for("● connected", re.escape(STORY), "reached the token limit · 160 tokens")
    screen = terminal.screen()
    assert screen.count("Tell me about whales") == 2  # as the title and as the message


def test_pages_open_over_the_conversation_and_it_is_there_when_one_returns(screens: Screens) -> None:
    terminal = screens.open("/set temperature=0", "/rename Kept")
    ask(terminal, CAPITAL, PARIS)
    terminal.press("F1")
    terminal.wait_for("Keys", "Shift.Enter", "Messages")
    terminal.press("q")
    terminal.wait_until_gone("Shift.Enter")
    terminal.press("C-p")
    terminal.wait_for("Search for commands")
    terminal.type("memory pool")
    terminal.wait_for("/pool")
    terminal.press("Enter")
    terminal.wait_for("The pool", "one cell = ", "Esc back")
    terminal.press("F2")
    terminal.wait_for(PARIS, "│ Ask something")
    terminal.press("C-q")
    terminal.wait_for("ended with 0")
    again = screens.open()
    again.press("F3")
    again.wait_for("Kept")
    again.press("Down", "Enter")
    again.wait_for(PARIS, "first after")
    # What was sent is remembered too.
    again.press("Up")
    again.wait_for(r"│ What is the capital of France\?")


def test_an_answer_outlives_the_death_of_its_daemon_as_one_answer(screens: Screens, place: Place) -> None:
    parameters = "/set temperature=0.8 seed=11 ignore_eos=true max_tokens=120"
    calm = screens.open(parameters)
    calm.enter(STORY)
    ended = calm.wait_for("reached the token limit · 120 tokens")
    killed = screens.open(parameters)
    killed.enter(STORY)
    killed.wait_until(lambda screen: len(prose(screen)) > 700, "a part of the answer")
    place.kill()
    away = killed.wait_for("◌ (no connection|connecting)")
    assert "reached" not in away
    place.serve()
    resumed = killed.wait_for("● connected", "reached the token limit · 120 tokens")
    texts = [
        prose(screen[screen.index(STORY, 100) : screen.index("reached the token limit")]) for screen in (ended, resumed)
    ]
    assert texts[0] == texts[1]

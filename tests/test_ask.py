"""`chatd ask`: where a question goes, what is written of the answer, and how it ends, against the scripted daemon."""

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chatd import asking
from chatd import protocol as p
from chatd.asking import CUT_SHORT, INTERRUPTED, Question, ask_daemon
from chatd.errors import ChatdError, Conflict, EngineError, NotFound, Unavailable
from chatd.testing.scripted_daemon import Script, ScriptedDaemon
from chatd.testing.scripted_session import ScriptedSession

CHATD = [sys.executable, "-m", "chatd.cli"]


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


async def asked(daemon: ScriptedDaemon, text: str = "hello?", **options: Any) -> tuple[int, str, str]:
    """Ask, and return the exit code, what was written and what was noted."""
    out, notices = io.StringIO(), console()
    code = await ask_daemon(daemon.url, None, Question(text, **options), out, notices)
    assert isinstance(notices.file, io.StringIO)
    return code, out.getvalue(), notices.file.getvalue()


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with ScriptedDaemon([Script(deltas=["Hello ", "there."])]) as running:
        yield running


def put(daemon: ScriptedDaemon, ident: str, title: str, touched: int = 0) -> ScriptedSession:
    session = ScriptedSession(ident, title, None, touched=touched)
    daemon.sessions[ident] = session
    return session


async def until(predicate: Any) -> None:
    async with asyncio.timeout(15):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# Where a question goes.


async def test_a_question_begins_a_conversation_with_its_title_and_system_prompt(daemon: ScriptedDaemon) -> None:
    assert await asked(daemon, "What is\na block?", system="Be brief.") == (0, "Hello there.\n", "")
    [session] = daemon.sessions.values()
    assert (session.title, session.system) == ("What is a block?", "Be brief.")
    assert [item.content for item in session.items] == ["What is\na block?", "Hello there."]


async def test_parameters_are_those_of_the_one_answer(daemon: ScriptedDaemon) -> None:
    typed = ["--set", "temperature=0.5", "--set", "seed=7", "--set", "stop=the end top_k=3"]
    code, out, _ = await Run(Path("/nonexistent"), "hello?", *typed, url=daemon.url)()
    assert (code, out) == (0, "Hello there.\n")
    said = next(command for command in daemon.commands if isinstance(command, p.UserMessage))
    assert said.params == p.Params(temperature=0.5, seed=7, stop=("the end top_k=3",))
    [session] = daemon.sessions.values()
    assert session.params == p.Params()


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("warmth=1", "'warmth' is not a parameter (temperature, "),
        ("temperature=9", "temperature is 9.0, the range is 0.0 to 5.0"),
        ("temperature=nan", "temperature is nan, the range is 0.0 to 5.0"),
        ("top_k=1.5", "top_k is '1.5', which is no whole number"),
        ("hot", "'hot' is not NAME=VALUE"),
    ],
)
async def test_a_parameter_that_is_none_is_refused_before_anything_is_asked(typed: str, reason: str) -> None:
    code, out, err = await Run(Path("/nonexistent"), "hello?", "--set", typed, url="http://127.0.0.1:9")()
    assert (code, out) == (2, "")
    assert reason in err


async def test_a_conversation_goes_on_by_its_id_or_its_title(daemon: ScriptedDaemon) -> None:
    put(daemon, "ses_a", "About rivers")
    other = put(daemon, "ses_b", "Rivers")
    for named in ("ses_b", "rivers", "Rivers"):
        other.items.clear()
        assert (await asked(daemon, session=named))[0] == 0
        assert [item.role for item in other.items] == ["user", "assistant"]
    assert daemon.sessions["ses_a"].items == []
    assert (await asked(daemon, session="about"))[0] == 0
    assert len(daemon.sessions["ses_a"].items) == 2


async def test_last_is_the_conversation_that_was_used_last(daemon: ScriptedDaemon) -> None:
    put(daemon, "ses_old", "x", touched=1)
    newest = put(daemon, "ses_new", "y", touched=2)
    await asked(daemon, session="last", system="Now in French.")
    assert len(newest.items) == 2
    assert newest.system == "Now in French."


async def test_an_id_goes_before_a_title(daemon: ScriptedDaemon) -> None:
    put(daemon, "ses_a", "ses_b")
    put(daemon, "ses_b", "x")
    await asked(daemon, session="ses_b")
    assert (len(daemon.sessions["ses_a"].items), len(daemon.sessions["ses_b"].items)) == (0, 2)


async def test_a_conversation_that_is_not_there_or_not_the_only_one_is_refused(daemon: ScriptedDaemon) -> None:
    with pytest.raises(NotFound, match="no conversation to go on with"):
        await asked(daemon, session="last")
    put(daemon, "ses_a", "tea 1")
    put(daemon, "ses_b", "tea 2")
    with pytest.raises(NotFound, match="no conversation has the id or title 'coffee'"):
        await asked(daemon, session="coffee")
    with pytest.raises(Conflict, match="2 conversations have 'tea'") as caught:
        await asked(daemon, session="tea")
    assert "ses_a" in (caught.value.hint or "")
    assert not any(session.items for session in daemon.sessions.values())


# What is written.


async def test_an_answer_is_written_as_it_comes(daemon: ScriptedDaemon) -> None:
    async with ScriptedDaemon([Script(deltas=["one ", "two"], manual=True)]) as slow:
        out = io.StringIO()
        task = asyncio.create_task(ask_daemon(slow.url, None, Question("count"), out, console()))
        slow.release()
        await until(lambda: out.getvalue() == "one ")
        slow.release(2)
        assert await task == 0
        assert out.getvalue() == "one two\n"


async def test_what_a_terminal_would_obey_is_not_written_however_it_is_split() -> None:
    deltas = ["a\x1b", "[31mb\x07\tc\n", "\u202ed\x9b2J\x7f\r", "\x1b]52;c;eA==\x07"]
    async with ScriptedDaemon([Script(deltas=deltas)]) as hostile:
        _, written, _ = await asked(hostile)
    assert written == "a␛[31mb␇\tc\nd\ufffd2J␡␛]52;c;eA==␇\n"


async def test_json_is_one_object_with_the_exact_text_in_ascii() -> None:
    deltas = ["caf\u00e9 \x1b[31m", "\x7f\u202e\n"]
    async with ScriptedDaemon([Script(deltas=deltas)]) as hostile:
        code, written, noted = await asked(hostile, as_json=True)
        [session] = hostile.sessions.values()
    assert (code, noted) == (0, "")
    assert written.endswith("}\n")
    assert written[:-1].isascii()
    assert written[:-1].isprintable()
    assert json.loads(written) == {
        "session": session.id,
        "message": session.items[0].id,
        "answer": session.items[1].id,
        "model": "smollm2-135m",
        "text": "".join(deltas),
        "reason": "stop",
        "usage": {"input_tokens": 64, "input_tokens_details": {"cached_tokens": 48}, "output_tokens": 2},
        "timings": {
            "queue_ms": 1.0,
            "ttft_ms": 120.0,
            "prefill_tok_s": 400.0,
            "decode_tok_s": 38.0,
            "preemptions": 0,
        },
    }


async def test_where_it_waits_is_shown_on_a_terminal_and_goes_away() -> None:
    before = [
        (p.ResponseQueued, {"position": 3, "why": "memory"}),
        (p.ResponsePrefill, {"done": 512, "total": 2048, "cached": 0}),
    ]
    async with ScriptedDaemon([Script(deltas=["x"], before=before, manual=True)]) as slow:
        screen = io.StringIO()
        notices = Console(file=screen, force_terminal=True, width=80)
        task = asyncio.create_task(ask_daemon(slow.url, None, Question("?"), io.StringIO(), notices))
        await until(lambda: "answering" in screen.getvalue())
        slow.release(2)
        assert await task == 0
    assert screen.getvalue().endswith("\x1b[2K")


# How it ends.


async def test_a_refusal_of_the_daemon_is_raised(daemon: ScriptedDaemon) -> None:
    put(daemon, "ses_a", "x").response = "res_1"
    with pytest.raises(Conflict, match="an answer is in progress"):
        await asked(daemon, session="ses_a")
    async with ScriptedDaemon([Script(deltas=["x"], fail=EngineError("the engine died"))]) as failing:
        with pytest.raises(EngineError, match="the engine died"):
            await asked(failing)


async def test_an_answer_that_somebody_else_ends_is_cut_short() -> None:
    async with ScriptedDaemon([Script(deltas=["one ", "two"], manual=True)]) as slow:
        out, notices = io.StringIO(), console()
        task = asyncio.create_task(ask_daemon(slow.url, None, Question("count"), out, notices))
        slow.release()
        await until(lambda: out.getvalue() == "one ")
        next(iter(slow.sessions.values())).cancelled = True
        slow.release()
        assert await task == CUT_SHORT
    assert "cut short (cancelled); it is kept in ses_1" in notices.file.getvalue()  # type: ignore[attr-defined]


async def test_ctrl_c_ends_the_answer_and_keeps_what_there_is() -> None:
    async with ScriptedDaemon([Script(deltas=["one ", "two"], manual=True)]) as slow:
        out, notices = io.StringIO(), console()
        task = asyncio.create_task(ask_daemon(slow.url, None, Question("count"), out, notices))
        slow.release()
        await until(lambda: out.getvalue() == "one ")
        os.kill(os.getpid(), signal.SIGINT)
        assert await task == INTERRUPTED
        assert out.getvalue() == "one \n"
        [session] = slow.sessions.values()
        assert (session.items[-1].content, session.items[-1].status) == ("one ", "incomplete")
    assert "kept in ses_1" in notices.file.getvalue()  # type: ignore[attr-defined]


async def test_ctrl_c_before_there_is_an_answer_ends_it_as_it_begins() -> None:
    async with ScriptedDaemon([Script(deltas=["one"], manual=True)]) as slow:

        async def interrupt(command: p.Command) -> bool:
            if isinstance(command, p.UserMessage):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0)
            return False

        slow.on_command = interrupt
        assert (await asked(slow))[:2] == (INTERRUPTED, "")
        assert isinstance(slow.commands[-1], p.ResponseCancel)


async def test_a_second_ctrl_c_waits_for_nobody() -> None:
    async with ScriptedDaemon([Script(deltas=["one"], manual=True)]) as deaf:

        async def swallow(command: p.Command) -> bool:
            return isinstance(command, p.ResponseCancel)

        deaf.on_command = swallow
        task = asyncio.create_task(ask_daemon(deaf.url, None, Question("count"), io.StringIO(), console()))
        await until(lambda: bool(deaf.sessions) and next(iter(deaf.sessions.values())).response is not None)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: isinstance(deaf.commands[-1], p.ResponseCancel))
        os.kill(os.getpid(), signal.SIGINT)
        assert await task == INTERRUPTED


async def test_a_lost_connection_is_repaired_and_nothing_is_written_twice() -> None:
    async with ScriptedDaemon([Script(deltas=["one ", "two ", "three"], manual=True)]) as flaky:
        out = io.StringIO()
        task = asyncio.create_task(ask_daemon(flaky.url, None, Question("count"), out, console()))
        flaky.release()
        await until(lambda: out.getvalue() == "one ")
        await flaky.drop()
        flaky.release(3)
        assert await task == 0
        assert out.getvalue() == "one two three\n"


async def test_a_daemon_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "RECONNECT_WAIT_S", 0.05)
    async with ScriptedDaemon([Script(deltas=["one ", "two"], manual=True)]) as gone:
        out = io.StringIO()
        task = asyncio.create_task(ask_daemon(gone.url, None, Question("count"), out, console()))
        gone.release()
        await until(lambda: out.getvalue() == "one ")
        await gone.stop()
        with pytest.raises(Unavailable, match="did not come back"):
            await task


async def test_an_output_that_fails_ends_the_answer_in_the_daemon() -> None:
    class FullDisk(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    async with ScriptedDaemon([Script(deltas=["one ", "two"], manual=True)]) as slow:
        slow.release()
        with pytest.raises(ChatdError, match="the answer cannot be written: No space left on device"):
            await ask_daemon(slow.url, None, Question("count"), FullDisk(), console())
        assert isinstance(slow.commands[-1], p.ResponseCancel)


# The command.


class Run:
    """The command as a child, which may be written to while it runs."""

    def __init__(self, home: Path, *arguments: str, url: str | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("CHATD_", "XDG_"))}
        self._environment = {**clean, "HOME": str(home), "COLUMNS": "200", **({"CHATD_URL": url} if url else {})}
        self._arguments = arguments

    async def __call__(self, piped: bytes = b"") -> tuple[int, str, str]:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *CHATD, "ask", *self._arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment
        )
        async with asyncio.timeout(60):
            out, err = await child.communicate(piped)
        assert child.returncode is not None
        return child.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("arguments", "piped", "message"),
    [
        (["What", "is it?"], b"", "What is it?"),
        ([], b"from a pipe\n", "from a pipe"),
        (["Sum it up:"], b"line 1\n\tline 2\n", "Sum it up:\n\nline 1\n\tline 2"),
    ],
)
async def test_words_and_a_pipe_make_one_message(
    arguments: list[str], piped: bytes, message: str, daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    assert await Run(tmp_path, *arguments, url=daemon.url)(piped) == (0, "Hello there.\n", "")
    [session] = daemon.sessions.values()
    assert session.items[0].content == message


async def test_what_is_no_question_exits_with_2(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    for arguments, piped, said in (
        ([], b" \n", "nothing is asked"),
        (["x"], b"ab\xff", "not UTF-8 text (at byte 2)"),
        ([], b"x" * (p.MAX_FRAME_BYTES + 1), f"more than {p.MAX_FRAME_BYTES} bytes"),
        (["x", "--url", "ftp://box"], b"", "is not the address of a daemon"),
        (["x", "--url", "http://192.0.2.1", "--key", "k"], b"", "is not encrypted"),
    ):
        code, out, err = await Run(tmp_path, *arguments, url=nobody)(piped)
        assert (code, out) == (2, ""), err
        assert said in err
        assert "Traceback" not in err


async def test_where_no_daemon_runs_it_says_what_to_do_and_starts_none(tmp_path: Path) -> None:
    code, out, err = await Run(tmp_path, "x", url="http://127.0.0.1:9")()
    assert (code, out) == (3, "")
    assert err.startswith("chatd: no daemon answers at http://127.0.0.1:9")
    assert "`chatd serve --port 9`" in err
    assert "--start" in err
    assert not (tmp_path / ".local").exists()


async def test_a_daemon_elsewhere_is_not_started_here(tmp_path: Path) -> None:
    code, _, err = await Run(tmp_path, "x", "--start", url="https://127.0.0.1:9")()
    assert code == 3
    assert "start one with `chatd serve --port 9 --tls-cert" in err


async def test_what_a_daemon_says_of_a_refusal_is_cleaned(tmp_path: Path) -> None:
    fail = EngineError("it \x1b[31mburns\x07")
    async with ScriptedDaemon([Script(deltas=[], fail=fail)]) as failing:
        code, out, err = await Run(tmp_path, "x", url=failing.url)()
    assert (code, out) == (1, "")
    assert err == "chatd: it ␛[31mburns␇\n"


async def test_a_pipe_that_closes_ends_the_answer_without_a_word(tmp_path: Path) -> None:
    async with ScriptedDaemon([Script(deltas=["x"] * 100, manual=True)]) as slow:
        run = Run(tmp_path, "x", url=slow.url)
        reading, writing = os.pipe()
        child = await asyncio.create_subprocess_exec(
            *CHATD, "ask", "x", stdin=asyncio.subprocess.DEVNULL, stdout=writing, stderr=-1, env=run._environment
        )
        os.close(writing)
        slow.release()
        await until(lambda: bool(slow.sessions) and len(next(iter(slow.sessions.values())).items) == 2)
        os.close(reading)
        slow.release()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                _, err = await child.communicate()
        assert (child.returncode, err) == (141, b"")
        assert next(iter(slow.sessions.values())).cancelled


async def test_start_serves_one_question_and_stops_again(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chatd import client_commands

    log: list[str] = []

    class Started:
        key = None

        def __init__(self, url: str) -> None:
            log.append(f"start {url.rpartition(':')[0]}")
            self.url = daemon.url

        def __enter__(self) -> "Started":
            return self

        def __exit__(self, *_: object) -> None:
            log.append("stop")

        def wait_ready(self, on_phase: Any) -> None:
            on_phase("loading [/weights]", 0.5)

    monkeypatch.setattr("chatd.local_daemon.LocalDaemon", Started)
    monkeypatch.setattr("chatd.local_daemon.readiness", lambda url: None)
    with client_commands._running("http://127.0.0.1:9", "k", True) as place:
        assert place == (daemon.url, None)
        assert log == ["start http://127.0.0.1"]
    assert log[-1] == "stop"


@pytest.mark.model
async def test_a_question_with_start_is_answered_by_the_real_model(tmp_path: Path, tmp_path_factory: Any) -> None:
    models = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    arguments = ["Say hello.", "--start", "--json"]
    run = Run(tmp_path, *arguments, url="http://127.0.0.1:9")
    run._environment |= {
        "XDG_CACHE_HOME": str(models),
        "CHATD_SESSIONS__MAX_TOKENS": "4",
        "CHATD_ENGINE__KV_MEMORY": "64MiB",
    }
    code, out, err = await run()
    answer = json.loads(out)
    assert answer["model"] == "smollm2-135m"
    assert answer["text"]
    assert (code, answer["reason"]) in ((0, "stop"), (CUT_SHORT, "max_output_tokens")), err

"""What the docs say is true: frames decode, names exist and are complete, examples run, quoted help is the help."""

import http
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatd import protocol as p
from chatd.config import CLIENT_VARIABLES, Settings, leaves
from chatd.local_daemon import LocalDaemon
from chatd.models.model_config import SUPPORTED_ARCHITECTURES, SUPPORTED_ROPE_TYPES
from chatd.server import openai_schema
from chatd.server.app import ROUTES
from chatd.server.websocket import CAPS
from chatd_tui.command_table import COMMANDS
from chatd_tui.commands import key_name
from chatd_tui.keymap import DEFAULT
from chatd_tui.page_keys import POOL_KEYS
from chatd_tui.screens.help import KEYS
from chatd_tui.widgets.pool_map import GLYPHS

ROOT = Path(__file__).parent.parent
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
TYPES = p.COMMAND_TYPES | p.EVENT_TYPES
LOG_EVENTS = {"server.crashed_before", "server.listening", "server.ready"}


def fences(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.S | re.M)


def section(page: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, _, rest = PAGES[page].partition(f"\n{heading}\n")
    assert rest, f"{page}.md has no {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.M)[0]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return each table as its header and its rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()]
        found.append((rows[0], rows[2:]))
    return found


def column(text: str, *headers: str) -> set[str]:
    """Return the code spans in the columns of these names."""
    names: set[str] = set()
    for header, rows in tables(text):
        for at, name in enumerate(header):
            if name in headers:
                names.update(span for row in rows if at < len(row) for span in code_spans(row[at]))
    return names


def codes_in(*folders: str) -> set[str]:
    """Return the error codes that the source of these folders or files names."""
    codes: set[str] = set()
    for folder in folders:
        path = ROOT / "chatd" / folder
        for source in [path] if path.is_file() else path.rglob("*.py"):
            text = source.read_text()
            codes.update(re.findall(r'\bcode = "(\w+)"', text))
            for argument in re.findall(r"\bcode=([^,()]+)", text):
                codes.update(re.findall(r'"(\w+)"', argument))
    return codes


# Frames.

FRAMES = [(page, text) for page in PAGES for text in fences(page, "json")]


@pytest.mark.parametrize(("page", "text"), FRAMES, ids=[f"{page}-{i}" for i, (page, _) in enumerate(FRAMES)])
def test_a_frame_decodes_and_encodes_to_the_same_fields(page: str, text: str) -> None:
    shown = json.loads(text)
    is_command = shown["type"] in p.COMMAND_TYPES and "id" in shown
    frame: Any = p.decode_command(text) if is_command else p.decode_event(text)
    assert frame is not None, f"{shown['type']} is no frame"
    again = json.loads(p.encode(frame))
    # A client may leave out what is so anyway, the daemon says all there is.
    assert (shown | again if is_command else again) == shown


def test_every_command_and_event_is_named_and_no_other() -> None:
    roots = {name.partition(".")[0] for name in TYPES}
    other = {*leaves(Settings().model_dump()), *CAPS}
    named = set()
    for span in code_spans(PAGES["protocol"]):
        dotted = re.fullmatch(r"[a-z_]+(?:\.[a-z_]+)+", span)
        if (dotted and span.partition(".")[0] in roots and span not in other) or span in TYPES:
            named.add(span)
    assert named == TYPES


def test_every_field_of_every_command_is_named_and_no_other() -> None:
    (rows,) = [rows for header, rows in tables(PAGES["protocol"]) if header[:2] == ["command", "fields"]]
    shown = {code_spans(row[0])[0]: set(code_spans(row[1])) for row in rows}
    assert shown == {
        str(command.__struct_config__.tag): {*command.__struct_fields__} - {"id"} for command in p.COMMANDS
    }


def test_every_sampling_parameter_is_named_and_no_other() -> None:
    assert column(section("protocol", "### params"), "name") == {*p.Params.__struct_fields__}


# Metrics, fields, codes, settings, routes.


def test_every_metric_is_named_and_no_other() -> None:
    source = (ROOT / "chatd/server/metrics.py").read_text()
    assert column(PAGES["operating"], "metric") == {*re.findall(r'"(chatd_[a-z0-9_]+)"', source)}


def test_every_field_of_a_chat_request_is_named_and_no_other() -> None:
    text = section("openai", "## Fields")
    (done, refused) = [rows for header, rows in tables(text) if header[0] == "field"]
    assert {name for row in done for name in code_spans(row[0])} == {*openai_schema.ChatRequest.__struct_fields__}
    assert {name for row in refused for name in code_spans(row[0])} == openai_schema.UNSUPPORTED
    (ignored,) = re.findall(r"^\*\*Ignored\*\*(.*?)\n\n", text, re.S | re.M)
    assert set(code_spans(ignored)) == openai_schema.INFORMATIONAL
    for name in openai_schema.StreamOptions.__struct_fields__:
        assert f"`{name}`" in text


def test_neutral_values_are_those_that_are_accepted() -> None:
    (_, refused) = [rows for header, rows in tables(section("openai", "## Fields")) if header[0] == "field"]
    for names, *rest in refused:
        for name in code_spans(names):
            said = {word.strip("`") for word in re.split(r", (?=[`\w])", rest[0] if rest else "") if word}
            known = {json.dumps(value) for value in openai_schema.NEUTRAL.get(name, ()) if not isinstance(value, float)}
            assert said == known, name


def test_error_codes_exist_and_those_of_the_doors_are_all_named() -> None:
    phrases = {status.phrase.lower().replace(" ", "_") for status in http.HTTPStatus}
    named = {code for page in ("protocol", "openai", "client") for code in column(PAGES[page], "code", "codes")}
    everywhere = codes_in(".")
    assert named <= everywhere | phrases
    doors = codes_in("server", "sessions", "engine/client.py", "engine/sampling.py", "engine/core.py")
    classes = {error.code for error in _subclasses() if not hasattr(error, "exit_code")}
    # What start-up says has an exit code; "disconnected" is read by nobody.
    quiet = {
        "error",
        "conflict",
        "disconnected",
        *(error.code for error in _subclasses() if hasattr(error, "exit_code")),
    }
    assert (doors | classes) - quiet - codes_in("models") <= named


def _subclasses() -> list[Any]:
    from chatd.errors import ChatdError

    found: list[Any] = [ChatdError]
    for error in found:
        found.extend(error.__subclasses__())
    return found


def test_the_reasons_to_refuse_a_model_are_all_named() -> None:
    found = codes_in("models") | {"model_error"}
    assert column(PAGES["models"], "code") == {code for code in found if code.startswith("model_")}


def test_what_models_are_supported_is_what_the_code_supports() -> None:
    text = section("models", "## Supported")
    assert set(re.findall(r"`(\w+ForCausalLM)`", text)) == {*SUPPORTED_ARCHITECTURES}
    (types,) = [row[1] for _, rows in tables(text) for row in rows if row[0] == "rotary embeddings"]
    assert set(code_spans(types)) == {*SUPPORTED_ROPE_TYPES}


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_are_named_exist(page: str) -> None:
    known = {*leaves(Settings().model_dump())}
    for span in code_spans(PAGES[page]):
        if re.fullmatch(r"(server|engine|sessions|quotas|log)\.[a-z_]+", span):
            assert span in known | TYPES | LOG_EVENTS, span


def test_every_route_is_named() -> None:
    everything = "\n".join(PAGES.values())
    for route in ROUTES:
        assert f"{route.path.replace(':path', '')}`" in everything, route.path


def test_the_keys_and_marks_of_the_terminal_are_all_named() -> None:
    text = section("terminal", "## Keys")
    for names, _ in KEYS:
        for name in re.split(r", (?:or )?", names):
            assert name.replace("\\", "`\\`") in text, name
    pool_page = section("terminal", "## The pool page")
    ((_, rows),) = [table for table in tables(pool_page) if table[0] == ["name", "keys", "does"]]
    shown = [(name.strip("`"), [key.strip("`") for key in keys.split(", ")], does) for name, keys, does in rows]
    assert shown == [(key.name, [key_name(each) for each in key.keys], key.help) for key in POOL_KEYS]
    assert column(pool_page, "cell") == {*GLYPHS.values()}
    assert {name for name in column(PAGES["terminal"], "variable") if name.startswith("CHATD_")} <= CLIENT_VARIABLES


def test_the_commands_of_the_terminal_are_the_registrys() -> None:
    rows = re.findall(r"^\| `(/.*?)` \| (.*?) ?\| (.*) \|$", section("terminal", "## Commands"), re.M)
    expected = [(command.usage, ", ".join(DEFAULT.names(command)), command.help) for command in COMMANDS]
    assert [(usage.replace("\\|", "|"), keys, text) for usage, keys, text in rows] == expected


# Quoted help, links.


def test_quoted_help_is_the_help() -> None:
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    modules = {"chatd": "chatd.cli", "chatd-tui": "chatd_tui.cli"}
    quotes = [text for page in PAGES for text in fences(page, "text") if text.startswith("$ chatd")]
    assert len(quotes) == 6
    running = []
    for quote in quotes:
        name, *arguments = quote[2:].split("\n", 1)[0].split()
        # A help names its program as it was called.
        code = f"import sys; sys.argv = {[name, *arguments]!r}; from {modules[name]} import main; main()"
        command = [sys.executable, "-c", code]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    for quote, process in zip(quotes, running, strict=True):
        command_line, shown = quote[2:].split("\n", 1)
        printed, _ = process.communicate()
        assert shown.strip() == "\n".join(line.rstrip() for line in printed.splitlines()).strip(), command_line


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^)\s:]*)\)", PAGES[page]):
        path = (ROOT / "docs" / target) if target else ROOT / "docs" / f"{page}.md"
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


# Examples.


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with the real model and a local key of its own, whose answers are short."""
    folder = tmp_path_factory.mktemp("docs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.setenv("CHATD_SESSIONS__MAX_TOKENS", "32")
        patch.setenv("CHATD_URL", address)
        patch.delenv("CHATD_KEY", raising=False)
        with LocalDaemon(address, ["--kv-memory", "64MiB"]) as daemon:
            daemon.wait_ready(lambda phase, done: None)
            yield address


EXAMPLES = [(page, text) for page in PAGES for text in fences(page, "python")]


@pytest.mark.model
@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[f"{page}-{i}" for i, (page, _) in enumerate(EXAMPLES)])
def test_an_example_runs(page: str, text: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(text, f"{page}.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()

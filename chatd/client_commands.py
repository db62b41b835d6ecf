"""`chatd ask` and `chatd top`: commands for people and scripts that have a daemon's address and a key."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.markup import escape

from chatd.config import check_key_transport, client_defaults, start_hint
from chatd.errors import EnvironmentProblem, InvalidRequest

if TYPE_CHECKING:
    from chatd.protocol import Params

notices = Console(stderr=True)

LONG_LINE = 4096
"""More columns than any line of a report has."""

UrlOption = Annotated[str | None, typer.Option(help="Of the daemon (default: CHATD_URL, or this machine).")]
KeyOption = Annotated[
    str | None,
    typer.Option(help="Others here can see it: prefer CHATD_KEY or CHATD_KEY_FILE. Default: those, or the local key."),
]


def ask(
    question: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="What to ask; text from a pipe is put below it, or asked alone."),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Go on in this conversation: its id, its title, or `last`.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The conversation's system prompt from here on.")] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter of this answer, such as temperature=0.7."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: text, reason, usage, timings and ids.")
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Where no daemon runs here, start one for this question.")
    ] = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Ask one question and print the answer as it comes."""
    own = _params(params or ())
    text = _question_text(" ".join(question or ()), _piped_text())
    address, key = _daemon(url, key)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the output's encoding cannot say is no reason to lose the rest.
        sys.stdout.reconfigure(errors="replace")
    with _running(address, key, start) as (address, key):
        from chatd.asking import NOBODY_READS, Question, ask_daemon

        asked = Question(text, session=session, system=system, params=own, as_json=as_json)
        exit_code = asyncio.run(ask_daemon(address, key, asked, sys.stdout, notices))
        if exit_code == NOBODY_READS:
            discard_output()
    raise typer.Exit(exit_code)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the pool as it is now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object, for scripts.")] = False,
    keymap: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of your own (default: keymap.toml).")
    ] = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Show where the memory goes: the block pool, live or once."""
    if as_json and not once:
        raise typer.BadParameter("--json prints one reading: add --once")
    address, key = _daemon(url, key)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise EnvironmentProblem("chatd top needs a terminal", hint="`chatd top --once` prints the pool as it is now")
    from chatd.local_daemon import readiness

    if readiness(address) is None:
        raise EnvironmentProblem(f"no daemon answers at {address}", hint=start_hint(address))
    if once:
        _print_pool(address, key, as_json)
        return
    try:
        from chatd_tui.top import run_pool
    except ImportError as error:
        raise EnvironmentProblem(
            f"the terminal client is not installed ({error.name} is missing)",
            hint='pip install "chatd[tui]"; `chatd top --once` does without',
        ) from None
    run_pool(address, key, keymap)


def _print_pool(address: str, key: str | None, as_json: bool) -> None:
    from chatd.pool_report import as_builtins, as_tables, read_pool

    hello, state = asyncio.run(read_pool(address, key))
    if as_json:
        # The one control character that JSON lets stand in ASCII.
        typer.echo(json.dumps(as_builtins(hello, state)).replace("\x7f", "\\u007f"))
    else:
        console = Console(highlight=False)
        if console.is_terminal:
            console.print(as_tables(hello, state, console.width))
        else:
            # Whoever reads a pipe wants whole lines, however long.
            Console(highlight=False, width=LONG_LINE).print(as_tables(hello, state))


def _params(typed: Sequence[str]) -> Params:
    """Return what `--set` says, each of them one parameter.

    Raises:
        BadParameter: A name or a value is wrong.
    """
    from chatd.protocol import Params
    from chatd.typed_params import check, with_value

    params = Params()
    try:
        for pair in typed:
            name, sign, value = pair.partition("=")
            if not sign:
                raise InvalidRequest(f"{pair[:40]!r} is not NAME=VALUE", hint="such as temperature=0.7")
            params = with_value(params, name.strip(), value.strip())
        check(params)
    except InvalidRequest as error:
        raise typer.BadParameter(f"--set: {error.message}{f' ({error.hint})' if error.hint else ''}") from None
    return params


def _question_text(typed: str, piped: str) -> str:
    """Return the message: what was typed, what was piped, or the one above the other."""
    parts = [part for part in (typed.strip(), piped.strip("\n")) if part.strip()]
    if not parts:
        raise typer.BadParameter('nothing is asked: chatd ask "…", or text through a pipe')
    return "\n\n".join(parts)


def _piped_text() -> str:
    """Return what comes through a pipe or from a file, "" at a terminal.

    Raises:
        BadParameter: It is no text, or more than any message can be.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    from chatd.protocol import MAX_FRAME_BYTES

    data = sys.stdin.buffer.read(MAX_FRAME_BYTES + 1)
    if len(data) > MAX_FRAME_BYTES:
        raise typer.BadParameter(f"standard input has more than {MAX_FRAME_BYTES} bytes, which no message can have")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8 text (at byte {error.start})") from None


def _daemon(url: str | None, key: str | None) -> tuple[str, str | None]:
    """Return the address to ask and the key for it."""
    from chatd.local_daemon import daemon_url

    try:
        address = daemon_url(client_defaults(url).url)
        key = key or client_defaults(address).key
        check_key_transport(address, key)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{error.message}{f' ({error.hint})' if error.hint else ''}") from None
    return address, key


@contextmanager
def _running(address: str, key: str | None, start: bool) -> Iterator[tuple[str, str | None]]:
    """Give the address and key of the daemon that runs, or of one that is started for as long as the block.

    Raises:
        EnvironmentProblem: None answers, and none was to be started or none can be.
    """
    from chatd.local_daemon import LocalDaemon, check_can_start, private_url, readiness

    if readiness(address) is not None:
        yield address, key
        return
    if not start:
        raise EnvironmentProblem(
            f"no daemon answers at {address}", hint=f"{start_hint(address)}, or for this question with --start"
        )
    check_can_start(address)
    with LocalDaemon(private_url(urlsplit(address).port or 0)) as daemon:
        with notices.status("starting a daemon") as status:
            daemon.wait_ready(
                lambda phase, done: status.update(f"{escape(phase)} {done:.0%}" if done else escape(phase))
            )
        yield daemon.url, daemon.key


def discard_output() -> None:
    """Have what is left in the output's buffer go nowhere, so that the exit is quiet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

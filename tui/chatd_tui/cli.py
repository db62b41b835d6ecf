"""The `chatd-tui` command: connects to daemons, or offers to start one for as long as the client is open."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

import chatd
from chatd.clean import clean
from chatd.config import Server, check_key_transport, chosen_servers
from chatd.errors import ChatdError, EnvironmentProblem, InvalidRequest, StartupError
from chatd.local_daemon import LocalDaemon, check_can_start, daemon_url, readiness

notices = Console(stderr=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command; a refusal is one line on stderr and an exit code that tells its kind."""
    try:
        app()
    except ChatdError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: ChatdError) -> NoReturn:
    message = clean(error.message).replace("\n", "\n           ")
    notices.print(f"[bold red]chatd-tui:[/] {escape(message)}", highlight=False, soft_wrap=True)
    if error.hint:
        notices.print(f"           {escape(clean(error.hint))}", highlight=False, soft_wrap=True)
    sys.exit(error.exit_code if isinstance(error, StartupError) else 2 if isinstance(error, InvalidRequest) else 1)


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(chatd.__version__, highlight=False)
        raise typer.Exit


@app.command()
def connect(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Of the daemon (default: CHATD_URL, servers.toml, or this machine)."),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=URL]", help="One more in the same list; a NAME alone is one of servers.toml."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Others here can see it: prefer CHATD_KEY or CHATD_KEY_FILE. Default: those, or the local key."
        ),
    ] = None,
    keymap: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of your own (default: keymap.toml).")
    ] = None,
    theme: Annotated[str | None, typer.Option(help="Its name (default: CHATD_THEME, or the last one).")] = None,
    no_mouse: Annotated[bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Talk to a chatd daemon, or to several, in the terminal."""
    servers = [_with_address(chosen) for chosen in chosen_servers(url, server or (), key)]
    if len(servers) == 1:
        check_key_transport(servers[0].url, servers[0].read_key())
    from chatd_tui.keymap_file import load_keymap
    from chatd_tui.theme import check_theme

    keys = load_keymap(keymap)
    if theme is not None:
        check_theme(theme)
    if not _has_terminal():
        raise EnvironmentProblem(
            "chatd-tui needs a terminal",
            hint="run it in one; a program can use `chatd.client`, or any OpenAI client with the daemon's /v1",
        )
    from chatd_tui.app import run_app

    run = partial(run_app, keymap=keys, theme=theme, mouse=not no_mouse)
    if len(servers) > 1 or not _wants_to_start(servers[0]):
        # Where nobody answers yet, the client says what to do about it and goes on trying.
        run(servers)
        return
    with LocalDaemon(servers[0].url) as daemon:
        with notices.status("starting") as status:
            daemon.wait_ready(
                lambda phase, done: status.update(f"{escape(phase)} {done:.0%}" if done else escape(phase))
            )
        run(daemon.url, daemon.key)


def _with_address(server: Server) -> Server:
    """Return a server with its address as http(s)."""
    try:
        return replace(server, url=daemon_url(server.url))
    except InvalidRequest as error:
        where = f"server {server.name}: " if server.name else ""
        raise InvalidRequest(f"{where}{error.message}", param=error.param) from None


def _wants_to_start(server: Server) -> bool:
    """Ask whether to start a daemon, where none answers and one can be started here."""
    if readiness(server.url) is not None:
        return False
    try:
        check_can_start(server.url)
    except EnvironmentProblem:
        return False
    question = f"No daemon answers at {server.url}. Start one here, for as long as you chat?"
    return typer.confirm(question, default=True)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


if __name__ == "__main__":
    main()

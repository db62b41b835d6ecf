"""The `chatd` command. Each command reads its settings, does one thing of another module, and shows errors in one way.

Nothing heavy is imported here: a command imports what it needs when it runs, so `chatd --help` is instant and the base
install has every command that it can serve.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import chatd
import chatd.journal_changes
from chatd.clean import clean
from chatd.client_commands import ask, discard_output, top
from chatd.config import (
    BUILT_IN_MODEL,
    LoadedSettings,
    client_defaults,
    leaves,
    load_settings,
    private_settings,
    usual_keys_path,
)
from chatd.errors import ChatdError, EnvironmentProblem, InvalidRequest, StartupError
from chatd.journal_commands import print_table, sessions_app, usage

SERVING = "Serving"
CONVERSATIONS = "Conversations"
SETTING_UP = "Setting up"

app = typer.Typer(
    help="chatd keeps many people's conversations with a language model resident on one box.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
keys_app = typer.Typer(help="The keys file: which key belongs to which tenant and user.", no_args_is_help=True)
config_app = typer.Typer(help="The settings and where each came from.", no_args_is_help=True)
app.add_typer(sessions_app, name="sessions", rich_help_panel=CONVERSATIONS)
app.add_typer(keys_app, name="keys", rich_help_panel=SETTING_UP)
app.add_typer(config_app, name="config", rich_help_panel=SETTING_UP)
notices = Console(stderr=True)
output = Console()

Quantization = Literal["auto", "fp16", "bf16", "int8", "fp32"]
KVDtype = Literal["auto", "float16", "bfloat16", "float32", "fp8", "int8"]
Device = Literal["auto", "cpu", "cuda"]
LogLevel = Literal["debug", "info", "warning", "error"]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file (default: CHATD_CONFIG, or config.toml in your folder).")
]
KeysFileOption = Annotated[
    Path | None,
    typer.Option("--keys-file", help="The keys file (default: server.keys_file, else keys.json in your folder)."),
]
KeyClass = Literal["interactive", "batch"]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=f"Built-in name ({BUILT_IN_MODEL}), local folder, or Hugging Face id."),
]
QuantizationOption = Annotated[Quantization | None, typer.Option(help="Weights of the linear layers.")]


def main() -> None:
    """Run the command line; a refusal is one line on stderr and an exit code that tells its kind."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ChatdError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard_output()
        _fail(EnvironmentProblem("there is no room on the disk for what this command writes"))


def _fail(error: ChatdError) -> NoReturn:
    # A daemon's words, and what it quotes, may be anybody's.
    # A log or a pipe has no width at which a line, and a path in it, would be cut.
    whole = not notices.is_terminal
    message = clean(error.message).replace("\n", "\n       ")
    notices.print(f"[bold red]chatd:[/] {_escaped(message)}", highlight=False, soft_wrap=whole)
    if error.hint:
        notices.print(f"       {_escaped(clean(error.hint))}", highlight=False, soft_wrap=whole)
    sys.exit(error.exit_code if isinstance(error, StartupError) else 2 if isinstance(error, InvalidRequest) else 1)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _show_version(wanted: bool) -> None:
    if wanted:
        output.print(chatd.__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(rich_help_panel=SERVING)
def serve(
    model: ModelArgument = None,
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    keys_file: KeysFileOption = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no key; loopback only.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None,
    behind_proxy: Annotated[str | None, typer.Option(help="IP address or network of the proxy that ends TLS.")] = None,
    device: Annotated[Device | None, typer.Option(help="Where the model runs; auto is a GPU if there is one.")] = None,
    quantization: QuantizationOption = None,
    kv_dtype: Annotated[KVDtype | None, typer.Option(help="Format of the KV cache.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Compute answers alike whatever is beside them, on a GPU too.")
    ] = False,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Capture no graphs of decode steps on a GPU.")
    ] = False,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Part of a GPU's memory that may be used, 0 to 1.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help='Size of the block pool, such as "2GiB".')] = None,
    host_memory: Annotated[str | None, typer.Option(help='Host memory for KV beyond the pool, such as "8GiB".')] = None,
    disk_space: Annotated[str | None, typer.Option(help='Files for KV beyond all memory, such as "50GiB".')] = None,
    disk_directory: Annotated[Path | None, typer.Option(help="Where those files are.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a context.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests in one batch.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Rows of one step.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the CPU backend.")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Least severe event that is logged.")] = None,
    decision_log: Annotated[Path | None, typer.Option(help="File for the engine's decisions (chatd replay).")] = None,
    no_journal: Annotated[bool, typer.Option("--no-journal", help="Keep nothing across restarts.")] = False,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve a model to everybody who has a key."""
    flags: dict[str, object] = {
        "model.name": model,
        "server.host": host,
        "server.port": port,
        "server.keys_file": keys_file,
        "server.allow_anonymous_loopback": no_auth or None,
        "journal.enabled": False if no_journal else None,
        "server.tls_cert": tls_cert,
        "server.tls_key": tls_key,
        "server.behind_proxy": behind_proxy,
        "engine.device": device,
        "model.quantization": quantization,
        "model.kv_dtype": kv_dtype,
        "engine.deterministic": deterministic or None,
        "engine.enforce_eager": enforce_eager or None,
        "engine.gpu_memory_utilization": gpu_memory_utilization,
        "engine.kv_memory": kv_memory,
        "engine.host_memory": host_memory,
        "engine.disk_space": disk_space,
        "engine.disk_directory": disk_directory,
        "model.max_model_len": max_model_len,
        "engine.max_num_seqs": max_num_seqs,
        "engine.max_num_batched_tokens": max_num_batched_tokens,
        "engine.threads": threads,
        "log.level": log_level,
        "engine.decision_log": decision_log,
    }
    run, settings = _server_module().serve, load_settings(config, flags).settings
    if until_stdin_closes:
        _end_with_stdin()
        settings = private_settings(settings)
    run(settings, load_settings=lambda: load_settings(config, flags).settings)


@app.command(rich_help_panel=SERVING)
def replay(
    log: Annotated[Path, typer.Argument(help="File that a daemon wrote (engine.decision_log).")],
    explain: Annotated[int | None, typer.Option(min=0, help="Tell the life of the request with this number.")] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="Count and tell from this step on.")] = 0,
    last: Annotated[int | None, typer.Option("--to", min=0, help="Stop after this step.")] = None,
) -> None:
    """Make the engine's decisions again without its model, and compare each with the log."""
    try:
        from chatd.engine.replay import replay_file
    except ImportError as error:
        raise EnvironmentProblem(
            f"the server is not installed ({error.name} is missing)", hint='pip install "chatd[server]"'
        ) from None
    # Steps that failed then fail again, as they should; the log that tells of them is the daemon's.
    logging.getLogger("chatd.engine").setLevel(logging.CRITICAL + 1)
    report = replay_file(log, explain=explain, first_step=first, last_step=last)
    print("\n".join(report.lines))
    raise typer.Exit(0 if report.is_same else 1)


@app.command(rich_help_panel=CONVERSATIONS)
def chat(
    model: ModelArgument = None,
    config: ConfigOption = None,
    quantization: QuantizationOption = None,
) -> None:
    """Start a daemon for yourself, talk to it in the terminal, and stop it again."""
    if not _has_terminal():
        raise EnvironmentProblem(
            "chatd chat needs a terminal",
            hint="run it in one; without a terminal, `chatd serve` starts the daemon for any OpenAI client",
        )
    from chatd.local_daemon import LocalDaemon, private_url, readiness

    try:
        from chatd_tui.app import run_app
        from chatd_tui.keymap_file import load_keymap
    except ImportError as error:
        raise EnvironmentProblem(
            f"the terminal client is not installed ({error.name} is missing)", hint='pip install "chatd[tui]"'
        ) from None
    keymap = load_keymap()
    loaded = load_settings(config, {"model.name": model, "model.quantization": quantization})
    settings = loaded.settings
    url = f"http://127.0.0.1:{settings.server.port}"
    if settings.server.port and readiness(url) is not None:
        notices.print(f"a daemon is running at {url} already; connecting to it", highlight=False)
        run_app(url, client_defaults(url).key, keymap=keymap)
        return
    _server_module()
    _resolve_with_progress(settings.model.name)
    arguments = [settings.model.name, "--quantization", settings.model.quantization]
    if config is not None:
        arguments += ["--config", str(config)]
    with LocalDaemon(private_url(settings.server.port), arguments) as daemon:
        with _phases_shown() as show:
            daemon.wait_ready(show)
        run_app(daemon.url, daemon.key, keymap=keymap)


@app.command(rich_help_panel=SETTING_UP)
def pull(model: Annotated[str, typer.Argument(help="Built-in name, or Hugging Face id.")]) -> None:
    """Fetch a model and make it ready, so that the first start does not wait for it."""
    files = _resolve_with_progress(model)
    output.print(f"{files.id} is in {files.path}", highlight=False, soft_wrap=True)


@keys_app.command("create")
def keys_create(
    tenant: Annotated[str, typer.Option(help="The tenant that the key belongs to.")],
    user: Annotated[str, typer.Option(help="The user within the tenant.")],
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="May see the whole pool and all metrics.")] = False,
    key_class: Annotated[
        KeyClass, typer.Option("--class", help="How its requests are scheduled; batch yields to interactive.")
    ] = "interactive",
    keys_file: KeysFileOption = None,
) -> None:
    """Make a key and show it once; the file keeps only its hash."""
    from chatd.tenants.keys import create_key

    path = _keys_path(keys_file)
    secret = create_key(path, tenant=tenant, user=user, label=label, operator=operator, key_class=key_class)
    notices.print(f"added to {path}; this is the only time the key is shown:", highlight=False, soft_wrap=True)
    print(secret)


@keys_app.command("list")
def keys_list(keys_file: KeysFileOption = None) -> None:
    """List the keys, without their secrets."""
    from chatd.tenants.keys import list_keys

    path = _keys_path(keys_file)
    table = Table("id", "tenant", "user", "label", "class", "operator", "created")
    keys = list_keys(path)
    for key in keys:
        created = key.created_at.strftime("%Y-%m-%d %H:%M")
        row = (key.id, key.tenant, key.user, key.label, key.key_class, "yes" if key.is_operator else "", created)
        table.add_row(*map(_escaped, row))
    notices.print(
        f"keys in {path}" if keys or path.exists() else f"there are no keys: {path} does not exist",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    print_table(table)


@keys_app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The id that `chatd keys list` shows.")],
    keys_file: KeysFileOption = None,
) -> None:
    """Remove a key; a running daemon closes its connections within 5 s."""
    from chatd.tenants.keys import revoke_key

    revoke_key(_keys_path(keys_file), key_id)
    notices.print(f"revoked {key_id}", highlight=False)


@config_app.command("show")
def config_show(
    config: ConfigOption = None, as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False
) -> None:
    """Show every setting and where its value came from."""
    loaded = load_settings(config)
    rows = _setting_rows(loaded)
    if as_json:
        print(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=2))
        return
    # A path that is cut off says nothing, where there is no terminal to widen.
    table = Table("setting", Column("value", overflow="fold"), Column("from", overflow="fold"))
    for name, value, source in rows:
        table.add_row(name, _escaped(json.dumps(value)), _escaped(source), style="" if source != "default" else "dim")
    print_table(table)


@app.command(rich_help_panel=SETTING_UP)
def schema() -> None:
    """Print the JSON Schema of the websocket protocol's frames."""
    from chatd.protocol import json_schema

    print(json.dumps(json_schema(), indent=2))


app.command(rich_help_panel=CONVERSATIONS)(ask)
app.command(rich_help_panel=SERVING)(top)
app.command(rich_help_panel=CONVERSATIONS)(usage)


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _setting_rows(loaded: LoadedSettings) -> list[tuple[str, Any, str]]:
    values = leaves(loaded.settings.model_dump(mode="json"))
    return [(name, value, loaded.sources.get(name, "default")) for name, value in values.items()]


def _keys_path(given: Path | None) -> Path:
    return given or load_settings().settings.server.keys_file or usual_keys_path()


def _server_module() -> Any:
    """Import the server, or say how to install it."""
    try:
        from chatd.server import serve as module
    except ImportError as error:
        raise EnvironmentProblem(
            f"the server is not installed ({error.name} is missing)", hint='pip install "chatd[server]"'
        ) from None
    return module


def _resolve_with_progress(model: str) -> Any:
    try:
        from chatd.models.registry import resolve
    except ImportError as error:
        raise EnvironmentProblem(
            f"the server is not installed ({error.name} is missing)", hint='pip install "chatd[server]"'
        ) from None
    with _phases_shown() as show:
        return resolve(model, progress=show)


@contextmanager
def _phases_shown() -> Iterator[Callable[[str, float], None]]:
    """Show each phase on a line of its own; a phase is over when the next one begins."""
    description = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(finished_text="✓"), description, BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notices) as progress:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: float) -> None:
            if phase not in tasks:
                for task in tasks.values():
                    progress.update(task, completed=1.0)
                tasks[phase] = progress.add_task(phase, total=1.0)
            progress.update(tasks[phase], completed=done)

        yield show


def _end_with_stdin() -> None:
    """Ask this process to stop when its standard input closes: whoever started it is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="until-stdin-closes", daemon=True).start()


if __name__ == "__main__":
    main()

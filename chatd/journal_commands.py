"""`chatd sessions ls|show|export` and `chatd usage`: what the journal has, read beside a running daemon or without one.

Reading takes no lock and changes nothing. What changes the journal is in `journal_changes`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from chatd.clean import clean_line
from chatd.config import journal_directory, load_settings
from chatd.errors import EnvironmentProblem, InvalidRequest, NotFound

if TYPE_CHECKING:
    from chatd.journal.reader import JournalReader
    from chatd.journal.records import MessageRecord, SessionRecord

sessions_app = typer.Typer(help="Conversations in the journal.", no_args_is_help=True)
notices = Console(stderr=True)
output = Console()
WIDE_LIST = 120
"""Columns of a terminal from which on a list has a row for each conversation."""

MAX_WIDTH = 10_000
"""Of a line that no terminal cuts."""

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file (default: CHATD_CONFIG, or config.toml in your folder).")
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--directory", help="The journal's folder (default: journal.directory).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For scripts.")]
TenantOption = Annotated[str | None, typer.Option(help="Of this tenant only.")]
UserOption = Annotated[str | None, typer.Option(help="Of this user only.")]


@sessions_app.command("ls")
def sessions_ls(
    tenant: TenantOption = None,
    user: UserOption = None,
    query: Annotated[
        str | None, typer.Option(help="With these words in the title or in a message; needs --tenant and --user.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: JsonOption = False,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """List conversations, the last used first."""
    if query is not None and (tenant is None or user is None):
        raise InvalidRequest("a search is in one user's conversations: name --tenant and --user", param="query")
    with _reading(directory, config) as reader:
        found = [
            session
            for session in reader.sessions()
            if tenant in (None, session.tenant) and user in (None, session.user)
        ]
        if query is not None and tenant is not None and user is not None:
            ranks = {session: rank for rank, session in enumerate(reader.search(tenant, user, query, limit))}
            found = sorted((s for s in found if s.id in ranks), key=lambda session: ranks[session.id])
        else:
            found.sort(key=lambda session: session.updated_at, reverse=True)
    if as_json:
        print_text(json.dumps([_summary(session) for session in found[:limit]], indent=2))
        return
    shown = found[:limit]
    is_narrow = output.is_terminal and output.width < WIDE_LIST
    print_table(_narrow_list(shown) if is_narrow else _list(shown))
    if len(found) > limit:
        notices.print(f"{len(found) - limit} more (--limit)", highlight=False)


@sessions_app.command("show")
def sessions_show(
    session: Annotated[str, typer.Argument(help="Its id.")],
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Print a conversation."""
    from chatd.session_files import as_markdown

    with _reading(directory, config) as reader:
        print_text(as_markdown(*_load(reader, session)), end="")


@sessions_app.command("export")
def sessions_export(
    session: Annotated[str, typer.Argument(help="Its id.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A new file, instead of standard output.")
    ] = None,
    file_format: Annotated[
        Literal["md", "json", "html"] | None,
        typer.Option(
            "--format", help="Default: what FILE's name ends with, or md. json has all branches, and can be imported."
        ),
    ] = None,
    output_file: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The same.")] = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Write a conversation as Markdown, JSON or HTML."""
    from chatd.session_files import RENDERERS
    from chatd.transcript_file import format_of, write_new

    if file is not None and output_file is not None:
        raise typer.BadParameter(f"{file} and --output {output_file} are two files; name one")
    to = file or output_file
    chosen = file_format or ("md" if to is None else format_of(to.name))
    with _reading(directory, config) as reader:
        text = RENDERERS[chosen](*_load(reader, session))
    if to is None:
        print_text(text, end="")
        return
    try:
        write_new(to, text)
    except OSError as error:
        raise EnvironmentProblem(f"{to} cannot be written: {error.strerror}") from None
    notices.print(f"wrote {to}", highlight=False, markup=False, soft_wrap=True)


def usage(
    tenant: TenantOption = None,
    first: Annotated[str | None, typer.Option("--from", metavar="DAY", help="From this day on, as 2026-01-31.")] = None,
    last: Annotated[str | None, typer.Option("--to", metavar="DAY", help="Up to this day.")] = None,
    as_json: JsonOption = False,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the tokens of each tenant, key and day (UTC)."""
    with _reading(directory, config) as reader:
        rows = reader.usage(tenant, _day(first, "--from"), _day(last, "--to"))
    if as_json:
        print_text(
            json.dumps(
                [
                    {name: str(value) if name == "day" else value for name, value in _fields(row).items()}
                    for row in rows
                ],
                indent=2,
            )
        )
        return
    numbers = ("turns", "tokens in", "of them cached", "tokens out")
    table = Table("tenant", "key", "day", *(Column(name, justify="right") for name in numbers))
    for row in rows:
        counts = (row.requests, row.input_tokens, row.cached_tokens, row.output_tokens)
        table.add_row(_text(row.tenant), _text(row.key_id), str(row.day), *(f"{count:,}" for count in counts))
    print_table(table)


def _list(sessions: Sequence[SessionRecord]) -> Table:
    """Return conversations, a row each."""
    table = Table(_ids(sessions), "tenant", "user", Column("title", overflow="fold"), "messages", "last used", "")
    for session in sessions:
        row = (session.id, session.tenant, session.user, session.title)
        cells = (_text(clean_line(cell)) for cell in row)
        table.add_row(*cells, str(session.num_items), _when(session), _marks(session))
    return table


def _narrow_list(sessions: Sequence[SessionRecord]) -> Table:
    """Return conversations with their titles below their ids, so that nothing is cut off at 80 columns."""
    ids = Column("id", width=max((len(session.id) for session in sessions), default=2), overflow="fold")
    columns = (Column("tenant, user", overflow="fold"), Column("messages", width=8), Column("last used", width=16))
    table = Table(ids, *columns)
    for session in sessions:
        title = f"{session.title} ({_marks(session)})" if _marks(session) else session.title
        table.add_row(
            _text(f"{session.id}\n{clean_line(title)}"),
            _text(f"{clean_line(session.tenant)}\n{clean_line(session.user)}"),
            str(session.num_items),
            _when(session),
        )
    return table


def _ids(sessions: Sequence[SessionRecord]) -> Column:
    # An id that is cut off is none.
    return Column("id", min_width=max((len(session.id) for session in sessions), default=2), overflow="fold")


def _marks(session: SessionRecord) -> str:
    return " ".join(name for name in ("pinned", "archived", "closed") if getattr(session, name))


def print_table(table: Table) -> None:
    """Print a table; into a pipe or a file as wide as it is, since nothing there has a width."""
    console = output if output.is_terminal else Console(width=MAX_WIDTH)
    console.print(table)


def _directory(given: Path | None, config: Path | None) -> Path:
    return given.absolute() if given is not None else journal_directory(load_settings(config).settings)


@contextmanager
def _reading(given: Path | None, config: Path | None) -> Iterator[JournalReader]:
    """Open a journal to read, beside whoever writes it."""
    with journal_reader(_directory(given, config)) as reader:
        yield reader


@contextmanager
def journal_reader(place: Path) -> Iterator[JournalReader]:
    """Open the journal in a directory to read, beside whoever writes it."""
    from chatd.journal.directory import DATABASE
    from chatd.journal.reader import open_to_read
    from chatd.journal.storage_errors import DATABASE_ERRORS

    file = place / DATABASE
    if not file.is_file():
        raise EnvironmentProblem(
            f"there is no journal in {place}",
            hint="a daemon makes one when it starts; name its folder with --directory",
        )
    try:
        reader = open_to_read(place)
        try:
            yield reader
        finally:
            reader.close()
    except DATABASE_ERRORS as error:
        raise EnvironmentProblem(f"the journal in {place} cannot be read: {error}") from None


def _load(reader: JournalReader, session: str) -> tuple[SessionRecord, list[MessageRecord]]:
    record = reader.session(session)
    if record is None:
        raise NotFound(f"session {session[:64]!r} is not in the journal", param="session")
    return record, reader.messages(session)


def _summary(session: SessionRecord) -> dict[str, object]:
    """Return what a list says of a session, for scripts."""
    names = ("id", "tenant", "user", "title", "created_at", "updated_at", "num_items", "num_tokens", "model")
    flags = ("pinned", "archived", "closed")
    return {name: getattr(session, name) for name in (*names, *flags)}


def _fields(record: object) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(record)  # type: ignore[arg-type]


def _when(session: SessionRecord) -> str:
    return datetime.fromtimestamp(session.updated_at, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def _day(text: str | None, option: str) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{text!r} is no day such as 2026-01-31 ({option})", param=option) from None


def _text(cell: str) -> str:
    from rich.markup import escape

    return escape(cell)


def print_text(text: str, end: str = "\n") -> None:
    """Write text as it is: neither wrapped nor taken for markup."""
    sys.stdout.write(text + end)

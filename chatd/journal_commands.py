"""`chatd sessions …` and `chatd usage`: what the journal has, read beside a running daemon or without one.

Reading takes no lock and changes nothing. Writing takes the lock that a daemon holds, so it is refused while one runs:
that daemon has the conversations in memory and would write them back.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table

from chatd.clean import clean_line
from chatd.config import disk_tier_directory, journal_directory, load_settings
from chatd.errors import Conflict, EnvironmentProblem, InvalidRequest, NotFound

if TYPE_CHECKING:
    from chatd.journal.journal import Journal
    from chatd.journal.reader import JournalReader
    from chatd.journal.records import MessageRecord, SessionRecord
    from chatd.session_files import SessionFile

sessions_app = typer.Typer(help="Conversations in the journal.", no_args_is_help=True)
notices = Console(stderr=True)
output = Console()
MAX_WIDTH = 10_000
"""Of a line that no terminal cuts."""
_T = TypeVar("_T")

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
        _print(json.dumps([_summary(session) for session in found[:limit]], indent=2))
        return
    shown = found[:limit]
    # An id that is cut off is none.
    ids = Column("id", min_width=max((len(session.id) for session in shown), default=2))
    table = Table(ids, "tenant", "user", Column("title", overflow="fold"), "messages", "last used", "")
    for session in shown:
        marks = " ".join(name for name in ("pinned", "archived", "closed") if getattr(session, name))
        row = (session.id, session.tenant, session.user, session.title)
        table.add_row(*(_text(clean_line(cell)) for cell in row), str(session.num_items), _when(session), marks)
    _print_table(table)
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
        _print(as_markdown(*_load(reader, session)), end="")


@sessions_app.command("export")
def sessions_export(
    session: Annotated[str, typer.Argument(help="Its id.")],
    file_format: Annotated[
        Literal["md", "json", "html"],
        typer.Option("--format", help="json has all branches and token ids, and can be imported."),
    ] = "md",
    to: Annotated[Path | None, typer.Option("--output", "-o", help="A new file, instead of standard output.")] = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Write a conversation as Markdown, JSON or HTML."""
    from chatd.session_files import RENDERERS
    from chatd.transcript_file import write_new

    with _reading(directory, config) as reader:
        text = RENDERERS[file_format](*_load(reader, session))
    if to is None:
        _print(text, end="")
        return
    try:
        write_new(to, text)
    except OSError as error:
        raise EnvironmentProblem(f"{to} cannot be written: {error.strerror}") from None
    notices.print(f"wrote {to}", highlight=False, markup=False, soft_wrap=True)


@sessions_app.command("import")
def sessions_import(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="What `export --format json` wrote.")],
    tenant: Annotated[str | None, typer.Option(help="Whose they become (default: whose they were).")] = None,
    user: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    new_ids: Annotated[bool, typer.Option("--new-ids", help="Beside conversations that have the same ids.")] = False,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Bring exported conversations into the journal; no daemon may run."""
    from chatd.session_files import with_new_ids

    read = [_read_file(path, tenant, user) for path in files]
    if new_ids:
        read = [with_new_ids(file) for file in read]
    place = _directory(directory, config)

    async def run(journal: Journal) -> None:
        for file in read:
            await _import(journal, place, file)
            notices.print(f"imported {file.session.id}", highlight=False, markup=False)

    _writing(place, run)


@sessions_app.command("rm")
def sessions_rm(
    sessions: Annotated[list[str] | None, typer.Argument(metavar="[SESSION…]", help="Their ids.")] = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="All that nobody used for so long; those that are pinned stay.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only, with --unused-days.")] = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove conversations, by their ids or by their age; no daemon may run."""
    if bool(sessions) == (unused_days is not None):
        raise InvalidRequest("name sessions, or --unused-days", param="sessions")
    place = _directory(directory, config)

    async def run(journal: Journal) -> list[str]:
        if unused_days is not None:
            days = {} if tenant is None else {tenant: unused_days}
            return await journal.expire(time.time(), days, unused_days if tenant is None else None)
        _check_known(place, sessions or ())
        for session in sessions or ():
            await journal.erase(session)
        return list(sessions or ())

    removed = _writing(place, run)
    notices.print(f"removed {len(removed)} session{'' if len(removed) == 1 else 's'}", highlight=False)


@sessions_app.command("erase")
def sessions_erase(
    session: Annotated[str, typer.Argument(help="Its id.")],
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove a conversation and print a receipt, as JSON; no daemon may run.

    A running daemon does it with `session.erase`, and drops the KV it keeps, too.
    """
    place = _directory(directory, config)

    async def run(journal: Journal) -> dict[str, object]:
        _check_known(place, [session])
        erased = await journal.erase(session)
        return {
            "session": session,
            "messages": erased.messages,
            "shared_messages": erased.shared_messages,
            "tokens": erased.tokens,
            "bytes": erased.num_bytes,
        }

    _print(json.dumps(_writing(place, run)))


@sessions_app.command("erase-tenant")
def sessions_erase_tenant(
    tenant: Annotated[str, typer.Argument(help="Its name; its keys are revoked first.")],
    directory: DirectoryOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove all that there is of a tenant, and print a receipt, as JSON; no daemon may run.

    From the journal its conversations, kept answers and usage, from the disk tier its blocks. Keys are not touched.
    """
    settings = load_settings(config).settings
    place = directory.absolute() if directory is not None else journal_directory(settings)
    blocks = disk_tier_directory(settings)

    async def run(journal: Journal) -> dict[str, object]:
        num_blocks = _remove_blocks(blocks, tenant)
        num_sessions, erased = await journal.erase_tenant(tenant)
        return {
            "tenant": tenant,
            "sessions": num_sessions,
            "messages": erased.messages,
            "tokens": erased.tokens,
            "bytes": erased.num_bytes,
            "disk_blocks": num_blocks,
        }

    _print(json.dumps(_writing(place, run)))


def _remove_blocks(root: Path, tenant: str) -> int:
    from chatd.kvcache.block_directory import BlockDirectory

    if not root.is_dir():
        return 0
    directory = BlockDirectory(root)
    try:
        return directory.remove_tenant(tenant)
    except OSError as error:
        raise EnvironmentProblem(f"{root} cannot be cleared: {error.strerror or error}") from None
    finally:
        directory.close()


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
        _print(
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
    _print_table(table)


def _print_table(table: Table) -> None:
    """Print a table; into a pipe or a file as wide as it is, since nothing there has a width."""
    console = output if output.is_terminal else Console(width=MAX_WIDTH)
    console.print(table)


def _directory(given: Path | None, config: Path | None) -> Path:
    return given.absolute() if given is not None else journal_directory(load_settings(config).settings)


@contextmanager
def _reading(given: Path | None, config: Path | None) -> Iterator[JournalReader]:
    """Open a journal to read, beside whoever writes it."""
    with _reader(_directory(given, config)) as reader:
        yield reader


@contextmanager
def _reader(place: Path) -> Iterator[JournalReader]:
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


def _writing(place: Path, run: Callable[[Journal], Coroutine[object, object, _T]]) -> _T:
    """Open a journal that no daemon has, do something, and close it."""
    from chatd.journal.directory import JournalInUse
    from chatd.journal.journal import Journal

    async def main() -> _T:
        try:
            journal = Journal.open(place)
        except JournalInUse as error:
            error.hint = "stop that daemon first, or do it through the daemon: session.erase, session.create"
            raise
        try:
            return await run(journal)
        finally:
            await journal.close()

    return asyncio.run(main())


def _load(reader: JournalReader, session: str) -> tuple[SessionRecord, list[MessageRecord]]:
    record = reader.session(session)
    if record is None:
        raise NotFound(f"session {session[:64]!r} is not in the journal", param="session")
    return record, reader.messages(session)


def _check_known(place: Path, sessions: Sequence[str]) -> None:
    """Refuse ids that the journal does not have, before anything is removed."""
    with _reader(place) as reader:
        known = reader.session_ids()
    for session in sessions:
        if session not in known:
            raise NotFound(f"session {session[:64]!r} is not in the journal", param="session")


def _read_file(path: Path, tenant: str | None, user: str | None) -> SessionFile:
    import msgspec

    from chatd.session_files import from_json

    try:
        file = from_json(path.read_bytes())
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from None
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", param="file") from None
    owner = {"tenant": tenant or file.session.tenant, "user": user or file.session.user}
    return msgspec.structs.replace(file, session=msgspec.structs.replace(file.session, **owner))


async def _import(journal: Journal, place: Path, file: SessionFile) -> None:
    """Write a conversation, if nothing else has its ids; messages that a fork brought along already are shared."""
    from chatd.journal.records import SaveMessage, SaveSession

    session = file.session
    with _reader(place) as reader:
        if session.id in reader.session_ids():
            raise Conflict(
                f"session {session.id!r} is in the journal already", hint="--new-ids makes another one of it"
            )
        for message in file.messages:
            known = reader.message(message.id)
            if known is not None and known != (session.tenant, session.user, message):
                raise Conflict(
                    f"message {message.id!r} is in the journal already, and is another one", hint="use --new-ids"
                )
    await journal.commit([SaveSession(session), *(SaveMessage(session.id, message) for message in file.messages)])


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


def _print(text: str, end: str = "\n") -> None:
    """Write text as it is: neither wrapped nor taken for markup."""
    sys.stdout.write(text + end)

"""`chatd sessions import|rm|erase|erase-tenant`: through the daemon that has the journal, or in it where none runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from chatd.client_commands import KeyOption, UrlOption
from chatd.config import disk_tier_directory, journal_directory, load_settings
from chatd.errors import Conflict, EnvironmentProblem, InvalidRequest, NotFound
from chatd.journal_commands import ConfigOption, DirectoryOption, journal_reader, print_text, sessions_app

if TYPE_CHECKING:
    from chatd.journal.journal import Journal
    from chatd.operator_client import OperatorClient
    from chatd.session_files import SessionFile

notices = Console(stderr=True)
_T = TypeVar("_T")


@sessions_app.command("import")
def sessions_import(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="What `export --format json` wrote.")],
    tenant: Annotated[str | None, typer.Option(help="Whose they become (default: whose they were).")] = None,
    user: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    new_ids: Annotated[bool, typer.Option("--new-ids", help="Beside conversations that have the same ids.")] = False,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Bring exported conversations into the journal."""
    from chatd.session_files import with_new_ids

    read = [_read_file(path, tenant, user) for path in files]
    if new_ids:
        read = [with_new_ids(file) for file in read]
    places = _Places(directory, config)

    def tell(file: SessionFile) -> None:
        notices.print(f"imported {file.session.id}", highlight=False, markup=False)

    async def run(journal: Journal) -> None:
        for file in read:
            await _import(journal, places.journal, file)
            tell(file)

    def ask(daemon: OperatorClient) -> None:
        from chatd.session_files import as_json

        for file in read:
            daemon.take_in(as_json(file.session, file.messages))
            tell(file)

    _change(places, url, key, run, ask)


@sessions_app.command("rm")
def sessions_rm(
    sessions: Annotated[list[str] | None, typer.Argument(metavar="[SESSION…]", help="Their ids.")] = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="All that nobody used for so long; those that are pinned stay.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only, with --unused-days.")] = None,
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Remove conversations, by their ids or by their age."""
    if bool(sessions) == (unused_days is not None):
        raise InvalidRequest("name sessions, or --unused-days", param="sessions")
    if sessions and tenant is not None:
        raise InvalidRequest("--tenant goes with --unused-days", param="tenant")
    places, names = _Places(directory, config), list(dict.fromkeys(sessions or ()))

    async def run(journal: Journal) -> list[str]:
        from chatd.sessions.stored_blocks import remove_stored_blocks

        if unused_days is not None:
            days, others = ({}, unused_days) if tenant is None else ({tenant: unused_days}, None)
            now = time.time()
            await remove_stored_blocks(journal, places.blocks, await journal.expired(now, days, others))
            return await journal.expire(now, days, others)
        _check_known(places.journal, names)
        await remove_stored_blocks(journal, places.blocks, names)
        for session in names:
            await journal.erase(session)
        return names

    def ask(daemon: OperatorClient) -> list[str]:
        return daemon.remove(names) if unused_days is None else daemon.remove_unused(unused_days, tenant)

    removed = _change(places, url, key, run, ask)
    notices.print(f"removed {len(removed)} session{'' if len(removed) == 1 else 's'}", highlight=False)


@sessions_app.command("erase")
def sessions_erase(
    session: Annotated[str, typer.Argument(help="Its id.")],
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Remove a conversation from the journal and all tiers, and print a receipt, as JSON."""
    places = _Places(directory, config)

    async def run(journal: Journal) -> dict[str, Any]:
        from chatd.sessions.stored_blocks import remove_stored_blocks

        _check_known(places.journal, [session])
        blocks = await remove_stored_blocks(journal, places.blocks, [session])
        erased = await journal.erase(session)
        return {
            "session": session,
            "messages": erased.messages,
            "shared_messages": erased.shared_messages,
            "tokens": erased.tokens,
            "bytes": erased.num_bytes,
            "blocks": 0,
            "host_blocks": 0,
            "disk_blocks": blocks[session],
        }

    print_text(json.dumps(_change(places, url, key, run, lambda daemon: daemon.erase(session))))


@sessions_app.command("erase-tenant")
def sessions_erase_tenant(
    tenant: Annotated[str, typer.Argument(help="Its name; its keys are revoked first.")],
    directory: DirectoryOption = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Remove all that there is of a tenant, and print a receipt, as JSON.

    From the journal its conversations, kept answers and usage, from all tiers its blocks. Keys are not touched.
    """
    places = _Places(directory, config)

    async def run(journal: Journal) -> dict[str, Any]:
        num_blocks = _remove_blocks(places.blocks, tenant)
        num_sessions, erased = await journal.erase_tenant(tenant)
        return {
            "tenant": tenant,
            "sessions": num_sessions,
            "messages": erased.messages,
            "tokens": erased.tokens,
            "bytes": erased.num_bytes,
            "blocks": 0,
            "host_blocks": 0,
            "disk_blocks": num_blocks,
        }

    print_text(json.dumps(_change(places, url, key, run, lambda daemon: daemon.erase_tenant(tenant))))


class _Places:
    """Where the journal and the disk tier are."""

    def __init__(self, directory: Path | None, config: Path | None) -> None:
        settings = load_settings(config).settings
        self.journal = directory.absolute() if directory is not None else journal_directory(settings)
        self.blocks = disk_tier_directory(settings)


def _change(
    places: _Places,
    url: str | None,
    key: str | None,
    run: Callable[[Journal], Coroutine[object, object, _T]],
    ask: Callable[[OperatorClient], _T],
) -> _T:
    """Do something in the journal, or have the daemon do it that has it, or the one at `url`."""
    if url is not None:
        return ask(_daemon(url, key))
    from chatd.journal.directory import JournalInUse

    try:
        return asyncio.run(_run_in_journal(places.journal, run))
    except JournalInUse as error:
        if error.url is None:
            error.hint = "stop that daemon first, or say where it answers: --url"
            raise
        address = error.url
    return ask(_daemon(address, key))


async def _run_in_journal(place: Path, run: Callable[[Journal], Coroutine[object, object, _T]]) -> _T:
    from chatd.journal.journal import Journal

    journal = Journal.open(place)
    try:
        return await run(journal)
    finally:
        await journal.close()


def _daemon(url: str, key: str | None) -> OperatorClient:
    from chatd.local_daemon import daemon_url
    from chatd.operator_client import OperatorClient

    return OperatorClient(daemon_url(url), key)


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


def _check_known(place: Path, sessions: Sequence[str]) -> None:
    """Refuse ids that the journal does not have, before anything is removed."""
    with journal_reader(place) as reader:
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
    with journal_reader(place) as reader:
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

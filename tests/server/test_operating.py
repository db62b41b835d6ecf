"""`chatd sessions import|rm|erase|erase-tenant` beside a daemon that runs: they reach what it has in memory."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from typer.testing import CliRunner

from chatd.cli import app
from chatd.client import Client, Session
from chatd.config import Settings
from chatd.errors import Conflict, NotFound, PermissionDenied
from chatd.protocol import Event, Params, SessionErased
from chatd.server.app import ROUTES
from chatd.server.backend import Backend
from chatd.server.daemon import Daemon
from chatd.server.policy import Access
from chatd.server.serve import serve_async
from chatd.tenants.keys import create_key
from chatd.testing.toy_daemon import ToyBackend

LONG = Params(max_tokens=100_000, ignore_eos=True)
SHORT = Params(max_tokens=40, ignore_eos=True)


class Running:
    """A daemon with a journal, and the commands beside it."""

    def __init__(self, url: str, daemon: Daemon, keys: dict[str, str], journal: Path) -> None:
        self.url = url
        self.daemon = daemon
        self.keys = keys
        self.journal = journal

    def client(self, user: str) -> Client:
        return Client(self.url, key=self.keys[user])

    async def command(self, *arguments: object, by: str = "ann") -> str:
        """Run `chatd sessions …` as somebody would in a shell on that machine."""
        words = ["sessions", *map(str, arguments), "--directory", str(self.journal)]
        changes = arguments[0] in ("import", "rm", "erase", "erase-tenant")
        words += ["--key", self.keys[by]] if changes else []
        result = await asyncio.to_thread(CliRunner().invoke, app, words, catch_exceptions=True)
        if result.exception is not None:
            raise result.exception
        return result.stdout

    async def listed(self) -> list[str]:
        return [row["id"] for row in json.loads(await self.command("ls", "--json"))]


@pytest.fixture
async def running(tmp_path: Path, log: io.StringIO) -> AsyncIterator[Running]:
    path = tmp_path / "keys.json"
    keys = {
        user: create_key(path, tenant=tenant, user=user, operator=user == "ann")
        for user, tenant in (("ann", "acme"), ("bob", "acme"), ("eve", "beta"))
    }
    journal = tmp_path / "journal"
    settings = Settings(
        server={"port": 0, "keys_file": path},
        journal={"directory": journal},
        engine={"disk_directory": tmp_path / "kv"},
    )
    opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve_async(
            settings,
            on_ready=opened.set_result,
            make_backend=lambda daemon, own: cast(Backend, ToyBackend(daemon, own, 0.002)),
            stop=stop,
            handle_signals=False,
        )
    )
    async with asyncio.timeout(30):
        await asyncio.wait((opened, serving), return_when=asyncio.FIRST_COMPLETED)
        ready = await opened
    try:
        yield Running(ready.url, ready.daemon, keys, journal)
    finally:
        stop.set()
        async with asyncio.timeout(30):
            await serving


@contextlib.asynccontextmanager
async def conversation(running: Running, user: str, content: str, params: Params = SHORT) -> AsyncIterator[Session]:
    """A client of a user's with a conversation in which it has said something; a long answer is in progress."""
    async with running.client(user) as client:
        session = await client.create_session(params=params)
        if params is SHORT:
            assert await said(session, content)
        else:
            await session.send(content)
        yield session


async def said(session: Session, content: str) -> str:
    """Return the answer to a message."""
    return "".join([delta async for delta in session.stream(content)])


async def watched(client: Client, session: str) -> list[Event]:
    """Return all events of a session, to the one that says that it is gone."""
    events = []
    with contextlib.suppress(NotFound):
        async for event in client.follow(session, role="observer"):
            events.append(event)
    return events


async def test_an_erase_reaches_a_session_that_answers_and_whoever_is_attached(running: Running) -> None:
    async with conversation(running, "eve", "a canary of eve's", LONG) as session, running.client("eve") as other:
        watching = asyncio.create_task(watched(other, session.id))
        receipt = json.loads(await running.command("erase", session.id))
        async with asyncio.timeout(10):
            events = await watching
    assert isinstance(events[-1], SessionErased)
    assert events[-1].session == receipt["session"] == session.id
    assert (receipt["messages"], receipt["blocks"] > 0, receipt["bytes"] > 0) == (2, True, True)
    assert await running.listed() == []
    assert running.daemon.manager.num_in_flight == 0
    assert not any(b"a canary" in file.read_bytes() for file in running.journal.iterdir())
    with pytest.raises(NotFound):
        await running.command("erase", session.id)


async def test_sessions_are_removed_by_id_or_by_age_and_those_in_use_stay(running: Running) -> None:
    async with conversation(running, "eve", "one") as used:
        async with conversation(running, "bob", "two") as one, conversation(running, "bob", "three") as two:
            pass
        with pytest.raises(NotFound):
            await running.command("rm", one.id, "ses_of_nobody")
        assert sorted(await running.listed()) == sorted([used.id, one.id, two.id])
        await running.command("rm", one.id)
        assert sorted(await running.listed()) == sorted([used.id, two.id])
        await running.command("rm", "--unused-days", 0, "--tenant", "beta")
        assert sorted(await running.listed()) == sorted([used.id, two.id])
        await running.command("rm", "--unused-days", 0)
        assert await running.listed() == [used.id]


async def test_what_was_exported_is_imported_into_a_daemon_and_can_be_gone_on_with(
    running: Running, tmp_path: Path
) -> None:
    async with conversation(running, "eve", "what is a whale?") as session:
        pass
    file = tmp_path / "session.json"
    await running.command("export", session.id, "--format", "json", "-o", file)
    with pytest.raises(Conflict, match="is in the journal already"):
        await running.command("import", file)
    await running.command("rm", session.id)
    await running.command("import", file, "--user", "bob", "--tenant", "acme")
    async with running.client("bob") as client:
        again = await client.attach(session.id)
        assert again.snapshot is not None
        assert [item.role for item in again.snapshot.items] == ["user", "assistant"]
        assert again.snapshot.items[0].content == "what is a whale?"
        assert await said(again, "and a shark?")
    async with running.client("eve") as client:
        with pytest.raises(NotFound):
            await client.attach(session.id)


async def test_nothing_is_left_of_a_tenant_and_the_others_go_on(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        for user in ("eve", "bob"):
            await http.post(
                "/v1/chat/completions",
                headers={"Authorization": f"Bearer {running.keys[user]}"},
                json={
                    "model": "toy",
                    "messages": [{"role": "user", "content": f"stateless {user}" * 4}],
                    "max_tokens": 9,
                },
            )
    async with (
        conversation(running, "bob", "a conversation of bob's that stays") as stays,
        conversation(running, "eve", "a canary of eve's", LONG),
        conversation(running, "eve", "a canary of eve's, too"),
    ):
        receipt = json.loads(await running.command("erase-tenant", "beta"))
        assert receipt["tenant"] == "beta"
        assert (receipt["sessions"], receipt["messages"]) == (2, 4)
        assert receipt["blocks"] > 2
        assert await running.listed() == [stays.id]
        assert await said(stays, "and on")
    engine = cast(Any, running.daemon.engine)
    assert not [lease for lease in engine.core.leases if lease.tenant == "beta"]
    namespaces = {block.entry.namespace for block in engine.core.pool.blocks if block.entry is not None}
    assert engine.core.kv.index.namespace_id(engine.core.config.namespace.of("beta")) not in namespaces
    assert not any(b"a canary" in file.read_bytes() for file in running.journal.iterdir())
    usage = json.loads(
        (
            await asyncio.to_thread(CliRunner().invoke, app, ["usage", "--json", "--directory", str(running.journal)])
        ).stdout
    )
    assert {row["tenant"] for row in usage} == {"acme"}
    async with conversation(running, "eve", "a new beginning") as begun:
        assert await running.listed() == [begun.id, stays.id]


async def test_only_the_operator_may_and_loopback_is_no_key(running: Running) -> None:
    async with conversation(running, "bob", "mine") as session:
        with pytest.raises(PermissionDenied, match="operator's key"):
            await running.command("erase", session.id, by="bob")
    own = [policy for policy in ROUTES if policy.access is Access.OPERATORS_KEY]
    assert len(own) == 4
    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        for policy in own:
            path = policy.path.replace("{session}", session.id).replace("{tenant}", "acme")
            assert (await http.request(policy.method, path)).status_code == 401
            for user in ("bob", "eve"):
                headers = {"Authorization": f"Bearer {running.keys[user]}"}
                assert (await http.request(policy.method, path, headers=headers)).status_code == 403
    assert await running.listed() == [session.id]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"sessions": [], "unused_days": null}',
        '{"sessions": ["a"], "unused_days": 1}',
        '{"sessions": ["a"], "tenant": "acme"}',
        '{"x": 1}',
        '{"format": "", "version": 1, "session": {"x": ' + "[" * 100_000,
    ],
)
async def test_a_removal_that_does_not_say_what_is_refused(running: Running, body: str) -> None:
    headers = {"Authorization": f"Bearer {running.keys['ann']}"}
    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        for path in ("/v1/sessions/remove", "/v1/sessions/import"):
            assert (await http.post(path, content=body, headers=headers)).status_code == 400

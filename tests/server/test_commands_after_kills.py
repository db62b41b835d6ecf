"""A command that a client sends again after the daemon was killed has one effect and one answer."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from chatd.client import Client
from chatd.errors import Conflict
from chatd.protocol import (
    ItemAdded,
    MessageEdit,
    Params,
    SessionCreated,
    SessionFork,
    SessionUpdate,
    SessionUpdated,
    UserMessage,
)
from chatd.testing.ports import free_port
from chatd.testing.toy_daemon import ToyFarm


async def test_a_command_that_comes_again_after_a_kill_has_one_effect_and_its_first_answer(tmp_path: Path) -> None:
    params = Params(max_tokens=120, ignore_eos=True)
    port, journal = free_port(), {"directory": str(tmp_path / "journal")}
    with ToyFarm(tmp_path) as farm:
        pid = farm.start(port, journal=journal)
        async with Client(f"http://127.0.0.1:{port}", wait_s=30.0, backoff=lambda _attempt: 0.02) as client:
            session = await client.create_session(title="t")
            said = UserMessage(id="c1", session=session.id, content="hello", params=params)
            edited = MessageEdit(id="c2", session=session.id, item="", content="other", respond=False)
            named = SessionUpdate(id="c3", session=session.id, title="named")
            first, _ = await client._ask(said, ItemAdded, session=session.id)
            edited = msgspec.structs.replace(edited, item=first.item.id)
            await asyncio.to_thread(farm.kill, pid)
            pid = await asyncio.to_thread(lambda: farm.start(port, journal=journal))
            again, _ = await client._ask(said, ItemAdded, session=session.id)
            assert again.item == first.item
            await client._ask(named, SessionUpdated, session=session.id)
            with contextlib.suppress(Conflict):  # It may have ended.
                await session.cancel()
            beside, _ = await client._ask(edited, ItemAdded, session=session.id)
            await asyncio.to_thread(farm.kill, pid)
            pid = await asyncio.to_thread(lambda: farm.start(port, journal=journal))
            twice, _ = await client._ask(edited, ItemAdded, session=session.id)
            assert twice.item == beside.item
            with pytest.raises(Conflict) as refused:
                await client._ask(msgspec.structs.replace(said, content="another"), ItemAdded, session=session.id)
            assert refused.value.error_code == "id_reused"
            info, items = await client.get_session(session.id)
            assert (info.title, [item.content for item in items]) == ("named", ["other"])
            assert [item.siblings.count for item in items if item.siblings] == [2]
            forked = SessionFork(id="c4", session=session.id)
            made, _ = await client._ask(forked, SessionCreated)
            await asyncio.to_thread(farm.kill, pid)
            await asyncio.to_thread(lambda: farm.start(port, journal=journal))
            remade, _ = await client._ask(forked, SessionCreated)
            assert remade.session.id == made.session.id
            assert len(await client.list_sessions()) == 2

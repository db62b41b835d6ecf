"""What one user can have the journal keep and do is bounded, also where sessions are closed or left to the journal."""

import asyncio

import pytest

from chatd.errors import RateLimited
from chatd.journal.records import SaveAnswer
from chatd.protocol import BranchSelect, Message, MessageEdit, SessionCreate, SessionList, SessionUpdate, UserMessage
from chatd.sessions.manager import Owner, Receipt, SessionLimits
from chatd.sessions.native import MAX_SELECTED_BYTES
from chatd.sessions.recorder import LARGE_BYTES
from chatd.testing.restarts import ANN, RestartingDaemon

EVE = Owner("zeta", "eve")
BIG = "x" * 2**18


async def closed(daemon: RestartingDaemon, **fields: object) -> str:
    session = await daemon.manager.create(ANN, SessionCreate(**fields))
    await daemon.manager.close(session)
    return session.id


async def test_closed_and_archived_sessions_count_where_a_journal_keeps_them() -> None:
    limits = SessionLimits(max_sessions_per_user=9, max_kept_sessions_per_user=2)
    daemon = await RestartingDaemon(limits=limits).start()
    await closed(daemon)
    archived = await closed(daemon)
    session = await daemon.manager.resolve(ANN, archived)
    await daemon.manager.update(session, SessionUpdate(session=archived, archived=True))
    for _ in range(2):
        with pytest.raises(RateLimited, match="2 sessions are kept, the limit is 2") as refused:
            await daemon.manager.create(ANN, SessionCreate())
        assert refused.value.error_code == "too_many_sessions"
        await daemon.manager.create(EVE, SessionCreate())
        await daemon.start()
    # A kept one can be used again.
    await daemon.say(await daemon.manager.resolve(ANN, archived), "again")


async def test_bytes_in_the_journal_count_across_closing_and_restarts() -> None:
    limits = SessionLimits(max_kept_bytes_per_user=2**20, max_text_bytes_per_user=2**23)
    daemon = await RestartingDaemon(limits=limits).start()
    for _ in range(3):
        session = await daemon.manager.create(ANN, SessionCreate())
        await daemon.say(session, BIG, respond=False)
        await daemon.manager.close(session)
    for _ in range(2):
        with pytest.raises(RateLimited, match="max_kept_bytes_per_user") as refused:
            await daemon.manager.create(ANN, SessionCreate(messages=(Message(role="user", content=BIG),)))
        assert refused.value.error_code == "too_much_text"
        await daemon.start()
    await daemon.manager.create(EVE, SessionCreate(messages=(Message(role="user", content=BIG),)))


async def test_system_prompts_of_sessions_that_are_left_to_the_journal_count_as_memory() -> None:
    daemon = await RestartingDaemon(limits=SessionLimits(max_text_bytes_per_user=2**20)).start()
    for _ in range(3):
        await closed(daemon, system=BIG)
    with pytest.raises(RateLimited, match="max_text_bytes_per_user"):
        await daemon.manager.create(ANN, SessionCreate(system=BIG))


async def test_one_tenant_has_one_search_at_a_time() -> None:
    daemon = await RestartingDaemon().start()
    running, most, search = [], [0], daemon.handle.find

    async def slow(tenant: str, *args: object):
        running.append(tenant)
        most[0] = max(most[0], running.count("acme"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.remove(tenant)
        return await search(tenant, *args)

    daemon.handle.find = slow
    await asyncio.gather(*(daemon.manager.list(ANN, SessionList(query="x")) for _ in range(5)))
    assert most == [1]


async def test_large_messages_of_one_tenant_reach_the_journal_one_after_the_other() -> None:
    daemon = await RestartingDaemon().start()
    sessions = [(await daemon.open())[0] for _ in range(4)]
    theirs = await daemon.manager.create(EVE, SessionCreate())
    gate, commit, waiting = asyncio.Event(), daemon.journal.commit, []

    async def slow(changes) -> None:
        waiting.append(changes)
        await gate.wait()
        await commit(changes)

    daemon.journal.commit = slow
    text = "x" * (LARGE_BYTES + 1)
    saying = [asyncio.create_task(daemon.say(session, text, respond=False)) for session in sessions]
    saying.append(
        asyncio.create_task(
            daemon.manager.user_message(theirs, UserMessage(session=theirs.id, content=text, respond=False))
        )
    )
    await asyncio.sleep(0.01)
    assert len(waiting) == 2  # One of each.
    gate.set()
    await asyncio.gather(*saying)
    assert all(session.conversation.head.content == text for session in (*sessions, theirs))


async def test_the_answer_to_a_selection_is_not_kept_where_it_is_most_of_a_conversation() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "y" * MAX_SELECTED_BYTES, respond=False)
    large = session.conversation.head
    await daemon.manager.edit(session, MessageEdit(session=session.id, item=large.id, content="z", respond=False))
    small = session.conversation.head
    for command, leaf in (("to large", large), ("to small", small)):
        receipt = Receipt(command, b"")
        await daemon.manager.select_branch(session, BranchSelect(session=session.id, leaf=leaf.id), receipt=receipt)
        assert session.conversation.head is leaf
    kept = [c.command for changes in daemon.journal.commits for c in changes if isinstance(c, SaveAnswer)]
    assert kept == ["to small"]

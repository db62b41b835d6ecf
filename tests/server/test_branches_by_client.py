"""The client's forks, edits, regenerations and selections, against the daemon."""

import pytest

from chatd.client import Client
from chatd.errors import ChatdError, InvalidRequest
from chatd.protocol import (
    BranchSelected,
    ItemAdded,
    OutputTextDelta,
    ResponseCompleted,
    ResponseCreated,
    SessionAttached,
)
from chatd.testing.sessions import TURN_END, encode_text

from .conftest import Running, eventually


def numbered():
    numbers = iter(range(1, 1000))
    return lambda _log: [*encode_text(f"answer {next(numbers)}"), TURN_END]


def client_of(running: Running) -> Client:
    return Client.connect(running.url, key=running.key)


async def test_a_turn_of_an_edit_has_its_message_and_its_answer(start) -> None:
    async with start(numbered()) as running, client_of(running) as client:
        session = await client.create_session()
        turn = session.say("hello")
        assert [event async for event in turn if isinstance(event, ResponseCompleted)]
        edited = session.edit(turn.message.id, "hi")
        events = [event async for event in edited]
        assert "".join(event.delta for event in events if isinstance(event, OutputTextDelta)) == "answer 2"
        assert (edited.message.content, edited.item.content, edited.reason) == ("hi", "answer 2", "stop")
        assert edited.message.siblings.previous == turn.item.id
        note = await session.rewrite(edited.item.id, "what it should have said")
        assert (note.role, note.siblings.index) == ("assistant", 2)
        _, items = await client.get_session(session.id)
        assert [item.content for item in items] == ["hi", "what it should have said"]


async def test_a_turn_of_a_regeneration_has_its_answer(start) -> None:
    async with start(numbered()) as running, client_of(running) as client:
        session = await client.create_session()
        with pytest.raises(InvalidRequest):
            async for _ in session.regenerate():
                pass
        async for _ in session.say("hello"):
            pass
        again = session.regenerate()
        events = [event async for event in again]
        assert isinstance(next(event for event in events if hasattr(event, "seq")), ResponseCreated)
        assert (again.message, again.text, again.item.content) == (None, "answer 2", "answer 2")
        assert again.item.siblings.index == 2
        first = again.item.siblings.previous
        selected = await session.select_branch(first)
        assert [item.content for item in selected.items] == ["answer 1"]
        third = session.regenerate(first)
        async for _ in third:
            pass
        assert third.item.siblings.count == 3


async def test_an_answer_that_is_regenerated_goes_on_after_a_lost_connection(start) -> None:
    async with start(numbered()) as running, client_of(running) as client:
        session = await client.create_session()
        async for _ in session.say("hello"):
            pass
        running.engine.held = True
        again = session.regenerate()
        texts = []
        async for event in again:
            if isinstance(event, ResponseCreated):
                running.engine.step(3)
            if isinstance(event, OutputTextDelta):
                if not texts:
                    for connection in list(running.daemon.connections):
                        connection.close(1012, "again")
                    running.engine.held = False
                texts.append(event.delta)
        assert "".join(texts) == again.item.content == "answer 2"


async def test_those_who_follow_see_every_branch(start) -> None:
    async with start(numbered()) as running, client_of(running) as client, client_of(running) as other:
        session = await client.create_session()
        turn = session.say("hello")
        async for _ in turn:
            pass
        items: list = []
        following = other.follow(session.id, role="observer")
        attached = await anext(following)
        assert isinstance(attached, SessionAttached)
        items += attached.snapshot.items
        async for _ in session.edit(turn.message.id, "hi"):
            pass
        await session.select_branch(turn.item.id)
        async for event in following:
            if isinstance(event, ItemAdded | ResponseCreated):
                cut(items, event.item.parent)
                items.append(event.item)
            elif isinstance(event, ResponseCompleted):
                items[-1] = event.item
            elif isinstance(event, BranchSelected):
                cut(items, event.parent)
                items += event.items
                break
        assert items == (await client.get_session(session.id))[1]


def cut(items: list, parent: str | None) -> None:
    while items and items[-1].id != parent:
        items.pop()


async def test_a_fork_is_a_session_of_its_own(start) -> None:
    async with start(numbered()) as running, client_of(running) as client:
        session = await client.create_session(title="t")
        turn = session.say("hello")
        async for _ in turn:
            pass
        fork = await client.fork_session(session.id, at=turn.item.id)
        assert (fork.info.title, fork.created.copies_on_write) == ("t", 1)
        assert fork.created.shared_tokens > fork.created.shared_blocks > 0
        assert "".join([text async for text in fork.stream("more")]) == "answer 2"
        assert session.created.shared_tokens == 0
        await eventually(lambda: not running.engine.running)
        counts = [(await client.get_session(s.id))[0].num_items for s in (session, fork)]
        assert counts == [2, 4]
        with pytest.raises(ChatdError) as refused:
            await client.fork_session(session.id, at="msg_nobody")
        assert refused.value.param == "at"

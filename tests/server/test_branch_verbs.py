"""Forks, edits, regenerations and selections over the websocket."""

import pytest

from chatd.engine.messages import Fork
from chatd.protocol import (
    BranchSelect,
    BranchSelected,
    Error,
    ItemAdded,
    MessageEdit,
    OutputTextDelta,
    Params,
    RateLimitsUpdated,
    ResponseCompleted,
    ResponseCreated,
    ResponseRegenerate,
    SessionAttach,
    SessionCreate,
    SessionCreated,
    SessionFork,
    SessionGet,
    SessionGot,
    SessionList,
    SessionListed,
    SessionUpdate,
    SessionUpdated,
    Siblings,
    TranscriptEvent,
    UserMessage,
)
from chatd.testing.sessions import TURN_END, encode_text

from .conftest import Talk, eventually
from .test_websocket import create


def numbered():
    numbers = iter(range(1, 1000))
    return lambda _log: [*encode_text(f"answer {next(numbers)}"), TURN_END]


async def answered(talk: Talk, command) -> list:
    """Send a command; return the events of the transcript up to the end of its answer."""
    await talk.send(command)
    return [event for event in await talk.until(ResponseCompleted) if isinstance(event, TranscriptEvent)]


async def test_the_caps_say_that_there_are_forks_and_branches(start) -> None:
    async with start() as running, running.chat() as bob:
        assert {"fork", "branch"} <= set(bob.hello.caps)


async def test_a_fork_is_attached_and_says_what_it_shares(start) -> None:
    async with start(numbered()) as running, running.chat() as bob:
        session = (await create(bob, title="t")).session.id
        events = await answered(bob, UserMessage(session=session, content="hello"))
        created = await bob.ask(SessionFork(id="f1", session=session))
        num_tokens = (await running.manager.resolve(*owner_of(running, session))).conversation.num_tokens
        assert isinstance(created, SessionCreated)
        assert (created.session.title, created.session.num_items, created.head_seq) == ("t", 2, 0)
        assert (created.shared_tokens, created.shared_blocks) == (num_tokens, -(-num_tokens // 16))
        assert created.copies_on_write == 1
        items = [(await bob.next()).item for _ in range(2)]
        assert [item.content for item in items] == ["hello", "answer 1"]
        assert items[1] == events[-1].item
        # The new session goes on by itself.
        more = await answered(bob, UserMessage(session=created.session.id, content="more"))
        assert more[-1].usage.cached_tokens == num_tokens
        assert (await bob.ask(SessionGet(id="g", session=session))).session.num_items == 2


def owner_of(running, session: str):
    found = next(s for s in running.manager._store.by_lease.values() if s.id == session)
    return found.owner, session


async def test_a_fork_that_is_asked_for_twice_is_one(start) -> None:
    async with start(numbered()) as running, running.chat() as bob, running.chat() as again:
        session = (await create(bob)).session.id
        await answered(bob, UserMessage(session=session, content="hello"))
        command = SessionFork(id="f1", session=session)
        first, second = await bob.ask(command), await again.ask(command)
        assert second.session.id == first.session.id
        numbers = [(e.shared_tokens, e.shared_blocks, e.copies_on_write) for e in (first, second)]
        assert numbers[0] == numbers[1] != (0, 0, 0)
        # The other connection is attached as well.
        await again.send(UserMessage(session=first.session.id, content="more"))
        assert (await again.until(ResponseCompleted))[-1].item.content == "answer 2"


async def test_edits_and_regenerations_are_answered_once_and_told_to_all(start) -> None:
    async with start(numbered()) as running, running.chat() as bob, running.chat() as other:
        session = (await create(bob)).session.id
        (asked, *_, _end) = await answered(bob, UserMessage(session=session, content="hello"))
        await other.ask(SessionAttach(id="a", session=session))
        edit = MessageEdit(id="e1", session=session, item=asked.item.id, content="hi")
        events = await answered(bob, edit)
        assert [type(event) for event in events if not isinstance(event, OutputTextDelta)][:2] == [
            ItemAdded,
            ResponseCreated,
        ]
        assert (events[0].re, events[0].item.siblings.index) == ("e1", 2)
        seen = await other.until(ResponseCompleted)
        assert next(event for event in seen if isinstance(event, ItemAdded)).re is None
        assert await bob.ask(edit) == events[0]
        regenerate = ResponseRegenerate(id="r1", session=session)
        events = await answered(bob, regenerate)
        created = next(event for event in events if isinstance(event, ResponseCreated))
        assert created.re == "r1"
        assert created.item.siblings.index == 2
        assert await bob.ask(regenerate) == created
        assert (await bob.ask(SessionGet(id="g", session=session))).session.num_items == 2
        assert len(running.engine.submits) == 3
        await other.until(ResponseCompleted)
        select = BranchSelect(id="b1", session=session, leaf=asked.item.id)
        selected = await bob.ask(select)
        assert isinstance(selected, BranchSelected)
        assert [item.siblings for item in selected.items] == [
            Siblings(index=1, count=2, next=events[-1].item.id),
        ]
        theirs = (await other.until(BranchSelected))[-1]
        assert (theirs.re, theirs.seq, theirs.items) == (None, selected.seq, selected.items)
        assert await bob.ask(select) == selected


async def test_an_edit_and_a_regeneration_count_against_the_keys_quota(start) -> None:
    async with start(numbered(), quotas={"requests_per_minute": 4}) as running, running.chat() as bob:
        session = (await create(bob)).session.id
        events = await answered(bob, UserMessage(session=session, content="hello"))
        item = next(event for event in events if isinstance(event, ItemAdded)).item.id
        await answered(bob, MessageEdit(session=session, item=item, content="hi"))
        await answered(bob, ResponseRegenerate(session=session))
        for command in (
            ResponseRegenerate(id="r", session=session),
            MessageEdit(id="m", session=session, item=item, content="x"),
            MessageEdit(id="n", session=session, item=item, content="x", respond=False),
            UserMessage(id="u", session=session, content="x", respond=False),
            SessionUpdate(id="t", session=session, title="x"),
            SessionCreate(id="c"),
            SessionFork(id="f", session=session),
        ):
            refused = await bob.ask(command)
            assert isinstance(refused, Error)
            assert refused.error.code == "rate_limit_exceeded"
        # To look at what there is costs none, up to ten times as many.
        assert isinstance(await bob.ask(BranchSelect(id="b", session=session, leaf=item)), BranchSelected)
        for number in range(19):
            assert isinstance(await bob.ask(SessionList(id=f"l{number}")), SessionListed)
            assert isinstance(await bob.ask(SessionGet(id=f"g{number}", session=session)), SessionGot)
        assert isinstance(await bob.ask(SessionList(id="last")), SessionListed)
        for look in (
            SessionList(id="y"),
            SessionGet(id="z", session=session),
            BranchSelect(session=session, leaf=item),
        ):
            refused = await bob.ask(look)
            assert (refused.error.code, refused.error.retry_after_ms > 0) == ("rate_limit_exceeded", True)


async def test_a_session_that_is_not_opened_gives_its_place_in_the_quota_back(start) -> None:
    async with start(numbered(), quotas={"requests_per_minute": 2}) as running, running.chat() as bob:
        refused = await bob.ask(SessionCreate(id="a", params=Params(temperature=-1.0)))
        assert refused.error.code == "invalid_request"
        session = (await create(bob)).session.id
        refused = await bob.ask(SessionFork(id="b", session=session, at="msg_none"))
        assert refused.error.code == "invalid_request"
        assert isinstance(await bob.ask(SessionFork(id="c", session=session)), SessionCreated)
        refused = await bob.ask(SessionFork(id="d", session=session))
        assert refused.error.code == "rate_limit_exceeded"


async def test_a_refused_regeneration_gives_its_place_in_the_quota_back(start) -> None:
    async with start(numbered(), quotas={"requests_per_minute": 2}) as running, running.chat() as bob:
        session = (await create(bob)).session.id
        refused = await bob.ask(ResponseRegenerate(id="r", session=session))
        assert (refused.error.code, refused.error.param) == ("invalid_request", "item")
        await bob.send(UserMessage(session=session, content="hello"))
        events = await bob.until(ResponseCompleted)
        assert any(isinstance(event, RateLimitsUpdated) for event in events)


async def test_what_is_written_without_an_answer_counts_as_a_request_unless_it_is_refused(start) -> None:
    async with start(numbered(), quotas={"requests_per_minute": 3}) as running, running.chat() as bob:
        session = (await create(bob)).session.id
        refused = await bob.ask(SessionUpdate(id="a", session=session, params=Params(temperature=-1.0)))
        assert refused.error.code == "invalid_request"
        update = SessionUpdate(id="b", session=session, title="whales")
        updated = await bob.ask(update)
        assert isinstance(updated, SessionUpdated)
        limits = (await bob.until(RateLimitsUpdated))[-1].limits
        assert (limits[0]["name"], limits[0]["remaining"]) == ("requests", 1)
        assert await bob.ask(update) == updated, "the first answer to a command that comes twice"
        added = await bob.ask(UserMessage(id="c", session=session, content="a note", respond=False))
        assert isinstance(added, ItemAdded)
        refused = await bob.ask(UserMessage(id="d", session=session, content="another", respond=False))
        assert (refused.error.code, refused.error.retry_after_ms > 0) == ("rate_limit_exceeded", True)
        assert not running.manager.num_in_flight


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_fork_while_an_answer_streams_needs_a_finished_message(start, at_end: bool) -> None:
    async with start(numbered()) as running, running.chat() as bob:
        session = (await create(bob)).session.id
        first = await answered(bob, UserMessage(session=session, content="hello"))
        running.engine.held = True
        await bob.ask(UserMessage(id="m", session=session, content="more"))
        if at_end:
            refused = await bob.ask(SessionFork(id="f", session=session))
            assert (refused.error.code, refused.error.param) == ("session_busy", "at")
        else:
            await bob.send(SessionFork(id="f", session=session, at=first[-1].item.id))
            await eventually(lambda: any(isinstance(message, Fork) for message in running.engine.sent))
            running.engine.flush()
            created = (await bob.until(SessionCreated))[-1]
            assert created.shared_tokens > 0
        running.engine.held = False

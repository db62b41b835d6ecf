"""Every verb against one's own, another user's, another tenant's, an unknown and a malformed session."""

from typing import Any

import msgspec
import pytest

from chatd.protocol import COMMANDS, Error, ItemAdded, Message, Params, ResponseIncomplete, UserMessage, encode
from chatd.server.policy import Access, PolicyError, check_verbs
from chatd.server.verbs import VERBS
from chatd.sessions.limits import SessionLimits

from .test_websocket import create

MORE_FIELDS: dict[str, dict[str, Any]] = {
    "user.message": {"content": "hi", "respond": False},
    "message.edit": {"content": "hi", "respond": False},
}
ITEM_FIELDS = {
    "message.edit": "item",
    "response.regenerate": "item",
    "response.continue": "item",
    "branch.select": "leaf",
    "session.fork": "at",
}
"""What names a message of the session."""
WITH_SESSION = [command for command in COMMANDS if "session" in command.__struct_fields__]
TAGS = {command: str(command.__struct_config__.tag) for command in COMMANDS}


def build(command: type, session: str, ident: str, item: str = "msg_1") -> Any:
    fields = dict(MORE_FIELDS.get(TAGS[command], {}))
    if TAGS[command] in ITEM_FIELDS:
        fields[ITEM_FIELDS[TAGS[command]]] = item
    return command(id=ident, session=session, **fields)


def test_every_command_has_a_policy_and_needs_a_key() -> None:
    assert set(VERBS) == set(COMMANDS)
    assert all(verb.access in (Access.KEY, Access.OPERATOR) for verb in VERBS.values())


def test_a_command_without_a_policy_fails_start_up() -> None:
    some = {command: verb for command, verb in VERBS.items() if command is not UserMessage}
    with pytest.raises(PolicyError, match="UserMessage"):
        check_verbs(COMMANDS, some)
    with pytest.raises(PolicyError, match="int"):
        check_verbs(COMMANDS, {**VERBS, int: VERBS[UserMessage]})


@pytest.mark.parametrize("command", WITH_SESSION, ids=TAGS.get)
async def test_a_foreign_session_is_as_unknown_as_one_that_does_not_exist(start, command) -> None:
    async with (
        start() as running,
        running.chat() as bob,
        running.chat(running.keys["ann"]) as ann,
        running.chat(running.keys["eve"]) as eve,
    ):
        own = (await create(bob, messages=(Message(role="user", content="hello"),))).session.id
        item = (await bob.until(ItemAdded))[-1].item.id
        unknown = "ses_" + "0" * 20
        answers = {
            "other user": await ann.ask(build(command, own, "c", item)),
            "other tenant": await eve.ask(build(command, own, "c", item)),
            "unknown": await bob.ask(build(command, unknown, "c", item)),
        }
        bodies = set()
        for who, answer in answers.items():
            assert isinstance(answer, Error), (who, answer)
            assert answer.error.code == "not_found", (who, answer)
            bodies.add(encode(answer).replace(own, "S").replace(unknown, "S"))
        assert len(bodies) == 1, "a foreign session can be told from an unknown one"
        malformed = await bob.ask(encode(build(command, own, "c", item)).replace(own, "../" + own))
        assert malformed.error.param == "session"
        if TAGS[command] == "response.cancel":
            answer = await bob.ask(build(command, own, "c", item))
            assert answer.error.code == "not_responding"
        else:
            if TAGS[command] in ITEM_FIELDS:
                refused = await bob.ask(build(command, own, "i", "msg_of_another"))
                assert refused.error.param == ITEM_FIELDS[TAGS[command]]
            if TAGS[command] == "response.continue":
                await bob.ask(UserMessage(id="m", session=own, content="hi", params=Params(max_tokens=2)))
                item = (await bob.until(ResponseIncomplete))[-1].item.id
            answer = await bob.ask(build(command, own, "c", item))
            assert not isinstance(answer, Error), answer


async def test_lists_show_ones_own_sessions_only(start) -> None:
    async with start() as running, running.chat() as bob, running.chat(running.keys["eve"]) as eve:
        await create(bob, title="canary-of-bob")
        answer = await eve.ask(msgspec.json.encode({"type": "session.list", "id": "l", "query": "canary"}).decode())
        assert answer.sessions == []
        assert "canary" not in encode(answer)


async def test_a_closed_session_is_told_to_others_as_unknown(start) -> None:
    async with start() as running, running.chat() as bob, running.chat(running.keys["eve"]) as eve:
        session = (await create(bob)).session.id
        close = next(command for command in COMMANDS if TAGS[command] == "session.close")
        get = next(command for command in COMMANDS if TAGS[command] == "session.get")
        await bob.ask(build(close, session, "c"))
        assert not isinstance(await bob.ask(build(get, session, "g")), Error)
        assert (await eve.ask(build(get, session, "g"))).error.code == "not_found"


@pytest.mark.parametrize("command", WITH_SESSION, ids=TAGS.get)
async def test_a_deleted_session_is_as_unknown_as_one_that_never_was(start, command) -> None:
    async with start(limits=SessionLimits(max_closed_sessions_per_user=0)) as running, running.chat() as bob:
        gone = (await create(bob)).session.id
        close = next(command for command in COMMANDS if TAGS[command] == "session.close")
        await bob.ask(build(close, gone, "close"))
        unknown = "ses_" + "0" * 20
        answers = [await bob.ask(build(command, session, f"c{i}")) for i, session in enumerate((gone, unknown))]
        bodies = {encode(answer).replace(gone, "S").replace(unknown, "S") for answer in answers}
        assert answers[0].error.code == "not_found"
        assert len({body.replace('"c0"', '"c"').replace('"c1"', '"c"') for body in bodies}) == 1


@pytest.mark.parametrize("command", WITH_SESSION, ids=TAGS.get)
async def test_an_erased_session_is_as_unknown_as_one_that_never_was(start, command) -> None:
    async with start() as running, running.chat() as bob:
        gone = (await create(bob, title="canary", messages=(Message(role="user", content="canary"),))).session.id
        await bob.until(ItemAdded)
        erase = next(command for command in COMMANDS if TAGS[command] == "session.erase")
        erased = await bob.ask(build(erase, gone, "erase"))
        assert erased.receipt.messages == 1
        again = await bob.ask(build(erase, gone, "erase"))
        assert again == erased, "the receipt may be asked for again"
        unknown = "ses_" + "0" * 20
        answers = [await bob.ask(build(command, session, f"c{i}")) for i, session in enumerate((gone, unknown))]
        bodies = {encode(answer).replace(gone, "S").replace(unknown, "S") for answer in answers}
        assert answers[0].error.code == "not_found"
        assert len({body.replace('"c0"', '"c"').replace('"c1"', '"c"') for body in bodies}) == 1

"""A client and a daemon of different versions: what both know works, and nothing else is an error."""

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest

from chatd import protocol as p
from chatd.client import Client
from chatd.errors import InvalidRequest
from chatd.testing.other_versions import newer, older
from chatd.testing.protocol_values import make_info
from chatd.testing.scripted_daemon import Script, ScriptedDaemon

Rewrite = Callable[[str], list[str]]
VERSIONS = pytest.mark.parametrize("rewrite", [older, newer], ids=["older", "newer"])


@VERSIONS
async def test_a_whole_conversation_with_a_daemon_of_another_version(rewrite: Rewrite) -> None:
    async with ScriptedDaemon([Script(deltas=["Hello ", "there."])]) as daemon:
        daemon.rewrite = rewrite
        async with Client.connect(daemon.url) as client:
            assert client.hello.model == daemon.model
            session = await client.create_session(title="Rivers", params=p.Params(temperature=0.5))
            turn = session.say("hi")
            deltas = [event.delta async for event in turn if isinstance(event, p.OutputTextDelta)]
            assert deltas == ["Hello ", "there."]
            assert turn.item is not None
            assert turn.item.content == turn.text == "Hello there."
            listed = await client.list_sessions()
            assert [(info.id, info.title) for info in listed] == [(session.id, "Rivers")]
            info, items = await client.get_session(session.id)
            assert info.params == p.Params(temperature=0.5)
            assert [(item.role, item.content) for item in items] == [("user", "hi"), ("assistant", "Hello there.")]
            assert (await client.update_session(session.id, title="Lakes")).title == "Lakes"
            async for state in client.pool(detail="map"):
                assert state.totals.blocks == daemon.totals.blocks
                break


@VERSIONS
async def test_a_lost_connection_to_one_is_repaired_without_a_gap(rewrite: Rewrite) -> None:
    words = [f"w{n} " for n in range(9)]
    async with ScriptedDaemon([Script(deltas=words, manual=True)]) as daemon:
        daemon.rewrite = rewrite
        async with Client.connect(daemon.url, backoff=lambda _: 0.001) as client:
            session = await client.create_session()
            turn = session.say("count")

            async def read() -> None:
                async for _ in turn:
                    pass

            reading = asyncio.create_task(read())
            for n in range(10):
                daemon.release(1)
                while len(turn.text.split()) < min(n + 1, 9):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                if n % 3 == 1:
                    daemon.abort()
                if n == 5:
                    daemon.forget()
            await reading
            assert turn.text == "".join(words)


def info(**changes: object) -> dict[str, object]:
    return {**msgspec.to_builtins(make_info()), **changes}


def got(**changes: object) -> str:
    items = [{"id": "a", "role": "tool", "content": "x", "status": "reviewed"}]
    return json.dumps({"type": "session.get", "session": info(**changes), "items": items})


def test_an_unknown_value_is_the_nearest_known_one() -> None:
    event = p.decode_event(got(context_policy="summarize"))
    assert isinstance(event, p.SessionGot)
    assert event.session.context_policy == "refuse"
    assert (event.items[0].role, event.items[0].status, event.items[0].content) == ("system", "completed", "x")


def test_parameters_that_are_not_known_are_left_out() -> None:
    event = p.decode_event(got(params={"temperature": 0.5, "top_a": 1, "mirostat": {"tau": 2}}))
    assert isinstance(event, p.SessionGot)
    assert event.session.params == p.Params(temperature=0.5)


def test_what_only_describes_may_be_missing_and_what_identifies_may_not() -> None:
    frame = json.loads(got())
    for name in ("tier", "context_max", "num_items", "busy", "updated_at"):
        del frame["session"][name]
    event = p.decode_event(json.dumps(frame))
    assert isinstance(event, p.SessionGot)
    assert (event.session.tier, event.session.context_max, event.session.busy) == ("", 0, False)
    del frame["session"]["id"]
    with pytest.raises(InvalidRequest, match="missing required field `id`"):
        p.decode_event(json.dumps(frame))


def test_a_long_history_that_differs_everywhere_is_read() -> None:
    items = [{"id": str(n), "role": "tool", "content": "x", "status": "reviewed"} for n in range(5000)]
    items[7]["role"] = "user"
    rows = [{"id": str(n), "title": "t", "model": "m", "created_at": 0, "updated_at": 0} for n in range(200)]
    event = p.decode_event(json.dumps({"type": "session.get", "session": info(), "items": items}))
    assert isinstance(event, p.SessionGot)
    assert {item.role for item in event.items} == {"system", "user"}
    listed = p.decode_event(json.dumps({"type": "session.list", "sessions": rows}))
    assert isinstance(listed, p.SessionListed)
    assert [row.id for row in listed.sessions] == [str(n) for n in range(200)]


@pytest.mark.parametrize(
    "frame",
    [
        got(title=5),
        got(params=[]),
        got(params={f"p{n}": n for n in range(2000)}),
        got()[:-1],
        '{"type":"session.get","session":[],"items":[{"id":"a","role":"x"}]',
        '{"type":"response.completed","session":"s","seq":1,"ts":0,"response":"r","item":{},"reason":"x"}',
    ],
)
def test_what_cannot_be_understood_is_refused_as_before(frame: str) -> None:
    with pytest.raises(InvalidRequest):
        p.decode_event(frame)

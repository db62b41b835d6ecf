"""What is wrong with one conversation keeps a daemon from nothing: it starts, lists and serves the others."""

from array import array

import msgspec
import pytest

from chatd.errors import DamagedRecord, StorageError
from chatd.journal.records import ID_TYPE, SaveMessage, SaveSession
from chatd.protocol import SessionList, UserMessage
from chatd.testing.restarts import ANN, RestartingDaemon
from chatd.testing.sessions import VOCAB_SIZE


async def with_two_answers_in_progress() -> tuple[RestartingDaemon, str, str]:
    daemon = await RestartingDaemon().start()
    bad, _ = await daemon.open()
    good, _ = await daemon.open()
    await daemon.say(bad, "one")
    await daemon.say(good, "two")
    daemon.engine.step()
    await daemon.settle()
    return daemon, bad.id, good.id


async def contents(daemon: RestartingDaemon, session_id: str) -> list[tuple[str, str]]:
    session = await daemon.manager.resolve(ANN, session_id)
    return [(item.content, item.status) for item in daemon.manager.items(session)]


async def change_answer(daemon: RestartingDaemon, session_id: str, **fields: object) -> None:
    """Put other values into the answer in progress, as an import or another version may have them."""
    answer = (await daemon.journal.messages(session_id))[-1]
    await daemon.journal.commit([SaveMessage(session_id, msgspec.structs.replace(answer, **fields))])


async def test_a_damaged_conversation_with_an_answer_in_progress_does_not_keep_a_daemon_from_starting() -> None:
    daemon, bad, good = await with_two_answers_in_progress()
    read = daemon.journal.messages

    async def messages(session: str):
        if session == bad:
            raise DamagedRecord("a message is damaged")
        return await read(session)

    daemon.journal.messages = messages
    await daemon.start()
    await daemon.run()
    assert await contents(daemon, good) == [("two", "completed"), ("hello", "completed")]
    with pytest.raises(DamagedRecord):
        await daemon.manager.resolve(ANN, bad)
    assert {row.id for row in (await daemon.manager.list(ANN, SessionList())).sessions} == {bad, good}


async def test_an_answer_in_progress_of_a_session_that_was_left_out_does_not_keep_a_daemon_from_starting() -> None:
    daemon, bad, good = await with_two_answers_in_progress()
    read = daemon.journal.sessions

    async def sessions():
        return [record for record in await read() if record.id != bad]

    daemon.journal.sessions = sessions
    await daemon.start()
    await daemon.run()
    assert await contents(daemon, good) == [("two", "completed"), ("hello", "completed")]


@pytest.mark.parametrize("field", ["ids", "prompt_ids"])
async def test_an_answer_in_progress_whose_ids_no_token_has_is_taken_out(field: str) -> None:
    daemon, bad, good = await with_two_answers_in_progress()
    await change_answer(daemon, bad, **{field: array(ID_TYPE, [1, VOCAB_SIZE])})
    await daemon.start()
    await daemon.run()
    assert await contents(daemon, bad) == [("one", "completed")]
    assert await contents(daemon, good) == [("two", "completed"), ("hello", "completed")]


async def test_an_answer_that_cannot_be_taken_up_is_taken_out_once_and_its_session_goes_on() -> None:
    daemon, bad, good = await with_two_answers_in_progress()
    await change_answer(daemon, bad, request_class="of another version")
    await daemon.start()
    await daemon.run()
    assert len(daemon.restored.turns) == 1
    assert await contents(daemon, good) == [("two", "completed"), ("hello", "completed")]
    assert await contents(daemon, bad) == [("one", "completed")]
    assert [m for m in await daemon.journal.messages(bad) if m.status == "in_progress"] == []
    session = await daemon.manager.resolve(ANN, bad)
    await daemon.manager.user_message(session, UserMessage(session=bad, content="again"))
    await daemon.run()
    assert (await contents(daemon, bad))[-1] == ("hello", "completed")


async def test_a_full_disk_keeps_no_daemon_from_starting_though_an_answer_cannot_go_on() -> None:
    daemon, bad, good = await with_two_answers_in_progress()
    await change_answer(daemon, bad, request_class="of another version")
    daemon.journal.error = StorageError("no room")
    await daemon.start()
    assert await contents(daemon, bad) == [("one", "completed")]
    daemon.journal.error = None
    await daemon.run()
    await daemon.manager.settle()
    assert [m for m in await daemon.journal.messages(bad) if m.status == "in_progress"] == []
    assert (await contents(daemon, good))[-1] == ("hello", "completed")


async def test_an_ended_conversation_whose_ids_no_token_has_goes_on_from_its_text() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "one")
    await daemon.run()
    await change_answer(daemon, session.id, ids=array(ID_TYPE, [2**32 - 1]))
    await daemon.start()
    again = await daemon.get(session)
    await daemon.say(again, "two")
    assert max(daemon.engine.submits[-1].new_ids) < VOCAB_SIZE
    await daemon.run()
    assert [text for text, _ in await contents(daemon, session.id)] == ["one", "hello", "two", "hello"]


async def test_the_end_of_a_turn_that_fails_in_any_way_frees_its_session() -> None:
    daemon = await RestartingDaemon().start()
    session, _ = await daemon.open()
    await daemon.say(session, "one")
    daemon.journal.before_commit = lambda changes: 1 / 0 if any(isinstance(c, SaveSession) for c in changes) else None
    await daemon.run()
    assert session.turn is None
    daemon.journal.before_commit = None
    await daemon.say(session, "two")
    await daemon.run()
    assert [text for text, _ in await contents(daemon, session.id)] == ["two", "hello"]

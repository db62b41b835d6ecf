"""Which answers a crash of the daemon is counted against."""

import pytest

from chatd.errors import StorageError
from chatd.protocol import Params
from chatd.sessions.crashes import counted
from chatd.testing.journal_records import make_answer
from chatd.testing.restarts import RestartingDaemon
from chatd.testing.sessions import encode_text


def answer(num_tokens, **fields):
    record = make_answer("a", None, None, range(num_tokens))
    return type(record)(**{name: getattr(record, name) for name in record.__struct_fields__} | fields)


def test_a_kill_is_counted_against_nobody():
    for fields in ({}, {"num_crashes": 1, "crashed_at": 3, "is_tried": True}):
        before = answer(3, **fields)
        assert counted(before, has_crashed=False).num_crashes == before.num_crashes
        assert not counted(before, has_crashed=False).is_tried


def test_a_crash_is_counted_against_all_that_were_in_progress_and_then_against_the_one_that_was_tried():
    first = counted(answer(3), has_crashed=True)
    assert (first.num_crashes, first.crashed_at, first.is_tried) == (1, 3, False)
    waited = counted(answer(3, num_crashes=1, crashed_at=3), has_crashed=True)
    assert waited.num_crashes == 1
    tried = counted(answer(4, num_crashes=1, crashed_at=3, is_tried=True), has_crashed=True)
    assert tried.num_crashes == 2


@pytest.mark.parametrize("is_tried", [False, True])
def test_an_answer_that_has_got_on_is_counted_anew(is_tried):
    fields = {"num_crashes": 1, "crashed_at": 3, "is_tried": is_tried}
    assert counted(answer(5, **fields), has_crashed=False).num_crashes == 0
    assert counted(answer(5, **fields), has_crashed=True).num_crashes == 1


async def test_suspects_go_on_one_after_another_and_the_journal_knows_which():
    daemon = await RestartingDaemon(lambda _log: encode_text("abcdefgh" * 8)).start()
    sessions = [(await daemon.open(params=Params(max_tokens=20)))[0] for _ in range(3)]
    for session in sessions:
        await daemon.say(session, "say")
    daemon.engine.step()
    await daemon.settle()
    daemon.journal.crash = "a fault"
    await daemon.start()
    assert daemon.journal.crash == ""
    assert len(daemon.restored.turns) == 3
    for number in range(1, 4):
        await daemon.until(lambda number=number: len(daemon.engine.submits) == number)
        assert len(daemon.engine.running) <= 3
        tried = [m.id for m in await in_progress(daemon, sessions) if m.is_tried]
        assert len(tried) == number, "those that have got on stay marked, and are counted anew"
        daemon.engine.step(2)
    await daemon.until(lambda: not daemon.manager.num_in_flight, step=True)
    for session in sessions:
        items = daemon.manager.items(await daemon.get(session))
        assert items[-1].content == ("abcdefgh" * 8)[:20]


async def in_progress(daemon, sessions):
    messages = [m for session in sessions for m in await daemon.journal.messages(session.id)]
    return [message for message in messages if message.status == "in_progress"]


async def test_of_answers_that_were_tried_the_second_time_it_is_taken_out_and_the_others_go_on():
    daemon = await RestartingDaemon("hello").start()
    sessions = [(await daemon.open())[0] for _ in range(2)]
    for session in sessions:
        await daemon.say(session, "say")
    for _ in range(2):
        daemon.journal.crash = "a fault"
        await daemon.start()
        await daemon.until(lambda: len(daemon.engine.submits) == 1)
    await daemon.until(lambda: not daemon.manager.num_in_flight, step=True)
    contents = [[i.content for i in daemon.manager.items(await daemon.get(session))] for session in sessions]
    assert sorted(contents) == [["say"], ["say", "hello"]]


async def test_a_crash_that_the_journal_cannot_count_is_found_again_at_the_next_start():
    daemon = await RestartingDaemon("hello").start()
    session, _ = await daemon.open()
    await daemon.say(session, "say")
    daemon.journal.crash = "a fault"
    daemon.journal.error = StorageError("the disk is full")
    await daemon.start()
    assert daemon.journal.crash == "a fault"
    daemon.journal.error = None
    await daemon.start()
    assert daemon.journal.crash == ""
    assert [m.num_crashes for m in await in_progress(daemon, [session])] == [1]

"""A command that comes twice has one effect and one answer."""

import asyncio

import pytest

from chatd.errors import Conflict
from chatd.protocol import Pong, SessionCreate, SessionDetached
from chatd.server.idempotency import AnswerCache

ONE = SessionCreate(id="1", title="a")


async def test_the_first_answer_is_given_again_to_the_same_user_only() -> None:
    answers = AnswerCache()
    assert await answers.earlier("acme", "ann", ONE) is None
    answers.finish("acme", "ann", ONE, Pong(t=1))
    assert await answers.earlier("acme", "ann", ONE) == Pong(t=1)
    assert await answers.earlier("acme", "bob", ONE) is None
    assert await answers.earlier("beta", "ann", ONE) is None


async def test_another_body_under_the_same_id_is_refused() -> None:
    answers = AnswerCache()
    await answers.earlier("acme", "ann", ONE)
    with pytest.raises(Conflict) as refused:
        await answers.earlier("acme", "ann", SessionCreate(id="1", title="b"))
    assert refused.value.error_code == "id_reused"


async def test_a_repeat_waits_for_the_first_and_one_that_was_refused_begins_anew() -> None:
    answers = AnswerCache()
    await answers.earlier("acme", "ann", ONE)
    waiting = [asyncio.create_task(answers.earlier("acme", "ann", ONE)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    answers.forget("acme", "ann", ONE)
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(pending), done.pop().result()) == (1, 1, None)
    answers.finish("acme", "ann", ONE, Pong(t=2))
    assert await pending.pop() == Pong(t=2)


async def test_old_answers_go_by_number_and_by_size() -> None:
    answers = AnswerCache(max_answers=2)
    for number in range(3):
        command = SessionCreate(id=str(number))
        await answers.earlier("t", "u", command)
        answers.finish("t", "u", command, Pong(t=number))
    assert await answers.earlier("t", "u", SessionCreate(id="2")) == Pong(t=2)
    assert await answers.earlier("t", "u", SessionCreate(id="0")) is None
    large = AnswerCache(max_bytes=1000)
    for number in range(3):
        command = SessionCreate(id=str(number))
        await large.earlier("t", "u", command)
        large.finish("t", "u", command, SessionDetached(session="s" * 400))
    assert await large.earlier("t", "u", SessionCreate(id="2")) is not None
    assert await large.earlier("t", "u", SessionCreate(id="0")) is None
    assert large._users["t", "u"].num_bytes <= 1000


async def test_no_users_answers_drive_out_anothers() -> None:
    answers = AnswerCache(max_answers=2, max_bytes=1000)
    await answers.earlier("acme", "ann", ONE)
    answers.finish("acme", "ann", ONE, Pong(t=1))
    for tenant, user in (("acme", "bob"), ("beta", "ann")):
        for number in range(50):
            command = SessionCreate(id=str(number))
            await answers.earlier(tenant, user, command)
            answers.finish(tenant, user, command, SessionDetached(session="s" * 400))
    assert await answers.earlier("acme", "ann", ONE) == Pong(t=1)


async def test_a_command_that_is_being_carried_out_is_not_forgotten_for_others() -> None:
    answers = AnswerCache(max_answers=2, max_bytes=10)
    assert await answers.earlier("acme", "ann", ONE) is None
    for number in range(9):
        other = SessionCreate(id=f"other {number}")
        await answers.earlier("acme", "ann", other)
        answers.finish("acme", "ann", other, SessionDetached(session="s" * 100))
    again = asyncio.create_task(answers.earlier("acme", "ann", ONE))
    await asyncio.sleep(0)
    assert not again.done()
    answers.finish("acme", "ann", ONE, Pong(t=1))
    assert await again == Pong(t=1)

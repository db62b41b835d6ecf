"""`chatd ask` against a daemon of ours: what its refusals leave behind."""

import io

import pytest
from rich.console import Console

from chatd.asking import ANSWERED, Question, _erase_if_empty, ask_daemon
from chatd.client import Client
from chatd.errors import ContextLengthExceeded, RateLimited
from chatd.protocol import SessionList, UserMessage


async def test_a_question_that_is_refused_leaves_no_empty_conversation_behind(start) -> None:
    async def ask(text: str, **options: str) -> int:
        question = Question(text, **options)
        return await ask_daemon(running.url, running.key, question, io.StringIO(), Console(file=io.StringIO()))

    async with start(quotas={"requests_per_minute": 4}) as running:
        assert await ask("first") == ANSWERED
        with pytest.raises(ContextLengthExceeded):
            await ask("x" * 5000, system="be brief")
        # A refused question gives its request back, and the conversation that was begun for it counted as one.
        with pytest.raises(RateLimited):
            await ask("second")
        with pytest.raises(RateLimited):
            await ask("third", session="last")
        async with running.chat() as talk:
            listed = await talk.ask(SessionList())
    assert [(info.title, info.num_items) for info in listed.sessions] == [("first", 2)]


async def test_a_conversation_in_which_something_was_said_is_kept(start) -> None:
    async with start() as running, Client(running.url, key=running.key) as client, running.chat() as talk:
        sessions = [await client.create_session(system="be brief") for _ in range(2)]
        await talk.ask(UserMessage(id="m", session=sessions[0].id, content="hello", respond=False))
        for session in sessions:
            await _erase_if_empty(client, session)
        listed = await client.list_sessions()
    assert [(info.id, info.num_items) for info in listed] == [(sessions[0].id, 1)]

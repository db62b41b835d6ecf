"""`chatd ask` against a daemon of ours: what its refusals leave behind."""

import io

import pytest
from rich.console import Console

from chatd.asking import ANSWERED, Question, ask_daemon
from chatd.errors import ContextLengthExceeded, RateLimited
from chatd.protocol import SessionList


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

"""Sessions with real templates and tokenizers: their ids are those of the template's own text."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chatd.engine.messages import Ready, RequestClass
from chatd.protocol import Message, Params, SessionCreate, UserMessage
from chatd.sessions.manager import CompletionRequest, ModelProfile, Owner, SessionLimits, SessionManager
from chatd.sessions.prompt_encoder import PromptEncoder, Thoughts
from chatd.sessions.template import ChatTemplate
from chatd.sessions.tokenizer import ChatTokenizer, load_tokenizer
from chatd.testing.sessions import ScriptedEngine

ANN = Owner("acme", "ann")
SAID = ("What is the capital of France?", "naïve café, 東京", "<|im_end|> is text", "ok")
ANSWERS = ("It is Paris.", "Zażółć gęślą jaźń", "and so is that", "fine")


class Served:
    """A manager over one model's tokenizer and template, and an engine that answers with given texts."""

    def __init__(
        self, folder: Path, template: ChatTemplate, answers: Sequence[str], *, thoughts: Thoughts = "auto"
    ) -> None:
        self.tokenizer: ChatTokenizer = load_tokenizer(folder)
        self.reference = self.tokenizer.reference()
        self.encoder = PromptEncoder(template, self.tokenizer, thoughts=thoughts)
        self.answers = iter(answers)
        self.engine = ScriptedEngine(self._reply)
        vocab_size = self.tokenizer.vocab_size
        self.engine.ready = Ready(256, 16, 4096, vocab_size, 0, "fp32", [])
        profile = ModelProfile(
            id="m",
            context=4096,
            vocab_size=vocab_size,
            stop_token_ids=self.encoder.stop_token_ids,
        )
        self.manager = SessionManager(
            self.engine, self.encoder, profile, SessionLimits(), vocabulary=self.tokenizer, boot="b"
        )
        self.engine.on_messages = self.manager.on_engine_messages

    def _reply(self, _log: list[int]) -> list[int]:
        text = next(self.answers)
        control = {token.content: token.id for token in self.tokenizer.added_tokens}
        ids: list[int] = []
        for piece in text.split("|"):
            if piece in control:
                ids.append(control[piece])
            else:
                ids += self.reference.encode(piece, add_special_tokens=False).ids
        end = self.encoder.turn_end_id
        return [*ids, *(() if end is None else (end,))]


@pytest.fixture
def serve(model_folder: Callable[[str], Path], chat_template: Callable[[str], ChatTemplate]) -> Callable[..., Served]:
    """Serves a model that is like the family a template is for: `serve(name, answers, thoughts=…)`."""
    return lambda name, answers, **options: Served(model_folder(name), chat_template(name), answers, **options)


def plain(said: tuple[str, ...], answers: tuple[str, ...]) -> list[Message]:
    return [
        Message(role=role, content=text)
        for pair in zip(said, answers, strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


@pytest.mark.parametrize("name", ["chatml_default", "llama3", "mistral_nemo"])
async def test_a_sessions_log_is_what_the_template_makes_of_its_text(name: str, serve: Callable[..., Served]) -> None:
    served = serve(name, ANSWERS)
    manager = served.manager
    session = await manager.create(ANN, SessionCreate(system="Be brief."))
    logs = []
    for text in SAID:
        await manager.user_message(session, UserMessage(session=session.id, content=text))
        served.engine.run()
        logs.append(list(session.conversation.log()))
    assert [node.content for node in session.conversation.path()[1::2]] == list(ANSWERS)
    for submit, log in zip(served.engine.submits[1:], logs, strict=False):
        assert submit.base_len == len(log)
    # The contents that hold no control token's text are encoded as the model's own tokenizer does.
    messages = plain(SAID[:2], ANSWERS[:2])
    whole = served.encoder.begin("Be brief.", [*messages, Message(role="user", content="x")], date=session.date)
    assert whole[: len(logs[1])] == logs[1]
    assert set(logs[-1]) <= set(range(served.tokenizer.vocab_size))


@pytest.mark.parametrize("name", ["chatml_default", "llama3", "mistral_nemo", "gemma3", "phi3", "mistral_v3"])
async def test_stateless_history_hits_the_lease_whatever_the_template(name: str, serve: Callable[..., Served]) -> None:
    served = serve(name, ANSWERS)
    history: list[Message] = []
    for text in SAID:
        history.append(Message(role="user", content=text))
        completion = await served.manager.complete(
            ANN, CompletionRequest(messages=history, params=Params(max_tokens=32))
        )
        served.engine.run()
        history.append(Message(role="assistant", content=await completion.text()))
    first, *later = served.engine.submits
    assert first.base_len == 0
    assert all(submit.lease == first.lease and submit.base_len > len(first.new_ids) for submit in later)


@pytest.mark.parametrize(
    ("name", "thoughts", "dropped"),
    [
        ("chatml_thoughts", "auto", True),
        ("chatml_thoughts", "drop", True),
        ("chatml_thoughts", "keep", False),
        ("chatml_default", "auto", False),
        ("chatml_default", "drop", True),
        ("chatml_default", "keep", False),
    ],
)
async def test_thoughts_stay_in_the_text_and_leave_the_ids_where_they_are_dropped(
    name: str, thoughts: Thoughts, dropped: bool, serve: Callable[..., Served]
) -> None:
    served = serve(name, ["<think>|\nhm\n|</think>|\n\nParis.", "ok"], thoughts=thoughts)
    manager = served.manager
    session = await manager.create(ANN, SessionCreate())
    await manager.user_message(session, UserMessage(session=session.id, content="capital?"))
    served.engine.run()
    answer = session.conversation.head
    assert "Paris." in answer.content
    assert answer.usage.output_tokens > len(served.reference.encode("Paris.").ids)
    thought_end = served.tokenizer.token_id("</think>")
    assert (thought_end in answer.ids) == (not dropped)
    await manager.user_message(session, UserMessage(session=session.id, content="sure?"))
    served.engine.run()
    ahead = [submit for submit in served.engine.submits if submit.compute_only]
    _, second = [submit for submit in served.engine.submits if not submit.compute_only]
    held = [*served.engine.leases[second.lease]]
    assert held == list(session.conversation.log())
    assert second.base_len == answer.num_tokens
    assert len(ahead) == dropped
    if dropped:
        # What the next prompt has of the answer was computed when the turn had ended.
        assert ahead[0].base_len < len(served.engine.submits[0].new_ids) + 1
        assert ahead[0].request_class is RequestClass.PREFILL_AHEAD
        plain_log = served.encoder.begin(
            None,
            [
                Message(role="user", content="capital?"),
                Message(role="assistant", content="Paris."),
                Message(role="user", content="sure?"),
            ],
            date=session.date,
        )
        assert held[: len(plain_log)] == plain_log

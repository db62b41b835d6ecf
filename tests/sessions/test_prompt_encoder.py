"""What a conversation's ids are, against transformers' `apply_chat_template`, and what content can never do to them."""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chatd.errors import InvalidRequest, ModelError
from chatd.protocol import Message, Role
from chatd.sessions.prompt_encoder import PromptEncoder, SettledAnswer
from chatd.sessions.template import ChatTemplate
from chatd.sessions.tokenizer import ChatTokenizer, load_tokenizer

NAMES = sorted(path.stem for path in (Path(__file__).parent / "templates").glob("*.jinja"))
APPEND_ONLY = ["chatml_default", "llama3", "llama3_dated", "gemma2", "gemma3", "phi3"]
DAY = date(2024, 7, 26)
CONTROL_TEXTS = [
    "<|im_end|>", "<|im_start|>system\n", "<think>", "</think>", "<|eot_id|>", "<|start_header_id|>", "</s>", "<s>",
    "[INST]", "[/INST]", "<end_of_turn>", "<start_of_turn>", "<eos>", "<|end|>", "<|assistant|>", "<unk>", "<0x0A>",
    "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|im_", "end|>", "\n\n", "▁▁", "\ue0000\ue001", "\ue0100\ue011", "\0",
]  # fmt: skip

# U+2581 is a blank to SentencePiece's tokenizers and, doubled, an added token to Gemma's.
WORDS = st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=25)
BLANKS = st.text(" \n\t\r\x85\u3000\x1c", max_size=3)
PLAIN = st.builds(lambda left, text, right: left + text + right, BLANKS, WORDS, BLANKS)
CONTENT = st.lists(st.one_of(st.sampled_from(CONTROL_TEXTS), PLAIN), max_size=5).map("".join)


class Model:
    def __init__(self, folder: Path, template: ChatTemplate | None = None) -> None:
        self.folder = folder
        self.tokenizer: ChatTokenizer = load_tokenizer(folder)
        self.encoder = PromptEncoder(template or ChatTemplate.load(folder, self.tokenizer), self.tokenizer)
        self.kind = self.encoder.template.kind
        self.reference = PreTrainedTokenizerFast.from_pretrained(folder)
        self.added = re.compile("|".join(re.escape(token.content) for token in self.tokenizer.added_tokens))

    def id(self, token: str) -> int:
        token_id = self.tokenizer.token_id(token)
        assert token_id is not None
        return token_id

    def control_ids(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self.encoder.control_ids]


def say(role: Role, content: str) -> Message:
    return Message(role=role, content=content)


def turns(*contents: str) -> list[Message]:
    return [say("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]


def closing_ids(encoder: PromptEncoder) -> list[int]:
    """Return what an extension puts behind an answer that did not end, before what follows every answer."""
    open_end, ended = (encoder.extend(turns("x"), answer_ended=is_ended, date=DAY) for is_ended in (False, True))
    assert open_end[len(open_end) - len(ended) :] == ended
    return open_end[: len(open_end) - len(ended)]


@pytest.fixture(scope="module")
def models(model_folder: Callable[[str], Path], chat_template: Callable[[str], ChatTemplate]) -> Callable[[str], Model]:
    loaded: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in loaded:
            loaded[name] = Model(model_folder(name), chat_template(name))
        return loaded[name]

    return get


# Plain conversations are what transformers makes of them.


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(contents=st.lists(PLAIN, min_size=4, max_size=6), with_system=st.booleans())
def test_plain_conversations_give_the_ids_of_apply_chat_template(
    models: Callable[[str], Model], name: str, contents: list[str], with_system: bool
) -> None:
    model = models(name)
    contents = [model.added.sub(" ", content) for content in contents]
    if name == "llama2":
        # It strips an empty message together with its own text before it.
        contents = [content + "x" for content in contents]
    system = contents[0] if with_system and model.kind.system != "unsupported" else None
    said = turns(*contents[1 : 2 if model.kind.system == "floating" and with_system else 4])
    messages = [say("system", system), *said] if system is not None else said
    expected = model.reference.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=True,
        return_dict=False,
        date_string="26 Jul 2024",
    )
    assert model.encoder.begin(system, said, date=DAY) == expected


@pytest.mark.model
def test_the_real_small_model_gives_the_ids_of_apply_chat_template() -> None:
    from chatd.models.registry import resolve

    model = Model(resolve("smollm2-135m").path)
    assert str(model.kind) == "append-only, system prompt first, default system prompt"
    assert model.encoder.turn_end_id == 2
    assert 2 in model.encoder.stop_token_ids
    said = turns("What is the capital of France?", "Paris.\n", "  naïve café, 東京 👩‍👩‍👧‍👦\n\n\nx = 10  ")
    for system in (None, "", "You are a pirate."):
        head = [] if system is None else [say("system", system)]
        expected = model.reference.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in (*head, *said)],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert model.encoder.begin(system, said, date=DAY) == expected


# A conversation grows by appending.


@pytest.mark.parametrize("name", APPEND_ONLY)
@settings(deadline=None, max_examples=60)
@given(system=st.none() | CONTENT, first=CONTENT, answer=CONTENT, second=CONTENT)
def test_prompt_answer_and_extension_are_the_ids_of_the_whole_conversation(
    models: Callable[[str], Model], name: str, system: str | None, first: str, answer: str, second: str
) -> None:
    model = models(name)
    assert model.kind.append_only
    # An answer is what the model says after the prompt: blanks that start it could not have been joined to the prompt.
    answer = answer.replace("▁", "").strip()
    whole = model.encoder.begin(system, turns(first, answer, second), date=DAY)
    prompt = model.encoder.begin(system, turns(first), date=DAY)
    extension = model.encoder.extend(turns(second), answer_ended=False, date=DAY)
    answer_ids = whole[len(prompt) : -len(extension)]
    assert prompt + answer_ids + extension == whole
    assert model.tokenizer.decode(answer_ids) == answer


@pytest.mark.parametrize("name", NAMES)
@given(second=CONTENT)
@settings(deadline=None, max_examples=15)
def test_an_extension_after_a_closed_answer_is_the_rest_of_the_extension(
    models: Callable[[str], Model], name: str, second: str
) -> None:
    encoder = models(name).encoder
    closing = closing_ids(encoder)
    assert closing[-1] == encoder.turn_end_id or (closing == [] and encoder.turn_end_id is None)
    ended = encoder.extend(turns(second), answer_ended=True, date=DAY)
    assert closing + ended == encoder.extend(turns(second), answer_ended=False, date=DAY)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("chatml_default", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("mistral_v3", "</s>"),
        ("gemma2", "<end_of_turn>"),
        ("phi3", "<|end|>"),
        ("plain_roles", "</s>"),
        ("deepseek_r1", None),
    ],
)
def test_the_turn_end_is_found_and_is_a_stop_id(models: Callable[[str], Model], name: str, token: str | None) -> None:
    model = models(name)
    # DeepSeek-R1 has one too; it is the tokenizer's eos there.
    expected = model.id(token or "<｜end▁of▁sentence｜>")
    assert model.encoder.turn_end_id == expected
    assert expected in model.encoder.stop_token_ids


def test_a_template_whose_turns_end_in_plain_text_has_no_turn_end(model_folder: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(model_folder("chatml_default"))
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    encoder = PromptEncoder(ChatTemplate(source, tokenizer), tokenizer)
    assert encoder.turn_end_id is None
    extension = encoder.extend(turns("more"), answer_ended=True, date=DAY)
    assert extension == encoder.extend(turns("more"), answer_ended=False, date=DAY)
    assert tokenizer.decode(extension) == "\nuser: more\nassistant: "


# Content is never control.


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(system=st.none() | CONTENT, contents=st.lists(CONTENT, min_size=5, max_size=5))
def test_content_never_adds_or_removes_a_control_id(
    models: Callable[[str], Model], name: str, system: str | None, contents: list[str]
) -> None:
    model = models(name)
    encoder = model.encoder
    if system == "" and encoder.template.shape.ignores_empty_system:
        system = None
    harmless = encoder.begin(None if system is None else "s", turns(*"uauau"), date=DAY)
    assert model.control_ids(encoder.begin(system, turns(*contents), date=DAY)) == model.control_ids(harmless)
    extension = encoder.extend(turns("u"), answer_ended=False, date=DAY)
    hostile = encoder.extend(turns(contents[0]), answer_ended=False, date=DAY)
    assert model.control_ids(hostile) == model.control_ids(extension)


@pytest.mark.parametrize("name", NAMES)
def test_no_added_token_comes_of_its_own_text_whole_or_split(models: Callable[[str], Model], name: str) -> None:
    model = models(name)
    encoder = model.encoder
    plain = model.control_ids(encoder.begin("s", turns(*"uau"), date=DAY))
    for token in model.tokenizer.added_tokens:
        text = token.content
        for cut in range(len(text) + 1):
            start, end = text[:cut], text[cut:]
            for contents in (
                (f"s{start}", f"{end}u", "a", "u"),
                ("s", f"u{start}", f"{end}a", "u"),
                ("s", text, text, text),
            ):
                ids = encoder.begin(contents[0], turns(*contents[1:]), date=DAY)
                assert model.control_ids(ids) == plain


@pytest.mark.parametrize("name", ["llama2", "mistral_v3", "phi3"])
def test_emptying_the_added_tokens_alone_would_let_control_ids_through(
    models: Callable[[str], Model], name: str
) -> None:
    model = models(name)
    definition = json.loads((model.folder / "tokenizer.json").read_text())
    emptied = {**definition, "added_tokens": [], "post_processor": None}
    naive = Tokenizer.from_str(json.dumps(emptied))
    assert model.id("</s>") in naive.encode("x</s>y").ids


def test_runs_of_blanks_that_a_model_lists_among_its_added_tokens_stay_text(models: Callable[[str], Model]) -> None:
    model = models("gemma3")
    blank_line = model.id("\n\n")
    assert blank_line not in model.encoder.control_ids
    ids = model.encoder.begin("Be brief.", turns("one\n\ntwo"), date=DAY)
    assert ids.count(blank_line) == 2


def test_a_beginning_of_text_is_there_once_though_the_tokenizer_would_add_one_too(
    models: Callable[[str], Model],
) -> None:
    for name, bos in (("llama3", "<|begin_of_text|>"), ("mistral_v3", "<s>"), ("llama2", "<s>")):
        model = models(name)
        assert model.tokenizer.reference().encode("x").ids[0] == model.id(bos)
        ids = model.encoder.begin(None, turns("Hi"), date=DAY)
        assert (ids[0], ids.count(model.id(bos))) == (model.id(bos), 1)
        if name != "llama2":  # whose template begins every turn with one
            assert model.id(bos) not in model.encoder.extend(turns("Hi"), answer_ended=False, date=DAY)


# What a template does with contents is done to them first; what it cannot place is placed.


def test_what_a_template_strips_is_stripped_and_nothing_else(models: Callable[[str], Model]) -> None:
    llama, qwen = models("llama3").encoder, models("chatml_default").encoder
    padded, bare = turns("\x1c Hi \u3000\n"), turns("Hi")
    assert llama.begin(None, padded, date=DAY) == llama.begin(None, bare, date=DAY)
    assert qwen.begin(None, padded, date=DAY) != qwen.begin(None, bare, date=DAY)


def test_a_floating_system_prompt_stays_first(models: Callable[[str], Model]) -> None:
    model = models("mistral_nemo")
    ids = model.encoder.begin("Be brief.", turns("one", "two", "three"), date=DAY)
    assert model.tokenizer.decode(ids) == "Be brief.\n\nonetwothree"


def test_a_system_prompt_that_a_template_refuses_goes_before_the_first_message(
    models: Callable[[str], Model],
) -> None:
    encoder = models("gemma2").encoder
    expected = encoder.begin(None, turns("Be brief.\n\nHi"), date=DAY)
    assert encoder.begin("Be brief.", turns("Hi"), date=DAY) == expected
    assert encoder.begin(None, [say("system", "Be brief."), *turns("Hi")], date=DAY) == expected


def test_an_empty_system_prompt_is_none_where_the_template_says_so(models: Callable[[str], Model]) -> None:
    phi, smol = models("phi3").encoder, models("chatml_default").encoder
    assert phi.begin("", turns("Hi"), date=DAY) == phi.begin(None, turns("Hi"), date=DAY)
    assert smol.begin("", turns("Hi"), date=DAY) != smol.begin(None, turns("Hi"), date=DAY)


def test_system_messages_at_the_start_are_one_system_prompt(models: Callable[[str], Model]) -> None:
    encoder = models("llama3").encoder
    messages = [say("system", "two"), say("system", "three"), *turns("Hi")]
    assert encoder.begin("one", messages, date=DAY) == encoder.begin("one\n\ntwo\n\nthree", turns("Hi"), date=DAY)


def test_messages_in_a_row_are_turns_of_their_own_or_joined_where_turns_are_strict(
    models: Callable[[str], Model],
) -> None:
    for name, num_turns in (("chatml_default", 2), ("gemma2", 1)):
        model = models(name)
        start = model.id("<|im_start|>" if name == "chatml_default" else "<start_of_turn>")
        ids = model.encoder.extend([say("user", "one"), say("user", "two")], answer_ended=True, date=DAY)
        assert ids.count(start) == num_turns + 1
    joined = models("gemma2").encoder.extend(turns("one\n\ntwo"), answer_ended=True, date=DAY)
    assert joined == ids


def test_a_later_system_message_has_a_turn_or_goes_before_the_next_user_message(
    models: Callable[[str], Model],
) -> None:
    later = [say("system", "Be brief."), say("user", "Hi")]
    chatml, gemma = models("chatml_default"), models("gemma2")
    ids = chatml.encoder.extend(later, answer_ended=True, date=DAY)
    assert chatml.tokenizer.decode(ids) == "\nsystem\nBe brief.\nuser\nHi\nassistant\n"
    expected = gemma.encoder.extend(turns("Be brief.\n\nHi"), answer_ended=True, date=DAY)
    assert gemma.encoder.extend(later, answer_ended=True, date=DAY) == expected
    whole = chatml.encoder.begin(None, [*turns("a", "b"), *later], date=DAY)
    assert whole[-len(ids) :] == ids


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "no user message"),
        ([("system", "Be brief.")], "no user message"),
        ([("user", "a"), ("system", "b")], "last message is the system's"),
        ([("user", "a"), ("assistant", "b")], "last message is the assistant's"),
        ([("assistant", "a"), ("user", "b")], "first message is the assistant's"),
    ],
)
def test_an_order_that_a_strict_template_has_no_place_for_is_refused(
    models: Callable[[str], Model], messages: list[tuple[Role, str]], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        models("mistral_nemo").encoder.begin(None, [say(*message) for message in messages], date=DAY)


def test_the_date_is_that_of_the_sessions_creation(models: Callable[[str], Model]) -> None:
    model = models("llama3_dated")
    ids = model.encoder.begin(None, turns("Hi"), date=date(2031, 12, 1))
    assert "Today Date: 01 Dec 2031\n" in model.tokenizer.decode(ids)
    assert model.encoder.begin(None, turns("Hi"), date=datetime(2031, 12, 1, 23, 59)) == ids


# Thoughts.


def test_an_earlier_answer_is_rendered_without_its_thoughts_where_the_template_drops_them(
    models: Callable[[str], Model],
) -> None:
    thinking = turns("a", "<think>\nhmm\n</think>\n\nb", "c")
    for name in ("chatml_thoughts", "deepseek_r1"):
        model = models(name)
        expected = model.reference.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in thinking],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert model.encoder.begin(None, thinking, date=DAY) == expected
    kept = models("llama3")
    assert "hmm" in kept.tokenizer.decode(kept.encoder.begin(None, thinking, date=DAY))


def test_thoughts_may_be_kept_or_dropped_whatever_the_template_does(models: Callable[[str], Model]) -> None:
    thinking, spoken = turns("a", "<think>\nhmm\n</think>\n\nb", "c"), turns("a", "b", "c")
    for name in ("chatml_thoughts", "chatml_default"):
        model = models(name)
        keeping, dropping = (
            PromptEncoder(model.encoder.template, model.tokenizer, thoughts=thoughts) for thoughts in ("keep", "drop")
        )
        assert dropping.begin(None, thinking, date=DAY) == dropping.begin(None, spoken, date=DAY)
        assert "hmm" in model.tokenizer.decode(keeping.begin(None, thinking, date=DAY))
        finished = model.reference.encode("<think>\nhmm</think>x", add_special_tokens=False)
        assert keeping.settle(finished) is None
        assert dropping.settle(finished) == SettledAnswer(0, model.reference.encode("x", add_special_tokens=False))


def test_a_settled_answer_is_what_history_has(models: Callable[[str], Model]) -> None:
    for name, thought in (("chatml_thoughts", "<think>\nhmm\n"), ("deepseek_r1", "hmm\n")):
        model = models(name)
        encoder = model.encoder
        spoken = model.reference.encode(thought + "</think>\n\nIt is Paris.", add_special_tokens=False)
        prompt = encoder.begin(None, turns("a"), date=DAY)
        settled = encoder.settle([*spoken, *closing_ids(encoder)])
        assert settled is not None
        history = prompt[: len(prompt) - settled.num_prompt_ids] + settled.ids
        more = encoder.extend(turns("c"), answer_ended=True, date=DAY)
        text = "<think>\nhmm\n</think>\n\nIt is Paris."
        assert history + more == encoder.begin(None, turns("a", text, "c"), date=DAY)


def test_an_answer_without_a_finished_thought_settles_as_it_is(models: Callable[[str], Model]) -> None:
    thinking, plain = models("chatml_thoughts"), models("chatml_default")
    unfinished = thinking.reference.encode("<think>\nhmm", add_special_tokens=False)
    assert thinking.encoder.settle(unfinished) is None
    finished = thinking.reference.encode("<think>\nhmm</think>x", add_special_tokens=False)
    assert plain.encoder.settle(finished) is None
    settled = thinking.encoder.settle(finished)
    assert settled == SettledAnswer(0, thinking.reference.encode("x", add_special_tokens=False))


# Limits and refusals.


@pytest.mark.parametrize("content", ["x" * 101, "ü" * 51])
def test_too_many_bytes_are_refused_before_they_are_tokenized(models: Callable[[str], Model], content: str) -> None:
    model = models("chatml_default")
    encoder = PromptEncoder(model.encoder.template, model.tokenizer, max_bytes=100)
    assert encoder.begin(None, turns(content[:50]), date=DAY)
    with pytest.raises(InvalidRequest, match="more than 100 bytes") as caught:
        encoder.begin(None, turns(content), date=DAY)
    assert caught.value.error_code == "content_too_large"
    with pytest.raises(InvalidRequest, match="more than 100 bytes"):
        encoder.extend(turns(content), answer_ended=True, date=DAY)
    with pytest.raises(InvalidRequest, match="more than 100 bytes"):
        encoder.begin(content[:30], turns(content[:75]), date=DAY)


def test_a_lone_surrogate_is_refused(models: Callable[[str], Model]) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        models("chatml_default").encoder.begin(None, turns("\ud800"), date=DAY)


def test_many_threads_may_encode_at_once(models: Callable[[str], Model]) -> None:
    encoder = models("llama3").encoder
    said = [turns(f"message {i} " * 50) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda messages: encoder.begin(None, messages, date=DAY), said))
    assert ids == [encoder.begin(None, messages, date=DAY) for messages in said]


def changed(folder: Path, into: Path, change: Callable[[dict[str, Any]], None]) -> PromptEncoder:
    """Load a copy of a model whose tokenizer.json is changed."""
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    definition = json.loads((into / "tokenizer.json").read_text())
    change(definition)
    (into / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(into)
    return PromptEncoder(ChatTemplate.load(into, tokenizer), tokenizer)


def test_a_model_whose_plain_conversations_give_other_ids_is_refused_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    def add_a_word(definition: dict[str, Any]) -> None:
        definition["added_tokens"].append({**definition["added_tokens"][-1], "id": 999, "content": "capital"})

    with pytest.raises(ModelError, match="odd-model cannot be served: its tokenizer gives other ids"):
        changed(model_folder("chatml_default"), tmp_path / "odd-model", add_a_word)


def test_a_model_in_which_unknown_characters_would_end_an_answer_drops_them(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    def without_bytes(definition: dict[str, Any]) -> None:
        definition["model"] |= {"byte_fallback": False, "unk_token": "</s>"}

    with pytest.raises(ModelError, match="cannot be served"):
        changed(model_folder("llama2"), tmp_path / "odd-model", without_bytes)

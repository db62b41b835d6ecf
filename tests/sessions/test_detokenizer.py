from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from chatd.errors import ModelError
from chatd.sessions.detokenizer import BYTE_ALPHABET, Detokenizer, TokenBytes, decode
from chatd.sessions.tokenizer import ChatTokenizer, load_tokenizer

BYTE_LEVEL = ("chatml_default", "mistral_nemo")
BYTE_FALLBACK = ("llama2", "mistral_v3", "gemma2", "phi3")
FAMILY = "👩‍👩‍👧‍👦 ok"


@pytest.fixture(scope="module", params=[*BYTE_LEVEL, *BYTE_FALLBACK])
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> tuple[ChatTokenizer, Tokenizer]:
    folder = model_folder(request.param)
    return load_tokenizer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


def byte_token(tokenizer: ChatTokenizer, byte: int) -> int:
    names = (next(char for char, value in BYTE_ALPHABET.items() if value == byte), f"<0x{byte:02X}>")
    token_id = tokenizer.token_id(names[tokenizer.token_id(names[1]) is not None])
    assert token_id is not None
    return token_id


def deltas(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    result, position = [], 0
    for size in sizes:
        result.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*result, detokenizer.push(ids[position:]), detokenizer.flush()]


@settings(deadline=None)
@given(data=st.data())
def test_the_deltas_of_random_ids_make_the_whole_text_and_hold_no_early_replacement(
    model: tuple[ChatTokenizer, Tokenizer], data: st.DataObject
) -> None:
    tokenizer, _ = model
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=30))
    whole = tokenizer.decode(ids)
    sent = ""
    for delta in deltas(tokenizer.detokenizer(), ids, sizes):
        sent += delta
        assert whole.startswith(sent)
    assert sent == whole


@settings(deadline=None)
@given(data=st.data())
def test_random_ids_of_a_byte_level_vocabulary_decode_as_in_tokenizers(
    model: tuple[ChatTokenizer, Tokenizer], data: st.DataObject
) -> None:
    tokenizer, reference = model
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    expected = reference.decode(ids, skip_special_tokens=True)
    if "ByteLevel" in (tokenizer.folder / "tokenizer.json").read_text() or "\ufffd" not in expected:
        assert tokenizer.decode(ids) == expected


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=40))
def test_encoded_text_comes_back_token_by_token(model: tuple[ChatTokenizer, Tokenizer], text: str) -> None:
    tokenizer, reference = model
    ids = reference.encode(text, add_special_tokens=False).ids
    detokenizer = tokenizer.detokenizer()
    sent = "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.flush()
    assert sent == reference.decode(ids, skip_special_tokens=True)


def test_a_character_is_sent_once_its_last_byte_is_there(model: tuple[ChatTokenizer, Tokenizer]) -> None:
    tokenizer, _ = model
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([byte_token(tokenizer, byte)]) for byte in FAMILY.encode()]
    assert "".join(pieces) == FAMILY
    assert [piece for piece in pieces if piece] == list(FAMILY)
    assert detokenizer.flush() == ""


def test_invalid_bytes_are_replaced_only_once_they_are_certainly_invalid(
    model: tuple[ChatTokenizer, Tokenizer],
) -> None:
    tokenizer, _ = model
    ids = [byte_token(tokenizer, byte) for byte in b"\xe6\x9da\xff"]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "\ufffda", "\ufffd"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_at_the_end_is_one_replacement(model: tuple[ChatTokenizer, Tokenizer]) -> None:
    tokenizer, _ = model
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([byte_token(tokenizer, byte) for byte in "東".encode()[:2]]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text_and_other_added_tokens_have(model_folder: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(model_folder("chatml_thoughts"))
    names = ("<|im_start|>", "<think>", "<|im_end|>", "</think>")
    ids = [tokenizer.token_id(name) for name in names]
    assert tokenizer.decode([token_id for token_id in ids if token_id is not None]) == "<think></think>"


def test_the_space_that_a_metaspace_tokenizer_puts_before_a_text_is_taken_off_once() -> None:
    tokens = dict(enumerate(["<s>", "▁Hello", "▁", "▁you"]))
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    table = TokenBytes({"type": "Sequence", "decoders": steps}, tokens.get, [0])
    assert decode(table, [0, 1, 3]) == "Hello you"
    assert decode(table, [2, 1]) == " Hello"
    detokenizer = Detokenizer(table)
    assert [detokenizer.push([token_id]) for token_id in (0, 2, 1, 3)] == ["", "", " Hello", " you"]


def test_the_metaspace_decoder_drops_the_prefix_of_the_first_token_only() -> None:
    tokens = dict(enumerate(["<s>", "▁Hello", "▁", "▁you"]))
    for scheme in ("always", "first", "never"):
        table = TokenBytes({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}, tokens.get, [0])
        reference = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
        for ids in ([1, 3], [2, 1], [2, 2, 3]):
            assert decode(table, [0, *ids]) == reference.decode([tokens[token_id] for token_id in ids])


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
)
def test_a_decoder_that_is_not_supported_is_named(decoder: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"decoder '(WordPiece|Replace|Strip)'"):
        TokenBytes(decoder, {}.get, [])


def test_a_tokenizer_without_decoder_is_refused() -> None:
    with pytest.raises(ModelError, match="no decoder"):
        TokenBytes(None, {}.get, [])

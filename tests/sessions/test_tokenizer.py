import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatd.errors import InvalidRequest, ModelError
from chatd.sessions.content_encoder import Place, Stretch
from chatd.sessions.tokenizer import AddedToken, check_size, load_tokenizer, strip_beside


def test_a_model_folder_gives_its_vocabulary_and_the_ids_that_end_an_answer(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_folder("llama3")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    plain = load_tokenizer(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    assert plain.vocab_size == len(definition["model"]["vocab"]) + len(definition["added_tokens"])
    assert plain.eos_token_id == plain.token_id("<|eot_id|>")
    assert plain.stop_token_ids == {plain.eos_token_id}
    assert plain.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    end = plain.token_id("<|end_of_text|>")
    for value in (end, [end], [end, 10**9, True, None, "x"]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert load_tokenizer(tmp_path).stop_token_ids == {plain.eos_token_id, end}


def test_special_tokens_may_be_written_as_objects(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder("llama3") / "tokenizer.json").read_bytes())
    config = {"eos_token": {"content": "<|end_of_text|>", "special": True}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|end_of_text|>"}
    assert tokenizer.eos_token_id == tokenizer.token_id("<|end_of_text|>")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "tokenizer.json of broken cannot be read: No such file"),
        ("{", "not valid JSON"),
        ('{"model": ' + "[" * 100_000, "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "vocabulary in tokenizer.json of broken is not understood"),
        ('{"model": {"vocab": {"a": "b"}}}', "vocabulary in tokenizer.json of broken is not understood"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "x"}]}', "added_tokens of tokenizer.json of broken"),
        ('{"model": {"vocab": {"a": 0}}}', "no decoder"),
        ('{"model": {"vocab": {"a": 0}}, "decoder": {"type": "CTC"}}', "decoder 'CTC'"),
    ],
    ids=["missing", "cut", "nested", "list", "empty", "vocabulary", "added tokens", "no decoder", "decoder"],
)
def test_a_broken_tokenizer_file_is_refused_with_the_reason(tmp_path: Path, content: str | None, why: str) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=why):
        load_tokenizer(folder)


def test_a_file_that_tokenizers_does_not_understand_is_refused(tmp_path: Path) -> None:
    definition = {"model": {"type": "Novel", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be loaded"):
        load_tokenizer(tmp_path).content_encoder([])


def test_a_file_above_the_limit_is_not_read(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[[str], Path]
) -> None:
    monkeypatch.setattr("chatd.sessions.tokenizer.MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(ModelError, match="more than 1000 bytes"):
        load_tokenizer(model_folder("llama3"))


def unigram(pieces: list[str]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces], "byte_fallback": False},
    }  # fmt: skip


def test_a_piece_of_a_unigram_vocabulary_that_is_control_cannot_be_spelled(tmp_path: Path) -> None:
    pieces = ["<unk>", "</s>", "<", "/", "s", ">", "a", "s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram(pieces)))
    tokenizer = load_tokenizer(tmp_path)
    open_to_all = tokenizer.content_encoder([]).encode([Stretch("a</s>a")])
    closed = tokenizer.content_encoder([1]).encode([Stretch("a</s>a")])
    assert [[pieces[token_id] for token_id in ids] for ids in (open_to_all[0], closed[0])] == [
        ["a", "</s>", "a"],
        ["a", "<", "/", "s>", "a"],
    ]
    assert tokenizer.unknown_id == 0


def test_a_vocabulary_that_spells_every_byte_has_no_unknown_id(model_folder: Callable[[str], Path]) -> None:
    assert load_tokenizer(model_folder("llama2")).unknown_id is None
    assert load_tokenizer(model_folder("llama3")).unknown_id is None


def test_a_long_text_is_encoded_without_holding_the_interpreter(model_folder: Callable[[str], Path]) -> None:
    encoder = load_tokenizer(model_folder("chatml_default")).content_encoder([])
    text = "The quick brown fox jumps over the lazy dog. " * 15_000

    def longest_pause() -> float:
        """Return the largest part of an encoding in which this thread could do nothing."""
        finished = threading.Event()
        worker = threading.Thread(target=lambda: (encoder.encode([Stretch(text)]), finished.set()))
        start = last = time.perf_counter()
        longest = 0.0
        worker.start()
        while not finished.is_set():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        worker.join()
        return longest / (time.perf_counter() - start)

    # Making the list of ids takes the interpreter for a part of the time. A busy machine makes pauses too, though not
    # in every try; an encoder that holds the interpreter does.
    assert any(longest_pause() < 0.6 for _ in range(8))


@pytest.mark.parametrize(
    ("name", "places"),
    [("mistral_v3", "opening"), ("llama2", "opening, after a token"), ("chatml_default", ""), ("gemma2", "")],
)
def test_the_blank_that_a_tokenizer_puts_before_a_text_is_put_where_it_would_put_it(
    model_folder: Callable[[str], Path], name: str, places: str
) -> None:
    tokenizer = load_tokenizer(model_folder(name))
    encoder = tokenizer.content_encoder([])
    ids = encoder.encode([Stretch("city", place) for place in Place])
    starts = [tokenizer.token_bytes[first].startswith(b" ") for first, *_ in ids]
    assert starts == ["opening" in places, "after a token" in places, False]


def test_nothing_is_encoded_to_nothing(model_folder: Callable[[str], Path]) -> None:
    assert load_tokenizer(model_folder("llama3")).content_encoder([]).encode([]) == []


def test_an_added_token_swallows_the_blanks_that_it_is_declared_to_swallow() -> None:
    left = AddedToken(id=0, content="<a>", special=True, lstrip=True, rstrip=False)
    right = AddedToken(id=1, content="<b>", special=True, lstrip=False, rstrip=True)
    text = "\n\u3000 x\x1c \u2009"
    assert strip_beside(text, before=right, after=left) == "x\x1c"
    assert strip_beside(text, before=left, after=right) == text
    assert strip_beside(text, before=None, after=None) == text


def test_sizes_are_counted_in_bytes_over_all_contents() -> None:
    check_size(["ab", "ü"], 4)
    with pytest.raises(InvalidRequest, match="more than 3 bytes"):
        check_size(["ab", "ü"], 3)

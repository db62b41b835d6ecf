"""Small models' tokenizers and templates: real algorithms with vocabularies trained here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from chatd.sessions.template import ChatTemplate
from chatd.sessions.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"

# Has the texts of control tokens, so that the vocabularies learn to spell them.
CORPUS = [
    "The capital of France is Paris, and the quick brown fox jumps over the lazy dog.",
    "You are a helpful assistant. system\nuser\nassistant\nmodel\n",
    "def f(x):\n    return x + 1\n\n\nprint(f(10))",
    "naïve café, 東京 is a city; Zażółć gęślą jaźń",
    "text with </s> and <s> and [INST] and [/INST] and <|im_end|> and <think> in it",
    "</s></s></s> [INST] [INST] [/INST] [/INST] <s> <s> <think> <think> </think> </think>",
] * 4

Special = tuple[str, bool]  # text, special


def _added(token_id: int, content: str, special: bool, **flags: bool) -> dict[str, Any]:
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **defaults, **flags}


def _byte_level(num_merges: int = 150) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())


def _byte_fallback(num_pieces: int = 420) -> dict[str, Any]:
    """A vocabulary as SentencePiece makes it: blanks as U+2581, bytes for what it cannot spell."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=num_pieces, special_tokens=first, show_progress=False, max_token_length=6, limit_alphabet=70
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [_added(i, first[i], True) for i in range(3)]
    return _spell(definition, "</s>", "<s>", "[INST]", "[/INST]")


def _spell(definition: dict[str, Any], *texts: str) -> dict[str, Any]:
    """Have the vocabulary know these texts as pieces, and its first merges lead to them."""
    model = definition["model"]
    vocab, merges = dict(model["vocab"]), []
    for text in texts:
        for end in range(1, len(text) + 1):
            vocab.setdefault(text[end - 1], len(vocab))
            vocab.setdefault(text[:end], len(vocab))
            if end > 1:
                merges.append([text[: end - 1], text[end - 1]])
    return definition | {"model": model | {"vocab": vocab, "merges": [*merges, *model["merges"]]}}


def _sentencepiece(definition: dict[str, Any], prefix: str, *, strips: bool) -> dict[str, Any]:
    """Set how text gets its prefix: by normalizer "prepend", "first" by pre-tokenizer, or "none"."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    definition = dict(definition)
    if prefix == "prepend":
        definition["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
        }
    elif prefix == "first":
        definition["normalizer"] = None
        definition["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        }
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []),
    ]
    return definition | {"decoder": {"type": "Sequence", "decoders": steps}}


def _with_added(definition: dict[str, Any], tokens: list[Special], **flags: bool) -> dict[str, Any]:
    added = list(definition["added_tokens"])
    vocab = definition["model"]["vocab"]
    next_id = max([*vocab.values(), *(token["id"] for token in added)]) + 1
    for content, special in tokens:
        token_id = vocab.get(content)
        if token_id is None:
            token_id, next_id = next_id, next_id + 1
        added.append(_added(token_id, content, special, **flags))
    return definition | {"added_tokens": sorted(added, key=lambda token: token["id"])}


def _special(*tokens: str) -> list[Special]:
    return [(token, True) for token in tokens]


CHATML = [*_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), ("<think>", False), ("</think>", False)]
LLAMA3 = _special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = [*_special("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("\n\n", False), ("▁▁", False)]
INST = _special("[INST]", "[/INST]")
# Keeps line ends together, so that what follows a generation prompt cannot change its last token.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bos_first(definition: dict[str, Any], bos: str) -> dict[str, Any]:
    """Have the post-processor put a beginning-of-text token before every text."""
    token_id = next(token["id"] for token in definition["added_tokens"] if token["content"] == bos)
    start, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }
    return definition | {"post_processor": processor}


def _definition(name: str, byte_level: dict[str, Any], fallback: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return the tokenizer.json, bos and eos of a model that is like the family its template is named after."""
    match name:
        case "chatml_default" | "chatml_thoughts":
            return _with_added(byte_level, CHATML), "<|endoftext|>", "<|im_end|>"
        case "llama3" | "llama3_dated":
            words = {"type": "Split", "pattern": {"Regex": LLAMA3_WORDS}, "behavior": "Isolated", "invert": False}
            spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            byte_level = byte_level | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, spell]}}
            return _bos_first(_with_added(byte_level, LLAMA3), "<|begin_of_text|>"), "<|begin_of_text|>", "<|eot_id|>"
        case "llama2":
            return _bos_first(_sentencepiece(fallback, "prepend", strips=True), "<s>"), "<s>", "</s>"
        case "mistral_v3":
            definition = _with_added(_sentencepiece(fallback, "first", strips=True), INST)
            return _bos_first(definition, "<s>"), "<s>", "</s>"
        case "mistral_nemo":
            return _with_added(byte_level, _special("<s>", "</s>", "[INST]", "[/INST]")), "<s>", "</s>"
        case "gemma2" | "gemma3":
            definition = _sentencepiece(fallback, "none", strips=False)
            vocab = definition["model"]["vocab"]
            pieces = {piece: len(vocab) + i for i, piece in enumerate(p for p in ("\n\n", "▁▁") if p not in vocab)}
            # As in Gemma, no piece mixes line ends with other characters.
            others = [merge for merge in definition["model"]["merges"] if "\n" not in "".join(merge)]
            merges = [["\n", "\n"], ["▁", "▁"], *others]
            model = definition["model"] | {"vocab": vocab | pieces, "merges": merges}
            return _with_added(definition | {"model": model}, GEMMA), "<bos>", "<eos>"
        case "phi3":
            tokens = _special("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
            definition = _with_added(_sentencepiece(fallback, "prepend", strips=True), tokens, rstrip=True)
            return definition, "<s>", "<|endoftext|>"
        case "deepseek_r1":
            special = _special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
            plain = [(token, False) for token in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")]
            definition = _with_added(byte_level, [*special, *plain])
            return definition, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
        case "plain_roles":
            return _sentencepiece(fallback, "first", strips=True), "<s>", "</s>"
    raise KeyError(name)


@pytest.fixture(scope="session")
def base_vocabularies() -> tuple[dict[str, Any], dict[str, Any]]:
    """A byte-level and a byte-fallback vocabulary, both trained on the same few sentences."""
    return _byte_level(), _byte_fallback()


@pytest.fixture(scope="session")
def model_folder(
    base_vocabularies: tuple[dict[str, Any], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Makes the folder of a model that is like the family that a template in `templates/` is for."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        folder = root / name
        if folder.exists():
            return folder
        folder.mkdir()
        definition, bos, eos = _definition(name, *base_vocabularies)
        (folder / "tokenizer.json").write_text(json.dumps(definition))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
        return folder

    return make


@pytest.fixture(scope="session")
def chat_template(model_folder: Callable[[str], Path]) -> Callable[[str], ChatTemplate]:
    """Loads the template of such a model, once: each load is a process."""
    loaded: dict[str, ChatTemplate] = {}

    def load(name: str) -> ChatTemplate:
        if name not in loaded:
            folder = model_folder(name)
            loaded[name] = ChatTemplate.load(folder, load_tokenizer(folder))
        return loaded[name]

    return load

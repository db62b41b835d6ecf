"""Names are found, and what chatd will not or cannot serve is refused with a code and a hint (SECURITY S12)."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import save_file

from chatd.errors import ModelError
from chatd.models.registry import resolve


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def refuse(name: object, cache: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve(str(name), cache_dir=cache)
    assert caught.value.exit_code == 4
    return caught.value


def edit_config(folder: Path, name: str = "config.json", **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_local_folder_is_resolved_with_its_own_name(tiny_folder: Path, cache: Path) -> None:
    files = resolve(str(tiny_folder), cache_dir=cache)
    assert (files.id, files.path) == ("tiny-model", tiny_folder)
    assert len(files.digest) == 64


def test_the_registry_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, chatd.models.registry;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'numba') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "hint"), [("smollm2-135", "smollm2-135m"), ("smolm2_135m", "smollm2-135m"), ("xyz", "built in:")]
)
def test_an_unknown_name_is_answered_with_the_nearest_right_ones(name: str, hint: str, cache: Path) -> None:
    error = refuse(name, cache)
    assert error.error_code == "model_not_found"
    assert hint in (error.hint or "")


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, cache: Path) -> None:
    assert refuse(tmp_path / "absent", cache).error_code == "model_not_found"
    assert refuse("./absent", cache).error_code == "model_not_found"
    assert refuse("", cache).error_code == "model_not_found"
    assert refuse("a\0b", cache).error_code == "model_not_found"


def test_a_single_file_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    error = refuse(tmp_path / "model.gguf", cache)
    assert error.error_code == "model_unsupported"
    assert "is a file" in error.message


def test_a_folder_without_a_config_is_refused(tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "config.json").unlink()
    assert refuse(tiny_folder, cache).error_code == "model_no_config"


def test_a_folder_without_a_tokenizer_is_refused(tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "tokenizer.json").unlink()
    assert refuse(tiny_folder, cache).error_code == "model_no_tokenizer"


def test_a_folder_without_a_chat_template_is_refused(tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "tokenizer_config.json").unlink()
    assert refuse(tiny_folder, cache).error_code == "model_no_template"


def test_a_template_in_a_file_of_its_own_is_enough(tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "tokenizer_config.json").unlink()
    (tiny_folder / "chat_template.jinja").write_text("{{ messages }}")
    assert resolve(str(tiny_folder), cache_dir=cache).path == tiny_folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_reason(name: str, tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / name)
    error = refuse(tiny_folder, cache)
    assert error.error_code == "model_pickle_only"
    assert name in error.message
    assert "run code" in error.message


def test_a_folder_without_weights_is_refused(tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    assert refuse(tiny_folder, cache).error_code == "model_no_weights"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_that_brings_code_is_refused(name: str, tiny_folder: Path, cache: Path) -> None:
    edit_config(tiny_folder, name, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    error = refuse(tiny_folder, cache)
    assert error.error_code == "model_custom_code"
    assert "auto_map" in error.message


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tiny_folder: Path, cache: Path) -> None:
    edit_config(tiny_folder, architectures=["GPT2LMHeadModel"])
    error = refuse(tiny_folder, cache)
    assert error.error_code == "model_unsupported"
    assert "GPT2LMHeadModel" in error.message
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in (error.hint or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(changes: dict[str, object], tiny_folder: Path, cache: Path) -> None:
    edit_config(tiny_folder, **changes)
    assert refuse(tiny_folder, cache).error_code == "model_unsupported"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"hidden_size": True},
        {"hidden_size": "4"},
        {"vocab_size": 2**40},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": 3},
        {"head_dim": 3},
        {"rms_norm_eps": "x"},
        {"tie_word_embeddings": 1},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
        {"rope_parameters": [1]},
        {"rope_theta": 0},
    ],
)
def test_a_config_value_out_of_range_is_named(changes: dict[str, object], tiny_folder: Path, cache: Path) -> None:
    edit_config(tiny_folder, **changes)
    assert refuse(tiny_folder, cache).error_code == "model_corrupt"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_broken_json_file_is_refused(name: str, content: bytes, tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / name).write_bytes(content)
    assert refuse(tiny_folder, cache).error_code == "model_corrupt"


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        safetensors_bytes(b"{"),
        safetensors_bytes([]),
        safetensors_bytes({"a": GOOD}, b"\x00" * 7),
        safetensors_bytes({"a": GOOD}, b"\x00" * 9),
        safetensors_bytes({"a": GOOD | {"data_offsets": [0, 2**70]}}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD | {"data_offsets": [8, 0]}}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD | {"data_offsets": [-8, 0]}}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD | {"shape": [3]}}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD | {"shape": [-2]}}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD | {"shape": ["2"]}}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD, "b": GOOD}, b"\x00" * 8),
        safetensors_bytes({"a": GOOD, "b": GOOD | {"data_offsets": [16, 24]}}, b"\x00" * 24),
        safetensors_bytes({"a": {"dtype": "F32"}}),
        safetensors_bytes({"a": 1}),
    ],
)
def test_a_corrupt_safetensors_file_is_refused(content: bytes, tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "model.safetensors").write_bytes(content)
    error = refuse(tiny_folder, cache)
    assert error.error_code == "model_corrupt"
    assert "model.safetensors" in error.message


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "absent.safetensors", "weights.bin", 7])
def test_an_index_cannot_name_files_outside_of_the_folder(name: object, tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder.parent / "outside.safetensors")
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert refuse(tiny_folder, cache).error_code == "model_corrupt"


def test_shards_are_found_through_the_index(tiny_folder: Path, cache: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "model-1.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tiny_folder / "model-2.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    first = resolve(str(tiny_folder), cache_dir=cache).digest
    save_file({"b": np.ones(2, np.float32)}, tiny_folder / "model-2.safetensors")
    assert resolve(str(tiny_folder), cache_dir=cache).digest != first


def test_the_digest_changes_with_weights_and_config_and_with_nothing_else(tiny_folder: Path, cache: Path) -> None:
    digests = [resolve(str(tiny_folder), cache_dir=cache).digest]
    edit_config(tiny_folder, "tokenizer_config.json", bos_token="x")
    digests.append(resolve(str(tiny_folder), cache_dir=cache).digest)
    copy = tiny_folder.parent / "copy"
    copy.mkdir()
    for path in tiny_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    digests.append(resolve(str(copy), cache_dir=cache).digest)
    assert len(set(digests)) == 1
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, tiny_folder / "model.safetensors")
    digests.append(resolve(str(tiny_folder), cache_dir=cache).digest)
    edit_config(tiny_folder, rope_theta=500.0)
    digests.append(resolve(str(tiny_folder), cache_dir=cache).digest)
    assert len(set(digests)) == 3


def test_weights_are_hashed_once_and_again_only_when_the_file_changed(tiny_folder: Path, cache: Path) -> None:
    phases: list[str] = []

    def digest() -> str:
        phases.clear()
        return resolve(str(tiny_folder), cache_dir=cache, progress=lambda phase, _: phases.append(phase)).digest

    first = digest()
    assert "hashing weights" in phases
    assert digest() == first
    assert phases == []
    os.utime(tiny_folder / "model.safetensors", ns=(1, 1))
    assert digest() == first
    assert "hashing weights" in phases


def test_a_damaged_note_of_hashes_is_ignored(tiny_folder: Path, cache: Path) -> None:
    first = resolve(str(tiny_folder), cache_dir=cache).digest
    for note in (cache / "digests").iterdir():
        note.write_text('{"version": 1, "hashes": 3}')
    assert resolve(str(tiny_folder), cache_dir=cache).digest == first


def test_a_cache_folder_that_cannot_be_written_only_costs_time(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = resolve(str(tiny_folder), cache_dir=tmp_path / "file").digest
    assert found == resolve(str(tiny_folder), cache_dir=tmp_path / "cache").digest


def test_a_hub_id_is_fetched_small_files_first_and_draws_no_bars_of_its_own(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def snapshot(repo_id: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        assert repo_id == "owner/tiny"
        asked.append(allow_patterns)
        # As the hub does: bytes are counted while their total still grows.
        with tqdm_class(total=0, unit="B") as bytes_bar, tqdm_class(total=2, unit="it") as files_bar:
            for num_bytes in (100, 300):
                bytes_bar.total += num_bytes
                bytes_bar.refresh()
                bytes_bar.update(num_bytes)
                bytes_bar.refresh()
                files_bar.update(1)
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    reports: list[float] = []
    files = resolve(
        "owner/tiny", cache_dir=cache, progress=lambda phase, at: reports.append(at) if phase[0] == "d" else None
    )
    assert files.id == "owner/tiny"
    assert reports == sorted(reports)
    assert (reports[0], reports[-1]) == (0.0, 1.0)
    assert capsys.readouterr() == ("", "")
    assert asked[0] == ["*.json", "*.jinja"]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for patterns in asked for pattern in patterns)


def test_a_hub_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(tiny_folder, architectures=["GPT2LMHeadModel"])
    asked: list[str] = []

    def snapshot(repo_id: str, **_: object) -> str:
        asked.append(repo_id)
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert refuse("owner/gpt2", cache).error_code == "model_unsupported"
    assert len(asked) == 1


def test_a_hub_model_with_pickled_weights_only_is_refused(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny_folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_a, **_k: str(tiny_folder))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_: ["config.json", "pytorch_model.bin"])
    error = refuse("owner/old", cache)
    assert error.error_code == "model_pickle_only"
    assert "pytorch_model.bin" in error.message


def not_found() -> RepositoryNotFoundError:
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    Exception.__init__(error, "404")
    return error


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (LocalEntryNotFoundError("offline"), "model_offline"),
        (not_found(), "model_not_found"),
        (OSError("disk full"), "model_fetch_failed"),
        (RuntimeError("connection reset"), "model_fetch_failed"),
    ],
)
def test_a_fetch_from_the_hub_that_fails_says_why(
    fault: Exception, code: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise fault

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert refuse("owner/tiny", cache).error_code == code

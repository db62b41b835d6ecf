"""Decides whether a folder holds a model that chatd can serve, before anything in it is trusted.

No file of the folder is executed or unpickled. Every refusal is a `ModelError` that says what is wrong and what would
help.
"""

from __future__ import annotations

from pathlib import Path

from chatd.errors import ModelError
from chatd.models.model_config import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    load_decoder_config,
    read_json,
)
from chatd.models.safetensors_file import read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")


def check_folder(folder: Path) -> None:
    """Refuse a folder that chatd cannot or will not serve.

    Raises:
        ModelError: `model_not_found`, `model_no_config`, `model_custom_code`, `model_unsupported`,
            `model_no_tokenizer`, `model_no_template`, `model_pickle_only`, `model_no_weights` or `model_corrupt`.
    """
    if folder.is_file():
        raise ModelError(
            f"{folder} is a file; a model is a folder with config.json, tokenizer.json and model.safetensors",
            code="model_unsupported",
        )
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder", code="model_not_found")
    load_decoder_config(folder)
    check_tokenizer(folder)
    for path in weight_files(folder):
        read_header(path)


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder whose tokenizer or chat template is missing, or needs code of its own.

    Raises:
        ModelError: `model_no_tokenizer`, `model_custom_code`, `model_no_template` or `model_corrupt`.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelError(
            f"{folder} has no {TOKENIZER_FILE}",
            code="model_no_tokenizer",
            hint="save the tokenizer as a fast one: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    config_path = folder / TOKENIZER_CONFIG_FILE
    config = read_json(config_path) if config_path.is_file() else {}
    if "auto_map" in config:
        raise ModelError(
            f"{config_path} asks for code of its own (auto_map), which chatd never runs", code="model_custom_code"
        )
    if not (folder / TEMPLATE_FILE).is_file() and not config.get("chat_template"):
        raise ModelError(
            f"{folder} has no chat template: neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG_FILE}",
            code="model_no_template",
            hint="chatd serves conversations; use the instruction-tuned variant of the model",
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, in order.

    Raises:
        ModelError: `model_pickle_only`, `model_no_weights`, or `model_corrupt` where the index names what is not there
            or lies outside of the folder.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{folder} has its weights as {', '.join(pickles[:3])} only; such files can run code when they are read",
            code="model_pickle_only",
            hint="use the model's safetensors files, or convert them where you trust their source",
        )
    raise ModelError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}", code="model_no_weights")


def _indexed_files(folder: Path) -> list[Path]:
    path = folder / INDEX_FILE
    weight_map = read_json(path, max_bytes=64 * 1024 * 1024).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map", code="model_corrupt")
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {name!r}, which is not a safetensors file of the folder", code="model_corrupt"
            )
        names.add(name)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ModelError(f"{folder} lacks {missing[0]}, which {INDEX_FILE} names", code="model_corrupt")
    return [folder / name for name in sorted(names)]

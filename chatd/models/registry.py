"""Finds a model by name: built in, a local folder, or a Hugging Face id.

Knows no torch, and imports what is heavy only where it is used.

```
resolve("smollm2-135m")             fetched once, converted, kept in the cache folder
resolve("./my-model")               a local Hugging Face folder
resolve("Qwen/Qwen3-0.6B")          a snapshot from the Hugging Face hub
```
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chatd import config
from chatd.errors import ModelError
from chatd.models.digest import weights_digest
from chatd.models.fetch import SMOLLM2_135M, BuiltIn, ensure_built_in
from chatd.models.hub import hub_snapshot
from chatd.models.model_folder import check_folder, weight_files

Progress = Callable[[str, float], None]

BUILT_IN: dict[str, BuiltIn] = {SMOLLM2_135M.id: SMOLLM2_135M}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine, checked.

    Attributes:
        id: The name it was asked for by; a folder's own name for a local one.
        path: The folder with config.json, tokenizer.json, the chat template and the safetensors files.
        digest: Hex; equal for equal weights and config.json. Part of every KV namespace.
    """

    id: str
    path: Path
    digest: str


def resolve(name_or_path: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFiles:
    """Return a model's files, fetched and converted if need be.

    Args:
        name_or_path: A built-in name, a local folder, or a Hugging Face id.
        cache_dir: Where converted models and notes are kept; the user's cache folder where absent.
        progress: Called with a phase and its fraction from 0 to 1; phases follow one another.

    Raises:
        ModelError: Unknown, not to be had, refused, or damaged; `error_code` says which.
        EnvironmentProblem: Something that is needed to fetch it is not installed, or the cache folder cannot be
            written.
    """
    cache = (cache_dir or config.cache_dir()).expanduser()
    if name_or_path in BUILT_IN:
        model_id, folder = name_or_path, ensure_built_in(BUILT_IN[name_or_path], cache / "models", progress)
    elif _is_path(name_or_path):
        folder = Path(name_or_path).expanduser().resolve()
        model_id = folder.name
    elif _HUB_ID.fullmatch(name_or_path):
        model_id, folder = name_or_path, hub_snapshot(name_or_path, progress)
    else:
        raise _unknown(name_or_path)
    check_folder(folder)
    digest = weights_digest(folder, weight_files(folder), cache / "digests", progress)
    return ModelFiles(id=model_id, path=folder, digest=digest)


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or (name != "" and Path(name).is_dir())


def _unknown(name: str) -> ModelError:
    near = difflib.get_close_matches(name, BUILT_IN, n=3, cutoff=0.4)
    return ModelError(
        f"{name!r} is no model that chatd knows",
        code="model_not_found",
        hint=f"did you mean {' or '.join(near)}?"
        if near
        else f"built in: {', '.join(BUILT_IN)}; or a folder, or owner/name",
    )

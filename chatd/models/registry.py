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
from chatd.errors import EnvironmentProblem, ModelError
from chatd.models.digest import weights_digest
from chatd.models.fetch import SMOLLM2_135M, BuiltIn, ensure_built_in
from chatd.models.model_config import CONFIG_FILE, load_decoder_config
from chatd.models.model_folder import INDEX_FILE, PICKLE_SUFFIXES, check_folder, check_tokenizer, weight_files

Progress = Callable[[str, float], None]

BUILT_IN: dict[str, BuiltIn] = {SMOLLM2_135M.id: SMOLLM2_135M}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SMALL_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("model.safetensors", "model-*.safetensors")


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
        model_id, folder = name_or_path, _hub_snapshot(name_or_path, progress)
    else:
        raise _unknown(name_or_path)
    check_folder(folder)
    digest = weights_digest(folder, weight_files(folder), cache / "digests", progress)
    return ModelFiles(id=model_id, path=folder, digest=digest)


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or Path(name).is_dir()


def _unknown(name: str) -> ModelError:
    near = difflib.get_close_matches(name, BUILT_IN, n=3, cutoff=0.4)
    return ModelError(
        f"{name!r} is no model that chatd knows",
        code="model_not_found",
        hint=f"did you mean {' or '.join(near)}?"
        if near
        else f"built in: {', '.join(BUILT_IN)}; or a folder, or owner/name",
    )


def _hub_snapshot(repo_id: str, progress: Progress | None) -> Path:
    """Download a repository's small files, check them, and only then its weights."""
    report = progress or (lambda _phase, _fraction: None)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            "huggingface_hub is not installed", hint='install the server: pip install "chatd[server]"'
        ) from error
    report("downloading", 0.0)
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=list(_SMALL_FILES)))
        if not (folder / CONFIG_FILE).is_file():
            raise ModelError(f"{repo_id} has no {CONFIG_FILE}", code="model_no_config")
        load_decoder_config(folder)
        check_tokenizer(folder)
        report("downloading", 0.05)
        folder = Path(snapshot_download(repo_id, allow_patterns=[*_SMALL_FILES, *_WEIGHT_FILES]))
        if not any(folder.glob("model*.safetensors")) and not (folder / INDEX_FILE).is_file():
            _refuse_pickled_repository(repo_id)
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} asks for a licence to be accepted",
            code="model_gated",
            hint="accept it on the model's page and run `hf auth login`",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the Hugging Face hub knows no model {repo_id}", code="model_not_found") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repo_id} is not on this machine, and the Hugging Face hub cannot be reached",
            code="model_offline",
            hint="connect once to fetch it, or name a local folder",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{repo_id} could not be fetched: {error}", code="model_fetch_failed") from error
    report("downloading", 1.0)
    return folder


def _refuse_pickled_repository(repo_id: str) -> None:
    from huggingface_hub import HfApi

    names = [name for name in HfApi().list_repo_files(repo_id) if name.endswith(PICKLE_SUFFIXES)]
    if names:
        raise ModelError(
            f"{repo_id} has its weights as {', '.join(names[:3])} only; such files can run code when they are read",
            code="model_pickle_only",
            hint="choose a repository with safetensors files",
        )

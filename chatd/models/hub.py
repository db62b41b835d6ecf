"""Fetches models from the Hugging Face hub: safetensors, JSON and templates, never code or pickles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatd.errors import EnvironmentProblem, ModelError
from chatd.models.model_config import CONFIG_FILE, load_decoder_config
from chatd.models.model_folder import INDEX_FILE, PICKLE_SUFFIXES, check_tokenizer

Progress = Callable[[str, float], None]

_SMALL_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("model.safetensors", "model-*.safetensors")


def hub_snapshot(repo_id: str, progress: Progress | None) -> Path:
    """Download a repository's small files, check them, and only then its weights; return the folder.

    Args:
        repo_id: owner/name.
        progress: Called with ("downloading", 0 to 1).

    Raises:
        ModelError: `model_not_found`, `model_gated`, `model_offline`, `model_fetch_failed`, or what it holds.
        EnvironmentProblem: huggingface_hub is not installed.
    """
    report = progress or (lambda _phase, _fraction: None)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            "huggingface_hub is not installed", hint='install the server: pip install "chatd[server]"'
        ) from error
    report("downloading", 0.0)
    try:
        folder = Path(
            snapshot_download(repo_id, allow_patterns=list(_SMALL_FILES), tqdm_class=_silent_bar(lambda _: None))
        )
        if not (folder / CONFIG_FILE).is_file():
            raise ModelError(f"{repo_id} has no {CONFIG_FILE}", code="model_no_config")
        load_decoder_config(folder)
        check_tokenizer(folder)
        report("downloading", 0.05)
        bar = _silent_bar(lambda fraction: report("downloading", 0.05 + 0.95 * fraction))
        folder = Path(snapshot_download(repo_id, allow_patterns=[*_SMALL_FILES, *_WEIGHT_FILES], tqdm_class=bar))
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
    except ModelError:
        raise
    except Exception as error:
        # Beside its own errors, the hub lets those of its HTTP library through, which is not the same in all versions.
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


def _silent_bar(report: Callable[[float], None]) -> type[Any]:
    """Return a progress bar for `snapshot_download` that draws nothing and reports the rising share of bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    best = 0.0

    class SilentBar(tqdm):  # type: ignore[misc]
        def clear(self, *_args: object, **_kwargs: object) -> None:
            """Clear nothing."""

        def close(self) -> None:
            """Leave no line behind."""
            self.disable = True

        def display(self, *_args: object, **_kwargs: object) -> None:
            """Report instead of drawing."""
            nonlocal best
            # The hub has two bars that count bytes, whose totals grow as files are found, and one that counts files.
            if self.unit == "B" and self.total and self.n / self.total > best:
                best = min(self.n / self.total, 1.0)
                report(best)

    return SilentBar

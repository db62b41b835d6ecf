"""Text to ids, such that no text whatever yields a control id. Knows a tokenizer.json; knows no model and no template.

`ContentEncoder` is a tokenizer with `added_tokens` emptied, without a post-processor, and with the control tokens' own
pieces taken out of the vocabulary. `encode` releases the GIL, so run it in a thread (`asyncio.to_thread`) and the event
loop keeps running. `tokenizers`' plain `encode` does not: it held the loop for 3 s on a text of 2 MB.
`encode_batch_fast` does.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import msgspec
from tokenizers import Tokenizer

from chatd.errors import ModelError


class Place(Enum):
    """Where a stretch of text stands, which decides the blank that some tokenizers put before it."""

    OPENING = "opens the whole text"
    AFTER_CONTROL = "follows a control token"
    GOING_ON = "goes on from an answer"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text between two control tokens, or between one and an end."""

    text: str
    place: Place = Place.AFTER_CONTROL


class ContentEncoder:
    """Encodes stretches of text, in which nothing is a control token.

    Args:
        definition: A tokenizer.json; large parts may be `msgspec.Raw`.
        control_ids: The ids that no text may yield.
    """

    def __init__(self, definition: Mapping[str, Any], control_ids: Iterable[int]) -> None:
        self._control_ids = frozenset(control_ids)
        content = dict(definition) | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        content["model"] = _without_pieces(content["model"], self._control_ids)
        built: list[tuple[dict[str, Any], Tokenizer]] = []
        self._tokenizers: dict[Place, Tokenizer] = {}
        for place in Place:
            parts = {part: _at_place(content.get(part), place) for part in ("normalizer", "pre_tokenizer")}
            # Most tokenizers do the same everywhere: one is enough then.
            tokenizer = next((tokenizer for known, tokenizer in built if known == parts), None)
            if tokenizer is None:
                tokenizer = _build(content | parts)
                built.append((parts, tokenizer))
            self._tokenizers[place] = tokenizer

    def encode(self, stretches: Sequence[Stretch]) -> list[list[int]]:
        """Return the ids of each stretch, encoded as one string each. Releases the GIL."""
        result: list[list[int]] = []
        for place, group in groupby(stretches, key=lambda stretch: stretch.place):
            texts = [stretch.text for stretch in group]
            encodings = self._tokenizers[place].encode_batch_fast(texts, add_special_tokens=False)
            result += [encoding.ids for encoding in encodings]
        for ids in result:
            assert self._control_ids.isdisjoint(ids), "text was encoded as a control token"
        return result

    def control_ids_in(self, texts: Sequence[str]) -> set[int]:
        """Return the control ids that these texts yield; there should be none."""
        found: set[int] = set()
        for tokenizer in self._tokenizers.values():
            for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
                found |= self._control_ids.intersection(encoding.ids)
        return found


def _build(definition: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer made from a definition."""
    data = msgspec.json.encode(definition)
    return guarded(lambda: Tokenizer.from_buffer(data))


def guarded(load: Callable[[], Tokenizer]) -> Tokenizer:
    """Return what `load` makes, its failures turned into the model's.

    Raises:
        ModelError: `tokenizers` does not understand the file.
    """
    # Its own pool of threads would compete with the engine's, and makes a later fork warn. Read at each call.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return load()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust side is not an Exception
        raise ModelError(f"tokenizer.json cannot be loaded: {error}") from error


def _without_pieces(model: Mapping[str, Any], control_ids: frozenset[int]) -> dict[str, Any]:
    """Return a tokenizer's model in which the pieces with these ids can no longer be spelled by any text.

    Their names become unguessable and the merges that lead to them go, so the ids of all other text stay as they are.
    """
    nonce = secrets.token_hex(8)
    result = dict(model)
    vocab = model["vocab"]
    if not isinstance(vocab, dict):
        result["vocab"] = [
            [f"\0{nonce} {i}", score] if i in control_ids else [piece, score] for i, (piece, score) in enumerate(vocab)
        ]
        return result
    removed = {piece: f"\0{nonce} {token_id}" for piece, token_id in vocab.items() if token_id in control_ids}
    if not removed:
        return result
    result["vocab"] = {removed.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if model.get("unk_token") in removed:
        result["unk_token"] = None
    if "merges" in model:
        merges = msgspec.json.decode(msgspec.json.encode(model["merges"]))
        result["merges"] = [merge for merge in merges if removed.keys().isdisjoint(_merge_pieces(merge))]
    return result


def _merge_pieces(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _at_place(part: Any, place: Place) -> Any:
    """Return a normalizer or pre-tokenizer without the blank that it would put before text at this place.

    Metaspace of scheme "first" puts one before the whole text only; the other kinds after every control token too.
    """
    if not isinstance(part, dict) or place is Place.OPENING:
        return part
    going_on = place is Place.GOING_ON
    match part:
        case {"type": "Sequence", "normalizers": list(parts)}:
            return part | {"normalizers": [kept for each in parts if (kept := _at_place(each, place)) is not None]}
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return part | {"pretokenizers": [_at_place(each, place) for each in parts]}
        case {"type": "Prepend"} if going_on:
            return None
        case {"type": "Metaspace", "prepend_scheme": scheme} if going_on or scheme == "first":
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True} if going_on:
            return part | {"add_prefix_space": False}
    return part

"""A model's tokenizer, loaded with `tokenizers` alone. Knows files, ids and encodings; knows nothing of templates.

Text is encoded by a tokenizer that has no control tokens: `added_tokens` emptied, no post-processor, and the control
tokens' own pieces taken out of the vocabulary, so that no text whatever yields a control id (`ContentEncoder`). What a
template writes between contents becomes ids elsewhere, in `template.py`.

`ContentEncoder.encode` releases the GIL, so run it in a thread (`asyncio.to_thread`) and the event loop keeps running.
`tokenizers`' plain `encode` does not: it held the loop for seconds on a text of a megabyte. `encode_batch_fast` does.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from chatd.errors import InvalidRequest, ModelError
from chatd.sessions.detokenizer import BYTE_ALPHABET, Detokenizer, TokenBytes, decode

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_CONFIG_BYTES = 16 * 1024 * 1024
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What Rust's `\s` matches: an added token with `lstrip` or `rstrip` swallows these from the text beside it. Python's
# own `str.strip` would also take U+001C to U+001F.
_BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that a tokenizer looks for before anything else.

    Args:
        special: Without text of its own when decoded.
        lstrip, rstrip: Whether it swallows the blanks before and after it.
    """

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text between two control tokens, or between one and an end.

    Args:
        opens_text: No token stands before it, so a prefix that a tokenizer gives to a text belongs here.
    """

    text: str
    opens_text: bool = False


class ContentEncoder:
    """Encodes stretches of text, in which nothing is a control token.

    Args:
        definition: A tokenizer.json.
        control_ids: The ids that no text may yield.
    """

    def __init__(self, definition: Mapping[str, Any], control_ids: Iterable[int]) -> None:
        self._control_ids = frozenset(control_ids)
        content = dict(definition) | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        content["model"] = _without_pieces(content["model"], self._control_ids)
        self._opening = _build(content)
        inner = _without_text_prefix(content.get("pre_tokenizer"))
        self._inner = (
            self._opening if inner == content.get("pre_tokenizer") else _build(content | {"pre_tokenizer": inner})
        )

    def encode(self, stretches: Sequence[Stretch]) -> list[list[int]]:
        """Return the ids of each stretch, encoded as one string each. Releases the GIL."""
        if not stretches:
            return []
        if stretches[0].opens_text and self._inner is not self._opening:
            encodings = self._opening.encode_batch_fast([stretches[0].text], add_special_tokens=False)
            encodings += self._inner.encode_batch_fast([s.text for s in stretches[1:]], add_special_tokens=False)
        else:
            encodings = self._inner.encode_batch_fast([s.text for s in stretches], add_special_tokens=False)
        result: list[list[int]] = [encoding.ids for encoding in encodings]
        for ids in result:
            assert self._control_ids.isdisjoint(ids), "text was encoded as a control token"
        return result

    def control_ids_in(self, texts: Sequence[str]) -> set[int]:
        """Return the control ids that these texts yield; there should be none."""
        found: set[int] = set()
        for tokenizer in (self._opening, self._inner):
            for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
                found |= self._control_ids.intersection(encoding.ids)
        return found


class ChatTokenizer:
    """What chatd needs of a model's tokenizer.

    Args:
        folder: Holds tokenizer.json and, if the model has them, tokenizer_config.json and generation_config.json.

    Raises:
        ModelError: A file is missing, too large, not valid or of a kind that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.folder = folder
        self.definition = read_json(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        self.config = _optional_json(folder / "tokenizer_config.json")
        generation = _optional_json(folder / "generation_config.json")
        self.added_tokens = _added_tokens(self.definition, self.name)
        self._ids_of_added = {token.content: token.id for token in self.added_tokens}
        self._added_by_id = {token.id: token for token in self.added_tokens}
        self._pieces = _pieces(self.definition, self.name)
        self.vocab_size = max([*self._pieces.values(), *self._added_by_id], default=-1) + 1
        self.special_tokens = _special_tokens(self.config)
        """Names such as `bos_token` and their texts, as templates use them."""
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token", ""))
        self.stop_token_ids = frozenset(_eos_ids(generation, self.vocab_size)) | (
            frozenset() if self.eos_token_id is None else {self.eos_token_id}
        )
        """The ids that end an answer, by generation_config.json and the tokenizer; the template adds its own."""
        tokens = {token_id: piece for piece, token_id in self._pieces.items()}
        tokens.update({token.id: token.content for token in self.added_tokens})
        self.unknown_id = _unknown_id(self.definition, self._pieces)
        """What a character becomes that the vocabulary cannot spell; None where it can spell every text."""
        special_ids = [token.id for token in self.added_tokens if token.special]
        self.token_bytes = TokenBytes(self.definition.get("decoder"), tokens.get, special_ids)

    def token_id(self, token: str) -> int | None:
        """Return the id of an added token or a piece of the vocabulary."""
        found = self._ids_of_added.get(token)
        return self._pieces.get(token) if found is None else found

    def added_token(self, token_id: int) -> AddedToken | None:
        """Return the added token with this id."""
        return self._added_by_id.get(token_id)

    def in_vocabulary(self, token: AddedToken) -> bool:
        """Return whether an added token is a piece of the model's own vocabulary too."""
        return self._pieces.get(token.content) == token.id

    def content_encoder(self, control_ids: Iterable[int]) -> ContentEncoder:
        """Return an encoder of text that yields none of these ids."""
        try:
            return ContentEncoder(self.definition, control_ids)
        except ModelError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ModelError(f"tokenizer.json of {self.name} is not understood: {error}") from error

    def reference(self) -> Tokenizer:
        """Return the tokenizer as the model's authors made it, to check encodings against."""
        path = self.folder / "tokenizer.json"
        tokenizer = _guarded(lambda: Tokenizer.from_file(str(path)))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return Detokenizer(self.token_bytes)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a whole answer, special tokens left out."""
        return decode(self.token_bytes, ids)


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Load a model folder's tokenizer.

    Raises:
        ModelError: See `ChatTokenizer`.
    """
    return ChatTokenizer(folder)


def strip_beside(text: str, *, before: AddedToken | None, after: AddedToken | None) -> str:
    """Return the text between two control tokens less the blanks that these swallow."""
    if before is not None and before.rstrip:
        text = text.lstrip(_BLANKS)
    if after is not None and after.lstrip:
        text = text.rstrip(_BLANKS)
    return text


def check_size(contents: Iterable[str], max_bytes: int) -> None:
    """Refuse text that is too large to be worth tokenizing, or is not valid Unicode.

    Raises:
        InvalidRequest: The contents together have more than `max_bytes` bytes of UTF-8, or hold a lone surrogate.
    """
    num_bytes = 0
    for content in contents:
        # A character has at least one byte: what is too long by characters is refused before it is copied.
        num_bytes += len(content)
        if num_bytes <= max_bytes:
            try:
                num_bytes += len(content.encode()) - len(content)
            except UnicodeEncodeError as error:
                raise InvalidRequest("text holds a lone surrogate", param="content") from error
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"text has more than {max_bytes} bytes, which is the limit", code="content_too_large", param="content"
            )


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder.

    Raises:
        ModelError: The file is missing, too large, or does not hold a JSON object.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(f"{path.name} of {path.parent.name} has more than {max_bytes} bytes, which is the limit")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path.name} of {path.parent.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} of {path.parent.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} of {path.parent.name} is not a JSON object")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}


def _build(definition: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer made from a definition."""
    text = json.dumps(definition, ensure_ascii=False)
    return _guarded(lambda: Tokenizer.from_str(text))


def _guarded(load: Callable[[], Tokenizer]) -> Tokenizer:
    # Its own pool of threads would compete with the engine's, and makes a later fork warn. Read at each call.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return load()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust side is not an Exception
        raise ModelError(f"tokenizer.json cannot be loaded: {error}") from error


def _added_tokens(definition: Mapping[str, Any], name: str) -> tuple[AddedToken, ...]:
    try:
        return tuple(
            AddedToken(
                id=int(token["id"]),
                content=str(token["content"]),
                special=bool(token.get("special", False)),
                lstrip=bool(token.get("lstrip", False)),
                rstrip=bool(token.get("rstrip", False)),
            )
            for token in definition.get("added_tokens") or ()
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"added_tokens of tokenizer.json of {name} are not understood: {error!r}") from error


def _pieces(definition: Mapping[str, Any], name: str) -> dict[str, int]:
    """Return the model's own vocabulary, without the added tokens."""
    try:
        vocab = definition["model"]["vocab"]
        if isinstance(vocab, dict):
            return {str(piece): int(token_id) for piece, token_id in vocab.items()}
        return {str(piece): token_id for token_id, (piece, _score) in enumerate(vocab)}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the vocabulary in tokenizer.json of {name} is not understood: {error!r}") from error


def _unknown_id(definition: Mapping[str, Any], pieces: Mapping[str, int]) -> int | None:
    model = definition["model"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in pieces for byte in range(256)):
        return None
    if '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")) and BYTE_ALPHABET.keys() <= pieces.keys():
        return None
    unk_id = model.get("unk_id")
    return unk_id if isinstance(unk_id, int) else pieces.get(model.get("unk_token") or "")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_ids(generation: Mapping[str, Any], vocab_size: int) -> list[int]:
    value = generation.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size]


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
        result["merges"] = [merge for merge in model["merges"] if removed.keys().isdisjoint(_merge_pieces(merge))]
    return result


def _merge_pieces(merge: str | Sequence[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _without_text_prefix(pre_tokenizer: Any) -> Any:
    """Return a pre-tokenizer that does not put a space before text that stands after a token."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    if pre_tokenizer.get("type") == "Sequence":
        parts = [_without_text_prefix(part) for part in pre_tokenizer["pretokenizers"]]
        return pre_tokenizer | {"pretokenizers": parts}
    if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        return pre_tokenizer | {"prepend_scheme": "never"}
    return pre_tokenizer

"""A model's tokenizer, read without transformers. Knows files, ids and texts; knows nothing of templates.

Loading takes some 0.1 s for a vocabulary of 50,000, and the text of an answer comes from a table of bytes
(`detokenizer`). How messages become ids is the work of `content_encoder` and `prompt_encoder`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from chatd.errors import InvalidRequest, ModelError
from chatd.sessions.content_encoder import ContentEncoder, guarded
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
        self._definition = _read_definition(folder / "tokenizer.json")
        self.config = _optional_json(folder / "tokenizer_config.json")
        generation = _optional_json(folder / "generation_config.json")
        self.added_tokens = _added_tokens(self._definition, self.name)
        self._ids_of_added = {token.content: token.id for token in self.added_tokens}
        self._added_by_id = {token.id: token for token in self.added_tokens}
        self._pieces = _pieces(self._definition, self.name)
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
        self.unknown_id = _unknown_id(self._definition, self._pieces)
        """What a character becomes that the vocabulary cannot spell; None where it can spell every text."""
        special_ids = [token.id for token in self.added_tokens if token.special]
        self.token_bytes = TokenBytes(self._definition.get("decoder"), tokens.get, special_ids)

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
            return ContentEncoder(self._definition, control_ids)
        except ModelError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, msgspec.MsgspecError) as error:
            raise ModelError(f"tokenizer.json of {self.name} is not understood: {error}") from error

    def reference(self) -> Tokenizer:
        """Return the tokenizer as the model's authors made it, to check encodings against."""
        path = self.folder / "tokenizer.json"
        tokenizer = guarded(lambda: Tokenizer.from_file(str(path)))
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
    value = _decode(path, _read(path, max_bytes))
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} of {path.parent.name} is not a JSON object")
    return value


def _read_definition(path: Path) -> dict[str, Any]:
    """Return a tokenizer.json. Its merges stay as they are written: half a million lists are made for nothing."""
    data = _read(path, MAX_TOKENIZER_BYTES)
    parts = _decode(path, data, dict[str, msgspec.Raw])
    model = _decode(path, bytes(parts.pop("model", b"{}")), dict[str, msgspec.Raw])
    merges = model.pop("merges", None)
    definition = {name: _decode(path, bytes(part)) for name, part in parts.items()}
    definition["model"] = {name: _decode(path, bytes(part)) for name, part in model.items()}
    if merges is not None:
        definition["model"]["merges"] = merges.copy()
    return definition


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(f"{path.name} of {path.parent.name} has more than {max_bytes} bytes, which is the limit")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path.name} of {path.parent.name} cannot be read: {error.strerror}") from error


def _decode(path: Path, data: bytes, type: Any = Any) -> Any:
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path.name} of {path.parent.name} is not a JSON object: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path.name} of {path.parent.name} is not valid JSON: {error}") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}


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
            if not all(isinstance(token_id, int) for token_id in vocab.values()):
                raise TypeError("ids must be whole numbers")
            return vocab
        return {str(piece): token_id for token_id, (piece, _score) in enumerate(vocab)}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the vocabulary in tokenizer.json of {name} is not understood: {error!r}") from error


def _unknown_id(definition: Mapping[str, Any], pieces: Mapping[str, int]) -> int | None:
    model = definition["model"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in pieces for byte in range(256)):
        return None
    if b'"ByteLevel"' in msgspec.json.encode(definition.get("pre_tokenizer")) and BYTE_ALPHABET.keys() <= pieces.keys():
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

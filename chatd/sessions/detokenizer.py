"""Token ids to text, one step at a time. Knows vocabularies and decoders; knows nothing of templates or sessions.

Every token is a run of UTF-8 bytes (`TokenBytes`), so the text of an answer is the decoding of the bytes of its tokens
laid end to end. `Detokenizer` decodes them as they come and holds back the bytes of an unfinished character. The cost
of a token does not depend on what came before it.

Byte-level decoders (GPT-2, Llama-3, Qwen, Mistral-Nemo) and metaspace decoders with byte fallback (Llama-2, Mistral,
Gemma, Phi-3) are supported. For valid UTF-8 the text is that of `tokenizers`' own decode with special tokens skipped.
For invalid bytes it is Python's `errors="replace"`; `tokenizers`' byte fallback would turn every byte of a run into
U+FFFD as soon as one of them is wrong, which cannot be known while the run is still growing.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from chatd.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes that they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
"""The character by which byte-level vocabularies spell a byte, and that byte."""


class TokenBytes(dict[int, bytes]):
    """The bytes that each token id adds to the text: none for special and unknown ids. Filled in as ids are met.

    Args:
        decoder: The `decoder` of a tokenizer.json.
        token_of: Maps an id to its token, or to None for an id outside the vocabulary.
        special_ids: The ids that have no text.

    Raises:
        ModelError: The decoder is of a kind that is not supported; names it.
    """

    def __init__(
        self,
        decoder: Mapping[str, Any] | None,
        token_of: Callable[[int], str | None],
        special_ids: Iterable[int],
    ) -> None:
        super().__init__()
        self._token_of = token_of
        self._special_ids = frozenset(special_ids)
        self._byte_level = False
        self._byte_fallback = False
        self._metaspace: str | None = None
        self._replacements: list[tuple[str, str]] = []
        self.max_stripped_spaces = 0
        """How many spaces at the very start of a text belong to the encoding, not to the text."""
        fused = False
        for step in _steps_of(decoder):
            match step:
                case {"type": "ByteLevel"}:
                    self._byte_level = True
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if not fused:
                    self._replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                    self.max_stripped_spaces = start
                case {"type": "Metaspace", "replacement": str(char)} if not fused:
                    self._replacements.append((char, " "))
                    if step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True):
                        self._metaspace = char
                case _:
                    raise ModelError(
                        f"decoder {step.get('type')!r} of tokenizer.json is not supported; supported are ByteLevel, "
                        "Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip"
                    )

    def __missing__(self, token_id: int) -> bytes:
        data = self._compute(token_id, first=False)
        self[token_id] = data
        return data

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token that stands at the very start of a text."""
        if self._metaspace is None:
            return self[token_id]
        return self._compute(token_id, first=True)

    def has_text(self, token_id: int) -> bool:
        """Return whether the id is a token of the vocabulary that is not special."""
        return token_id not in self._special_ids and self._token_of(token_id) is not None

    def _compute(self, token_id: int, *, first: bool) -> bytes:
        token = None if token_id in self._special_ids else self._token_of(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([BYTE_ALPHABET[char] for char in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if first and self._metaspace is not None:
            token = token.replace(self._metaspace, "")
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _steps_of(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the elementary decoders of a (possibly nested) sequence."""
    if decoder is None:
        raise ModelError("tokenizer.json has no decoder, so token ids cannot be turned into text")
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", ()) for step in _steps_of(part)]
    return [decoder]


class Detokenizer:
    """Turns the token ids of one answer into text deltas that concatenate to the whole text.

    A delta never holds half a character, and U+FFFD only where the whole text has it.
    """

    __slots__ = ("_at_start", "_decoder", "_first_seen", "_num_strippable", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._first_seen = False
        self._num_strippable = token_bytes.max_stripped_spaces

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; it may be empty."""
        token_bytes = self._token_bytes
        if self._at_start:
            return self._decoder.decode(self._start(ids))
        if len(ids) == 1:
            return self._decoder.decode(token_bytes[ids[0]])
        return self._decoder.decode(b"".join([token_bytes[token_id] for token_id in ids]))

    def flush(self) -> str:
        """Return what an unfinished character at the end amounts to: nothing, or U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _start(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ids at the start of a text, where some tokenizers put a space of their own."""
        token_bytes = self._token_bytes
        for position, token_id in enumerate(ids):
            if not token_bytes.has_text(token_id):
                continue
            data = token_bytes[token_id] if self._first_seen else token_bytes.first(token_id)
            self._first_seen = True
            while self._num_strippable > 0 and data.startswith(b" "):
                data = data[1:]
                self._num_strippable -= 1
            if data or self._num_strippable == 0:
                self._at_start = False
                return data + b"".join([token_bytes[later] for later in ids[position + 1 :]])
        return b""


def decode(token_bytes: TokenBytes, ids: Sequence[int]) -> str:
    """Return the whole text of a sequence of ids: what a `Detokenizer` gives for it, in one piece."""
    detokenizer = Detokenizer(token_bytes)
    return detokenizer.push(ids) + detokenizer.flush()

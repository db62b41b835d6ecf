"""Reads the header of a safetensors file with every bound checked; knows nothing of tensors' values and of torch.

The format: eight bytes of header length (little endian), a JSON object of name → {dtype, shape, data_offsets}, then the
data.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatd.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        dtype: The format's name for it; one of `DTYPE_BYTES` where the decoder can read it.
        shape: In torch order.
        start: First byte, from the start of the data.
        end: One past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file, which must fill it exactly.

    Raises:
        ModelError: `model_corrupt` with the reason: truncated, an offset out of bounds, an overlap or a gap, or a shape
            that does not fill its bytes.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _corrupt(path, f"the header claims {length} bytes in a file of {size}")
            raw = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"the header cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise _corrupt(path, "the header is not a JSON object")
    entries = {name: _entry(path, name, value) for name, value in raw.items() if name != "__metadata__"}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise _corrupt(path, f"{name} starts at byte {entry.start} of the data, not at {end}")
        end = entry.end
    if end != size - 8 - length:
        raise _corrupt(path, f"the tensors end at byte {end} of the data, the file at {size - 8 - length}")
    return entries


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"{name} lacks dtype, shape or data_offsets") from error
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**62 for number in numbers):
        raise _corrupt(path, f"{name} has a shape or an offset that is not a size")
    if end < start:
        raise _corrupt(path, f"{name} ends at byte {end}, before it starts at {start}")
    num_bytes = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if num_bytes is not None and math.prod(shape) * num_bytes != end - start:
        raise _corrupt(path, f"{name} has shape {shape} of {dtype} in {end - start} bytes")
    return TensorEntry(str(dtype), tuple(shape), start, end)


def _corrupt(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is not a whole safetensors file: {reason}", code="model_corrupt")

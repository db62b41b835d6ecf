"""Arrays that the host fills for each step and the device reads, there always in the same memory.

All of them are one piece of memory, on the host and on the device, so a step's inputs are one copy. The host has
several: it fills one while the copies of the steps in flight still read the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from chatd_kernels.stream import Ended, Stream

_ALIGNMENT = 64  # bytes: kernels that read a vector at once may do so at the start of each array
_NUM_STAGES = 3  # two steps in flight, and one that is made ready


class Stage:
    """One filling of the arrays.

    Attributes:
        arrays: By name, on the host; what they hold from an earlier step is to be overwritten.
    """

    def __init__(self, memory: torch.Tensor, target: torch.Tensor, arrays: dict[str, npt.NDArray[np.integer]]) -> None:
        self._memory = memory
        self._target = target
        self.arrays = arrays
        self.ended: Ended | None = None

    def send(self) -> None:
        """Copy everything to the device; a part of a step's work."""
        self._target.copy_(self._memory, non_blocking=True)


class StagedArrays:
    """The arrays.

    Args:
        stream: Of the device.
        shapes: By name, shape and dtype of each.

    Attributes:
        device: By name, the arrays on the device.
    """

    def __init__(self, stream: Stream, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (shape, dtype) in shapes.items():
            size = int(np.prod(shape)) * dtype.itemsize
            places[name] = (end, end + size)
            end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT

        def cut(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: memory[places[name][0] : places[name][1]].view(dtype).view(shape)
                for name, (shape, dtype) in shapes.items()
            }

        target = torch.zeros(end, dtype=torch.uint8, device=stream.device)
        self.device = cut(target)
        self._stages = []
        for _ in range(_NUM_STAGES):
            memory = stream.pinned((end,), torch.uint8)
            arrays = {name: array.numpy() for name, array in cut(memory).items()}
            self._stages.append(Stage(memory, target, arrays))
        self._next = 0

    def claim(self) -> Stage:
        """Return the filling that was used longest ago, once the device has read it; its `ended` is to be set."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        if stage.ended is not None:
            ended, stage.ended = stage.ended, None
            # What went wrong in that step was told by its own result.
            with suppress(Exception):
                ended.wait()
        return stage

"""What runs steps on a device in order: work goes in, and an end that can be waited for comes out.

`gpu_device.GpuStream` is that of a GPU. `InterpretedStream` stands in its place under Triton's interpreter, on CPU
tensors: work that was put in runs when its end is waited for and not before, so that a buffer which the host changes
too early, or reads too early, shows as it would on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's memory.

    Attributes:
        free: Taken by nobody, other processes included.
        total: Of the device.
    """

    free: int
    total: int


class Ended(Protocol):
    """The end of some work."""

    def wait(self) -> None:
        """Wait until the work, and all that was put in before it, has run.

        Raises:
            Exception: What went wrong on the device.
        """
        ...

    @property
    def seconds(self) -> float:
        """How long the work took; once it was waited for."""
        ...


class Stream(Protocol):
    """Runs work in the order in which it was put in, for the thread that made it.

    Attributes:
        device: Where it runs, and where its tensors are.
        name: Of the device, for people.
        has_bfloat16: Whether the device computes in bfloat16.
    """

    device: torch.device
    name: str
    has_bfloat16: bool

    def run(self, work: Work) -> Ended:
        """Put work in. What it reads of the host must stay as it is until its end."""
        ...

    def capture(self, work: Work) -> Work:
        """Return what replays the work on the very tensors that it names now; it must have run once before."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that the device copies to and from by itself."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device, which is there for what is put in after it; the array may change.

        Work may ask for one itself, and find it there.
        """
        ...

    def synchronize(self) -> None:
        """Wait for everything.

        Raises:
            Exception: What went wrong on the device. A device that was lost raises at every call.
        """
        ...

    def memory(self) -> DeviceMemory:
        """Return what is free now, with what the allocator keeps for itself given back."""
        ...

    def peak_bytes(self, work: Work) -> int:
        """Run work, and return how much memory it took beyond what was taken before."""
        ...


class _Deferred:
    """Work of an `InterpretedStream`, and its end."""

    def __init__(self, stream: InterpretedStream, work: Work) -> None:
        self._stream = stream
        self._work: Work | None = work
        self._error: Exception | None = None
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds

    def run(self) -> None:
        assert self._work is not None
        start = perf_counter()
        try:
            self._work()
        except Exception as error:
            self._error = error
        self._work = None
        self._seconds = perf_counter() - start

    def wait(self) -> None:
        while self._work is not None:
            self._stream.advance()
        if self._error is not None:
            raise self._error


class InterpretedStream:
    """The stream of the CPU's tensors under Triton's interpreter; see `Stream`.

    Args:
        memory_bytes: What the device is said to have.
    """

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.device = torch.device("cpu")
        self.name = "Triton's interpreter"
        self.has_bfloat16 = True
        self._memory_bytes = memory_bytes
        self._waiting: deque[_Deferred] = deque()

    def run(self, work: Work) -> Ended:
        """Put work in."""
        deferred = _Deferred(self, work)
        self._waiting.append(deferred)
        return deferred

    def advance(self) -> None:
        """Run the work that has waited longest."""
        self._waiting.popleft().run()

    def capture(self, work: Work) -> Work:
        """Return what replays the work."""
        return work

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that the device reaches."""
        return torch.zeros(shape, dtype=dtype)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device."""
        return torch.from_numpy(np.array(array))

    def synchronize(self) -> None:
        """Wait for everything."""
        while self._waiting:
            self.advance()

    def memory(self) -> DeviceMemory:
        """Return what is free now."""
        return DeviceMemory(self._memory_bytes, self._memory_bytes)

    def peak_bytes(self, work: Work) -> int:
        """Run work, and return how much memory it took."""
        self.synchronize()
        self.run(work).wait()
        return 0

"""What the launchers of the GPU's kernels know of a device, and ask of one: the only module that names torch.cuda.

AMD's builds of torch answer to the same names. Under Triton's interpreter tensors lie on the CPU, and the device is one
that makes every kernel take its general path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy.typing as npt
import torch

from chatd_kernels.stream import DeviceMemory, Ended, Work


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a choice of a kernel depends on.

    Attributes:
        num_processors: Streaming multiprocessors (compute units).
        has_fp8: Whether e4m3 converts in one instruction (NVIDIA from sm_89 on).
        fits_wide_tiles: Whether shared memory holds two stages of wide tiles (160 KiB a block; NVIDIA's sm_80 and
            sm_90).
        has_shared_operands: Whether matrix products read their operands from shared memory, which leaves more registers
            (NVIDIA from sm_90 on).
    """

    num_processors: int
    has_fp8: bool
    fits_wide_tiles: bool
    has_shared_operands: bool


INTERPRETED = DeviceFacts(num_processors=2, has_fp8=False, fits_wide_tiles=False, has_shared_operands=False)
SM_80 = DeviceFacts(num_processors=108, has_fp8=False, fits_wide_tiles=True, has_shared_operands=False)
SM_90 = DeviceFacts(num_processors=132, has_fp8=True, fits_wide_tiles=True, has_shared_operands=True)


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a tensor's device."""
    if device.type == "cpu":
        return INTERPRETED
    return _gpu_facts(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _gpu_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    is_nvidia = torch.version.hip is None
    capability = (properties.major, properties.minor)
    return DeviceFacts(
        num_processors=properties.multi_processor_count,
        has_fp8=is_nvidia and capability >= (8, 9),
        fits_wide_tiles=is_nvidia and (capability == (8, 0) or properties.major in (9, 10)),
        has_shared_operands=is_nvidia and properties.major in (9, 10),
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, copied there in the order of its current stream, without waiting for it."""
    return _reachable(tensor, device).to(device, non_blocking=True)


def _reachable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host where a GPU copies it by itself; the allocator keeps it there until that is done."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device's current stream has run everything."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


def pin_memory(data: torch.Tensor) -> None:
    """Let GPUs copy to and from memory that exists; torch's own pinned memory is rounded up to a power of two.

    Raises:
        OSError: the system does not pin so much.
    """
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error):
        raise OSError(f"{data.nbytes} bytes were not pinned: {error}")


OutOfDeviceMemory = torch.OutOfMemoryError
"""What an allocation on a device raises that has no room; the device goes on working."""


def has_gpu() -> bool:
    """Return whether torch can compute on a GPU here."""
    return torch.cuda.is_available()


class _EndedOnGpu:
    """An end in a GPU's stream."""

    def __init__(self, stream: torch.cuda.Stream, work: Work) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record(stream)
        work()
        self._end.record(stream)

    def wait(self) -> None:
        self._end.synchronize()

    @property
    def seconds(self) -> float:
        return float(self._start.elapsed_time(self._end)) / 1e3


class GpuStream:
    """A stream of the current GPU, which becomes this thread's own; see `stream.Stream`.

    Work starts at once, so an error of the host's part of it, such as `OutOfDeviceMemory`, is raised by `run`.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        self.has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._graph_memory: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def run(self, work: Work) -> Ended:
        """Put work in."""
        return _EndedOnGpu(self._stream, work)

    def capture(self, work: Work) -> Work:
        """Return what replays the work."""
        if not self._graphs:
            # One memory for all graphs, since no two of them run at a time. A memory whose graphs are all gone is given
            # back, and its handle good for nothing.
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._stream):
            work()
        self._graphs.add(graph)
        return graph.replay

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that the device reaches."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy on the device."""
        return to_device(torch.from_numpy(array), self.device)

    def synchronize(self) -> None:
        """Wait for everything."""
        torch.cuda.synchronize(self.device)

    def memory(self) -> DeviceMemory:
        """Return what is free now."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return DeviceMemory(*torch.cuda.mem_get_info(self.device))

    def peak_bytes(self, work: Work) -> int:
        """Run work, and return how much memory it took."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device) - before

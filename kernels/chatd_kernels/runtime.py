"""How the CPU kernels are compiled, cached, started and spread over threads.

A kernel here is one compiled function `void(int64 frame)`. A frame is an array of int64: two counters, then addresses
and numbers. Every thread of a parallel launch runs the same function on the same frame and takes items of work from the
first counter (`next_item`) until none is left; a thread that needs scratch memory takes its own number from the second
(`claim_worker`). Which thread computes an item never changes what is computed.

Threads are those of torch's own OpenMP team, entered by `GOMP_parallel` of the libgomp in torch's library folder: no
second pool, about 3 µs a launch. Where there is none (macOS, Windows), kernels run on the calling thread.

Idle OpenMP threads spin, and on a shared machine that makes a step ten times slower. Whoever starts the engine's
process sets OMP_WAIT_POLICY=PASSIVE in its environment: libgomp reads it when it is loaded, that is before torch is
imported, so it is too late to set it here.

Compiled code is kept in a cache folder (`set_cache_root`), under a digest of this package's source; numba keys it by
CPU inside.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from chatd_kernels.cpus import available_cpus
from chatd_kernels.jit import VERSIONS, cfunc, config, ir, llvm, types
from chatd_kernels.vector import emit_fetch_add, pointer

OPERATIONS = ("copy_blocks", "linear", "paged_attention", "rms_norm", "rope_kv_write", "silu_mul", "swap_blocks")
"""Folders of the package that hold an operation."""


# Inside kernels ----------------------------------------------------------------------------------


# Not compiled functions, since numba would compile one for each number it finds as an argument.


@llvm
def next_item(typingctx: Any, frame: Any) -> Any:
    """Take the number of the next item of work."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fetch_add(builder, args[0], 0)

    return types.int64(types.int64), codegen


@llvm
def claim_worker(typingctx: Any, frame: Any) -> Any:
    """Take this thread's number, 0 <= number < threads of the launch."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fetch_add(builder, args[0], 8)

    return types.int64(types.int64), codegen


@llvm
def argument(typingctx: Any, frame: Any, index: Any) -> Any:
    """The launch's argument number `index`, counted from 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.shl(builder.add(args[1], ir.Constant(ir.IntType(64), 2)), ir.Constant(ir.IntType(64), 3))
        return builder.load(pointer(builder, builder.add(args[0], offset), ir.IntType(64)))

    return types.int64(types.int64, types.int64), codegen


# Threads -----------------------------------------------------------------------------------------


def _load_gomp() -> Any:
    """`GOMP_parallel` of torch's libgomp, or None."""
    if not sys.platform.startswith("linux"):
        return None
    package = Path(torch.__file__).parent
    for path in sorted((*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*"))):
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None


_gomp_parallel = _load_gomp()


class _Team:
    """How many threads a parallel launch uses."""

    def __init__(self) -> None:
        self.num_threads = available_cpus() if _gomp_parallel is not None else 1


_team = _Team()


def num_threads() -> int:
    """Threads of a parallel launch."""
    return _team.num_threads


def set_num_threads(count: int) -> None:
    """Set the threads of parallel launches, and of torch's own operators, whose team they share.

    Raises:
        ValueError: `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"{count} threads: at least 1 is needed")
    _team.num_threads = count if _gomp_parallel is not None else 1
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


# Compilation -------------------------------------------------------------------------------------


# numba reads where to keep compiled code from a variable of the whole process.
_compiling = threading.Lock()


class Kernel:
    """A function `body(frame: int64) -> None`, compiled (or loaded from the cache) when first needed."""

    def __init__(self, body: Callable[[int], None]) -> None:
        self.name = f"{body.__module__.removeprefix('chatd_kernels.')}.{body.__name__}"
        self._body = body
        self._lock = threading.Lock()
        self._address = 0
        self._call: Any = None
        self._keep: Any = None
        self.was_cached = False

    def prepare(self) -> None:
        """Compile the kernel, or load it from the cache."""
        with self._lock:
            if self._call is not None:
                return
            with _compiling:
                before = config.CACHE_DIR
                folder = cache_folder() if _source_digest() == _SOURCE else None
                config.CACHE_DIR = "" if folder is None else str(folder)
                try:
                    compiled = cfunc(types.void(types.int64), cache=folder is not None, error_model="numpy")(self._body)
                finally:
                    config.CACHE_DIR = before
            self._keep = compiled
            self.was_cached = compiled.cache_hits > 0
            self._address = compiled.address
            self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)

    def launch(self, parallel: bool, *arguments: int, num_threads: int | None = None) -> int:
        """Run the kernel on int64 arguments, on all threads of the team (or `num_threads`) or on this one.

        Returns what the kernel left in the frame's second counter.

        The caller keeps what the addresses point to alive, and gives another thread no part of it meanwhile.
        """
        if self._call is None:
            self.prepare()
        frame = array.array("q", (0, 0, *arguments))
        address = frame.buffer_info()[0]
        threads = num_threads or _team.num_threads
        if parallel and threads > 1:
            _gomp_parallel(self._address, address, threads, 0)
        else:
            self._call(address)
        return frame[1]


class _Scratch(threading.local):
    """A thread's own scratch memory, as large as it was ever asked for."""

    def __init__(self) -> None:
        self.grow(1 << 16)

    def grow(self, num_bytes: int) -> None:
        """Replace the memory by a larger piece."""
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.num_bytes = num_bytes
        self.address: int = self.memory.data_ptr()


_scratch = _Scratch()


def scratch(num_bytes: int) -> int:
    """The address of scratch memory for one launch, aligned to 64 bytes; the calling thread's next call reuses it."""
    if _scratch.num_bytes < num_bytes:
        _scratch.grow(num_bytes)
    return _scratch.address


_kernels: list[Kernel] = []


def kernel(body: Callable[[int], None]) -> Kernel:
    """Make a `Kernel` of a function and list it for `warm_up`."""
    made = Kernel(body)
    _kernels.append(made)
    return made


def float_bits(value: float) -> int:
    """A float as the int64 of its float64 bits, to go into a frame (`load_f64` reads it back)."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def warm_up(progress: Callable[[str, int, int], None] | None = None) -> int:
    """Compile, or load from the cache, every CPU kernel, and return how many had to be compiled.

    Kernels do not depend on sizes, so there is nothing left to compile afterwards, whatever the model.

    Args:
        progress: called with (name, done, total) before each kernel.
    """
    compiled = 0
    for operation in OPERATIONS:
        import_module(f"chatd_kernels.{operation}.cpu")
    for index, entry in enumerate(_kernels):
        if progress is not None:
            progress(entry.name, index, len(_kernels))
        entry.prepare()
        compiled += not entry.was_cached
    return compiled


class _Cache:
    """Where compiled kernels are kept; `chatd` in the user's cache folder where nobody said."""

    root: Path | None = None


def set_cache_root(folder: Path) -> None:
    """Keep compiled kernels in this folder from now on; call it before a kernel is needed."""
    _Cache.root = folder
    cache_folder.cache_clear()


@cache
def cache_folder() -> Path | None:
    """The folder of compiled kernels for this source and these compilers, made if needed; None if it cannot be."""
    root = _Cache.root or Path.home() / ".cache" / "chatd"
    folder = root / "kernels" / _SOURCE
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _source_digest() -> str:
    """A name that changes with the source of any kernel: numba looks only at the file of the kernel itself."""
    digest = hashlib.sha256(f"{VERSIONS} {sys.version}".encode())
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.name in ("__init__.py", "reference.py", "testing.py"):
            continue
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


_SOURCE = _source_digest()
"""Of what is imported, or will be if nobody changes it meanwhile; code of a source that was changed is not kept."""

"""Which launcher runs an operation on which device.

A launcher is the function of the operation's name in `chatd_kernels.<operation>.<backend>`; a backend serves a device
type. Modules are imported when first used, so that a machine without a GPU never imports Triton, and the other way
round.

Under Triton's interpreter the GPU's kernels run on tensors of the CPU: `use_backend("gpu")` has the whole process
choose them, whatever thread asks and wherever its tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

Backend = Literal["cpu", "gpu"]

BACKENDS: dict[str, Backend] = {"cpu": "cpu", "cuda": "gpu"}
"""Device type -> module of the operation's folder; not every operation has every one."""


class _Chosen:
    """What `use_backend` chose; None leaves it to the device."""

    backend: Backend | None = None


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Run every operation of this process on one backend until the context ends.

    "gpu" needs a process that interprets Triton's kernels where tensors lie on the CPU: TRITON_INTERPRET=1 in its
    environment before Triton is imported.

    Raises:
        ValueError: no such backend.
    """
    if backend not in BACKENDS.values():
        raise ValueError(f"backend {backend!r} is not one of {', '.join(sorted(set(BACKENDS.values())))}")
    before = _Chosen.backend
    _Chosen.backend = backend
    try:
        yield
    finally:
        _Chosen.backend = before


def backend_of(device_type: str) -> Backend:
    """The backend that serves a type of device now.

    Raises:
        NotImplementedError: none does.
    """
    backend = _Chosen.backend or BACKENDS.get(device_type)
    if backend is None:
        known = ", ".join(sorted(BACKENDS))
        raise NotImplementedError(f"no kernels for device type {device_type!r} (known: {known})")
    return backend


def launcher(operation: str, device_type: str, function: str | None = None) -> Callable[..., Any]:
    """The launcher of an operation's function (by default the one of its own name) on a type of device.

    Raises:
        NotImplementedError: no backend serves this type of device, or this one does not have the operation.
    """
    return _find(operation, backend_of(device_type), function or operation)


@cache
def _find(operation: str, backend: Backend, function: str) -> Callable[..., Any]:
    name = f"chatd_kernels.{operation}.{backend}"
    if find_spec(name) is None:
        raise NotImplementedError(f"{operation} has no kernel for the backend {backend!r}")
    found: Callable[..., Any] = getattr(import_module(name), function)
    return found

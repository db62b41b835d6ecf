"""Which launcher runs an operation on which device.

A launcher is the function of the operation's name in `chatd_kernels.<operation>.<backend>`; a backend serves a device
type. Modules are imported when first used, so that a machine without a GPU never imports Triton, and the other way
round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

BACKENDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device type -> module of the operation's folder; not every operation has every one."""


@cache
def launcher(operation: str, device_type: str, function: str | None = None) -> Callable[..., Any]:
    """The launcher of an operation's function (by default the one of its own name) on a type of device.

    Raises:
        NotImplementedError: no backend serves this type of device.
    """
    name = f"chatd_kernels.{operation}.{BACKENDS.get(device_type, '')}"
    if device_type not in BACKENDS or find_spec(name) is None:
        known = ", ".join(sorted(BACKENDS))
        raise NotImplementedError(f"{operation} has no kernel for device type {device_type!r} (known: {known})")
    found: Callable[..., Any] = getattr(import_module(name), function or operation)
    return found

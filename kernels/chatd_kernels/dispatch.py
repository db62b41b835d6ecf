"""Which launcher runs an operation on which device.

A launcher is the function of the operation's name in `chatd_kernels.<operation>.<backend>`; a backend serves a device
type. Modules are imported when first used, so that a machine without a GPU never imports Triton, and the other way
round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

BACKENDS = {"cpu": "cpu"}
"""Device type -> module of the operation's folder."""


@cache
def launcher(operation: str, device_type: str, function: str | None = None) -> Callable[..., Any]:
    """The launcher of an operation's function (by default the one of its own name) on a type of device.

    Raises:
        NotImplementedError: no backend serves this type of device.
    """
    if device_type not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise NotImplementedError(f"{operation} has no kernel for device type {device_type!r} (known: {known})")
    module = import_module(f"chatd_kernels.{operation}.{BACKENDS[device_type]}")
    found: Callable[..., Any] = getattr(module, function or operation)
    return found

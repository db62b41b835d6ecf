"""Typed doors to numba and llvmlite, most of which have no types: what comes through here is `Any` or typed as used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding  # type: ignore[import-untyped]
import llvmlite.ir  # type: ignore[import-untyped]
import numba
import numba.core.cgutils
import numba.core.codegen
import numba.core.datamodel
import numba.extending

Function = TypeVar("Function", bound=Callable[..., Any])

ir: Any = llvmlite.ir
binding: Any = llvmlite.binding
cgutils: Any = numba.core.cgutils
codegen: Any = numba.core.codegen
config: Any = numba.config
datamodel: Any = numba.core.datamodel
carray: Any = numba.carray  # type: ignore[attr-defined]
cfunc: Any = numba.cfunc
types: Any = numba.types
VERSIONS = f"{numba.__version__} {llvmlite.__version__}"


def jit(function: Function) -> Function:
    """A function of compiled code. Divisions do not raise: nothing in a kernel may."""
    return cast(Function, numba.njit(error_model="numpy")(function))


def llvm(define: Callable[..., Any]) -> Any:
    """An operation of compiled code that is written as LLVM instructions (numba's `intrinsic`)."""
    return numba.extending.intrinsic(define)

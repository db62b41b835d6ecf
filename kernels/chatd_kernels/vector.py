"""Explicit vectors of 16 float32 lanes for numba: what the CPU kernels are written in.

numba gives no control over how a loop becomes vector code, and a reduction that LLVM may or may not reassociate is not
the same arithmetic on every path. Here each operation is one LLVM instruction on `<16 x float>`, which LLVM splits into
four SSE, two AVX2 or one AVX-512 operation. Every fused multiply-add is written out (`fma`), nothing is contracted or
reassociated, so a row's arithmetic is what the source says, whatever else is in the batch.

All addresses are plain int64 byte addresses. Nothing is bounds-checked: launchers check before they launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chatd_kernels.jit import carray, cgutils, datamodel, ir, jit, llvm, types

LANES = 16
"""Lanes of a vector; also the number of positions in one group of the K layout."""

FLOAT_BYTES = 4
HALF_BYTES = 2

_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_half = ir.HalfType()
_f32 = ir.FloatType()
F32_VECTOR = ir.VectorType(_f32, LANES)
F16_VECTOR = ir.VectorType(_half, LANES)
I32_VECTOR = ir.VectorType(_i32, LANES)


class _Float32x16(types.Type):  # type: ignore[misc]
    """The numba type of a value of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = _Float32x16()


@datamodel.register_default(_Float32x16)
class _Float32x16Model(datamodel.models.PrimitiveModel):  # type: ignore[misc]
    """A `float32x16` is one LLVM vector value."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, F32_VECTOR)


# Building blocks for intrinsics ------------------------------------------------------------------


def pointer(builder: Any, address: Any, value_type: Any) -> Any:
    """The LLVM pointer to `value_type` at an int64 address."""
    return builder.inttoptr(address, value_type.as_pointer())


def load_vector(builder: Any, address: Any, half: bool) -> Any:
    """Load 16 lanes with no alignment; 16-bit floats are widened, which is exact."""
    if half:
        return builder.fpext(builder.load(pointer(builder, address, F16_VECTOR), align=HALF_BYTES), F32_VECTOR)
    return builder.load(pointer(builder, address, F32_VECTOR), align=FLOAT_BYTES)


def splat(builder: Any, scalar: Any, vector_type: Any = F32_VECTOR) -> Any:
    """Copy a scalar to every lane."""
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_i32, 0))
    zeros = ir.Constant(I32_VECTOR, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), zeros)


def broadcast(builder: Any, address: Any) -> Any:
    """The float32 at an address in every lane."""
    return splat(builder, builder.load(pointer(builder, address, _f32)))


def call_llvm(builder: Any, name: str, return_type: Any, arguments: list[Any]) -> Any:
    """Call an LLVM intrinsic by name."""
    function_type = ir.FunctionType(return_type, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` with one rounding."""
    return call_llvm(builder, "llvm.fma.v16f32", F32_VECTOR, [a, b, c])


def _vector_constant(value: float) -> Any:
    return ir.Constant(F32_VECTOR, [value] * LANES)


def _binary(name: str, emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def define(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0], args[1])

        return float32x16(float32x16, float32x16), codegen

    define.__name__ = name
    define.__doc__ = doc
    return llvm(define)


vadd = _binary("vadd", lambda b, x, y: b.fadd(x, y), "Lane-wise `a + b`.")
vsub = _binary("vsub", lambda b, x, y: b.fsub(x, y), "Lane-wise `a - b`.")
vmul = _binary("vmul", lambda b, x, y: b.fmul(x, y), "Lane-wise `a * b`.")
vdiv = _binary("vdiv", lambda b, x, y: b.fdiv(x, y), "Lane-wise `a / b`.")
vmax = _binary("vmax", lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), "Lane-wise `a if a > b else b`.")
vmin = _binary("vmin", lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y), "Lane-wise `a if a < b else b`.")


@llvm
def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Lane-wise `a * b + c` with one rounding."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused_multiply_add(builder, *args)

    return float32x16(float32x16, float32x16, float32x16), codegen


@llvm
def vsplat(typingctx: Any, value: Any) -> Any:
    """A float32 in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return float32x16(types.float32), codegen


@llvm
def vabs(typingctx: Any, a: Any) -> Any:
    """Lane-wise `|a|`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.fabs.v16f32", F32_VECTOR, [args[0]])

    return float32x16(float32x16), codegen


@llvm
def vload(typingctx: Any, address: Any) -> Any:
    """16 float32 from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_vector(builder, args[0], half=False)

    return float32x16(types.int64), codegen


@llvm
def vload_half(typingctx: Any, address: Any) -> Any:
    """16 IEEE half floats from an address, widened."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_vector(builder, args[0], half=True)

    return float32x16(types.int64), codegen


@llvm
def vstore(typingctx: Any, address: Any, value: Any) -> Any:
    """Store 16 float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], F32_VECTOR), align=FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, float32x16), codegen


@llvm
def vstore_half(typingctx: Any, address: Any, value: Any) -> Any:
    """Round 16 lanes to half floats (to nearest, ties to even) and store them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = builder.fptrunc(args[1], F16_VECTOR)
        builder.store(halves, pointer(builder, args[0], F16_VECTOR), align=HALF_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, float32x16), codegen


@llvm
def vscatter_int16_pairs(typingctx: Any, address: Any, stride: Any, value: Any) -> Any:
    """Round 16 lanes to the nearest int16 and store lanes 2 i and 2 i + 1 at `address + i * stride`.

    Ties go to even, numbers beyond int16 are cut, NaN becomes 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, stride, value = args
        shorts = ir.VectorType(ir.IntType(16), LANES)
        nearest = call_llvm(builder, "llvm.rint.v16f32", F32_VECTOR, [value])
        integers = call_llvm(builder, "llvm.fptosi.sat.v16i16.v16f32", shorts, [nearest])
        pairs = builder.bitcast(integers, ir.VectorType(_i32, LANES // 2))
        for lane in range(LANES // 2):
            target = pointer(builder, builder.add(address, builder.mul(stride, ir.Constant(_i64, lane))), _i32)
            builder.store(builder.extract_element(pairs, ir.Constant(_i32, lane)), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x16), codegen


def _scatter(name: str, half: bool) -> Any:
    def define(typingctx: Any, address: Any, stride: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, stride, value = args
            element = _half if half else _f32
            if half:
                value = builder.fptrunc(value, F16_VECTOR)
            for lane in range(LANES):
                offset = builder.mul(stride, ir.Constant(_i64, lane))
                target = pointer(builder, builder.add(address, offset), element)
                builder.store(builder.extract_element(value, ir.Constant(_i32, lane)), target)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, float32x16), codegen

    define.__name__ = name
    define.__doc__ = "Store lane i at `address + i * stride`" + (", rounded to a half float." if half else ".")
    return llvm(define)


vscatter = _scatter("vscatter", half=False)
vscatter_half = _scatter("vscatter_half", half=True)


@llvm
def vmask(typingctx: Any, value: Any, first: Any, end: Any, fill: Any) -> Any:
    """Lanes `first <= lane < end` of `value`, and `fill` elsewhere, whatever those lanes held (also NaN)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, first, end, fill = args
        lanes = ir.Constant(I32_VECTOR, list(range(LANES)))
        low = splat(builder, builder.trunc(first, _i32), I32_VECTOR)
        high = splat(builder, builder.trunc(end, _i32), I32_VECTOR)
        inside = builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))
        return builder.select(inside, value, splat(builder, fill))

    return float32x16(float32x16, types.int64, types.int64, types.float32), codegen


def _tree(name: str, emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def define(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, width = args[0], LANES
            while width > 1:
                width //= 2
                undefined = ir.Constant(value.type, ir.Undefined)
                low = builder.shuffle_vector(
                    value, undefined, ir.Constant(ir.VectorType(_i32, width), list(range(width)))
                )
                high = builder.shuffle_vector(
                    value, undefined, ir.Constant(ir.VectorType(_i32, width), list(range(width, 2 * width)))
                )
                value = emit(builder, low, high)
            return builder.extract_element(value, ir.Constant(_i32, 0))

        return types.float32(float32x16), codegen

    define.__name__ = name
    define.__doc__ = doc
    return llvm(define)


hsum = _tree("hsum", lambda b, x, y: b.fadd(x, y), "The sum of the lanes, halves added to halves: one fixed order.")
hmax = _tree("hmax", lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), "The largest lane.")


@llvm
def vexp2(typingctx: Any, value: Any) -> Any:
    """Lane-wise `2 ** value`, relative error below 3e-7; 0 below -126, and `value` above 127 counts as 127.

    `2 ** (n + f)` with n the nearest integer and |f| <= 1/2: a polynomial of degree 6 in f (Taylor at 0, whose error at
    1/2 is 1.5e-8) and n in the exponent bits.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        low, high = _vector_constant(-126.0), _vector_constant(127.0)
        # In this order a NaN stays in the clamped value through f, and only -inf..-126 becomes 0.
        clamped = builder.select(builder.fcmp_ordered("<", value, low), low, value)
        clamped = builder.select(builder.fcmp_ordered(">", clamped, high), high, clamped)
        nearest = call_llvm(builder, "llvm.rint.v16f32", F32_VECTOR, [clamped])
        f = builder.fsub(clamped, nearest)
        coefficients = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
        result = _vector_constant(coefficients[0])
        for coefficient in coefficients[1:]:
            result = fused_multiply_add(builder, result, f, _vector_constant(coefficient))
        # fptosi of a NaN is poison: make n finite first; f, and so the result, stays NaN.
        finite = builder.select(builder.fcmp_ordered("ord", nearest, nearest), nearest, _vector_constant(0.0))
        exponent = builder.shl(builder.fptosi(finite, I32_VECTOR), ir.Constant(I32_VECTOR, [23] * LANES))
        one = builder.bitcast(_vector_constant(1.0), I32_VECTOR)
        scale = builder.bitcast(builder.add(exponent, one), F32_VECTOR)
        result = builder.fmul(result, scale)
        return builder.select(builder.fcmp_ordered("<", value, low), _vector_constant(0.0), result)

    return float32x16(float32x16), codegen


# Scalars at addresses ----------------------------------------------------------------------------


def _scalar_load(name: str, numba_type: Any, llvm_type: Any) -> Any:
    def define(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args[0], llvm_type))

        return numba_type(types.int64), codegen

    define.__name__ = name
    define.__doc__ = f"The {numba_type} at an address."
    return llvm(define)


load_i64 = _scalar_load("load_i64", types.int64, _i64)


@llvm
def load_i32(typingctx: Any, address: Any) -> Any:
    """The int32 at an address, as an int64: one integer type everywhere means one compiled variant of a function."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(pointer(builder, args[0], _i32)), _i64)

    return types.int64(types.int64), codegen


load_f32 = _scalar_load("load_f32", types.float32, _f32)
load_f64 = _scalar_load("load_f64", types.float64, ir.DoubleType())


@llvm
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], _f32))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


def emit_fetch_add(builder: Any, address: Any, offset: int) -> Any:
    """Emit: add 1 to the int64 at an address plus an offset, atomically, for what it held."""
    place = pointer(builder, builder.add(address, ir.Constant(_i64, offset)), _i64)
    return builder.atomic_rmw("add", place, ir.Constant(_i64, 1), "acq_rel")


@llvm
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address atomically and return what it held; orders memory on both sides."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], _i64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@llvm
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between ranges that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        cgutils.raw_memcpy(
            builder, pointer(builder, args[0], byte), pointer(builder, args[1], byte), args[2], ir.Constant(_i64, 1)
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# Arrays at addresses -----------------------------------------------------------------------------


@llvm
def as_pointer(typingctx: Any, address: Any) -> Any:
    """An int64 address as a void pointer, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@jit
def array_i32(address: int, size: int) -> Any:
    """The int32 array `[size]` at an address."""
    return carray(as_pointer(address), (size,), dtype=np.int32)


@jit
def array_i64(address: int, size: int) -> Any:
    """The int64 array `[size]` at an address."""
    return carray(as_pointer(address), (size,), dtype=np.int64)

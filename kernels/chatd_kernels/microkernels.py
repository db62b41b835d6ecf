"""Dot products in registers: what attention's scores and the linear layers are made of.

A variant holds `rows` x `panels` vectors of 16 sums. Each sum is `fma` over the inner dimension in order, starting at
0, in every variant: how many a variant holds changes its speed, never a bit. Six rows of one vector fill AVX2's
sixteen registers (a vector is two there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chatd_kernels.jit import binding, cgutils, codegen, config, ir, llvm, types
from chatd_kernels.vector import (
    F32_VECTOR,
    FLOAT_BYTES,
    HALF_BYTES,
    I32_VECTOR,
    LANES,
    broadcast,
    call_llvm,
    fused_multiply_add,
    load_vector,
    pointer,
)

_i8, _i16, _i32, _i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_UNROLL = 4
_VECTOR_BYTES = LANES * FLOAT_BYTES


def constant(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(_i64, value)


def define(name: str, num_arguments: int, codegen: Any) -> Any:
    """An operation of int64 arguments that returns nothing."""
    signature = types.void(*([types.int64] * num_arguments))
    names = ", ".join(f"a{i}" for i in range(num_arguments))
    # numba takes the number of arguments from the function's own signature: the def line is made to measure.
    scope = {"signature": signature, "codegen": codegen}
    exec(f"def {name}(typingctx, {names}):\n    return signature, codegen\n", scope)  # noqa: S102
    return llvm(scope[name])


def cpu_features() -> frozenset[str]:
    """Features of the CPU that numba compiles for, such as "+avx2"; empty where it is no x86."""
    if not binding.get_process_triple().startswith(("x86_64", "i386", "i686")):
        return frozenset()
    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else codegen.get_host_cpu_features()
    return frozenset(features.split(","))


HAS_AVX512 = "+avx512bw" in cpu_features()
"""Whether a vector of 16 float32 is one register of 32, or two of 16."""


class Product:
    """How one kind of dot product loads and multiplies; subclasses are the kinds."""

    name: str
    sum_type: Any
    x_bytes: int
    """Of one number of a row."""
    w_bytes: int
    """Of one number of a panel."""
    step: int
    """Numbers that one `multiply_add` takes."""

    def load_panel(self, builder: Any, address: Any) -> Any:
        """The `[step, 16]` weights at an address."""
        raise NotImplementedError

    def load_row(self, builder: Any, address: Any) -> Any:
        """The `step` numbers of a row at an address, for every lane."""
        raise NotImplementedError

    def multiply_add(self, builder: Any, total: Any, row: Any, panel: Any) -> Any:
        """`total` plus the products."""
        raise NotImplementedError


class FloatProduct(Product):
    """Float32 rows; panels `[size, 16]` of float32 or, widened as they are read, of half floats."""

    sum_type, x_bytes, step = F32_VECTOR, FLOAT_BYTES, 1

    def __init__(self, half: bool) -> None:
        self.half = half
        self.name = "half" if half else "float"
        self.w_bytes = HALF_BYTES if half else FLOAT_BYTES

    def load_panel(self, builder: Any, address: Any) -> Any:
        """See `Product`."""
        return load_vector(builder, address, self.half)

    def load_row(self, builder: Any, address: Any) -> Any:
        """See `Product`."""
        return broadcast(builder, address)

    def multiply_add(self, builder: Any, total: Any, row: Any, panel: Any) -> Any:
        """See `Product`."""
        return fused_multiply_add(builder, row, panel, total)


class Int8Product(Product):
    """Int16 rows and int8 panels `[size / 2, 16, 2]`; sums are exact int32, so their order does not matter."""

    name, sum_type, x_bytes, w_bytes, step = "int8", I32_VECTOR, 2, 1, 2

    def load_panel(self, builder: Any, address: Any) -> Any:
        """See `Product`."""
        packed = pointer(builder, address, ir.VectorType(_i8, 2 * LANES))
        return builder.sext(builder.load(packed, align=1), ir.VectorType(_i16, 2 * LANES))

    def load_row(self, builder: Any, address: Any) -> Any:
        """See `Product`."""
        return builder.load(pointer(builder, address, _i32), align=2)

    def multiply_add(self, builder: Any, total: Any, row: Any, panel: Any) -> Any:
        """See `Product`."""
        return _multiply_add_pairs(builder, total, row, panel)


def emit_dot(
    builder: Any, kind: Product, x_rows: list[Any], x_step: int, weights: list[Any], targets: list[list[Any]], size: Any
) -> None:
    """Emit the products of rows and panels, all in registers, and store the sums as float32 at the targets.

    A row's next number is `x_step` numbers further on.
    """
    zero = ir.Constant(kind.sum_type, [0] * LANES)
    # Stack slots that LLVM keeps in registers.
    sums = [[cgutils.alloca_once(builder, kind.sum_type) for _ in weights] for _ in x_rows]
    for line in sums:
        for total in line:
            builder.store(zero, total)
    with cgutils.for_range_slice(builder, constant(0), size, constant(_UNROLL), intp=_i64) as (start, _):
        for step in range(0, _UNROLL, kind.step):
            k = builder.add(start, constant(step))
            x_offset = builder.mul(k, constant(kind.x_bytes * x_step))
            w_offset = builder.mul(k, constant(LANES * kind.w_bytes))
            panels = [kind.load_panel(builder, builder.add(weight, w_offset)) for weight in weights]
            for x_row, line in zip(x_rows, sums, strict=True):
                row = kind.load_row(builder, builder.add(x_row, x_offset))
                for panel, total in zip(panels, line, strict=True):
                    builder.store(kind.multiply_add(builder, builder.load(total), row, panel), total)
    for line, places in zip(sums, targets, strict=True):
        for total, place in zip(line, places, strict=True):
            value = builder.load(total)
            if kind.sum_type == I32_VECTOR:
                value = builder.sitofp(value, F32_VECTOR)
            builder.store(value, pointer(builder, place, F32_VECTOR), align=FLOAT_BYTES)


def make_dot(rows: int, panels: int, half: bool) -> Any:
    """An operation `(x, x_stride, w0[, w1 ..], out, out_stride, size)`: products of rows and panels anywhere.

    Row r of `x` is `size` float32 at `x + r * x_stride`; a panel is `[size, 16]`; the 16 sums of row r and panel p go
    to `out + r * out_stride + p * 64`. `size` is a multiple of 4, strides are bytes.
    """
    kind = FloatProduct(half)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_stride, *weights, out, out_stride, size = args
        x_rows = [builder.add(x, builder.mul(x_stride, constant(r))) for r in range(rows)]
        targets = [
            [
                builder.add(builder.add(out, builder.mul(out_stride, constant(r))), constant(p * _VECTOR_BYTES))
                for p in range(panels)
            ]
            for r in range(rows)
        ]
        emit_dot(builder, kind, x_rows, 1, weights, targets, size)
        return context.get_dummy_value()

    return define(f"dot_{kind.name}_{rows}x{panels}", 5 + panels, codegen)


MAX_ROWS = 12 if HAS_AVX512 else 6
"""Rows of interleaved `make_dot_rows`: as many sums as leave registers for the operands."""

MAX_STRIDED_ROWS = 6
"""Rows of other variants: each needs an address of its own."""


def switch_on_rows(builder: Any, rows: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit one variant for each number of rows from 1 to `most`, and the choice at run time."""
    done = builder.append_basic_block("rows.done")
    switch = builder.switch(rows, done)
    for count in range(1, most + 1):
        block = builder.append_basic_block(f"rows.{count}")
        switch.add_case(constant(count), block)
        builder.position_at_end(block)
        emit(count)
        builder.branch(done)
    builder.position_at_end(done)


def make_dot_rows(kind: Product) -> Any:
    """An operation `(rows, x, w, out, out_stride, size)`: `rows` rows, 1 to MAX_ROWS, and one panel.

    Like `make_dot`, but the rows are interleaved, so that one pointer serves them all: `x` is `[size / step, rows,
    step]`. (Several panels at once would hide more latency with few rows, but weights stream from memory then, and
    one stream is up to twice as fast as two.)
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, x, weight, out, out_stride, size = args

        def emit(count: int) -> None:
            x_rows = [builder.add(x, constant(r * kind.step * kind.x_bytes)) for r in range(count)]
            targets = [[builder.add(out, builder.mul(out_stride, constant(r)))] for r in range(count)]
            emit_dot(builder, kind, x_rows, count, [weight], targets, size)

        switch_on_rows(builder, rows, MAX_ROWS, emit)
        return context.get_dummy_value()

    return define(f"dot_rows_{kind.name}", 6, codegen)


def make_dot_strided(kind: Product) -> Any:
    """An operation `(rows, x, x_stride, w, out, out_stride, size)`: 1 to MAX_STRIDED_ROWS rows and one panel."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, x, x_stride, weight, out, out_stride, size = args

        def emit(count: int) -> None:
            x_rows = [builder.add(x, builder.mul(x_stride, constant(r))) for r in range(count)]
            targets = [[builder.add(out, builder.mul(out_stride, constant(r)))] for r in range(count)]
            emit_dot(builder, kind, x_rows, 1, [weight], targets, size)

        switch_on_rows(builder, rows, MAX_STRIDED_ROWS, emit)
        return context.get_dummy_value()

    return define(f"dot_strided_{kind.name}", 7, codegen)


def _multiply_add_pairs(builder: Any, total: Any, pair: Any, weights: Any) -> Any:
    """`total[i] + pair[0] * weights[2 i] + pair[1] * weights[2 i + 1]` in int32, `pair` being two int16 in an int32."""
    features = cpu_features()
    if "+avx512vnni" in features:
        pairs = builder.bitcast(_splat_i32(builder, pair, LANES), weights.type)
        return call_llvm(builder, "llvm.x86.avx512.vpdpwssd.512", I32_VECTOR, [total, pairs, weights])
    if "+avx2" in features:
        half = LANES // 2
        words = builder.bitcast(_splat_i32(builder, pair, half), ir.VectorType(_i16, LANES))
        sums = [
            call_llvm(
                builder,
                "llvm.x86.avx2.pmadd.wd",
                ir.VectorType(_i32, half),
                [words, _lanes(builder, weights, range(first, first + LANES))],
            )
            for first in (0, LANES)
        ]
        return builder.add(total, builder.shuffle_vector(*sums, ir.Constant(I32_VECTOR, list(range(LANES)))))
    wide = ir.VectorType(_i32, 2 * LANES)
    words = builder.sext(builder.bitcast(_splat_i32(builder, pair, LANES), weights.type), wide)
    products = builder.mul(words, builder.sext(weights, wide))
    even, odd = (_lanes(builder, products, range(first, 2 * LANES, 2)) for first in (0, 1))
    return builder.add(total, builder.add(even, odd))


def _lanes(builder: Any, value: Any, lanes: range) -> Any:
    """Some lanes of a vector."""
    mask = ir.Constant(ir.VectorType(_i32, len(lanes)), list(lanes))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _splat_i32(builder: Any, scalar: Any, lanes: int) -> Any:
    """An int32 in every one of `lanes` lanes."""
    vector_type = ir.VectorType(_i32, lanes)
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_i32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(vector_type, [0] * lanes))

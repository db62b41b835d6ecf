"""The second product of attention in registers: rows of weights against V.

Each (row, dimension) is `fma` over the positions in order, in every variant. The first product, scores, is
`chatd_kernels.microkernels.make_dot`.
"""

from __future__ import annotations

from typing import Any

from chatd_kernels.jit import cgutils, ir
from chatd_kernels.microkernels import MAX_STRIDED_ROWS, constant, define, switch_on_rows
from chatd_kernels.vector import (
    F32_VECTOR,
    FLOAT_BYTES,
    HALF_BYTES,
    LANES,
    broadcast,
    fused_multiply_add,
    load_vector,
    pointer,
)

SEGMENT = 256
"""Positions of a segment: the unit of the softmax, aligned from position 0."""

SCORE_ROW_BYTES = SEGMENT * FLOAT_BYTES

_i64 = ir.IntType(64)


# Vectors of an output row that are held beside so many rows, enough for the multiply-add units to work in parallel.
_VECTORS_AT_ONCE = {1: 4, 2: 2, 3: 2}


def make_weighted_rows(half: bool) -> Any:
    """An operation `(rows, weights, v, out, head_dim, count)`: `out[r] += weights[r, j] * v[j]`, j in order.

    1 to MAX_STRIDED_ROWS rows. `weights` has rows SCORE_ROW_BYTES apart; `v` is `[count, head_dim]`, half floats or
    float32; `out` is `[rows, head_dim]` float32.
    """
    element = HALF_BYTES if half else FLOAT_BYTES

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, weights, v, out, head_dim, count = args
        out_stride = builder.mul(head_dim, constant(FLOAT_BYTES))
        v_stride = builder.mul(head_dim, constant(element))

        def emit(num_rows: int) -> None:
            width = _VECTORS_AT_ONCE.get(num_rows, 1)
            lanes = constant(width * LANES)
            whole = builder.mul(builder.sdiv(head_dim, lanes), lanes)
            ranges = [(width, constant(0), whole)] + ([(1, whole, head_dim)] if width > 1 else [])
            for vectors, first, end in ranges:
                with cgutils.for_range_slice(builder, first, end, constant(vectors * LANES), intp=_i64) as (d, _):
                    shift = builder.mul(d, constant(FLOAT_BYTES))
                    out_rows = [
                        builder.add(out, builder.add(shift, builder.mul(out_stride, constant(r))))
                        for r in range(num_rows)
                    ]
                    column = builder.add(v, builder.mul(d, constant(element)))
                    _emit_columns(builder, weights, column, v_stride, out_rows, vectors, count, half)

        switch_on_rows(builder, rows, MAX_STRIDED_ROWS, emit)
        return context.get_dummy_value()

    return define(f"weighted_rows{'_half' if half else ''}", 6, codegen)


def _emit_columns(
    builder: Any, weights: Any, v: Any, v_stride: Any, out_rows: list[Any], vectors: int, count: Any, half: bool
) -> None:
    """Emit the sums of some rows for 16 * `vectors` dimensions, all in registers over all positions."""
    element = HALF_BYTES if half else FLOAT_BYTES
    targets = [[builder.add(row, constant(c * LANES * FLOAT_BYTES)) for c in range(vectors)] for row in out_rows]
    sums = [[cgutils.alloca_once(builder, F32_VECTOR) for _ in line] for line in targets]
    for line, places in zip(sums, targets, strict=True):
        for total, place in zip(line, places, strict=True):
            builder.store(load_vector(builder, place, half=False), total)
    with cgutils.for_range_slice(builder, constant(0), count, constant(1), intp=_i64) as (j, _):
        base = builder.add(v, builder.mul(j, v_stride))
        values = [load_vector(builder, builder.add(base, constant(c * LANES * element)), half) for c in range(vectors)]
        weight = builder.add(weights, builder.mul(j, constant(FLOAT_BYTES)))
        for r, line in enumerate(sums):
            factor = broadcast(builder, builder.add(weight, constant(r * SCORE_ROW_BYTES)))
            for value, total in zip(values, line, strict=True):
                builder.store(fused_multiply_add(builder, factor, value, builder.load(total)), total)
    for line, places in zip(sums, targets, strict=True):
        for total, place in zip(line, places, strict=True):
            builder.store(builder.load(total), pointer(builder, place, F32_VECTOR), align=FLOAT_BYTES)

"""The second product of attention in registers: rows of weights against V.

Each (row, dimension) is `fma` over the positions in order, in every variant. The first product, scores, is
`chatd_kernels.microkernels.make_dot`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from chatd_kernels.microkernels import constant, define
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


def make_weighted_sum(rows: int, vectors: int, half: bool) -> Any:
    """An intrinsic `(weights, v, v_stride, out, out_stride, count)`: `out[r] += weights[r, j] * v[j]`, j in order.

    `weights` has rows SCORE_ROW_BYTES apart; `v` has `count` rows `v_stride` bytes apart, of which 16 * `vectors`
    dimensions are read; `out` has rows of float32 `out_stride` bytes apart.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, v, v_stride, out, out_stride, count = args
        element = HALF_BYTES if half else FLOAT_BYTES
        targets = [
            [
                builder.add(builder.add(out, builder.mul(out_stride, constant(r))), constant(c * LANES * FLOAT_BYTES))
                for c in range(vectors)
            ]
            for r in range(rows)
        ]
        sums = [[cgutils.alloca_once(builder, F32_VECTOR) for _ in range(vectors)] for _ in range(rows)]
        for r in range(rows):
            for c in range(vectors):
                builder.store(load_vector(builder, targets[r][c], half=False), sums[r][c])
        with cgutils.for_range_slice(builder, constant(0), count, constant(1), intp=_i64) as (j, _):
            base = builder.add(v, builder.mul(j, v_stride))
            values = [
                load_vector(builder, builder.add(base, constant(c * LANES * element)), half) for c in range(vectors)
            ]
            weight = builder.add(weights, builder.mul(j, constant(FLOAT_BYTES)))
            for r in range(rows):
                factor = broadcast(builder, builder.add(weight, constant(r * SCORE_ROW_BYTES)))
                for c in range(vectors):
                    builder.store(fused_multiply_add(builder, factor, values[c], builder.load(sums[r][c])), sums[r][c])
        for r in range(rows):
            for c in range(vectors):
                target = pointer(builder, targets[r][c], F32_VECTOR)
                builder.store(builder.load(sums[r][c]), target, align=FLOAT_BYTES)
        return context.get_dummy_value()

    return define(f"weighted_sum_{rows}x{vectors}{'_half' if half else ''}", 6, codegen)

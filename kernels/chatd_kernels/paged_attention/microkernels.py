"""The two products of attention, in registers: R query rows against 16 positions, and R rows of weights against V.

Both are written as LLVM instructions, so that each (row, position) score is `fma` over the dimensions in order and each
(row, dimension) output is `fma` over the positions in order, in every variant: how many rows or vectors a variant keeps
in registers changes its speed, never a bit. Six rows of one 16-lane vector fill AVX2's sixteen registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chatd_kernels.vector import F32_VECTOR, FLOAT_BYTES, HALF_BYTES, LANES, fused_multiply_add, load_vector, pointer, splat

SEGMENT = 256
"""Positions of a segment: the unit of the softmax, aligned from position 0."""

SCORE_ROW_BYTES = SEGMENT * FLOAT_BYTES

_i64 = ir.IntType(64)
_f32 = ir.FloatType()
_UNROLL = 4


def _constant(value: int) -> Any:
    return ir.Constant(_i64, value)


def _broadcast(builder: Any, address: Any) -> Any:
    return splat(builder, builder.load(pointer(builder, address, _f32)))


def make_scores(rows: int, groups: int, half: bool) -> Any:
    """An intrinsic `(q, q_stride, k0[, k1 ..], scores, head_dim)`: scores of `rows` rows and `groups` groups of 16.

    `q` has rows of float32 `q_stride` bytes apart; `k*` are groups `[head_dim, 16]`; row r, group g go to
    `scores + r * SCORE_ROW_BYTES + g * 64`. head_dim is a multiple of 4.
    """
    element = HALF_BYTES if half else FLOAT_BYTES

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, q_stride, *keys, scores, head_dim = args
        zero = ir.Constant(F32_VECTOR, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(groups)] for _ in range(rows)]
        for line in sums:
            for total in line:
                builder.store(zero, total)
        q_rows = [builder.add(q, builder.mul(q_stride, _constant(r))) for r in range(rows)]
        with cgutils.for_range_slice(builder, _constant(0), head_dim, _constant(_UNROLL), intp=_i64) as (start, _):
            for step in range(_UNROLL):
                d = builder.add(start, _constant(step))
                q_offset = builder.mul(d, _constant(FLOAT_BYTES))
                k_offset = builder.mul(d, _constant(LANES * element))
                vectors = [load_vector(builder, builder.add(key, k_offset), half) for key in keys]
                for r in range(rows):
                    value = _broadcast(builder, builder.add(q_rows[r], q_offset))
                    for g in range(groups):
                        builder.store(
                            fused_multiply_add(builder, value, vectors[g], builder.load(sums[r][g])), sums[r][g]
                        )
        for r in range(rows):
            for g in range(groups):
                target = builder.add(scores, _constant(r * SCORE_ROW_BYTES + g * LANES * FLOAT_BYTES))
                builder.store(builder.load(sums[r][g]), pointer(builder, target, F32_VECTOR), align=FLOAT_BYTES)
        return context.get_dummy_value()

    return _define(f"scores_{rows}x{groups}{'_half' if half else ''}", 4 + groups, codegen)


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
                builder.add(builder.add(out, builder.mul(out_stride, _constant(r))), _constant(c * LANES * FLOAT_BYTES))
                for c in range(vectors)
            ]
            for r in range(rows)
        ]
        sums = [[cgutils.alloca_once(builder, F32_VECTOR) for _ in range(vectors)] for _ in range(rows)]
        for r in range(rows):
            for c in range(vectors):
                builder.store(load_vector(builder, targets[r][c], half=False), sums[r][c])
        with cgutils.for_range_slice(builder, _constant(0), count, _constant(1), intp=_i64) as (j, _):
            base = builder.add(v, builder.mul(j, v_stride))
            values = [
                load_vector(builder, builder.add(base, _constant(c * LANES * element)), half) for c in range(vectors)
            ]
            weight = builder.add(weights, builder.mul(j, _constant(FLOAT_BYTES)))
            for r in range(rows):
                factor = _broadcast(builder, builder.add(weight, _constant(r * SCORE_ROW_BYTES)))
                for c in range(vectors):
                    builder.store(
                        fused_multiply_add(builder, factor, values[c], builder.load(sums[r][c])), sums[r][c]
                    )
        for r in range(rows):
            for c in range(vectors):
                target = pointer(builder, targets[r][c], F32_VECTOR)
                builder.store(builder.load(sums[r][c]), target, align=FLOAT_BYTES)
        return context.get_dummy_value()

    return _define(f"weighted_sum_{rows}x{vectors}{'_half' if half else ''}", 6, codegen)


def _define(name: str, num_arguments: int, codegen: Any) -> Any:
    """An intrinsic of int64 arguments; numba reads the number of arguments from the signature."""
    signature = types.void(*([types.int64] * num_arguments))
    names = ", ".join(f"a{i}" for i in range(num_arguments))
    # numba matches an intrinsic's arguments by name, and the number of `k*` differs: the def line is made to measure.
    scope = {"signature": signature, "codegen": codegen}
    exec(f"def {name}(typingctx, {names}):\n    return signature, codegen\n", scope)  # noqa: S102
    return intrinsic(scope[name])

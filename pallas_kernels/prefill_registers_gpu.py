"""The Mosaic GPU prefill kernel's arithmetic, register by register: products, softmax, scaling.

A thread holds two rows of a 64-row product, and of each 8 columns two neighbours (`combine_gpu.own_rows`).
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, vector

from . import combine_gpu as ends
from .tuning import TILE_ROWS

_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_QUAD = (1, 2)  # the four threads that share a row differ in these bits


def _scalars(pair: ir.Value) -> list[ir.Value]:
    return [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]


def _pair(a: ir.Value, b: ir.Value) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((2,), a.type), [a, b])


def _array(registers, shape: tuple[int, ...], layout) -> mgpu.FragmentedArray:
    layout = layout.to_mgpu()
    registers = np.asarray(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def row_scalars(x: mgpu.FragmentedArray) -> list[ir.Value]:
    """Of an array [64], the values of the thread's two rows."""
    return [vector.extract(r, dynamic_position=[], static_position=[0]) for r in x.registers.flat]


def _row_array(values: list[ir.Value]) -> mgpu.FragmentedArray:
    return _array([ends.splat(x, 1) for x in values], (TILE_ROWS,), _ROWS)


def _commit() -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)


def _scores(q, k, block_kv: int, swizzle: int) -> mgpu.FragmentedArray:
    s = mgpu.wgmma(
        mgpu.WGMMAAccumulator.zero(TILE_ROWS, block_kv), q, mgpu.memref_transpose(k, (1, 0, 3, 2)), swizzle=swizzle
    )
    _commit()
    return s.value


def _values(acc, p, v, swizzle: int) -> mgpu.FragmentedArray:
    acc = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(acc), p, v, swizzle=swizzle)
    _commit()
    return acc.value


def issue_scores(q, k, *, block_kv: int, transforms, swizzle: int):
    """Issues S = Q K^T; the result may be used after `settle`."""
    ref = plgpu.RefType(transforms)

    @plgpu.inline_mgpu(
        arg_types=(ref, ref), return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, block_kv), jnp.float32, layout=_WGMMA)
    )
    def issue(_, q, k):
        return _scores(q, k, block_kv, swizzle)

    return issue(q, k)


def issue_values(acc, p, v, *, transforms, swizzle: int):
    """Issues O += P V; the result may be used after `settle`."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA, plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=_WGMMA),
    )
    def issue(_, acc, p, v):
        return _values(acc, p, v, swizzle)

    return issue(acc, p, v)


def issue_both(q, k, acc, p, v, *, block_kv: int, transforms, swizzle: int):
    """Issues the scores of a block, then the values of the one before, as two groups."""
    ref = plgpu.RefType(transforms)

    @plgpu.inline_mgpu(
        arg_types=(ref, ref, _WGMMA, _WGMMA, ref),
        return_type=(
            plgpu.ShapeDtypeStruct((TILE_ROWS, block_kv), jnp.float32, layout=_WGMMA),
            plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=_WGMMA),
        ),
    )
    def issue(_, q, k, acc, p, v):
        acc, p = mgpu.optimization_barrier(acc, p)
        s = _scores(q, k, block_kv, swizzle)
        return s, _values(acc, p, v, swizzle)

    return issue(q, k, acc, p, v)


def settle(x, in_flight: int):
    """Waits until at most `in_flight` groups of products run, and gives a result of those that do not."""

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=_WGMMA))
    def wait(_, x):
        nvvm.wgmma_wait_group_sync_aligned(in_flight)
        return mgpu.optimization_barrier(x)

    return wait(x)


def _quad(value: ir.Value, op) -> ir.Value:
    for bit in _QUAD:
        value = op(value, utils.shfl_bfly(value, bit))
    return value


def _load_pairs(scales: ir.Value, first: int, columns: int, column: ir.Value) -> list[ir.Value]:
    """Of `columns` floats of shared memory from `first` on, those of the columns that the thread holds."""
    pair, index = ir.VectorType.get((2,), ir.F32Type.get()), ir.IndexType.get()
    found = []
    for n in range(columns // 8):
        at = arith.index_cast(index, arith.addi(column, ends.i32(first + 8 * n)))
        found += _scalars(vector.load(pair, scales, [at]))
    return found


def softmax(s, top, total, limits, scales, *, scale: float, cap: float | None, slack: float, dtype, group: int, window):
    """Weights of a block of scores, and the running maximum and sum with it.

    Args:
      s: [64, keys] raw products.
      top: [64] running maxima, base 2.
      total: [64] sums of the weights that the thread itself holds; `quad_sum` at the end.
      limits: (position of the first row's query, position of the first key), or `None` if each query sees each key.
      scales: in shared memory, those of the block's keys and then of its values, or `None` if the pages have none; the
        weights that come back are times those of the values, the sums are not.
      scale: of the products, to base 2; positive.
      cap: the soft cap, in base 2.
      slack: the maximum is left behind by up to so much; the sum is made with the same, so the result is the same.

    Returns:
      weights in `dtype`, maxima, sums, and the factors [64] of what was summed up before.
    """
    rows = plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.float32, layout=_ROWS)
    limits = () if limits is None else limits
    scales = () if scales is None else (scales,)

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _ROWS, _ROWS, *[plgpu.RefType()] * len(scales), *[_SCALAR] * len(limits)),
        return_type=(plgpu.ShapeDtypeStruct(s.shape, dtype, layout=_WGMMA), rows, rows, rows),
    )
    def compute(_, s, top, total, *rest):
        scales, limits = rest[: len(rest) % 2], [ends.scalar_of(x) for x in rest[len(rest) % 2 :]]
        registers = ends.halves(s)
        tops, totals = row_scalars(top), row_scalars(total)
        new_tops, new_totals, decays = [], [], []
        weights = np.empty(registers.shape, dtype=object)
        own_rows, column = ends.own_rows()
        of_keys = [_load_pairs(x, 0, s.shape[1], column) for x in scales]
        of_values = [_load_pairs(x, s.shape[1], s.shape[1], column) for x in scales]
        for half, row in enumerate(own_rows):
            values = [x for pair in registers[:, half] for x in _scalars(pair)]
            for factors in of_keys:
                values = [arith.mulf(x, y) for x, y in zip(values, factors, strict=True)]
            factor, unseen = scale, []
            if cap is not None:  # tanh(x) = 1 - 2 / (1 + e^2x); the hardware's tanh has only 11 bits
                factor = 1.0
                values = [_soft_capped(x, scale, cap) for x in values]
            if limits:
                position, first_key = limits
                query = arith.addi(position, arith.divui(row, ends.i32(group)))
                last = arith.subi(arith.subi(query, first_key), column)  # the last key seen, from the thread's first
                for i, x in enumerate(values):
                    at = ends.i32(i // 2 * 8 + i % 2)
                    seen = arith.cmpi(arith.CmpIPredicate.sle, at, last)
                    if window is not None:
                        behind = arith.cmpi(arith.CmpIPredicate.sgt, at, arith.subi(last, ends.i32(window)))
                        seen = arith.andi(seen, behind)
                    values[i] = arith.select(seen, x, ends.f32(-np.inf))
                    unseen.append(arith.xori(seen, utils.c(1, seen.type)))
            highest = _quad(_tree(values, arith.maximumf), arith.maximumf)
            highest = arith.mulf(highest, ends.f32(factor)) if factor != 1.0 else highest
            new_top = arith.maximumf(tops[half], highest)
            if slack:  # the maximum stays until it is left behind by more
                moved = arith.cmpf(arith.CmpFPredicate.OGT, arith.subf(new_top, tops[half]), ends.f32(slack))
                new_top = arith.select(moved, new_top, tops[half])
            decay = ends.exp2_of(arith.subf(tops[half], new_top))
            minus_top = arith.negf(new_top)
            exponents = [
                math.fma(x, ends.f32(factor), minus_top) if factor != 1.0 else arith.addf(x, minus_top) for x in values
            ]
            p = [ends.exp2_of(x) for x in exponents]
            own = math.fma(totals[half], decay, _tree(p, arith.addf))
            for factors in of_values:
                p = [arith.mulf(x, y) for x, y in zip(p, factors, strict=True)]
                if unseen:  # the scale of a slot that no query sees may be NaN
                    p = [arith.select(hidden, ends.f32(0.0), x) for hidden, x in zip(unseen, p, strict=True)]
            for n in range(len(p) // 2):
                pair = _pair(p[2 * n], p[2 * n + 1])
                element = utils.dtype_to_ir_type(dtype)
                weights[n, half] = arith.truncf(ir.VectorType.get((2,), element), pair)
            new_tops.append(new_top)
            new_totals.append(own)
            decays.append(decay)
        return (
            _array(weights, s.shape, _WGMMA),
            _row_array(new_tops),
            _row_array(new_totals),
            _row_array(decays),
        )

    return compute(s, top, total, *scales, *limits)


def _soft_capped(x: ir.Value, scale: float, cap: float) -> ir.Value:
    """cap * tanh(x * scale / cap), all in base 2: scale and cap hold a factor of log2(e)."""
    grown = ends.exp2_of(arith.mulf(x, ends.f32(2 * scale / (cap / np.log2(np.e)))))
    inverse = utils.inline_ptx(
        "rcp.approx.ftz.f32 $0, $1;", arith.addf(grown, ends.f32(1.0)), result_types=ir.F32Type.get()
    )
    return math.fma(inverse, ends.f32(-2 * cap), ends.f32(cap))


def _tree(values: list[ir.Value], op) -> ir.Value:
    """Reduces in four chains, so that none waits for the one before."""
    chains = values[:4]
    for i, x in enumerate(values[4:]):
        chains[i % 4] = op(chains[i % 4], x)
    return op(op(chains[0], chains[1]), op(chains[2], chains[3]))


def rescale(acc, decay):
    """Scales the outputs; warps none of whose factors differs from 1 skip it."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _ROWS), return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=_WGMMA)
    )
    def scale(_, acc, decay):
        registers = ends.halves(acc)
        factors = row_scalars(decay)

        def scaled() -> list[ir.Value]:
            splats = [ends.splat(x, 2) for x in factors]
            return [arith.mulf(x, splats[half]) for row in registers for half, x in enumerate(row)]

        one = ends.f32(1.0)
        moved = arith.ori(*[arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in factors])
        moved = nvvm.vote_sync(ends.i32(-1), moved, "any")
        flat = list(registers.flat)
        found = ends.either(moved, scaled, lambda: flat, [x.type for x in flat])
        return _array(found, acc.shape, _WGMMA)

    return scale(acc, decay)


def quad_sum(total):
    """Sums of rows from what their four threads hold."""

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.float32, layout=_ROWS))
    def add(_, total):
        return _row_array([_quad(x, arith.addf) for x in row_scalars(total)])

    return add(total)

"""A layer of few rows for Hopper in Pallas Mosaic GPU: one launch from one attention to the next.

    attended -> o | x + . , norm | gate_up | silu * up | down | x + . , norm | qkv of the next layer -> parts of it
               wait             wait                  wait                wait

With few rows a layer is the time of its weights, if they never stop coming: one warp of each block of threads loads the
boxes of all its products, in the order of their use, into a ring in shared memory, and runs ahead of the places where
blocks wait for each other. What the others do there is hidden, as long as the ring lasts: some 5 us.

A block needs all of a product before it goes on to the next. So there is one on each multiprocessor, and none may wait
for a block that has not begun: a launch must have the device to itself, as kernels of one stream have.

Weights are the 64-row operand of the matrix instruction, and rows the narrow one, as queries are in `narrow_gpu`:

    Y^T [64 columns, N tokens] += W^T [64 columns, 64] X^T [64, N tokens]
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import layer_rows_gpu as rows
from .columns_gpu import RegisterColumns, columns_of
from .layer_plan_gpu import WIDTH, LayerPlan, Product
from .read_once_gpu import copy_once

_TRANSFORMS = plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128)


class _Share:
    """What a block of threads has of a product: boxes [first, first + count) of the tiles lane, lane + lanes, .."""

    def __init__(self, product: Product, block, blocks: int):
        self.product, self.lanes = product, product.lanes(blocks)
        self.part, self.lane = lax.rem(block, product.parts), lax.div(block, product.parts)
        self.first = lax.div(self.part * product.boxes, product.parts)
        self.count = lax.div((self.part + 1) * product.boxes, product.parts) - self.first
        turns = lax.div(product.tiles - self.lane + (self.lanes - 1), self.lanes)
        self.turns = jnp.where(self.lane < self.lanes, turns, 0)


def _load(share: _Share, weights, ring, full, freed, stages: int, step):
    """Loads a share's boxes, tile by tile; `step` counts boxes of all products."""

    def box(i, step):
        turn = lax.div(i, share.count)
        row, tile = share.first + i - turn * share.count, share.lane + turn * share.lanes
        stage = lax.rem(step, stages)

        @pl.when(step >= stages)
        def _():
            plgpu.barrier_wait(freed.at[stage])

        where = weights.at[pl.ds(row * WIDTH, WIDTH), pl.ds(tile * WIDTH, WIDTH)]
        copy_once(where, ring.at[stage], full.at[stage])
        return step + 1

    return lax.fori_loop(0, share.turns * share.count, box, step)


def _multiply(share: _Share, plan: LayerPlan, out, rows_smem, ring, full, freed, step):
    """The tiles of a share, from rows in shared memory, to a part of `out` [P * T, N]."""

    def tile(turn, step):
        def accumulate(acc):
            def box(j, _):
                stage = lax.rem(step + j, plan.stages)
                plgpu.barrier_wait(full.at[stage])
                rows.fence_registers()
                plgpu.wgmma(acc, ring.at[stage].T, rows_smem.at[j].T)
                plgpu.wgmma_wait(1)

                @pl.when(j > 0)
                def _():
                    plgpu.barrier_arrive(freed.at[lax.rem(step + j - 1, plan.stages)])

            lax.fori_loop(0, share.count, box, None)
            return acc[...]

        result = pl.run_scoped(accumulate, plgpu.ACC((WIDTH, plan.columns), jnp.float32))
        step += share.count
        plgpu.barrier_arrive(freed.at[lax.rem(step - 1, plan.stages)])
        column = (share.lane + turn * share.lanes) * WIDTH
        rows.store_tile(result, out, share.part * plan.tokens, column, num_tokens=plan.tokens)
        return step

    return lax.fori_loop(0, share.turns, tile, step)


def _normed_row(x_ref, parts_ref, scale_ref, row, sums, eps: float, tokens: int):
    """A row of x plus a product in parts, rounded as `add_rms_norm` does, and its norm."""
    embed = x_ref.shape[1]
    columns = columns_of(embed, x_ref.dtype)
    stream = RegisterColumns.load(x_ref, row, columns)
    loaded = [
        RegisterColumns.load(parts_ref, part * tokens + row, columns) for part in range(parts_ref.shape[0] // tokens)
    ]
    factors = RegisterColumns.load(scale_ref, 0, columns)
    added = functools.reduce(jnp.add, loaded).astype(x_ref.dtype).astype(jnp.float32)
    y = (stream.astype(jnp.float32) + added).astype(x_ref.dtype)
    wide = y.astype(jnp.float32)
    inverse = lax.rsqrt(rows.sum_of(wide * wide, sums) / embed + eps)
    return columns, y, (wide * inverse * factors.astype(jnp.float32)).astype(x_ref.dtype)


@functools.partial(jax.jit, static_argnames=("plan", "eps"))
def after_attention_gpu(x, attended, weights, arrivals, *, plan: LayerPlan, eps: float):
    """The kernel call; jitted, so that equal layers are lowered once.

    Args:
      x: [T, E], the residual stream before the layer's attention is added.
      attended: [T, Hq * D], what attention gave.
      weights: `LayerWeights`.
      arrivals: int32[1], a count that every call leaves as it can be used by the next; 0 at first.

    Returns:
      the stream [T, E], f32 parts of what is to be added to it [P, T, E] or `None`, f32 parts of the projection
      [P, T, N] or `None`, and `arrivals`.
    """
    tokens, embed = x.shape
    intermediate, last, dtype = weights.down.shape[0], plan.qkv is None, x.dtype
    counter = jax.new_ref(arrivals, memory_space=plgpu.GMEM)
    operands = [x, attended, weights.o, weights.mlp_scale.reshape(1, embed), weights.gate_up, weights.down]
    operands += [] if last else [weights.scale.reshape(1, embed), weights.qkv]
    shape = jax.ShapeDtypeStruct
    stream = shape((tokens, embed), dtype)
    out_type = {
        "y": stream,
        "o_parts": shape((plan.o.parts * tokens, embed), jnp.float32),
        "gate_up_parts": shape((plan.gate_up.parts * tokens, 2 * intermediate), jnp.float32),
        "down_parts": shape((plan.down.parts * tokens, embed), jnp.float32),
    }
    if plan.apart:
        out_type |= {"normed": stream, "gated": shape((tokens, intermediate), dtype)}
    if plan.qkv is not None:
        out_type |= {"z": stream, "qkv_parts": shape((plan.qkv.parts * tokens, plan.qkv.outputs), jnp.float32)}
        if plan.apart:
            out_type |= {"normed_2": stream}
    products = plan.products

    def body(*refs):
        refs, scratch = list(refs[:-5]), refs[-5:]
        ins = [refs.pop(0) for _ in operands]
        counter_ref = refs.pop(0)
        outs = dict(zip(out_type, refs, strict=True))
        x_ref, attended_ref, o_ref, mlp_scale_ref, gate_up_ref, down_ref, *more = ins
        scale_ref, qkv_ref = more or (None, None)
        rows_smem, ring, sums, full, freed = scratch
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        kernels = [o_ref, gate_up_ref, down_ref, *([] if last else [qkv_ref])]
        shares = [_Share(product, block, plan.blocks) for product in products]
        sizes = {"tokens": plan.columns}

        @pl.when(wg == 1)
        def _():
            def warp(index):
                @pl.when(index == 0)
                def _():
                    step = jnp.int32(0)
                    for share, kernel in zip(shares, kernels, strict=True):
                        step = _load(share, kernel, ring, full, freed, plan.stages, step)

            plgpu.warp_map(warp)

        def wait():
            rows.wait_for_all(counter_ref, block, plan.blocks)

        def norm(share, x_ref, parts_ref, scale_ref, y_ref, normed_ref):
            """Rows of the next product, from a sum and its norm; the sum is kept."""
            if not plan.apart:

                @pl.when((share.turns > 0) | (block < tokens))  # who keeps a row may have no tile
                def _():
                    for row in range(tokens):
                        columns, y, normed = _normed_row(x_ref, parts_ref, scale_ref, row, sums, eps, tokens)
                        rows.put_row(
                            normed, rows_smem, jnp.int32(row), share.first, share.count, pieces=columns.pieces, **sizes
                        )

                        @pl.when(block == row)
                        def _(row=row, columns=columns, y=y):
                            RegisterColumns.store(y_ref, row, columns, y)

                return

            @pl.when(block < tokens)
            def _():
                columns, y, normed = _normed_row(x_ref, parts_ref, scale_ref, block, sums, eps, tokens)
                RegisterColumns.store(y_ref, block, columns, y)
                RegisterColumns.store(normed_ref, block, columns, normed)

            wait()
            copy(share, normed_ref)

        def copy(share, ref):
            @pl.when(share.turns > 0)
            def _():
                rows.put_part(ref, rows_smem, share.first, share.count, longest=share.product.longest, **sizes)

        @pl.when(wg == 0)
        def _():
            step = jnp.int32(0)

            def multiply(nth, out, step):
                plgpu.commit_smem()
                return _multiply(shares[nth], plan, outs[out], rows_smem, ring, full, freed, step)

            copy(shares[0], attended_ref)
            step = multiply(0, "o_parts", step)
            wait()
            norm(shares[1], x_ref, outs["o_parts"], mlp_scale_ref, outs["y"], outs.get("normed"))
            step = multiply(1, "gate_up_parts", step)
            wait()
            if plan.apart:
                rows.store_gated(outs["gate_up_parts"], outs["gated"], block, blocks=plan.blocks)
                wait()
                copy(shares[2], outs["gated"])
            else:

                @pl.when(shares[2].turns > 0)
                def _():
                    rows.put_gated_part(
                        outs["gate_up_parts"],
                        rows_smem,
                        shares[2].first,
                        shares[2].count,
                        dtype,
                        num_tokens=tokens,
                        longest=plan.down.longest,
                        **sizes,
                    )

            step = multiply(2, "down_parts", step)
            if not last:
                wait()
                norm(shares[3], outs["y"], outs["down_parts"], scale_ref, outs["z"], outs.get("normed_2"))
                multiply(3, "qkv_parts", step)

    results = plgpu.kernel(
        body,
        out_type=list(out_type.values()),
        scratch_types=[
            plgpu.SMEM((plan.row_boxes, plan.columns, WIDTH), dtype, transforms=rows.ROW_TRANSFORMS),
            plgpu.SMEM((plan.stages, WIDTH, WIDTH), dtype, transforms=_TRANSFORMS),
            plgpu.SMEM((4,), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
        ],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="layer_matmuls",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )(*operands, counter)
    found = dict(zip(out_type, results, strict=True))
    arrivals = jax.freeze(counter)
    if last:
        return found["y"], found["down_parts"].reshape(-1, tokens, embed), None, arrivals
    return found["z"], None, found["qkv_parts"].reshape(-1, tokens, weights.qkv.shape[1]), arrivals

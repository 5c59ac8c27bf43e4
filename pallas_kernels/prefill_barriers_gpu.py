"""How warps of the Mosaic GPU prefill kernel wait for each other: tiles, units, turns.

Pallas's own barriers count each thread of a warpgroup, and each copy arrives at one with all of a warp's threads. A
tile of small pages is many copies; here one thread says once how many bytes to expect, and issues them all.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import math

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, nvvm

from . import combine_gpu as ends
from .prefill_plan_gpu import most_pages

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_FIRST_TURN = 8  # hardware barriers from here on are for turns; Mosaic GPU's own begin at 0
_TWO_CONSUMERS = 256  # threads


def barriers(count: int):
    """Scratch for so many barriers."""
    return plgpu.SMEM((2 * count,), jnp.int32)  # of 8 bytes each


def _at(ref: ir.Value, index: ir.Value) -> utils.BarrierRef:
    return utils.BarrierRef(utils.memref_ptr(ref), index, None, 1)


def _lane() -> ir.Value:
    return arith.remui(ends.thread_index(), ends.i32(32))


def initialise(groups: list[tuple]) -> None:
    """Sets up barriers; all threads of the block call it, before any uses one.

    Args:
      groups: (scratch, count, arrivals) of barriers that complete at so many arrivals.
    """

    @plgpu.inline_mgpu(arg_types=tuple(_REF for _ in groups))
    def init(_, *refs):
        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)):
            for ref, (_, count, arrivals) in zip(refs, groups, strict=True):
                for i in range(count):
                    nvvm.mbarrier_init(_at(ref, ends.i32(i)).get_ptr(), ends.i32(arrivals))
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        gpu.barrier()

    init(*[ref for ref, _, _ in groups])


def wait(ref, index, round_) -> None:
    """Waits until barrier `index` has completed for the `round_`-th time, counted from 0."""

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR))
    def wait_for(_, ref, index, round_):
        odd = arith.trunci(ir.IntegerType.get_signless(1), ends.scalar_of(round_))
        _at(ref, ends.scalar_of(index)).wait_parity(odd)

    wait_for(ref, index, round_)


def arrive(ref, index) -> None:
    """Arrives once for each calling warp."""

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR))
    def arrive_at(_, ref, index):
        utils.warp_barrier()
        _at(ref, ends.scalar_of(index)).arrive(predicate=ends.equal(_lane(), ends.i32(0)))

    arrive_at(ref, index)


def load_tile(
    pages_ref, smem, barrier, index, head_and_kind, ids, first, *, page_size: int, transforms, swizzle: int | None
):
    """In a warp: copies a tile's pages of one head, K or V, to shared memory.

    Args:
      smem: swizzled tiles, or rows one after the other if there are no transforms.
      barrier, index: the barrier that completes when all is there.
      head_and_kind: 2 * head, plus 1 for V.
      ids: pages that the tile lies in, one after the other (`most_pages`).
      first: the tile's first slot in the first of them; `None` if it begins and ends with a page.
    """
    scalars = [head_and_kind, *ids, *([] if first is None else [first])]

    @plgpu.inline_mgpu(arg_types=(_REF, plgpu.RefType(transforms), _REF, _SCALAR, [_SCALAR] * len(scalars)))
    def load(ctx, pages, smem, barrier, index, scalars):
        index_type = ir.IndexType.get()
        ty = ir.MemRefType(smem.type)
        rows_of_one = ty.shape[2] if transforms else 1  # rows of the leading axis' elements, which may be tiles
        rows = ty.shape[0] * rows_of_one
        box = math.gcd(rows, page_size)
        column, *ids = map(ends.scalar_of, scalars)
        first = ids.pop() if len(ids) > most_pages(rows, page_size) else None
        full = _at(barrier, ends.scalar_of(index))

        def place(row: int) -> tuple[ir.Value, ir.Value | None]:
            """Page and first slot of the box that begins with this row of the tile."""
            nth, slot = divmod(row, page_size)
            if first is None:
                return ids[nth], None
            at = arith.addi(first, ends.i32(slot))
            if slot == 0:
                return ids[nth], at
            within = ends.less(at, ends.i32(page_size))
            after = arith.subi(at, ends.i32(page_size))
            return arith.select(within, ids[nth], ids[nth + 1]), arith.select(within, at, after)

        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)):
            full.arrive_expect_tx(math.prod(ty.shape) * utils.bytewidth(ty.element_type))
            for row in range(0, rows, box):
                page, slot = place(row)
                ctx.async_copy(
                    src_ref=pages,
                    dst_ref=utils.memref_slice(smem, slice(row // rows_of_one, (row + box) // rows_of_one)),
                    gmem_slice=(
                        arith.index_cast(index_type, page),
                        slice(None) if slot is None else mgpu.ds(arith.index_cast(index_type, slot), box),
                        arith.index_cast(index_type, column),
                    ),
                    gmem_transform=(mgpu.TileTransform(tuple(ty.shape[2:])),) if transforms else (),
                    barrier=full,
                    swizzle=swizzle,
                    arrive=False,
                    predicate=None,
                )

    load(pages_ref, smem, barrier, index, scalars)


def await_turn(me) -> None:
    """Waits until the consumer before has issued its products."""
    _turn("bar.sync", me)


def give_turn(me) -> None:
    """Lets consumer `me` issue its products."""
    _turn("bar.arrive", me)


def _turn(instruction: str, me) -> None:
    @plgpu.inline_mgpu(arg_types=(_SCALAR,))
    def turn(_, me):
        barrier = arith.addi(ends.scalar_of(me), ends.i32(_FIRST_TURN))
        utils.inline_ptx(f"{instruction} $0, {_TWO_CONSUMERS};", barrier, has_side_effects=True)

    turn(me)


def count_unit(counter_ref, next_ref, slot, last):
    """In a warp: takes the next unit off the counter, and puts its number where the others look.

    Args:
      counter_ref: i32[N] in global memory; element 0 counts the units that were taken.
      last: the number that the last of all takes gets; who gets it sets the counter back to 0.

    Returns:
      the unit's number.
    """

    @plgpu.inline_mgpu(
        arg_types=(_REF, _REF, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
    )
    def take(_, counter, smem, slot, last):
        i32 = ir.IntegerType.get_signless(32)
        slot, last = ends.scalar_of(slot), ends.scalar_of(last)
        lane = arith.remui(ends.thread_index(), ends.i32(32))
        pointer, _ = ends.address(counter, [ends.i32(0)])
        first = arith.extui(i32, ends.equal(lane, ends.i32(0)))
        taken = utils.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.u32 $0, 0; @p atom.global.add.relaxed.gpu.u32 $0, [$1], 1; }",
            pointer,
            first,
            result_types=i32,
            has_side_effects=True,
        )
        taken = nvvm.shfl_sync(ends.i32(-1), taken, ends.i32(0), ends.i32(31), nvvm.ShflKind.idx)
        with utils.when(ends.equal(lane, ends.i32(0))):
            at = arith.index_cast(ir.IndexType.get(), slot)
            memref.store(taken, smem, [at])
            with utils.when(ends.equal(taken, last)):
                ends.store_global(ends.i32(0), counter, [ends.i32(0)])
        return mgpu.FragmentedArray.splat(taken, (), is_signed=True)

    return take(counter_ref, next_ref, slot, last)

"""What the Mosaic GPU prefill kernel moves by hand: queries, outputs, and zeros over values that no query may see.

Rows of a tile are (token, query head) pairs, which TMA copies of whole tiles cannot gather or clip. All moves are of
16 bytes a thread; where they are in shared memory is the layout that matrix instructions read.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from . import combine_gpu as ends
from .prefill_registers_gpu import row_scalars

_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_THREADS = 128
_UNIT = 8  # values of 16 bytes


def _swizzled(offset: ir.Value, swizzle: int) -> ir.Value:
    """Where a byte of a tile in shared memory is: 16-byte units change places within rows of `swizzle` bytes."""
    unit = arith.andi(arith.shrui(offset, ends.i32(7)), ends.i32(swizzle // 16 - 1))
    return arith.xori(offset, arith.shli(unit, ends.i32(4)))


def _thread_here() -> ir.Value:
    """The thread's number in its warpgroup, read anew: what is made of it is not kept through the loops before."""
    thread = utils.inline_ptx(
        "mov.u32 $0, %tid.x;", result_types=ir.IntegerType.get_signless(32), has_side_effects=True
    )
    return arith.remui(thread, ends.i32(_THREADS))


def _own_units(smem, head_dim: int, swizzle: int) -> list[tuple[ir.Value, ir.Value, ir.Value]]:
    """The 16-byte units of a warp's 16 rows, lane by lane: row, first column, and address in shared memory."""
    thread = _thread_here()
    lane, warp = arith.remui(thread, ends.i32(32)), arith.divui(thread, ends.i32(32))
    columns = head_dim // _UNIT
    units = []
    for i in range(16 * columns // 32):
        nth = arith.addi(lane, ends.i32(i * 32))
        row = arith.divui(nth, ends.i32(columns))
        column = arith.muli(arith.subi(nth, arith.muli(row, ends.i32(columns))), ends.i32(_UNIT))
        row = arith.addi(row, arith.muli(warp, ends.i32(16)))
        units.append((row, column, address_of(smem, row, column, head_dim, swizzle)))
    return units


def address_of(smem, row: ir.Value, column: ir.Value, head_dim: int, swizzle: int) -> ir.Value:
    """Where an element of a swizzled tile of 16-bit values is."""
    tile_columns = swizzle // 2
    tile = arith.addi(
        arith.muli(arith.divui(row, ends.i32(8)), ends.i32(head_dim // tile_columns)),
        arith.divui(column, ends.i32(tile_columns)),
    )
    offset = arith.addi(
        arith.muli(tile, ends.i32(8 * swizzle)),
        arith.addi(
            arith.muli(arith.remui(row, ends.i32(8)), ends.i32(swizzle)),
            arith.muli(arith.remui(column, ends.i32(tile_columns)), ends.i32(2)),
        ),
    )
    return utils.getelementptr(utils.memref_ptr(smem), [_swizzled(offset, swizzle)], ir.IntegerType.get_signless(8))


def fetch_queries(q_ref, q_smem, token, head, live_rows, *, group: int, head_dim: int, transforms, swizzle: int):
    """Starts copying a tile's queries to shared memory, each warp its own 16 rows.

    Rows from `live_rows` on are some other queries.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), _SCALAR, _SCALAR, _SCALAR))
    def fetch(_, ref, smem, token, head, live_rows):
        token, head, live_rows = map(ends.scalar_of, (token, head, live_rows))
        for row, column, target in _own_units(smem, head_dim, swizzle):
            source = arith.select(ends.less(row, live_rows), row, ends.i32(0))
            pointer, _ = ends.address(ref, [*ends.query_of(source, token, head, group), column])
            utils.inline_ptx("cp.async.cg.shared.global [$0], [$1], 16;", target, pointer, has_side_effects=True)

    fetch(q_ref, q_smem, token, head, live_rows)


def store_outputs(refs, smem, token, head, live_rows, out, lse, *, group: int, head_dim: int, transforms, swizzle: int):
    """Stores the live rows of finished outputs, 16 bytes a thread, each warp its own 16 rows.

    Args:
      refs: outputs, and log-sum-exps or `None`.
      smem: room for the rows, where no product reads any more; `fetch_queries` may follow.
    """
    out_ref, lse_ref = refs
    with_lse = lse_ref is not None

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            *[plgpu.RefType()] * with_lse,
            plgpu.RefType(transforms),
            *[_SCALAR] * 3,
            _WGMMA,
            *[_ROWS] * with_lse,
        )
    )
    def store(_, *args):
        args = list(args)
        ref = args.pop(0)
        lse_ref = args.pop(0) if with_lse else None
        smem = args.pop(0)
        token, head, live_rows = (ends.scalar_of(args.pop(0)) for _ in range(3))
        registers = ends.halves(args.pop(0))
        thread = _thread_here()
        lane, warp = arith.remui(thread, ends.i32(32)), arith.divui(thread, ends.i32(32))
        row = arith.addi(arith.muli(warp, ends.i32(16)), arith.divui(lane, ends.i32(4)))
        rows, column = [row, arith.addi(row, ends.i32(8))], arith.muli(arith.remui(lane, ends.i32(4)), ends.i32(2))
        for half, row in enumerate(rows):
            for n, pair in enumerate(registers[:, half]):
                address = address_of(smem, row, arith.addi(column, ends.i32(8 * n)), head_dim, swizzle)
                llvm.store(ends.rounded(pair, ref, 2), address, alignment=4)
            if lse_ref is not None:
                with utils.when(arith.andi(ends.equal(column, ends.i32(0)), ends.less(row, live_rows))):
                    ends.store_global(row_scalars(args[0])[half], lse_ref, ends.query_of(row, token, head, group))
        utils.warp_barrier()
        four = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        units = _own_units(smem, head_dim, swizzle)
        values = [llvm.load(four, address, alignment=16) for _, _, address in units]
        for (row, column, _), value in zip(units, values, strict=True):
            with utils.when(ends.less(row, live_rows)):
                pointer, _ = ends.address(ref, [*ends.query_of(row, token, head, group), column])
                llvm.store(value, pointer, alignment=16)
        utils.warp_barrier()

    store(out_ref, *[lse_ref] * with_lse, smem, token, head, live_rows, out, *[lse] * with_lse)


def wait_for_queries() -> None:
    """Waits for `fetch_queries`, and lets the matrix instructions see them."""

    @plgpu.inline_mgpu()
    def wait(_):
        utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        utils.warpgroup_barrier()

    wait()


def hide_values(v_smem, low, high, *, block_kv: int, head_dim: int, transforms, swizzle: int) -> None:
    """Zeroes V in the slots of a block outside of [low, high): a weight of 0 does not hide a NaN.

    Consumers that share the block may do it at the same time: they write the same.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), _SCALAR, _SCALAR))
    def hide(_, smem, low, high):
        low, high = ends.scalar_of(low), ends.scalar_of(high)
        base = utils.memref_ptr(smem)
        units = head_dim // 8
        zero = ends.splat(ends.i32(0), 4)
        per_tile = swizzle // 16
        thread = _thread_here()
        for i in range(-(-block_kv * units // _THREADS)):
            nth = arith.addi(thread, ends.i32(i * _THREADS))
            row = arith.divui(nth, ends.i32(units))
            unit = arith.subi(nth, arith.muli(row, ends.i32(units)))
            unseen = arith.ori(
                ends.less(row, low), arith.xori(ends.less(row, high), utils.c(1, ends.less(row, high).type))
            )
            if block_kv * units % _THREADS:
                unseen = arith.andi(unseen, ends.less(row, ends.i32(block_kv)))
            tile = arith.addi(
                arith.muli(arith.divui(row, ends.i32(8)), ends.i32(units // per_tile)),
                arith.divui(unit, ends.i32(per_tile)),
            )
            # Whole rows of a tile are zeroed, so the order of units within them does not matter.
            offset = arith.addi(
                arith.muli(tile, ends.i32(8 * swizzle)),
                arith.addi(
                    arith.muli(arith.remui(row, ends.i32(8)), ends.i32(swizzle)),
                    arith.muli(arith.remui(unit, ends.i32(per_tile)), ends.i32(16)),
                ),
            )
            with utils.when(unseen):
                pointer = utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
                llvm.store(zero, pointer, alignment=16)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        utils.warpgroup_barrier()

    hide(v_smem, low, high)

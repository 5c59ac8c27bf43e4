"""What `layer_gpu` does between two matrix products, thread by thread: rows come together from parts, and go where the
matrix instruction reads them; finished tiles go back to global memory; blocks of threads wait for each other.

A *piece* is 8 neighbouring columns of a row, 16 bytes of it; a thread moves one at a time.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from .combine_gpu import (
    address,
    equal,
    exp2_of,
    f32,
    fence,
    i32,
    less,
    own_rows,
    scalar_of,
    splat,
    store_global,
    thread_index,
)
from .layer_plan_gpu import WIDTH
from .narrow_gpu import WEIGHT_TRANSFORMS, put_bytes, swizzled
from .write_rows_gpu import load_vector, store_vector

ROW_TRANSFORMS = WEIGHT_TRANSFORMS
_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_ROWS_REF = plgpu.RefType(ROW_TRANSFORMS)
_THREADS, _PIECE = 128, 8
_PIECES = WIDTH // _PIECE  # of a box's row
_AT_ONCE = 8  # pieces of a thread whose loads are in flight together
_LONGEST_WAIT_NS = 2_000_000_000  # for the other blocks, which come within microseconds


def wait_for_all(arrivals_ref, block, blocks: int) -> None:
    """Returns when all blocks have come here, and what each stored before is seen by all.

    One counter serves all calls: the blocks' counts add up to its highest bit, which so turns over each time. A block
    that waits for two seconds ends the kernel with an error.
    """

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR))
    def wait(_, ref, block):
        utils.warpgroup_barrier()
        with utils.when(equal(thread_index(), i32(0))):
            pointer, _ = address(ref, [i32(0)])
            count = arith.select(equal(scalar_of(block), i32(0)), i32(2**31 - (blocks - 1)), i32(1))
            fence()
            before = utils.inline_ptx(
                "atom.global.add.relaxed.gpu.u32 $0, [$1], $2;",
                pointer,
                count,
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            # If blocks cannot all run at once, as where another process has some multiprocessors, none of them would
            # ever return: an error says so, and a hang does not. The clock is read so seldom that no usual wait does.
            utils.inline_ptx(
                "{ .reg .pred p; .reg .b32 now, turns; .reg .b64 began, time; mov.b32 turns, 0; mov.b64 began, 0; "
                "again: ld.acquire.gpu.global.b32 now, [$0]; xor.b32 now, now, $1; setp.lt.s32 p, now, 0; @p bra done; "
                "add.s32 turns, turns, 1; and.b32 now, turns, 1023; setp.ne.s32 p, now, 0; @p bra again; "
                "mov.u64 time, %globaltimer; setp.eq.s64 p, began, 0; @p mov.b64 began, time; "
                f"sub.s64 time, time, began; setp.lt.s64 p, time, {_LONGEST_WAIT_NS}; @p bra again; trap; done: }}",
                pointer,
                before,
                has_side_effects=True,
            )
            fence()
        utils.warpgroup_barrier()

    wait(arrivals_ref, block)


def sum_of(x, sums_smem):
    """The sum of a row in registers, f32 as `RegisterColumns` has them, over all threads of the warpgroup."""
    layout = plgpu.Layout.WG_STRIDED(x.shape, _PIECE)

    @plgpu.inline_mgpu(arg_types=(layout, _REF), return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=_SCALAR))
    def reduce(_, x, sums):
        whole = functools.reduce(arith.addf, x.registers.flat)
        parts = [vector.extract(whole, dynamic_position=[], static_position=[i]) for i in range(_PIECE)]
        total = functools.reduce(arith.addf, parts)
        for distance in (1, 2, 4, 8, 16):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        index = ir.IndexType.get()
        lane, warp = arith.remui(thread_index(), i32(32)), arith.divui(thread_index(), i32(32))
        utils.warpgroup_barrier()  # the last sum has been read
        with utils.when(equal(lane, i32(0))):
            memref.store(total, sums, [arith.index_cast(index, warp)])
        utils.warpgroup_barrier()
        total = functools.reduce(arith.addf, [memref.load(sums, [utils.c(w, index)]) for w in range(4)])
        registers = np.empty((), dtype=object)
        registers[()] = total
        return mgpu.FragmentedArray(_registers=registers, _layout=_SCALAR.to_mgpu(), _is_signed=None)

    return reduce(x, sums_smem)


def _row_offset(token: ir.Value, box: ir.Value, column: ir.Value, tokens: int) -> ir.Value:
    """Byte offset of a token's column of a box in shared memory [boxes, tokens, 64]."""
    return arith.addi(arith.muli(box, i32(tokens * WIDTH * 2)), swizzled(token, column, WIDTH))


def put_row(row, rows_smem, token, first, count, *, tokens: int, pieces: int) -> None:
    """Stores those columns of a row in registers, as `RegisterColumns` has them, that a part needs.

    Args:
      first, count: boxes of the part.
      tokens: rows in shared memory.
      pieces: of the row.
    """
    layout = plgpu.Layout.WG_STRIDED(row.shape, _PIECE)

    @plgpu.inline_mgpu(arg_types=(_ROWS_REF, layout, _SCALAR, _SCALAR, _SCALAR))
    def put(_, ref, row, token, first, count):
        token, first, count = map(scalar_of, (token, first, count))
        for turn, register in enumerate(row.registers.flat):
            nth = arith.addi(thread_index(), i32(turn * _THREADS))
            box = arith.subi(arith.divui(nth, i32(_PIECES)), first)
            column = arith.muli(arith.remui(nth, i32(_PIECES)), i32(_PIECE))
            has = arith.andi(less(i32(-1), box), less(box, count))
            if (turn + 1) * _THREADS > pieces:
                has = arith.andi(has, less(nth, i32(pieces)))
            with utils.when(has):
                put_bytes(register, ref, _row_offset(token, box, column, tokens), 16)

    put(rows_smem, row, token, first, count)


class _Pieces:
    """Pieces of a part of all tokens, dealt out to the threads: token by token, box by box."""

    def __init__(self, tokens: int, longest: int, first: ir.Value, count: ir.Value):
        self.total = tokens * longest * _PIECES
        self.longest, self.first, self.count = longest, first, count

    def turns(self) -> list[range]:
        turns = -(-self.total // _THREADS)
        return [range(start, min(start + _AT_ONCE, turns)) for start in range(0, turns, _AT_ONCE)]

    def at(self, turn: int) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Token, box of the part, column in it, and whether there is one: else all are of some other."""
        nth = arith.addi(thread_index(), i32(turn * _THREADS))
        has = less(nth, i32(self.total))
        nth = arith.select(has, nth, i32(0))
        token = arith.divui(nth, i32(self.longest * _PIECES))
        nth = arith.subi(nth, arith.muli(token, i32(self.longest * _PIECES)))
        box = arith.divui(nth, i32(_PIECES))
        has = arith.andi(has, less(box, self.count))
        return token, arith.select(has, box, i32(0)), arith.muli(arith.remui(nth, i32(_PIECES)), i32(_PIECE)), has

    def column(self, box: ir.Value, column: ir.Value) -> ir.Value:
        """Column of the whole row."""
        return arith.addi(arith.muli(arith.addi(self.first, box), i32(WIDTH)), column)


def put_part(rows_ref, rows_smem, first, count, *, tokens: int, longest: int) -> None:
    """Copies a part of rows [T, K] to shared memory [boxes, `tokens`, 64]."""
    num_tokens, stride = rows_ref.shape

    @plgpu.inline_mgpu(arg_types=(_REF, _ROWS_REF, _SCALAR, _SCALAR))
    def put(_, rows, smem, first, count):
        pieces = _Pieces(num_tokens, longest, scalar_of(first), scalar_of(count))
        for turns in pieces.turns():
            places = [pieces.at(turn) for turn in turns]
            loaded = [
                load_vector(rows, arith.addi(arith.muli(token, i32(stride)), pieces.column(box, column)), _PIECE)
                for token, box, column, _ in places
            ]
            for (token, box, column, has), register in zip(places, loaded, strict=True):
                with utils.when(has):
                    put_bytes(register, smem, _row_offset(token, box, column, tokens), 16)

    put(rows_ref, rows_smem, first, count)


def _sum_of_parts(ref: ir.Value, token: ir.Value, column: ir.Value, parts: int, num_tokens: int, stride: int):
    """A piece's parts, as loads that are in flight together, and a function that adds them up."""
    loaded = []
    for part in range(parts):
        row = arith.addi(token, i32(part * num_tokens))
        loaded.append(load_vector(ref, arith.addi(arith.muli(row, i32(stride)), column), _PIECE))

    def total() -> ir.Value:
        result = loaded[0]
        for part in loaded[1:]:
            result = arith.addf(result, part)
        return result

    return total


def _gated(gate: ir.Value, up: ir.Value, element: ir.Type) -> ir.Value:
    """silu(gate) * up of 8 f32 values, which are rounded to `element` first, as products are, and after."""
    kind, wide = ir.VectorType.get((_PIECE,), element), gate.type
    gate, up = (arith.extf(wide, arith.truncf(kind, x)) for x in (gate, up))
    scaled = arith.mulf(gate, splat(f32(-math.log2(math.e)), _PIECE))
    parts = [vector.extract(scaled, dynamic_position=[], static_position=[i]) for i in range(_PIECE)]
    decay = vector.from_elements(wide, [exp2_of(x) for x in parts])
    silu = arith.divf(gate, arith.addf(splat(f32(1.0), _PIECE), decay))
    return arith.truncf(kind, arith.mulf(silu, up))


def _gated_piece(parts_ref, token, column, parts: int, num_tokens: int, intermediate: int):
    stride = 2 * intermediate
    gate = _sum_of_parts(parts_ref, token, column, parts, num_tokens, stride)
    up = _sum_of_parts(parts_ref, token, arith.addi(column, i32(intermediate)), parts, num_tokens, stride)
    return gate, up


def put_gated_part(parts_ref, rows_smem, first, count, dtype, *, num_tokens: int, tokens: int, longest: int) -> None:
    """silu(gate) * up of a part of the columns, from parts of both [P * T, 2 F], to shared memory."""
    rows, width = parts_ref.shape
    parts, intermediate, at_once = rows // num_tokens, width // 2, 2

    @plgpu.inline_mgpu(arg_types=(_REF, _ROWS_REF, _SCALAR, _SCALAR))
    def put(_, ref, smem, first, count):
        element = utils.dtype_to_ir_type(dtype)
        pieces = _Pieces(num_tokens, longest, scalar_of(first), scalar_of(count))
        for all_turns in pieces.turns():
            for turns in (all_turns[i : i + at_once] for i in range(0, len(all_turns), at_once)):
                places = [pieces.at(turn) for turn in turns]
                loaded = [
                    _gated_piece(ref, token, pieces.column(box, column), parts, num_tokens, intermediate)
                    for token, box, column, _ in places
                ]
                for (token, box, column, has), (gate, up) in zip(places, loaded, strict=True):
                    value = _gated(gate(), up(), element)
                    with utils.when(has):
                        put_bytes(value, smem, _row_offset(token, box, column, tokens), 16)

    put(parts_ref, rows_smem, first, count)


def store_gated(parts_ref, out_ref, block, *, blocks: int) -> None:
    """silu(gate) * up of all columns, from parts of both [P * T, 2 F], to [T, F]: a share of it a block."""
    num_tokens, intermediate = out_ref.shape
    parts = parts_ref.shape[0] // num_tokens
    total = num_tokens * intermediate // _PIECE

    @plgpu.inline_mgpu(arg_types=(_REF, _REF, _SCALAR))
    def store(_, ref, out, block):
        element = ir.MemRefType(out.type).element_type
        for turn in range(-(-total // (blocks * _THREADS))):
            nth = arith.addi(arith.muli(scalar_of(block), i32(_THREADS)), thread_index())
            nth = arith.addi(nth, i32(turn * blocks * _THREADS))
            with utils.when(less(nth, i32(total))):
                value = arith.muli(nth, i32(_PIECE))
                token = arith.divui(value, i32(intermediate))
                column = arith.subi(value, arith.muli(token, i32(intermediate)))
                gate, up = _gated_piece(ref, token, column, parts, num_tokens, intermediate)
                store_vector(_gated(gate(), up(), element), out, value)

    store(parts_ref, out_ref, block)


def store_tile(tile, parts_ref, first_row, column, *, num_tokens: int) -> None:
    """Stores a finished tile [64 columns, tokens] to rows from `first_row` on of [P * T, N], from `column` on."""

    @plgpu.inline_mgpu(arg_types=(_REF, plgpu.Layout.WGMMA, _SCALAR, _SCALAR))
    def store(_, ref, tile, first_row, column):
        rows, first_token = own_rows()
        registers = tile.registers.reshape(-1, 2)
        for i, pair in enumerate(registers):
            for which in range(2):
                token = arith.addi(first_token, i32(8 * i + which))
                with utils.when(less(token, i32(num_tokens))):
                    for row, register in zip(rows, pair, strict=True):
                        x = vector.extract(register, dynamic_position=[], static_position=[which])
                        where = [arith.addi(scalar_of(first_row), token), arith.addi(scalar_of(column), row)]
                        store_global(x, ref, where)

    store(parts_ref, tile, first_row, column)


def fence_registers() -> None:
    """Orders the accumulators' registers before the matrix instructions that follow; ptxas does it where it must."""

    @plgpu.inline_mgpu(arg_types=())
    def order(_):
        utils.inline_ptx("wgmma.fence.sync.aligned;", has_side_effects=True)

    order()

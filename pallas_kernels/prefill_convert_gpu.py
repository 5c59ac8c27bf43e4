"""The converting warpgroup of the Mosaic GPU prefill kernel: tiles of 8-bit K and V become tiles of 16 bits.

Products of a prefill tile read K and V from shared memory several times over, so here, unlike in decode
(`convert_gpu`), each tile is converted once, by a warpgroup that does nothing else:

    loading warps      ring of 8-bit tiles, rows one after the other
    this warpgroup     ring of 16-bit tiles, and a ring of scales
    consumers          products of 16 bits

Values are not scaled on the way. An int8 and an e4m3 are exact in bfloat16 and in float16: K becomes what the queries
are, V bfloat16, whose range holds weights that are multiplied by V's scales. The scales of a block lie beside its
tiles, and consumers fold them into scores and weights. A NaN of e4m3 becomes a number: V that no query may see needs no
zeros.

A thread turns 16 bytes into two units of 16 bytes of a swizzled tile. Threads go along rows, but from the middle of
each 128 bytes on they take the neighbouring row, so that eight of them write to all banks.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from . import combine_gpu as ends
from . import prefill_barriers_gpu as sync
from . import prefill_plan_gpu as plan
from .prefill_consumer_gpu import Call, Refs, Tiles, read_blocks, take_unit
from .prefill_rows_gpu import address_of

VALUE_DTYPE = jnp.bfloat16
_SCALAR = plgpu.Layout.WG_SPLAT(())
_THREADS = 128
_BYTES = 16  # that a thread converts at a time

# From a word of four values to two pairs in their order. bfloat16 0x4300 | u is 128 + u for a u of 7 bits, and
# 0x4300 | 0x80 is 256: so an int8 is its lower 7 bits on 128, less its sign bit on 128.
_INT8_TO_BFLOAT16 = """{
.reg .b32 low, high, base;
prmt.b32 low, $2, 0x43434343, 0x4140;
prmt.b32 high, $2, 0x43434343, 0x4342;
and.b32 base, low, 0xFF80FF80;
and.b32 low, low, 0xFF7FFF7F;
sub.rn.bf16x2 $0, low, base;
and.b32 base, high, 0xFF80FF80;
and.b32 high, high, 0xFF7FFF7F;
sub.rn.bf16x2 $1, high, base;
}"""
# float16 0x6400 | u is 1024 + u; with the sign bit of an int8 turned over, u is 128 + x.
_INT8_TO_FLOAT16 = """{
.reg .b32 word, low, high, bias;
mov.b32 bias, 0x64806480;
xor.b32 word, $2, 0x80808080;
prmt.b32 low, word, 0x64646464, 0x4140;
prmt.b32 high, word, 0x64646464, 0x4342;
sub.rn.f16x2 $0, low, bias;
sub.rn.f16x2 $1, high, bias;
}"""
# Exponent and mantissa of an e4m3 where those of a bfloat16 are give its value, subnormal or not, times 2^-120.
_E4M3_TO_BFLOAT16 = """{
.reg .b32 low, high, bits, factor;
mov.b32 factor, 0x7B807B80;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
shr.u32 bits, low, 4;
and.b32 bits, bits, 0x07F007F0;
lop3.b32 low, bits, low, 0x80008000, 0xF8;
mul.rn.bf16x2 $0, low, factor;
shr.u32 bits, high, 4;
and.b32 bits, bits, 0x07F007F0;
lop3.b32 high, bits, high, 0x80008000, 0xF8;
mul.rn.bf16x2 $1, high, factor;
}"""
_E4M3_TO_FLOAT16 = """{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}"""
_TO = {
    ("int8", "bfloat16"): _INT8_TO_BFLOAT16,
    ("int8", "float16"): _INT8_TO_FLOAT16,
    ("float8_e4m3fn", "bfloat16"): _E4M3_TO_BFLOAT16,
    ("float8_e4m3fn", "float16"): _E4M3_TO_FLOAT16,
}


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def convert_tile(raw_smem, smem, *, dtype, to, block_kv: int, head_dim: int, transforms, swizzle: int) -> None:
    """Converts a tile of 8-bit K or V, and lets the matrix instructions see what is written."""
    ptx = _TO[jnp.dtype(dtype).name, jnp.dtype(to).name]
    units = head_dim // _BYTES  # of a row

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms)))
    def convert(_, raw, smem):
        source, four = utils.memref_ptr(raw), ir.VectorType.get((4,), _i32())
        places, words = [], []
        for i in range(block_kv * units // _THREADS):
            nth = arith.addi(ends.thread_index(), ends.i32(i * _THREADS))
            row = arith.divui(nth, ends.i32(units))
            unit = arith.subi(nth, arith.muli(row, ends.i32(units)))
            row = arith.xori(row, arith.andi(arith.shrui(unit, ends.i32(2)), ends.i32(1)))
            places.append((row, arith.muli(unit, ends.i32(_BYTES))))
            offset = arith.addi(arith.muli(row, ends.i32(head_dim)), arith.muli(unit, ends.i32(_BYTES)))
            pointer = utils.getelementptr(source, [offset], ir.IntegerType.get_signless(8))
            words.append(llvm.load(four, pointer, alignment=_BYTES))
        for (row, column), loaded in zip(places, words, strict=True):
            pairs = []
            for which in range(4):
                word = vector.extract(loaded, dynamic_position=[], static_position=[which])
                pairs += utils.inline_ptx(ptx, word, result_types=(_i32(), _i32()))
            for half in range(2):
                target = address_of(smem, row, arith.addi(column, ends.i32(8 * half)), head_dim, swizzle)
                value = vector.from_elements(four, list(pairs[4 * half : 4 * half + 4]))
                llvm.store(value, target, alignment=16)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    convert(raw_smem, smem)


def num_scales(block_kv: int) -> int:
    """Scales of a block as the warpgroup holds them, one or more a thread: those of K, of V, and perhaps again."""
    return max(2 * block_kv, _THREADS)


def _scale_layout(block_kv: int):
    return plgpu.Layout.WG_STRIDED((num_scales(block_kv),), vec_size=1)


def fetch_scales(scales_ref, page_table_ref, head, row, last_page, first_key, *, block_kv: int, page_size: int):
    """The scales of a block's keys and of its values, from global memory; those past `last_page` are some others."""
    layout = _scale_layout(block_kv)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[_SCALAR] * 4),
        return_type=plgpu.ShapeDtypeStruct((num_scales(block_kv),), jnp.float32, layout=layout),
    )
    def fetch(_, scales, page_table, *scalars):
        head, row, last_page, first_key = map(ends.scalar_of, scalars)
        registers = np.empty((num_scales(block_kv) // _THREADS,), dtype=object)
        for i in range(registers.size):
            nth = arith.addi(ends.thread_index(), ends.i32(i * _THREADS))
            key, which = arith.remui(nth, ends.i32(block_kv)), arith.divui(nth, ends.i32(block_kv))
            which = arith.andi(which, ends.i32(1))
            position = arith.addi(first_key, key)
            column = arith.divui(position, ends.i32(page_size))
            slot = arith.subi(position, arith.muli(column, ends.i32(page_size)))
            page = ends.load_global(page_table, [row, arith.minui(column, last_page)])
            at = arith.addi(arith.muli(arith.addi(arith.muli(head, ends.i32(2)), which), ends.i32(page_size)), slot)
            registers[i] = ends.splat(ends.load_global(scales, [page, at]), 1)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return fetch(scales_ref, page_table_ref, head, row, last_page, first_key)


def put_scales(values, scales_smem, *, block_kv: int) -> None:
    """Stores what `fetch_scales` gave: the block's scales of K, then those of V."""

    @plgpu.inline_mgpu(arg_types=(_scale_layout(block_kv), plgpu.RefType()))
    def put(_, values, ref):
        for i, register in enumerate(values.registers.flat):
            nth = arith.addi(ends.thread_index(), ends.i32(i * _THREADS))
            if 2 * block_kv < _THREADS:
                nth = arith.remui(nth, ends.i32(2 * block_kv))
            vector.store(register, ref, [arith.index_cast(ir.IndexType.get(), nth)])

    put(values, scales_smem)


def convert(call: Call, refs: Refs, tiles: Tiles, page_size: int) -> None:
    """Converts the blocks of each unit that the block of threads takes, as the loading warps bring them.

    The scales of a block are fetched while the one before is converted.
    """
    blocks, raw, records = call.blocks, tiles.raw, refs.records
    bkv, stages = blocks.block_kv, blocks.stages
    num_units = records[0, plan.NUM_UNITS]

    def scales_of(fields, j):
        head, row, last_page, kv_start, num_blocks = fields
        first_key = kv_start + (num_blocks - 1 - j) * bkv
        return fetch_scales(
            refs.scales, refs.page_table, head, row, last_page, first_key, block_kv=bkv, page_size=page_size
        )

    def convert_one(step, raw_ring, ring, to):
        raw_smem, raw_full, raw_freed = raw_ring
        smem, full = ring
        raw_stage, stage = lax.rem(step, blocks.raw_stages), lax.rem(step, stages)
        sync.wait(raw_full, raw_stage, lax.div(step, blocks.raw_stages))
        convert_tile(
            raw_smem.at[raw_stage],
            smem.at[stage],
            dtype=call.page_dtype,
            to=to,
            block_kv=bkv,
            head_dim=call.head_dim,
            transforms=call.transforms,
            swizzle=blocks.swizzle,
        )
        sync.arrive(full, stage)
        sync.arrive(raw_freed, raw_stage)

    def wait_until_freed(freed, step):
        @pl.when(step >= stages)
        def _():
            sync.wait(freed, lax.rem(step, stages), lax.div(step, stages) - 1)

    def unit_blocks(state):
        i, _, step, scales, *fields = state
        next_unit = take_unit(tiles, i + 1)
        following = read_blocks(records, next_unit, num_units)
        num_blocks = fields[-1]

        def kv_block(j, carry):
            step, scales = carry
            ends_here = j + 1 == num_blocks
            next_fields = [jnp.where(ends_here, there, here) for here, there in zip(fields, following, strict=True)]
            next_scales = scales_of(next_fields, jnp.where(ends_here, 0, j + 1))
            wait_until_freed(tiles.k_freed, step)
            # There is a place more than there are tiles: the block that had this one is past its softmax, since the
            # scores of the block after it are there.
            put_scales(scales, tiles.scales.at[lax.rem(step, stages + 1)], block_kv=bkv)
            convert_one(step, (raw.k, raw.k_full, raw.k_freed), (tiles.k, tiles.k_full), call.dtype)
            wait_until_freed(tiles.v_freed, step)
            convert_one(step, (raw.v, raw.v_full, raw.v_freed), (tiles.v, tiles.v_full), VALUE_DTYPE)
            return step + 1, next_scales

        step, scales = lax.fori_loop(0, num_blocks, kv_block, (step, scales))
        return i + 1, next_unit, step, scales, *following

    first = take_unit(tiles, jnp.int32(0))

    @pl.when(first < num_units)
    def _():
        fields = read_blocks(records, first, num_units)
        state = jnp.int32(0), first, jnp.int32(0), scales_of(fields, jnp.int32(0)), *fields
        lax.while_loop(lambda state: state[1] < num_units, unit_blocks, state)

"""8-bit K and V from shared memory into the registers of a matrix instruction, as float16, for the Mosaic GPU kernel.

A tile of 64 keys lies in shared memory as TMA wrote it: rows of K and V, 2 D bytes a key, in tiles of 8 rows whose
16-byte units are swizzled. K and V are the left operands of the products (see `quantized_gpu`), and a thread needs, of
each 16 x 16 part of a left operand, 2 x 2 pairs of neighbours along the sum. `ldmatrix` hands out 32-bit words:

    K  [keys, D]     the sum is over D:     a word is 4 neighbours in a row, which are two pairs
    V^T [D, keys]    the sum is over keys:  transposed in units of 16 bits, a word is 2 neighbours in D of 2 keys,
                                            which are two pairs in two rows

So nothing is shuffled: the order of D within each 16 is one that suits the words, for the queries as well
(`put_queries`) and for the rows of the output (`adjacent` in `narrow_gpu.store`). Every int8 and every e4m3 is exact
in float16.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import math

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from . import combine_gpu as ends
from .narrow_gpu import put_bytes, query_layout, swizzled
from .tuning import scale_box

_WGMMA = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
_KEYS = 64
_F16_MAX = 65504.0

# float16 0x6400 | u is 1024 + u; with the sign bit of an int8 turned over, u is 128 + x.
_FROM_INT8 = """{
.reg .b32 odd, bias;
mov.b32 bias, 0x64806480;
shr.u32 odd, $2, 8;
lop3.b32 $0, $2, 0x00FF00FF, bias, 0x6A;
lop3.b32 odd, odd, 0x00FF00FF, bias, 0x6A;
sub.rn.f16x2 $0, $0, bias;
sub.rn.f16x2 $1, odd, bias;
}"""
_FROM_E4M3 = """{{
.reg .b32 word;
.reg .b16 low, high;
{take}
mov.b32 {{low, high}}, word;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}}"""


def _row_bytes(head_dim: int) -> int:
    """Bytes of a row of the swizzled tiles."""
    return math.gcd(2 * head_dim, 128)


def page_transforms(head_dim: int) -> tuple:
    """How a tile of 8-bit K and V is laid out, each key's V behind its K."""
    return plgpu.TilingTransform((8, _row_bytes(head_dim))), plgpu.SwizzleTransform(_row_bytes(head_dim))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _pair(word: ir.Value) -> ir.Value:
    """A 32-bit register as two float16."""
    as_vector = vector.from_elements(ir.VectorType.get((1,), _i32()), [word])
    return vector.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), as_vector)


def _convert(word: ir.Value, dtype, *, apart: bool) -> tuple[ir.Value, ir.Value]:
    """Two pairs of float16 from a word of four values: 0, 2 and 1, 3 if `apart`, else those of `_pairs_apart`."""
    if dtype == jnp.int8:
        ptx = _FROM_INT8
    else:
        ptx = _FROM_E4M3.format(take="prmt.b32 word, $2, 0, 0x3120;" if apart else "mov.b32 word, $2;")
    low, high = utils.inline_ptx(ptx, word, result_types=(_i32(), _i32()))
    return _pair(low), _pair(high)


def _pairs_apart(dtype) -> bool:
    """Whether the cheapest pairs of a word are 0, 2 and 1, 3; else they are 0, 1 and 2, 3."""
    return dtype == jnp.int8


def _load_matrices(base: ir.Value, offset: ir.Value, *, transposed: bool) -> list[ir.Value]:
    """Four 8 x 8 matrices of 16 bits: a 32-bit word of each; a lane's offset is that of row lane % 8 of lane / 8."""
    trans = ".trans" if transposed else ""
    return list(
        utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
            arith.addi(base, offset),
            result_types=(_i32(),) * 4,
            has_side_effects=True,
            convergent=True,
        )
    )


def _base(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(_i32(), utils.memref_ptr(ref))


def _lanes() -> tuple[ir.Value, ir.Value, ir.Value]:
    """Warp, matrix and row of the matrix that the thread names the address of."""
    lane, warp = arith.remui(ends.thread_index(), ends.i32(32)), arith.divui(ends.thread_index(), ends.i32(32))
    return warp, arith.divui(lane, ends.i32(8)), arith.remui(lane, ends.i32(8))


def _unit_offset(group: ir.Value, row: ir.Value, unit: ir.Value, head_dim: int) -> ir.Value:
    """Byte offset of a 16-byte unit of row `8 * group + row`; units of V follow those of K."""
    i, width = ends.i32, _row_bytes(head_dim)
    units = width // 16
    tile = arith.addi(arith.muli(group, i(2 * head_dim // width)), arith.divui(unit, i(units)))
    inside = arith.xori(arith.remui(unit, i(units)), arith.divui(row, i(128 // width)))
    return _sum(arith.muli(tile, i(8 * width)), arith.muli(row, i(width)), arith.muli(inside, i(16)))


def _sum(*terms: ir.Value) -> ir.Value:
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _array(registers: np.ndarray, shape: tuple[int, int]) -> mgpu.FragmentedArray:
    layout = _WGMMA.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def load_keys(kv_smem, *, head_dim: int, dtype):
    """K of a tile, [64 keys, D] float16, the order of D as in `put_queries`."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(page_transforms(head_dim)),),
        return_type=plgpu.ShapeDtypeStruct((_KEYS, head_dim), jnp.float16, layout=_WGMMA),
    )
    def load(_, ref):
        base, (warp, matrix, row) = _base(ref), _lanes()
        group = arith.addi(arith.muli(warp, ends.i32(2)), arith.remui(matrix, ends.i32(2)))
        unit = arith.divui(matrix, ends.i32(2))
        registers = np.empty((head_dim // 16, 2, 2), dtype=object)  # by 16 of D, halves of them, and the two keys
        for first in range(0, head_dim // 16, 2):
            here = arith.addi(unit, ends.i32(first))
            words = _load_matrices(base, _unit_offset(group, row, here, head_dim), transposed=False)
            for n, word in enumerate(words):
                registers[first + n // 2, :, n % 2] = _convert(word, dtype, apart=False)
        return _array(registers, (_KEYS, head_dim))

    return load(kv_smem)


def value_rows(head_dim: int) -> int:
    """Rows of V transposed, padded to whole products."""
    return -(-head_dim // 64) * 64


def load_values(kv_smem, *, head_dim: int, dtype):
    """V of a tile, transposed: [D, 64 keys] float16. Rows r and r + 8 of each 16 are 2r and 2r + 1 in D.

    Past D they are some other rows of it.
    """
    rows = value_rows(head_dim)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(page_transforms(head_dim)),),
        return_type=plgpu.ShapeDtypeStruct((rows, _KEYS), jnp.float16, layout=_WGMMA),
    )
    def load(_, ref):
        base, (warp, matrix, row) = _base(ref), _lanes()
        registers = np.empty((rows // 64, _KEYS // 8, 2), dtype=object)  # by 64 of D, 8 keys, and the two rows
        for tile in range(rows // 64):
            unit = arith.addi(warp, ends.i32(4 * tile))
            if rows != head_dim:
                unit = arith.minui(unit, ends.i32(head_dim // 16 - 1))
            unit = arith.addi(unit, ends.i32(head_dim // 16))
            for first in range(0, _KEYS // 8, 4):
                group = arith.addi(matrix, ends.i32(first))
                words = _load_matrices(base, _unit_offset(group, row, unit, head_dim), transposed=True)
                for n, word in enumerate(words):
                    registers[tile, first + n] = _convert(word, dtype, apart=True)
        return _array(registers, (rows, _KEYS))

    return load(kv_smem)


def put_queries(q, q_smem, *, n: int, head_dim: int, dtype, transforms) -> None:
    """Stores a tile's queries [N, D] where the matrix instruction reads them, D in the order in which K is loaded."""
    layout = query_layout(n, head_dim)
    q = jnp.clip(q.astype(jnp.float32), -_F16_MAX, _F16_MAX).astype(jnp.float16)
    # Of the four values of a word of K: how far apart in the sum are neighbours, and how far are those at distance two.
    by_one, by_two = (8, 1) if _pairs_apart(dtype) else (1, 8)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(transforms)))
    def put(_, q, ref):
        i, width = ends.i32, layout.to_mgpu().vec_size
        for nth, register in enumerate(q.registers.flat):
            value = arith.muli(arith.addi(ends.thread_index(), i(128 * nth)), i(width))
            row = arith.divui(value, i(head_dim))
            first = arith.subi(value, arith.muli(row, i(head_dim)))
            for which in range(width):
                column = arith.addi(first, i(which))
                in_16 = arith.remui(column, i(16))
                place = _sum(
                    arith.subi(column, in_16),
                    arith.muli(arith.divui(in_16, i(4)), i(2)),
                    arith.muli(arith.remui(in_16, i(2)), i(by_one)),
                    arith.muli(arith.remui(arith.divui(in_16, i(2)), i(2)), i(by_two)),
                )
                x = vector.extract(register, dynamic_position=[], static_position=[which])
                put_bytes(x, ref, swizzled(row, place, head_dim), 2)

    put(q, q_smem)


def load_scales(scales_smem, *, box: int, page_size: int):
    """The scales of a tile's keys and of its values, each [64]."""
    _, values_at = scale_box(box, page_size)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=(plgpu.ShapeDtypeStruct((_KEYS,), jnp.float32, layout=_ROWS),) * 2,
    )
    def load(_, ref):
        rows, _ = ends.own_rows()
        found = []
        index = ir.IndexType.get()
        for first in (0, values_at):
            registers = np.empty((2,), dtype=object)
            for half, key in enumerate(rows):
                nth = arith.divui(key, ends.i32(box))
                at = arith.addi(arith.remui(key, ends.i32(box)), ends.i32(first))
                where = [arith.index_cast(index, x) for x in (nth, at)]
                registers[half] = vector.load(ir.VectorType.get((1,), ir.F32Type.get()), ref, where)
            layout = _ROWS.to_mgpu()
            found.append(
                mgpu.FragmentedArray(
                    _registers=registers.reshape(layout.registers_shape((_KEYS,))), _layout=layout, _is_signed=None
                )
            )
        return tuple(found)

    return load(scales_smem)


def zero_values(kv_smem, first_seen, end_seen, *, head_dim: int) -> None:
    """Zeroes V of a tile in the rows outside of [first_seen, end_seen): a weight of 0 does not hide a NaN."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(page_transforms(head_dim)), _SCALAR, _SCALAR))
    def zero(_, ref, first_seen, end_seen):
        i = ends.i32
        key, half = arith.divui(ends.thread_index(), i(2)), arith.remui(ends.thread_index(), i(2))
        group, row = arith.divui(key, i(8)), arith.remui(key, i(8))
        unseen = arith.ori(
            ends.less(key, ends.scalar_of(first_seen)), ends.less(arith.subi(ends.scalar_of(end_seen), i(1)), key)
        )
        zeros = vector.broadcast(ir.VectorType.get((4,), _i32()), i(0))
        with utils.when(unseen):
            for first in range(head_dim // 16, head_dim // 8, 2):
                put_bytes(zeros, ref, _unit_offset(group, row, arith.addi(half, i(first)), head_dim), 16)

    zero(kv_smem, first_seen, end_seen)

"""Rows of heads in registers: how the KV write for Hopper loads and stores them, thread by thread.

A *row* is one head of one token; its number is token * heads + head. A warpgroup holds a tile of `rows` of them, as two
arrays: the columns that a rotation pairs stand at equal places of the first and of the second,

    columns      [0, half)   [half, 2 half)   the rest, if the rotation is partial
    first        piece 0 ..                   .. rest, in pairs of neighbouring pieces
    second                   piece 0 ..       .. rest

so that a thread has both values of each pair, 16 bytes of each in 16-bit dtypes, and the lanes of a row are neighbours.
Head counts, and so rows, need not fill a tile: what is beyond them is neither loaded nor stored.

Pallas can say none of this (a tile that ends early, rows that go to slots of their own), so it is written on
registers. The interpreter cannot run that; `PlainRows` is the same in plain Pallas, row by row, for it alone.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .combine_gpu import equal, i32, less, scalar_of, thread_index

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS, _WARP = 128, 32
_PIECE = 8  # values a thread moves at once: 16 bytes of a 16-bit dtype


@dataclass(frozen=True)
class Tile:
    """How the columns of a head are dealt out.

    Attributes:
      head_dim: columns of a row.
      half: pairs that are rotated, (i, half + i); the columns from 2 * half on are not. head_dim / 2 for all.
    """

    head_dim: int
    half: int

    @property
    def piece(self) -> int:
        """Neighbouring columns that a thread moves at once."""
        return math.gcd(_PIECE, self.half, (self.head_dim - 2 * self.half) // 2)

    @property
    def lanes(self) -> int:
        """Neighbouring threads that share a row: a power of two, so that some may have no column."""
        return min(_WARP, 1 << (self.head_dim // 2 // self.piece - 1).bit_length())

    @property
    def rows(self) -> int:
        return _THREADS // self.lanes

    @property
    def shape(self) -> tuple[int, int]:
        """Of the two arrays: columns are padded to whole turns of the lanes."""
        turn = self.lanes * self.piece
        return self.rows, -(-self.head_dim // 2 // turn) * turn

    @property
    def layout(self) -> Any:
        per_warp = _WARP // self.lanes
        tiles = ((self.rows, self.lanes * self.piece), (per_warp, self.lanes * self.piece), (1, self.piece))
        layout = mgpu.TiledLayout(
            fragmented_array.Tiling(tiles), (-6,), (-4, -3), -1, _check_canonical=False
        ).canonicalize()
        return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)

    @property
    def row_layout(self) -> Any:
        """Of one value a row, [rows]."""
        return self.layout.reduce(1)


@dataclass(frozen=True)
class Heads:
    """Which columns of a [T, C] array are heads: `count` of them, one after the other from `offset` on."""

    count: int
    offset: int = 0


def _pieces(tile: Tile) -> list[tuple[ir.Value, ir.Value, ir.Value]]:
    """For each turn of the lanes, the first columns of this thread's two pieces, and whether it has any."""
    lane = arith.remui(thread_index(), i32(tile.lanes))
    rotated, last = tile.half // tile.piece, tile.head_dim // 2 // tile.piece
    found = []
    for turn in range(tile.shape[1] // (tile.lanes * tile.piece)):
        nth = arith.addi(lane, i32(turn * tile.lanes))
        first = arith.muli(nth, i32(tile.piece))
        second = arith.addi(first, i32(tile.half))
        if rotated < last:
            rest = arith.addi(i32(2 * tile.half), arith.muli(arith.subi(nth, i32(rotated)), i32(2 * tile.piece)))
            turns = less(nth, i32(rotated))
            first = arith.select(turns, first, rest)
            second = arith.select(turns, second, arith.addi(rest, i32(tile.piece)))
        found.append((first, second, less(nth, i32(last))))
    return found


def _own_row(tile: Tile, start: ir.Value) -> ir.Value:
    return arith.addi(start, arith.divui(thread_index(), i32(tile.lanes)))


def _wide(x: ir.Value) -> ir.Value:
    # Elements of a pool can be more than 2**31.
    return arith.extsi(ir.IntegerType.get_signless(64), x)


def _pointer(ref: ir.Value, offset: ir.Value) -> tuple[ir.Value, ir.Type]:
    """Global address of an element by its place in row-major order; and the type that it is moved as."""
    element = ir.MemRefType(ref.type).element_type
    if utils.bitwidth(element) == 8:  # LLVM knows no floats of 8 bits
        element = ir.IntegerType.get_signless(8)
    pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
    return utils.getelementptr(pointer, [offset], element), element


def load_vector(ref: ir.Value, offset: ir.Value, width: int) -> ir.Value:
    pointer, element = _pointer(ref, offset)
    return llvm.load(ir.VectorType.get((width,), element), pointer, alignment=width * utils.bytewidth(element))


def store_vector(value: ir.Value, ref: ir.Value, offset: ir.Value) -> None:
    pointer, element = _pointer(ref, offset)
    (width,) = ir.VectorType(value.type).shape
    value = utils.bitcast(value, ir.VectorType.get((width,), element))
    llvm.store(value, pointer, alignment=width * utils.bytewidth(element))


def from_registers(registers: list[ir.Value], shape: tuple[int, ...], layout, *, is_signed: bool | None = None):
    layout = layout.to_mgpu()
    filled = np.empty(len(registers), dtype=object)
    filled[:] = registers
    return mgpu.FragmentedArray(
        _registers=filled.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=is_signed
    )


@dataclass(frozen=True)
class RegisterRows:
    """Rows in the registers of a warpgroup; `num_rows` is where they end."""

    tile: Tile
    num_rows: int

    def load(self, ref, start, heads: Heads, skip: int = 0):
        """The tile from row `start` on, two arrays of `tile.shape`; arbitrary where there is no row or column.

        Args:
          skip: tokens of `ref` before the first one.
        """
        tile, (_, stride) = self.tile, ref.shape
        kind = plgpu.ShapeDtypeStruct(tile.shape, ref.dtype, layout=tile.layout)

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=(kind, kind))
        def load(_, ref, start):
            row = self._clamped(_own_row(tile, scalar_of(start)))
            token = arith.divui(row, i32(heads.count))
            head = arith.subi(row, arith.muli(token, i32(heads.count)))
            origin = arith.addi(arith.muli(head, i32(tile.head_dim)), i32(heads.offset))
            origin = arith.addi(arith.muli(arith.addi(token, i32(skip)), i32(stride)), origin)
            firsts, seconds = [], []
            for first, second, has in _pieces(tile):
                for column, registers in ((first, firsts), (second, seconds)):
                    column = arith.select(has, column, i32(0))
                    registers.append(load_vector(ref, arith.addi(origin, column), tile.piece))
            return from_registers(firsts, tile.shape, tile.layout), from_registers(seconds, tile.shape, tile.layout)

        return load(ref, start)

    def load_angles(self, cos_ref, sin_ref, start, heads: Heads):
        """Cosines and sines of the rows' tokens, of `tile.shape`; arbitrary for columns that are not rotated."""
        tile = self.tile
        kind = plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=tile.layout)

        @plgpu.inline_mgpu(arg_types=(_REF, _REF, _SCALAR), return_type=(kind, kind))
        def load(_, cos, sin, start):
            token = arith.divui(self._clamped(_own_row(tile, scalar_of(start))), i32(heads.count))
            origin = arith.muli(token, i32(tile.half))
            coses, sines = [], []
            for first, _, _ in _pieces(tile):
                column = arith.select(less(first, i32(tile.half)), first, i32(0))
                for ref, registers in ((cos, coses), (sin, sines)):
                    registers.append(load_vector(ref, arith.addi(origin, column), tile.piece))
            return from_registers(coses, tile.shape, tile.layout), from_registers(sines, tile.shape, tile.layout)

        return load(cos_ref, sin_ref, start)

    def load_slots(self, ref, start, heads: Heads):
        """The slots of the rows' tokens, i32[rows]; those of the last row where there is no row."""
        tile = self.tile
        kind = plgpu.ShapeDtypeStruct((tile.rows,), jnp.int32, layout=tile.row_layout)

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=kind)
        def load(_, ref, start):
            token = arith.divui(self._clamped(_own_row(tile, scalar_of(start))), i32(heads.count))
            return from_registers([load_vector(ref, token, 1)], (tile.rows,), tile.row_layout, is_signed=True)

        return load(ref, start)

    def store(self, ref, start, pair) -> None:
        """Stores rows one after the other: `ref` is [T, heads * D]."""
        tile = self.tile

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, tile.layout, tile.layout))
        def store(_, ref, start, first, second):
            row = _own_row(tile, scalar_of(start))
            with utils.when(less(row, i32(self.num_rows))):
                self._store_row(ref, arith.muli(row, i32(tile.head_dim)), first, second)

        store(ref, start, *pair)

    def store_slots(self, ref, slots, start, heads: Heads, k, v) -> None:
        """Stores K and V rows to their slots of the pool [N, S, 2 * heads, D]; none for a slot that is negative."""
        tile = self.tile

        @plgpu.inline_mgpu(arg_types=(_REF, tile.row_layout, _SCALAR, *[tile.layout] * 4))
        def store(_, ref, slots, start, *registers):
            row, slot = _own_row(tile, scalar_of(start)), _only(slots)
            head = arith.remui(row, i32(heads.count))
            live = arith.andi(less(row, i32(self.num_rows)), less(i32(-1), slot))
            with utils.when(live):
                for kind in range(2):
                    nth = arith.addi(arith.muli(head, i32(2)), i32(kind))
                    at = arith.addi(arith.muli(_wide(slot), _wide(i32(2 * heads.count))), _wide(nth))
                    origin = arith.muli(at, _wide(i32(tile.head_dim)))
                    self._store_row(ref, origin, *registers[2 * kind : 2 * kind + 2])

        store(ref, slots, start, *k, *v)

    def store_scales(self, ref, slots, start, heads: Heads, page_size: int, k, v) -> None:
        """Stores one scale a row to the scales [N, heads * 2 * S]; none for a slot that is negative."""
        tile = self.tile

        @plgpu.inline_mgpu(arg_types=(_REF, *[tile.row_layout] * 2, _SCALAR, tile.row_layout))
        def store(_, ref, slots, k, start, v):
            row, slot = _own_row(tile, scalar_of(start)), _only(slots)
            head = arith.remui(row, i32(heads.count))
            live = arith.andi(less(row, i32(self.num_rows)), less(i32(-1), slot))
            first_lane = equal(arith.remui(thread_index(), i32(tile.lanes)), i32(0))
            with utils.when(arith.andi(live, first_lane)):
                page = arith.divui(slot, i32(page_size))
                offset = arith.subi(slot, arith.muli(page, i32(page_size)))
                for kind, scale in enumerate((k, v)):
                    nth = arith.addi(arith.muli(head, i32(2)), i32(kind))
                    within = arith.addi(arith.muli(nth, i32(page_size)), offset)
                    origin = arith.muli(_wide(page), _wide(i32(2 * heads.count * page_size)))
                    store_vector(scale.registers.flat[0], ref, arith.addi(origin, _wide(within)))

        store(ref, slots, k, start, v)

    def _clamped(self, row: ir.Value) -> ir.Value:
        return arith.minui(row, i32(self.num_rows - 1))

    def _store_row(self, ref: ir.Value, origin: ir.Value, first, second) -> None:
        for turn, (*columns, has) in enumerate(_pieces(self.tile)):
            with utils.when(has):
                for column, x in zip(columns, (first, second), strict=True):
                    column = column if origin.type == column.type else _wide(column)
                    store_vector(x.registers.flat[turn], ref, arith.addi(origin, column))


def _only(x: mgpu.FragmentedArray) -> ir.Value:
    return vector.extract(x.registers.flat[0], dynamic_position=[], static_position=[0])


@dataclass(frozen=True)
class PlainRows:
    """What `RegisterRows` does, in operations that Pallas's GPU interpreter runs: it refuses `inline_mgpu`."""

    tile: Tile
    num_rows: int

    def load(self, ref, start, heads: Heads, skip: int = 0):
        tile = self.tile
        token, head = self._place(start, heads)
        rows = ref[...][:, heads.offset : heads.offset + heads.count * tile.head_dim]
        x = rows.reshape(-1, heads.count, tile.head_dim)[token + skip, head]
        rest = x[:, 2 * tile.half :].reshape(tile.rows, -1, 2, tile.piece)
        pair = []
        for which in range(2):
            rotated = x[:, which * tile.half : (which + 1) * tile.half]
            pair.append(jnp.concatenate([rotated, rest[:, :, which].reshape(tile.rows, -1)], axis=1))
        return tuple(map(self._padded, pair))

    def load_angles(self, cos_ref, sin_ref, start, heads: Heads):
        token, _ = self._place(start, heads)
        return self._padded(cos_ref[...][token]), self._padded(sin_ref[...][token])

    def load_slots(self, ref, start, heads: Heads):
        return ref[...][self._place(start, heads)[0]]

    def store(self, ref, start, pair) -> None:
        tile, stride, x = self.tile, ref.shape[1], self._joined(pair)

        def store_row(nth, row):
            at = row * tile.head_dim
            ref[at // stride, pl.ds(at % stride, tile.head_dim)] = lax.dynamic_index_in_dim(x, nth, keepdims=False)

        self._each(start, store_row)

    def store_slots(self, ref, slots, start, heads: Heads, k, v) -> None:
        page_size, pairs = ref.shape[1], [self._joined(pair) for pair in (k, v)]

        def store_row(nth, row):
            slot = lax.dynamic_index_in_dim(slots, nth, keepdims=False)

            @pl.when(slot >= 0)
            def _():
                for kind, x in enumerate(pairs):
                    head = 2 * (row % heads.count) + kind
                    values = lax.dynamic_index_in_dim(x, nth, keepdims=False)
                    ref[slot // page_size, slot % page_size, head] = values

        self._each(start, store_row)

    def store_scales(self, ref, slots, start, heads: Heads, page_size: int, k, v) -> None:
        def store_row(nth, row):
            slot, *scales = (lax.dynamic_index_in_dim(x, nth, keepdims=False) for x in (slots, k, v))

            @pl.when(slot >= 0)
            def _():
                for kind, scale in enumerate(scales):
                    head = 2 * (row % heads.count) + kind
                    ref[slot // page_size, head * page_size + slot % page_size] = scale

        self._each(start, store_row)

    def _each(self, start, store_row) -> None:
        """Calls `store_row` with the number in the tile, and of all, of each row that there is."""

        @pl.loop(0, jnp.minimum(self.tile.rows, self.num_rows - start))
        def _(nth):
            store_row(nth, start + nth)

    def _place(self, start, heads: Heads) -> tuple[jax.Array, jax.Array]:
        row = jnp.minimum(start + jnp.arange(self.tile.rows, dtype=jnp.int32), self.num_rows - 1)
        return row // heads.count, row % heads.count

    def _padded(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, self.tile.shape[1] - x.shape[1])))

    def _joined(self, pair) -> jax.Array:
        tile = self.tile
        rest = [x[:, tile.half : tile.head_dim // 2].reshape(tile.rows, -1, 1, tile.piece) for x in pair]
        rest = jnp.concatenate(rest, axis=2).reshape(tile.rows, -1)
        return jnp.concatenate([*(x[:, : tile.half] for x in pair), rest], axis=1)

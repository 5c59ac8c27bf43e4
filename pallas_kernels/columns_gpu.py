"""A row's columns over the threads of a warpgroup: how the norm for Hopper loads and stores them.

Thread t holds pieces t, 128 + t, ... of a row; a piece is 16 bytes of neighbouring columns, so a warp's load is one
contiguous run. Rows need not fill the last turn: SmolLM2's 576 columns are 72 pieces. Columns that are missing are 0,
and are not stored. Pallas cannot say that of global memory, so it is written on registers; the interpreter refuses
those, and `PlainColumns` is the same in plain Pallas, for it alone.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from .combine_gpu import i32, less, scalar_of, thread_index
from .write_rows_gpu import from_registers, load_vector, store_vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
_PIECE_BYTES = 16


@dataclass(frozen=True)
class Columns:
    """How the columns of a row are dealt out.

    Attributes:
      count: how many there are, whole pieces.
      piece: neighbouring ones that a thread moves at once.
    """

    count: int
    piece: int

    @property
    def pieces(self) -> int:
        return self.count // self.piece

    @property
    def turns(self) -> int:
        """Pieces of a thread, some of which may not be there."""
        return -(-self.pieces // _THREADS)

    @property
    def shape(self) -> tuple[int]:
        """Of a row in registers: padded to whole turns of the threads."""
        return (self.turns * _THREADS * self.piece,)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED(self.shape, self.piece)


def columns_of(count: int, dtype: Any) -> Columns:
    """Pieces of 16 bytes of that dtype."""
    return Columns(count, _PIECE_BYTES // jnp.dtype(dtype).itemsize)


def _places(columns: Columns) -> list[tuple[ir.Value, ir.Value | None]]:
    """For each turn the first column of this thread's piece, and whether it is there (`None`: it always is)."""
    found = []
    for turn in range(columns.turns):
        nth = arith.addi(thread_index(), i32(turn * _THREADS))
        has = None if (turn + 1) * _THREADS <= columns.pieces else less(nth, i32(columns.pieces))
        found.append((arith.muli(nth, i32(columns.piece)), has))
    return found


class RegisterColumns:
    """Rows in the registers of a warpgroup."""

    @staticmethod
    def load(ref, row, columns: Columns) -> jax.Array:
        """A row of `ref` [T, C], an array of `columns.shape`; 0 where there is no column."""
        stride = ref.shape[1]
        kind = plgpu.ShapeDtypeStruct(columns.shape, ref.dtype, layout=columns.layout)

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR), return_type=kind)
        def load(_, ref, row):
            origin, registers = arith.muli(scalar_of(row), i32(stride)), []
            for column, has in _places(columns):
                if has is None:
                    registers.append(load_vector(ref, arith.addi(origin, column), columns.piece))
                    continue
                column = arith.select(has, column, i32(0))
                loaded = load_vector(ref, arith.addi(origin, column), columns.piece)
                zero = arith.constant(ir.VectorType(loaded.type).element_type, 0.0)
                registers.append(arith.select(has, loaded, vector.broadcast(loaded.type, zero)))
            return from_registers(registers, columns.shape, columns.layout)

        return load(ref, row)

    @staticmethod
    def store(ref, row, columns: Columns, x) -> None:
        stride = ref.shape[1]

        @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, columns.layout))
        def store(_, ref, row, x):
            origin = arith.muli(scalar_of(row), i32(stride))
            for (column, has), register in zip(_places(columns), x.registers.flat, strict=True):
                if has is None:
                    store_vector(register, ref, arith.addi(origin, column))
                    continue
                with utils.when(has):
                    store_vector(register, ref, arith.addi(origin, column))

        store(ref, row, x)


class PlainColumns:
    """What `RegisterColumns` does, in operations that Pallas's GPU interpreter runs."""

    @staticmethod
    def load(ref, row, columns: Columns) -> jax.Array:
        return jnp.pad(ref[...][row], (0, columns.shape[0] - columns.count))

    @staticmethod
    def store(ref, row, columns: Columns, x) -> None:
        ref[row] = x[: columns.count]

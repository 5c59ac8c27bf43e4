"""Rows of logits, piece by piece, in the registers of a warpgroup: how the kernels that filter load them."""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from .combine_gpu import i32, less, scalar_of, thread_index
from .write_rows_gpu import from_registers, load_vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_REF = plgpu.RefType()
_THREADS = 128
PIECE = 4 * _THREADS  # values that a warpgroup loads at once
IN_FLIGHT = 8  # pieces


@dataclass(frozen=True)
class RegisterPieces:
    """Pieces of rows in the registers of a warpgroup; Pallas cannot load them from global memory.

    Attributes:
      width: neighbours that a thread loads at once: 4 where rows are whole 16 bytes.
    """

    width: int

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((PIECE,), self.width)

    def load(self, ref, row, start) -> jax.Array:
        """[start, start + PIECE) of a row of `ref` [S, V]; -inf past its end."""
        columns, width = ref.shape[1], self.width

        @plgpu.inline_mgpu(
            arg_types=(_REF, _SCALAR, _SCALAR),
            return_type=plgpu.ShapeDtypeStruct((PIECE,), jnp.float32, layout=self.layout),
        )
        def load(_, ref, row, start):
            origin, registers = arith.muli(scalar_of(row), i32(columns)), []
            for turn in range(0, PIECE, _THREADS * width):
                column = arith.addi(arith.muli(thread_index(), i32(width)), i32(turn))
                column = arith.addi(scalar_of(start), column)
                has = less(column, i32(columns))
                loaded = load_vector(ref, arith.addi(origin, arith.select(has, column, i32(0))), width)
                nothing = arith.constant(ir.VectorType(loaded.type).element_type, float("-inf"))
                registers.append(arith.select(has, loaded, vector.broadcast(loaded.type, nothing)))
            return from_registers(registers, (PIECE,), self.layout)

        return load(ref, row, start)

    def spread(self, x, dtype) -> jax.Array:
        """A number for each of a piece."""
        return plgpu.layout_cast(jnp.full((PIECE,), x, dtype), self.layout)

    def places(self) -> jax.Array:
        """0, 1, ... of a piece."""
        return plgpu.layout_cast(lax.iota(jnp.int32, PIECE), self.layout)


@dataclass(frozen=True)
class PlainPieces:
    """What `RegisterPieces` does, in operations that Pallas's GPU interpreter runs."""

    width: int

    def load(self, ref, row, start) -> jax.Array:
        padded = jnp.pad(ref[...][row], (0, IN_FLIGHT * PIECE), constant_values=-jnp.inf)
        return lax.dynamic_slice(padded, (start,), (PIECE,))

    def spread(self, x, dtype) -> jax.Array:
        return jnp.full((PIECE,), x, dtype)

    def places(self) -> jax.Array:
        return lax.iota(jnp.int32, PIECE)


def pieces_of(columns: int, interpret: Any) -> tuple[Any, int]:
    """How rows of so many columns are loaded, and how many pieces at a time; the interpreter compiles each."""
    kind, in_flight = (PlainPieces, 2) if interpret else (RegisterPieces, IN_FLIGHT)
    return kind(math.gcd(columns, 4)), in_flight


def compiler_params() -> Any:
    """Of kernels whose threads share sums alone, the reductions of which have barriers of their own."""
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=mgpu.LoweringSemantics.Lane)

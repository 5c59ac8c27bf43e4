"""The kernels that are compared, and the shapes and loads they are compared on."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, paged_attention
from jpaged.pallas_kernels.cost import AttentionCost, attention_cost

from .chips import Chip

PAGE_SIZE: Final = 64
# Sizes of jax's kernel. Its table goes up to contexts of 16 pages: 16 pages of 64, 32 queries (64 on v6e, of 4,096
# tokens). For longer ones it falls back to 128 pages a block: straight code, which libtpu had not compiled in minutes;
# so it gets the largest block that it was tuned for, which by this model is also faster than 8 pages.
JAX_PAGES: Final = 16
_POOL_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class Shape:
    """Heads of a model's attention, as one device holds them."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Load:
    """Query and KV tokens of each row; all rows are decode rows, or all are prefill chunks."""

    name: str
    q_len: int
    kv_len: int
    rows: int

    @property
    def num_tokens(self) -> int:
        return self.q_len * self.rows

    @property
    def pages_per_row(self) -> int:
        return -(-self.kv_len // PAGE_SIZE)


_SHAPES: Final = (
    Shape("llama-3-8b", 32, 8, 128),
    Shape("llama-3-70b / 8", 8, 1, 128),
    Shape("D64", 32, 8, 64),
)
_LOADS: Final = (Load("decode 32 x 4k", 1, 4096, 32), Load("prefill 4 x 1024 @ 8k", 1024, 8192, 4))
SHAPES: Final = {shape.name: shape for shape in _SHAPES}
LOADS: Final = {load.name: load for load in _LOADS}


@dataclass(frozen=True)
class Built:
    """A program to compile: `args` are numpy arrays where the kernel's loops depend on them, else only shapes."""

    function: Callable
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Kernel:
    """Attention by one implementation.

    Attributes:
      name: in the tables.
      build: makes the program for a shape, a load, a dtype of pages and a chip; raises where it refuses.
    """

    name: str
    build: Callable[[Shape, Load, str, Chip], Built]


def spec_of(shape: Shape, load: Load, dtype: str, implementation: str) -> PageSpec:
    """Pages for the load and the null page, in a pool that no VMEM holds: XLA moves a smaller one there as a whole."""
    spec = PageSpec(2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim, dtype, implementation)
    num_pages = max(load.rows * load.pages_per_row + 1, -(-_POOL_BYTES // spec.bytes_per_page))
    return dataclasses.replace(spec, num_pages=num_pages)


def cost_of(shape: Shape, load: Load, dtype: str) -> AttentionCost:
    """What attention has to do, whatever does it."""
    spec = spec_of(shape, load, dtype, "xla")
    return attention_cost(
        spec,
        num_heads=shape.num_heads,
        q_lens=[load.q_len] * load.rows,
        kv_lens=[load.kv_len] * load.rows,
        q_itemsize=2,
    )


def metadata(load: Load) -> PagedMetadata:
    """The load's metadata; pages lie in order."""
    page_table = 1 + np.arange(load.rows * load.pages_per_row, dtype=np.int32).reshape(load.rows, -1)
    first = load.kv_len - load.q_len
    positions = np.tile(np.arange(first, load.kv_len, dtype=np.int32), load.rows)
    row = np.repeat(np.arange(load.rows), load.q_len)
    slots = page_table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    values = {
        "page_table": page_table,
        "kv_lens": np.full(load.rows, load.kv_len, np.int32),
        "cu_q_lens": np.arange(load.rows + 1, dtype=np.int32) * load.q_len,
        "positions": positions,
        "slot_mapping": slots.astype(np.int32),
        "num_decode": np.int32(load.rows if load.q_len == 1 else 0),
        "num_seqs": np.int32(load.rows),
    }
    values = {name: np.asarray(value, np.int32) for name, value in values.items()}
    return PagedMetadata(**values)  # pyright: ignore[reportArgumentType]  # numpy arrays, to be known while tracing


def _build_ours(shape: Shape, load: Load, dtype: str, chip: Chip) -> Built:
    spec = spec_of(shape, load, dtype, "mosaic_tpu")
    scales = None if spec.scales_shape is None else jax.ShapeDtypeStruct(spec.scales_shape, jnp.float32)
    pages = KVPages(jax.ShapeDtypeStruct(spec.data_shape, spec.dtype), scales, spec)  # pyright: ignore
    q = jax.ShapeDtypeStruct((load.num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16)

    def attend(q, pages, meta):
        return paged_attention(q, pages, meta, implementation="mosaic_tpu")

    return Built(attend, (q, pages, metadata(load)))


def _build_jax(shape: Shape, load: Load, dtype: str, chip: Chip) -> Built:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    if dtype != "bfloat16":
        raise NotImplementedError("compared on bfloat16 pages only")
    spec, meta = spec_of(shape, load, dtype, "xla"), metadata(load)
    q = jax.ShapeDtypeStruct((load.num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct(spec.data_shape, spec.dtype)
    num_seqs = np.asarray([load.rows], np.int32)

    queries = 64 if load.q_len > 1 and chip.unit_size == 256 else 32

    def attend(q, pages, kv_lens, page_table, cu_q_lens, num_seqs):
        return ragged_paged_attention(
            *(q, pages, kv_lens, page_table, cu_q_lens, num_seqs),
            sm_scale=shape.head_dim**-0.5,
            num_kv_pages_per_block=JAX_PAGES,
            num_queries_per_block=queries,
            vmem_limit_bytes=chip.vmem_bytes * 3 // 4,
        )

    return Built(attend, (q, pages, meta.kv_lens, meta.page_table, meta.cu_q_lens, num_seqs))


JPAGED: Final = Kernel("jpaged", _build_ours)
JAX_RPA: Final = Kernel("jax ragged_paged_attention", _build_jax)
KERNELS: Final = {kernel.name: kernel for kernel in (JPAGED, JAX_RPA)}

"""What the Mosaic TPU kernel keeps in a core's vector memory, and tiles that fit it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .compat import TPU
from .heads_tpu import buffer_shape
from .pages import PageSpec
from .tpu_plan import NUM_FIELDS, num_items
from .tpu_tuning import LANES, MIB, TPUBlocks, choose_tpu_blocks, padded_bytes, padded_heads, tile_kv
from .xla import AttentionOptions

_LEAST_Q = 16  # query tokens of the smallest tile
_SMEM_BYTES = 3 * MIB // 4  # of scalar memory, for the list of items; the rest is the compiler's


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel is specialised for.

    Attributes:
      chunks: runs of 128 page ids of a row.
      (others): of the call's arguments.
    """

    spec: PageSpec
    blocks: TPUBlocks
    options: AttentionOptions
    num_heads: int
    num_rows: int
    num_tokens: int
    chunks: int
    q_dtype: Any
    with_lse: bool
    with_sinks: bool

    @property
    def heads(self) -> int:
        return padded_heads(self.num_heads)

    @property
    def group(self) -> int:
        return self.num_heads // self.spec.num_kv_heads

    @property
    def width(self) -> int:
        """Lanes of a query: its head_dim, or the 128 lanes of a row that K and V share."""
        return max(self.spec.head_dim, LANES)

    @property
    def dtype(self) -> Any:
        """Of the factors of matrix products: bf16 if it holds queries and pages exactly."""
        exact = self.q_dtype == jnp.bfloat16 and self.spec.dtype != jnp.float32
        return jnp.dtype(jnp.bfloat16 if exact else jnp.float32)

    @property
    def has_prefill(self) -> bool:
        return self.num_tokens > 1  # a single token is a decode row


def buffers(static: KernelSpec) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of a core's buffers in vector memory, by name."""
    spec, blocks = static.spec, static.blocks
    heads, width, slots = static.heads, static.width, blocks.buffers
    page_rows, lanes = spec.page_size * spec.num_kv_heads, 2 * spec.head_dim
    vmem = {
        "ring": ((slots, blocks.pages * page_rows, lanes), spec.dtype),
        "q": ((slots, 1, heads, width), static.q_dtype),
        "out": ((2, 1, heads, width), static.q_dtype),
        "top": ((heads, LANES), jnp.float32),
        "total": ((heads, LANES), jnp.float32),
        "acc": ((heads, width), jnp.float32),
    }
    if spec.quantized:
        vmem["scale_ring"] = ((slots, blocks.pages, *spec.scales_by_row_shape[1:]), jnp.float32)
    if static.with_lse:
        vmem["lse"] = ((2, 1, heads, LANES), jnp.float32)
    if static.has_prefill:
        tile = (spec.num_kv_heads, static.group * blocks.block_q)
        kv_dtype = jnp.float32 if spec.quantized else spec.dtype
        vmem |= {
            "tile_q": ((slots, blocks.block_q, heads, width), static.q_dtype),
            "tile_out": ((1, blocks.block_q, heads, width), static.q_dtype),
            "heads_q": ((*tile, width), static.dtype),
            "q_rows": buffer_shape(blocks.block_q * heads, width, static.q_dtype, heads),
            "kv_rows": buffer_shape(blocks.block_k * spec.num_kv_heads, lanes, kv_dtype, spec.num_kv_heads),
            "tile_top": ((*tile, LANES), jnp.float32),
            "tile_total": ((*tile, LANES), jnp.float32),
            "tile_acc": ((*tile, width), jnp.float32),
        }
        if static.with_lse:
            vmem["tile_lse"] = ((1, blocks.block_q, heads, LANES), jnp.float32)
    return vmem


def vmem_limit(chip: TPU) -> int:
    """Bytes of vector memory that a kernel may take."""
    return chip.vmem_bytes - chip.vmem_bytes // 8


def _check_scalars(static: KernelSpec) -> None:
    """Raises NotImplementedError if the list of items does not fit the scalar memory."""
    needed = 4 * NUM_FIELDS * (sum(num_items(static.num_rows, static.num_tokens, _LEAST_Q)) + 1)
    if needed > _SMEM_BYTES:
        raise NotImplementedError(
            f"the Mosaic TPU kernel: the items of {static.num_rows} rows and {static.num_tokens} tokens take up to "
            f"{needed >> 10} KiB of scalar memory, of {_SMEM_BYTES >> 10}: use smaller steps"
        )


def fit(static: KernelSpec, chip: TPU) -> KernelSpec:
    """Makes tiles smaller until the buffers, and the scores that the compiler keeps, fit the vector memory.

    Raises:
      NotImplementedError: the smallest do not fit either, or the scalar memory is too small for the list of items.
    """
    _check_scalars(static)
    while True:
        spec, blocks = static.spec, static.blocks
        prefill = static.group * blocks.block_q * blocks.block_k
        decode = static.heads * blocks.pages * spec.page_size * spec.num_kv_heads
        # Scores, weights, and both again while the compiler overlaps two heads.
        needed = padded_bytes(buffers(static).values()) + 4 * max(prefill, decode) * 4 + 2 * MIB
        if static.dtype == jnp.float32:  # products of f32 factors split K and V in pieces
            needed += 2 * blocks.pages * spec.page_size * spec.num_kv_heads * 2 * spec.head_dim * 4
        if needed <= vmem_limit(chip):
            return static
        # What takes more is made smaller: the ring, with the scores of a block, or what belongs to a tile of queries.
        ring = padded_bytes([buffers(static)["ring"]]) + 16 * decode
        if blocks.block_q > _LEAST_Q and (2 * ring < needed or blocks.pages == 1):
            blocks = dataclasses.replace(blocks, block_q=blocks.block_q // 2)
        elif blocks.pages > 1:
            pages = blocks.pages // 2
            blocks = dataclasses.replace(blocks, pages=pages, block_k=tile_kv(spec.page_size, pages))
        else:
            raise NotImplementedError(
                f"the Mosaic TPU kernel: the smallest tiles for {static.num_heads} query heads, {spec.num_kv_heads} KV "
                f"heads and a head_dim of {spec.head_dim} take {needed >> 10} KiB of vector memory, and a {chip.kind} "
                f"has {vmem_limit(chip) >> 10}: use a smaller page_size, or implementation='xla' with pages made for it"
            )
        static = dataclasses.replace(static, blocks=blocks)


def memory_objection(spec: PageSpec, num_heads: int, q_dtype: Any, chip: TPU) -> str | None:
    """Why the kernel has no room for such pages and queries on the chip; `None` if it has."""
    static = KernelSpec(
        spec=spec,
        blocks=choose_tpu_blocks(spec, chip, num_tokens=4096),
        options=AttentionOptions(scale=1.0, sliding_window=None, soft_cap=None),
        num_heads=num_heads,
        num_rows=1,
        num_tokens=4096,
        chunks=1,
        q_dtype=jnp.dtype(q_dtype),
        with_lse=True,
        with_sinks=True,
    )
    try:
        fit(static, chip)
    except NotImplementedError as error:
        return str(error)
    return None

"""The KV write for Hopper in Pallas Mosaic GPU: one launch rotates q and k, quantises, and fills the slots in place.

What XLA does in three to five small kernels a layer (rotate q, rotate k, stack K and V, quantise, scatter) is one here,
which reads each value once and writes it once:

    blocks of q    rows of q -> rotate -> rows of the rotated q
    blocks of kv   rows of k and v, slots -> rotate k -> quantise both -> slots of the pool, and their scales

All rows of a kind are cut into tiles of equal size, whatever the tokens, so a token alone and a long prompt fill the
chip as well as they can. The pool is a Ref that the kernel gets and gives back: it is never copied if it is donated.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from .kv_write import write_kv_xla
from .metadata import PagedMetadata
from .pages import KVPages, PageSpec
from .rope import Rope, apply_rope
from .write_rows_gpu import Heads, PlainRows, RegisterRows, Tile

_SMALL = 2048  # tiles of a launch that is bound by latency: each is a block's only one
_TILES = 2  # of a block of a larger launch, loaded together


def _rotate(pair, angles, tile: Tile):
    """As `apply_rope`: in f32, the result in the dtype of the rows."""
    first, second = (x.astype(jnp.float32) for x in pair)
    cos, sin = angles
    turned = first * cos - second * sin, second * cos + first * sin
    if 2 * tile.half < tile.head_dim:
        column = plgpu.layout_cast(plgpu.broadcasted_iota(jnp.int32, tile.shape, 1, layout=tile.layout), tile.layout)
        turned = [jnp.where(column < tile.half, new, old) for new, old in zip(turned, (first, second), strict=True)]
    return tuple(x.astype(pair[0].dtype) for x in turned)


def _quantize(pair, dtype, tile: Tile):
    """As `quantization.quantize`, of rows that are two arrays: the values, and a scale a row."""
    largest = float(jnp.iinfo(dtype).max) if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    wide = [x.astype(jnp.float32) for x in pair]
    absmax = jnp.max(jnp.maximum(jnp.abs(wide[0]), jnp.abs(wide[1])), axis=1)
    vanishes = absmax < largest * float(jnp.finfo(jnp.float32).tiny)
    scales = jnp.where(vanishes, jnp.ones_like(absmax), absmax / largest)
    by_row = plgpu.layout_cast(lax.broadcast_in_dim(scales, tile.shape, (0,)), tile.layout)
    values = []
    for x in wide:
        scaled = jnp.clip(x / by_row, -largest, largest)
        values.append((jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype))
    return tuple(values), scales


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static of a call; `q` has no heads where there is no q to rotate, and `dtype` is that of what is read."""

    spec: PageSpec
    tile: Tile
    num_tokens: int
    rotate: bool
    q: Heads
    k: Heads
    v: Heads
    tiles: int
    rows: type
    dtype: Any
    parts: int

    def blocks(self, heads: Heads) -> int:
        return -(-self.num_tokens * heads.count // (self.tile.rows * self.tiles))

    def starts(self, block) -> list:
        return [(block * self.tiles + n) * self.tile.rows for n in range(self.tiles)]

    def load(self, rows, ref, start, heads: Heads):
        """A tile, of the sum of all parts, rounded: one part alone is f32, too."""
        pairs = [rows.load(ref, start, heads, part * self.num_tokens) for part in range(self.parts)]
        return tuple(functools.reduce(jnp.add, halves).astype(self.dtype) for halves in zip(*pairs, strict=True))

    def rotate_queries(self, block, q, cos, sin, out) -> None:
        rows = self.rows(self.tile, self.num_tokens * self.q.count)
        starts = self.starts(block)
        loaded = [(self.load(rows, q, at, self.q), rows.load_angles(cos, sin, at, self.q)) for at in starts]
        for at, (pair, angles) in zip(starts, loaded, strict=True):
            rows.store(out, at, _rotate(pair, angles, self.tile))

    def write(self, block, k, v, cos, sin, slot_mapping, data, scales) -> None:
        spec, tile = self.spec, self.tile
        rows = self.rows(tile, self.num_tokens * self.k.count)
        starts, loaded = self.starts(block), []
        for at in starts:
            angles = rows.load_angles(cos, sin, at, self.k) if self.rotate else None
            slots = rows.load_slots(slot_mapping, at, self.k)
            loaded.append((self.load(rows, k, at, self.k), self.load(rows, v, at, self.v), angles, slots))
        for at, (k_pair, v_pair, angles, slots) in zip(starts, loaded, strict=True):
            if angles is not None:
                k_pair = _rotate(k_pair, angles, tile)
            if scales is None:
                k_pair, v_pair = (tuple(x.astype(spec.dtype) for x in pair) for pair in (k_pair, v_pair))
            else:
                k_pair, k_scales = _quantize(k_pair, spec.dtype, tile)
                v_pair, v_scales = _quantize(v_pair, spec.dtype, tile)
                rows.store_scales(scales, slots, at, self.k, spec.page_size, k_scales, v_scales)
            rows.store_slots(data, slots, at, self.k, k_pair, v_pair)


@functools.partial(jax.jit, static_argnames=("spec", "heads", "dtype", "parts", "tiles", "interpret"))
def write(
    q,
    k,
    v,
    cos,
    sin,
    slot_mapping,
    data,
    scales,
    *,
    spec,
    heads,
    dtype=None,
    parts=1,
    tiles=None,
    interpret=None,
):
    """The kernel call; jitted, so that equal layers are lowered once.

    Args:
      q, k, v: [T, C] arrays whose columns are heads, which may be three times the same one, or f32 parts of them, all
        of the first, then all of the second [parts * T, C]; q is `None` if only K and V are to be written.
      cos, sin: of the rope, or both `None`.
      heads: where in their columns the heads of q, k and v are; none of q, if there is no q.
      dtype: that the sum of parts is rounded to, of one part, too; `None` for that of k.
      tiles: of a block, or `None` for as many as suit the size.

    Returns:
      the rotated q [T, Hq * D] or `None`, the pool and its scales.
    """
    tile = Tile(spec.head_dim, spec.head_dim // 2 if cos is None else cos.shape[1])
    q_heads, k_heads, v_heads = heads
    tokens, dtype = k.shape[0] // parts, k.dtype if dtype is None else dtype
    if tiles is None:
        launch = tokens * (q_heads.count + k_heads.count) // tile.rows
        tiles = 1 if launch <= _SMALL else _TILES
    call = _Call(
        spec=spec,
        tile=tile,
        num_tokens=tokens,
        rotate=cos is not None,
        q=q_heads,
        k=k_heads,
        v=v_heads,
        tiles=tiles,
        rows=PlainRows if interpret else RegisterRows,
        dtype=dtype,
        parts=parts,
    )
    q_blocks = call.blocks(q_heads)
    # Dropped slots are marked here, for all layers at once; and what is computed has a buffer of its own, where a slice
    # of a step's packed metadata would be handed over as it lies, aligned to less than the 256 bytes that Mosaic asks.
    outside = (slot_mapping < spec.page_size) | (slot_mapping >= spec.num_pages * spec.page_size)
    slot_mapping = jnp.where(outside, -1, slot_mapping)

    def body(*refs):
        refs = iter(refs)
        q_ref, k_ref, v_ref, cos_ref, sin_ref, slots_ref, data_ref, scales_ref = (
            None if x is None else next(refs) for x in operands
        )
        block = lax.axis_index("block")
        if q_blocks:
            (out,) = refs

            @pl.when(block < q_blocks)
            def _():
                call.rotate_queries(block, q_ref, cos_ref, sin_ref, out)

        @pl.when(block >= q_blocks)
        def _():
            call.write(block - q_blocks, k_ref, v_ref, cos_ref, sin_ref, slots_ref, data_ref, scales_ref)

    pools = [None if x is None else jax.new_ref(x, memory_space=plgpu.GMEM) for x in (data, scales)]
    operands = [q, k, v, cos, sin, slot_mapping, *pools]
    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((tokens, q_heads.count * spec.head_dim), dtype)] if q_blocks else [],
        grid=(q_blocks + call.blocks(k_heads),),
        grid_names=("block",),
        kernel_name="rope_and_write_kv" if call.rotate else "write_kv",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # threads share nothing
            reduction_scratch_bytes=128,  # none is used: a row is reduced within a warp
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*[x for x in operands if x is not None])
    return results[0] if q_blocks else None, *[None if x is None else jax.freeze(x) for x in pools]


def _write_into(
    kv_pages: KVPages, meta: PagedMetadata, rope: Rope | None, q, k, v, **options: Any
) -> tuple[Any, KVPages]:
    """`write` into these pages, with what a step knows: the rotated q, and the pages."""
    cos, sin = (None, None) if rope is None else (rope.cos.astype(jnp.float32), rope.sin.astype(jnp.float32))
    pools = (kv_pages.data, kv_pages.scales)
    rotated, data, scales = write(q, k, v, cos, sin, meta.slot_mapping, *pools, spec=kv_pages.spec, **options)
    return rotated, dataclasses.replace(kv_pages, data=data, scales=scales)


def rotate_and_write_gpu(
    q: Float[Array, "T Hq D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    rope: Rope | None,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "T Hq D"], KVPages]:
    """Rotates q and k by the rope, if there is one, and writes k and v to their slots: in one launch.

    What would go to the null page, which is padding, is dropped, as are slots outside of the pool.

    Args:
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      the rotated q, or q where there is no rope; and the pages.
    """
    if rope is None:
        return q, write_kv_gpu(k, v, kv_pages, meta, interpret=interpret)
    # A thread moves an even number of values; and one token is XLA's, see `write_kv_gpu`.
    if rope.cos.shape[1] % 2 or k.shape[0] == 1:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        return q, write_kv_gpu(k, v, kv_pages, meta, interpret=interpret)
    tokens, heads, kv_heads = q.shape[0], Heads(q.shape[1]), Heads(kv_pages.spec.num_kv_heads)
    flat = (x.reshape(tokens, -1) for x in (q, k, v))
    with jax.named_scope("rope_and_write_kv"):
        rotated, kv_pages = _write_into(
            kv_pages, meta, rope, *flat, heads=(heads, kv_heads, kv_heads), interpret=interpret
        )
    return rotated.reshape(q.shape), kv_pages


def rotate_and_write_qkv_gpu(
    qkv: Float[Array, "T H D"] | Float32[Array, "P T H D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    rope: Rope,
    *,
    dtype: Any = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T Hq D"], KVPages]:
    """`rotate_and_write_gpu` of a fused projection, whose heads of q, k and v are read where they are.

    Its result for a token alone is a kernel's, too: a projection is an array of its own, not a slice of one.

    Args:
      rope: an even number of angles a token: a thread moves an even number of values.
      dtype: of the result, where `qkv` is parts.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    tokens, total, head_dim = qkv.shape[-3:]
    parts = 1 if qkv.ndim == 3 else qkv.shape[0]
    kv_heads, fused = kv_pages.spec.num_kv_heads, qkv.reshape(parts * tokens, -1)
    heads = total - 2 * kv_heads
    with jax.named_scope("rope_and_write_kv"):
        rotated, kv_pages = _write_into(
            kv_pages,
            meta,
            rope,
            *(fused, fused, fused),
            heads=(
                Heads(heads),
                Heads(kv_heads, heads * head_dim),
                Heads(kv_heads, (heads + kv_heads) * head_dim),
            ),
            dtype=None if dtype is None else jnp.dtype(dtype),
            parts=parts,
            interpret=interpret,
        )
    return rotated.reshape(tokens, heads, head_dim), kv_pages


def write_kv_gpu(
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    interpret: Any = None,
) -> KVPages:
    """The Mosaic GPU implementation of `write_kv`: `rotate_and_write_gpu` without a q and a rope.

    One token is left to XLA, which takes as long for it. Its k and v are slices of a projection that lie in one piece,
    and so might be handed over where they lie, aligned to less than the 256 bytes that Mosaic asks.
    """
    if k.shape[0] == 1:
        return write_kv_xla(k, v, kv_pages, meta)
    heads = Heads(kv_pages.spec.num_kv_heads)
    flat = (x.reshape(x.shape[0], -1) for x in (k, v))
    with jax.named_scope("write_kv"):
        _, kv_pages = _write_into(
            kv_pages, meta, None, None, *flat, heads=(Heads(0), heads, heads), interpret=interpret
        )
    return kv_pages

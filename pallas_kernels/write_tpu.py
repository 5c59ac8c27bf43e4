"""The Mosaic TPU kernel of `write_kv`: a step's new rows enter the pages in place, many DMAs in flight.

A DMA moves whole tiles of rows. Where a token's rows are whole tiles, a run of tokens in one page is one DMA and no
more. Else the tiles that a run touches are read, the new rows are merged into them, and they are written back:

    item        i     i+1   i+2   i+3   i+4           an item is a run of tokens in one block of one page
    read                                =====         old tiles leave HBM, `ahead` items before they are needed
    merge       #
    write       =====                                 waited for when the buffer is needed again

Blocks begin at whole tiles and tokens of a row are neighbours, so no tile is in two items; no two rows write one page.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .metadata import PagedMetadata
from .pages import KVPages, PageSpec
from .quantization import quantize
from .tpu_tuning import LANES
from .write_plan_tpu import (
    FIRST,
    GROUPS,
    HI,
    LANE,
    LO,
    NUM_FIELDS,
    PAGE,
    SOURCE,
    WriteBlocks,
    choose_write_blocks,
    plan_write,
)

Ref = Any
Scalar = jax.Array


@dataclass(frozen=True)
class _Merge:
    """The refs of a call that merges, and what an item does with them. `scales` and what belongs to it may be `None`.

    Attributes:
      items: the work list in scalar memory.
      rows, row_scales: the tile's new rows in vector memory, 32 bits a value, [planes, rows, lanes] and [2, rows].
      data, scales: the pages in HBM.
      buffer, scale_buffer: rings in vector memory, [buffers, block rows, 2 * D] and [buffers, 2, block lanes].
      reads, writes: a DMA semaphore for each entry of the rings.
    """

    spec: PageSpec
    blocks: WriteBlocks
    items: Ref
    rows: Ref
    row_scales: Ref
    data: Ref
    scales: Ref
    buffer: Ref
    scale_buffer: Ref
    reads: Ref
    writes: Ref

    def field(self, name: int, item: Scalar) -> Scalar:
        return self.items[name * (self.items.shape[0] // NUM_FIELDS) + item]

    def entry(self, item: Scalar) -> Scalar:
        return item & (self.blocks.buffers - 1)

    def copies(self, item: Scalar, *, out: bool) -> list[Any]:
        """The item's DMAs: its old tiles to the buffers, or the buffers back to its tiles."""
        page, entry, group = self.field(PAGE, item), self.entry(item), self.blocks.group
        near, far = self.buffer.at[entry], self.data.at[page]
        if self.blocks.group < self.data.shape[1]:
            first, length = pl.multiple_of(self.field(FIRST, item), group), self.field(GROUPS, item) * group
            near, far = self.buffer.at[entry, pl.ds(0, length)], self.data.at[page, pl.ds(first, length)]
        pairs = [(near, far)]
        if self.scales is not None:
            lanes, far = self.scale_buffer.shape[-1], self.scales.at[page]
            if lanes < self.scales.shape[-1]:
                far = self.scales.at[page, :, pl.ds(pl.multiple_of(self.field(LANE, item), LANES), lanes)]
            pairs.append((self.scale_buffer.at[entry], far))
        sem = (self.writes if out else self.reads).at[entry]
        if out:
            return [pltpu.make_async_copy(near, far, sem) for near, far in pairs]
        return [pltpu.make_async_copy(far, near, sem) for near, far in pairs]

    def read(self, item: Scalar) -> None:
        for copy in self.copies(item, out=False):
            copy.start()

    def finish_write(self, item: Scalar) -> None:
        for copy in self.copies(item, out=True):
            copy.wait()

    def merge_and_write(self, item: Scalar) -> None:
        for copy in self.copies(item, out=False):
            copy.wait()
        if self.blocks.num_groups == 1:
            self._merge_group(item, jnp.int32(0))
        else:
            lax.fori_loop(0, self.field(GROUPS, item), lambda i, _: self._merge_group(item, i), None)
        if self.scales is not None:
            self._merge_scales(item)
        for copy in self.copies(item, out=True):
            copy.start()

    def _merge_group(self, item: Scalar, i: Scalar) -> None:
        group, (planes, _, lanes) = self.blocks.group, self.rows.shape
        begin = pl.multiple_of(i * group, group)
        row = begin + lax.broadcasted_iota(jnp.int32, (group, lanes), 0)
        is_new = (row >= self.field(LO, item)) & (row < self.field(HI, item))
        for plane in range(planes):
            to = (self.entry(item), pl.ds(begin, group), pl.ds(plane * lanes, lanes))
            new = self.rows[plane, pl.ds(self.field(SOURCE, item) + begin, group)]
            self.buffer[to] = jnp.where(is_new, _from_32_bits(new, self.spec.dtype), self.buffer[to])

    def _merge_scales(self, item: Scalar) -> None:
        lanes = self.scale_buffer.shape[-1]
        # Lane 0 of the block would hold the scales of new row `source`. Loads begin at whole registers: turn the rest.
        skipped = self.field(FIRST, item) - self.field(LANE, item)
        source = self.field(SOURCE, item) - skipped + self.blocks.lane_margin - self.blocks.margin
        turn = source & (LANES - 1)
        window = self.row_scales[:, pl.ds(pl.multiple_of(source - turn, LANES), lanes + LANES)]
        new = pltpu.roll(window, lanes + LANES - turn, 1)[:, :lanes]
        lane = lax.broadcasted_iota(jnp.int32, (2, lanes), 1) - skipped
        is_new = (lane >= self.field(LO, item)) & (lane < self.field(HI, item))
        self.scale_buffer[self.entry(item)] = jnp.where(is_new, new, self.scale_buffer[self.entry(item)])


def _from_32_bits(rows: Array, dtype: Any) -> Array:
    """The inverse of `_to_32_bits`, in a kernel."""
    if dtype.itemsize > 1:
        return rows.astype(dtype)
    octets = rows.astype(jnp.int8)
    return octets if dtype == jnp.int8 else pltpu.bitcast(octets, dtype)


def _to_32_bits(rows: Array) -> Array:
    """Only rows of 32 bits a value can be loaded from where no tile begins: all dtypes travel so, without loss."""
    if rows.dtype.itemsize > 1:
        return rows.astype(jnp.float32)
    return lax.bitcast_convert_type(rows, jnp.int8).astype(jnp.int32)


def _merging_kernel(spec: PageSpec, blocks: WriteBlocks, items: Ref, bounds: Ref, *refs: Ref) -> None:
    if spec.quantized:
        rows, row_scales, _, _, data, scales, buffer, scale_buffer, reads, writes = refs
    else:
        rows, _, data, buffer, reads, writes = refs
        row_scales = scales = scale_buffer = None
    merge = _Merge(spec, blocks, items, rows, row_scales, data, scales, buffer, scale_buffer, reads, writes)
    tile = pl.program_id(0)
    first, end = bounds[tile], bounds[tile + 1]
    ahead = blocks.buffers // 2
    lax.fori_loop(first, jnp.minimum(first + ahead, end), lambda i, _: merge.read(i), None)

    def step(i: Scalar, _: None) -> None:
        merge.merge_and_write(i)
        following = i + ahead

        @pl.when(following < end)
        def _() -> None:
            @pl.when(following - blocks.buffers >= first)
            def _() -> None:
                merge.finish_write(following - blocks.buffers)

            merge.read(following)

    lax.fori_loop(first, end, step, None)
    # The next tile may begin in a tile of rows that this one wrote, so nothing stays under way.
    lax.fori_loop(jnp.maximum(first, end - blocks.buffers), end, lambda i, _: merge.finish_write(i), None)


def _copying_kernel(
    spec: PageSpec, group: int, items: Ref, bounds: Ref, rows: Ref, _: Ref, data: Ref, sem: Ref
) -> None:
    """Where a token's rows are whole tiles: all DMAs at once."""
    heads, num_items = spec.num_kv_heads, items.shape[0] // NUM_FIELDS

    def send(item: Scalar, _: None) -> None:
        page, first, groups, source = (items[name * num_items + item] for name in (PAGE, FIRST, GROUPS, SOURCE))
        new = rows.at[pl.ds(pl.multiple_of(source, heads), groups * group)]
        old = data.at[page, pl.ds(pl.multiple_of(first, heads), groups * group)]
        pltpu.make_async_copy(new, old, sem).start()

    lax.fori_loop(0, bounds[1], send, None)

    @pl.when(bounds[1] > 0)
    def _() -> None:
        # They share a semaphore, so one wait for as many bytes is enough.
        all_rows = rows.at[pl.ds(0, pl.multiple_of(bounds[2], heads))]
        pltpu.make_async_copy(all_rows, all_rows, sem).wait()


def write_kv_tpu(
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    interpret: Any = False,
) -> KVPages:
    """The Mosaic TPU implementation of `write_kv`; the null page and slots outside the pool are not written.

    Args:
      meta: `meta.work.write` may hold the result of `plan_write`; if it holds none, or one for pages that are written
        in other blocks, the list is made here, and XLA keeps one for all layers.
      interpret: as of `pl.pallas_call`.

    Example:
      >>> from jpaged.pallas_kernels import PageSpec, make_pages
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with two tokens on page 3
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 2), positions=i32(0, 1), slot_mapping=i32(24, 25),
      ...     num_decode=jnp.int32(0), num_seqs=jnp.int32(1))
      >>> spec = PageSpec(4, page_size=8, num_kv_heads=1, head_dim=2, dtype="float32", implementation="mosaic_tpu")
      >>> k, v = jnp.zeros((2, 1, 2)), jnp.array([[[1.0, 0.0]], [[3.0, 4.0]]])
      >>> kv_pages = write_kv_tpu(k, v, make_pages(spec), meta, interpret=pltpu.InterpretParams())
      >>> kv_pages.data[3, :2].tolist()  # K and V of a head side by side
      [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 3.0, 4.0]]
    """
    spec, work = kv_pages.spec, getattr(meta.work, "write", None)
    blocks = choose_write_blocks(spec, k.shape[0])
    with jax.named_scope("write_kv"):
        if work is None or work.blocks != blocks:
            work = plan_write(meta, spec)
        pools = [kv_pages.data] if kv_pages.scales is None else [kv_pages.data, kv_pages.scales]
        rows, scales = jnp.concatenate([k, v], axis=-1).astype(spec.dtype), None
        if spec.quantized:
            rows, scales = quantize(jnp.stack([k, v], axis=2), spec.dtype)
            scales = scales.reshape(-1, 2)
        new = [rows.reshape(-1, 2 * spec.head_dim)]
        if blocks.merges:
            new = [_tiled_rows(new[0], blocks, spec)] + (
                [] if scales is None else [_tiled_scales(scales, blocks, spec)]
            )
        call = _call(spec, blocks, new, pools, interpret)
        data, *scales = call(work.items, work.bounds, *new, *pools)
    return dataclasses.replace(kv_pages, data=data, scales=scales[0] if scales else None)


def _in_tiles(x: Array, axis: int, tile: int, before: int, size: int) -> Array:
    """Cuts an axis into tiles with a margin before each and, after it, what fills it up to `size`."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % tile)
    shape = (*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    x, pad = jnp.pad(x, pad).reshape(shape), [(0, 0)] * len(shape)
    pad[axis + 1] = (before, size - tile - before)
    return jnp.pad(x, pad).reshape(*shape[:axis], -1, *shape[axis + 2 :])


def _tiled_rows(rows: Array, blocks: WriteBlocks, spec: PageSpec) -> Array:
    """[planes, tiles * tile_rows, lanes]: what begins at any row must be one register wide to be loaded."""
    lanes = LANES if rows.shape[1] % LANES == 0 else rows.shape[1]
    planes = _to_32_bits(rows).reshape(rows.shape[0], -1, lanes).swapaxes(0, 1)
    return _in_tiles(planes, 1, blocks.tile_tokens * spec.num_kv_heads, blocks.margin, blocks.tile_rows)


def _tiled_scales(scales: Array, blocks: WriteBlocks, spec: PageSpec) -> Array:
    return _in_tiles(scales.T, 1, blocks.tile_tokens * spec.num_kv_heads, blocks.lane_margin, blocks.tile_lanes)


def _call(spec: PageSpec, blocks: WriteBlocks, new: list[Array], pools: list[Array], interpret: Any) -> Any:
    in_place = pl.BlockSpec(memory_space=pltpu.HBM)
    if blocks.merges:
        kernel, in_specs = partial(_merging_kernel, spec, blocks), []
        for x, size in zip(new, (blocks.tile_rows, blocks.tile_lanes), strict=False):
            shape = (*x.shape[:1], size, *x.shape[2:])
            in_specs.append(pl.BlockSpec(shape, lambda i, *_, after=x.ndim - 2: (0, i, *[0] * after)))
        scratch: list[Any] = [pltpu.VMEM((blocks.buffers, blocks.rows, 2 * spec.head_dim), spec.dtype)]
        if spec.quantized:
            scratch.append(pltpu.VMEM((blocks.buffers, 2, blocks.lanes), jnp.float32))
        scratch += [pltpu.SemaphoreType.DMA((blocks.buffers,))] * 2
    else:
        kernel, in_specs, scratch = partial(_copying_kernel, spec, blocks.group), [in_place], [pltpu.SemaphoreType.DMA]
    num_tiles = new[0].shape[1] // blocks.tile_rows if blocks.merges else 1
    num_bytes = 3 * new[0].size * new[0].dtype.itemsize
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_tiles,),
            in_specs=[*in_specs, *[in_place] * len(pools)],
            out_specs=[in_place] * len(pools),
            scratch_shapes=scratch,
        ),
        input_output_aliases={2 + len(new) + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_bytes),
        interpret=interpret,
        name="write_kv",
    )

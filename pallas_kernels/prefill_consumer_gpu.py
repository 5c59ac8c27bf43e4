"""The computing warpgroup of the Mosaic GPU prefill kernel: how a unit's blocks are walked."""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import combine_gpu as ends
from . import prefill_barriers_gpu as sync
from . import prefill_plan_gpu as plan
from . import prefill_registers_gpu as registers
from . import prefill_rows_gpu as rows
from .consumer_gpu import LOG2E, LOWEST, WGMMA, finished
from .prefill_tuning_gpu import PrefillBlocks
from .tuning import TILE_ROWS
from .xla import AttentionOptions

UNITS_AHEAD = 2


@dataclass(frozen=True)
class Call:
    """Static facts of a kernel call.

    Attributes:
      group: query heads of a KV head.
      tokens: query tokens of a consumer's part of a tile.
      head_dim: width of a head.
      dtype: of queries and of K in the tiles.
      value_dtype: of V in the tiles.
      page_dtype: of pages.
      transforms: how the tiles in shared memory are laid out.
    """

    group: int
    tokens: int
    head_dim: int
    dtype: Any
    value_dtype: Any
    page_dtype: Any
    transforms: tuple
    blocks: PrefillBlocks
    options: AttentionOptions
    with_lse: bool

    @property
    def quantized(self) -> bool:
        """Whether the pages have scales."""
        return self.page_dtype.itemsize == 1


@dataclass(frozen=True)
class Refs:
    """Arrays in global memory; `scales`, `sinks` and `lse` may be `None`."""

    q: Any
    pages: Any
    scales: Any
    records: Any
    page_table: Any
    counters: Any
    sinks: Any
    out: Any
    lse: Any


@dataclass(frozen=True)
class RawTiles:
    """Tiles of 8 bits on their way to those of 16."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_freed: Any
    v_freed: Any


@dataclass(frozen=True)
class Tiles:
    """Shared memory and barriers; `raw` and `scales` are of 8-bit pages, else `None`."""

    q: Any
    k: Any
    v: Any
    units: Any
    k_full: Any
    v_full: Any
    k_freed: Any
    v_freed: Any
    unit_full: Any
    unit_freed: Any
    scales: Any
    raw: RawTiles | None


@dataclass(frozen=True)
class Part:
    """A consumer's part of a unit: its own tokens, and the blocks, which are the unit's.

    Attributes:
      token, position: of the part's first query token, in the step and in its sequence.
      live_rows: rows that hold a query of the unit; 0 if the unit has too few tokens to reach this part.
      kv_len: KV tokens of the row.
      first_position: of the unit's first token.
    """

    head: jax.Array
    token: jax.Array
    position: jax.Array
    live_rows: jax.Array
    kv_len: jax.Array
    first_position: jax.Array
    kv_start: jax.Array
    num_blocks: jax.Array


def take_unit(tiles: Tiles, i) -> jax.Array:
    """The i-th unit that this block takes, counted from 0; each warp that walks units asks for each once, in order."""
    slot = lax.rem(i, UNITS_AHEAD)
    sync.wait(tiles.unit_full, slot, lax.div(i, UNITS_AHEAD))
    unit = tiles.units[slot]
    sync.arrive(tiles.unit_freed, slot)
    return unit


def read_blocks(records, unit, num_units) -> list[jax.Array]:
    """Of a unit, which blocks it reads: head, row, last column of the page table, first KV token, blocks."""
    at = jnp.minimum(unit, num_units - 1)
    return [records[at, f] for f in (plan.HEAD, plan.ROW, plan.LAST_PAGE, plan.KV_START, plan.NUM_BLOCKS)]


def consume(call: Call, refs: Refs, tiles: Tiles) -> None:
    """Computes this warpgroup's part of each unit that the block takes."""
    blocks, window, head_dim = call.blocks, call.options.sliding_window, call.head_dim
    bkv, stages, records = blocks.block_kv, blocks.stages, refs.records
    scale, cap = call.options.scale * LOG2E, call.options.soft_cap
    me = lax.axis_index("wg")
    layout = {"transforms": call.transforms, "swizzle": blocks.swizzle}
    num_units = records[0, plan.NUM_UNITS]

    def give_turn():
        sync.give_turn(lax.rem(me + 1, blocks.consumers))

    def read(unit) -> Part:
        at = jnp.minimum(unit, num_units - 1)
        token, tokens, position = records[at, plan.TOKEN], records[at, plan.NUM_TOKENS], records[at, plan.POSITION]
        offset = me * call.tokens
        return Part(
            head=records[at, plan.HEAD],
            token=token + jnp.minimum(offset, tokens - 1),
            position=position + offset,
            live_rows=jnp.clip(tokens - offset, 0, call.tokens) * call.group,
            kv_len=records[at, plan.KV_LEN],
            first_position=position,
            kv_start=records[at, plan.KV_START],
            num_blocks=records[at, plan.NUM_BLOCKS],
        )

    def queries(i):
        """Where the queries of the i-th unit are."""
        return tiles.q.at[lax.rem(i, blocks.query_buffers), me]

    def fetch_queries(i, part: Part):
        rows.fetch_queries(
            refs.q,
            queries(i),
            part.token,
            part.head,
            part.live_rows,
            group=call.group,
            head_dim=head_dim,
            **layout,
        )

    def softmax(s, top, total, part: Part, step, first_key=None):
        return registers.softmax(
            s,
            top,
            total,
            None if first_key is None else (part.position, first_key),
            tiles.scales.at[lax.rem(step, stages + 1)] if call.quantized else None,
            scale=scale,
            cap=None if cap is None else cap * LOG2E,
            slack=blocks.slack,
            dtype=call.value_dtype,
            group=call.group,
            window=window,
        )

    def hide_values(part: Part, j, step):
        """In the last block, hides what comes after the row's last token; in the first, what the window has left."""
        if call.quantized:
            return  # no NaN is left of them
        first_key = part.kv_start + (part.num_blocks - 1 - j) * bkv
        low = jnp.int32(0) if window is None else part.first_position - (window - 1) - first_key
        high = part.kv_len - first_key

        @pl.when((low > 0) | (high < bkv))
        def _():
            rows.hide_values(
                tiles.v.at[lax.rem(step + j, stages)], low, high, block_kv=bkv, head_dim=head_dim, **layout
            )

    def first_scores(i, step):
        """Scores of the last block of the i-th unit, which is walked first."""
        rows.wait_for_queries()
        stage = lax.rem(step, stages)
        sync.wait(tiles.k_full, stage, lax.div(step, stages))
        sync.await_turn(me)
        s = registers.issue_scores(queries(i), tiles.k.at[stage], block_kv=bkv, **layout)
        give_turn()
        s = registers.settle(s, 0)
        sync.arrive(tiles.k_freed, stage)
        return s

    def unit_loop(state):
        i, s, _, step, *fields = state
        part = Part(*fields)
        last = part.num_blocks - 1
        next_unit = take_unit(tiles, i + 1)
        following = read(next_unit)

        top = plgpu.layout_cast(jnp.full((TILE_ROWS,), LOWEST, jnp.float32), WGMMA.reduce(1))
        total = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), WGMMA.reduce(1))
        acc = plgpu.layout_cast(jnp.zeros((TILE_ROWS, head_dim), jnp.float32), WGMMA)
        p, top, total, _ = softmax(s, top, total, part, step, part.kv_start + last * bkv)
        if blocks.query_buffers > 1:
            fetch_queries(i + 1, following)
        stage = lax.rem(step, stages)
        sync.wait(tiles.v_full, stage, lax.div(step, stages))
        hide_values(part, 0, step)

        def products(i, step, acc, p):
            """The scores of a block, of the i-th unit, and the values of the block walked before it."""
            stage, stage_before = lax.rem(step, stages), lax.rem(step - 1, stages)
            sync.wait(tiles.k_full, stage, lax.div(step, stages))
            sync.await_turn(me)
            s, acc = registers.issue_both(
                queries(i), tiles.k.at[stage], acc, p, tiles.v.at[stage_before], block_kv=bkv, **layout
            )
            give_turn()
            s = registers.settle(s, 1)
            sync.arrive(tiles.k_freed, stage)
            return s, acc

        def outputs(step, acc):
            acc = registers.settle(acc, 0)
            sync.arrive(tiles.v_freed, lax.rem(step, stages))
            return acc

        def kv_block(j, carry, *, masked: bool):
            acc, p, top, total = carry
            s, acc = products(i, step + j, acc, p)
            first_key = part.kv_start + (last - j) * bkv if masked else None
            p, top, total, decay = softmax(s, top, total, part, step + j, first_key)
            acc = outputs(step + j - 1, acc)
            acc = registers.rescale(acc, decay)
            stage = lax.rem(step + j, stages)
            sync.wait(tiles.v_full, stage, lax.div(step + j, stages))
            return acc, p, top, total

        # Blocks from `full` on are before all of the part's queries; those from `behind` on, its window may have left.
        full = jnp.clip(part.num_blocks - lax.div(part.position + 1 - part.kv_start, bkv), 1, part.num_blocks)
        carry = lax.fori_loop(1, full, lambda j, c: kv_block(j, c, masked=True), (acc, p, top, total))
        if window is None:
            behind = part.num_blocks
        else:
            left = jnp.maximum(part.position + call.tokens - window - part.kv_start, 0)
            behind = jnp.clip(part.num_blocks - lax.div(left + bkv - 1, bkv), full, part.num_blocks)
        carry = lax.fori_loop(full, behind, lambda j, c: kv_block(j, c, masked=False), carry)
        if window is not None:
            carry = lax.fori_loop(behind, part.num_blocks, lambda j, c: kv_block(j, c, masked=True), carry)
        acc, p, top, total = carry
        if window is not None:
            hide_values(part, last, step)
        next_step = step + part.num_blocks

        def values_alone(acc, p):
            acc = registers.issue_values(acc, p, tiles.v.at[lax.rem(step + last, stages)], **layout)
            return outputs(step + last, acc)

        def with_next_scores(acc, p):
            rows.wait_for_queries()
            s, acc = products(i + 1, next_step, acc, p)
            return s, outputs(step + last, acc)

        no_scores = plgpu.layout_cast(jnp.zeros((TILE_ROWS, bkv), jnp.float32), WGMMA)
        has_next = next_unit < num_units
        if blocks.query_buffers > 1:
            s, acc = lax.cond(has_next, with_next_scores, lambda acc, p: (no_scores, values_alone(acc, p)), acc, p)
        else:
            acc = values_alone(acc, p)
        sinks = None
        if refs.sinks is not None:
            sinks = ends.load_sinks(refs.sinks, part.head, group=call.group) * LOG2E
        factor, lse = finished(top, registers.quad_sum(total), sinks, with_lse=call.with_lse)
        acc = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
        rows.store_outputs(
            (refs.out, refs.lse),
            queries(i),  # no product reads them any more
            part.token,
            part.head,
            part.live_rows,
            acc,
            lse,
            group=call.group,
            head_dim=head_dim,
            **layout,
        )
        if blocks.query_buffers == 1:
            fetch_queries(i + 1, following)
            s = lax.cond(has_next, lambda: first_scores(i + 1, next_step), lambda: no_scores)
        return i + 1, s, next_unit, next_step, *vars(following).values()

    @pl.when(num_units > 0)
    def _():
        @pl.when(me == blocks.consumers - 1)
        def _():
            give_turn()  # the first consumer's first

        unit = take_unit(tiles, jnp.int32(0))

        @pl.when(unit < num_units)
        def _():
            part = read(unit)
            fetch_queries(jnp.int32(0), part)
            state = jnp.int32(0), first_scores(jnp.int32(0), jnp.int32(0)), unit, jnp.int32(0), *vars(part).values()
            lax.while_loop(lambda state: state[2] < num_units, unit_loop, state)
            rows.wait_for_queries()

        @pl.when(me == 0)
        def _():
            sync.await_turn(me)  # the last one that was given

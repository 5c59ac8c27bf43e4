"""The prefill kernel's work list against a simple model: every tile of every head once, the longest rows first."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import PagedMetadata
from jpaged.pallas_kernels import prefill_plan_gpu as plan
from jpaged.pallas_kernels.prefill_tuning_gpu import (
    choose_prefill_blocks,
    fills_the_chip,
    has_prefill_tiles,
    tile_tokens,
)
from tests.kernels.test_gpu_plan import metadata

BLOCK, PAGE, HEADS, ROWS, TOKENS = 128, 16, 3, 6, 90
SECTION = 4000  # tokens: of all heads up to 1,333, of two up to 2,000


@partial(jax.jit, static_argnames=("tokens", "window"))
def _list(meta: PagedMetadata, q_lens: jax.Array, tokens: int, window: int | None) -> jax.Array:
    return plan.make_prefill_list(
        meta,
        q_lens,
        page_size=PAGE,
        num_kv_heads=HEADS,
        tokens=tokens,
        sliding_window=window,
        block_kv=BLOCK,
        section_tokens=SECTION,
    )


def expected_units(meta: PagedMetadata, rows: list[int], tokens: int, window: int | None) -> list[tuple[int, ...]]:
    """(head, token, tokens, position, row, first KV token, blocks, last page, KV tokens) in the order of the list."""
    cu, kv_lens = np.asarray(meta.cu_q_lens), np.asarray(meta.kv_lens)
    units = []
    for row in sorted(rows, key=lambda row: -kv_lens[row]):
        together = min(max(SECTION // kv_lens[row], 1), HEADS)
        sections = [range(first, min(first + together, HEADS)) for first in range(0, HEADS, together)]
        for heads, token in product(sections, reversed(range(cu[row], cu[row + 1], tokens))):
            count = min(tokens, cu[row + 1] - token)
            position = kv_lens[row] - cu[row + 1] + token
            stop = position + count
            start = 0 if window is None else max(position - window + 1, 0) // BLOCK * BLOCK
            blocks = -(-(stop - start) // BLOCK)
            last_page = min((stop - 1) // PAGE, meta.page_table.shape[1] - 1)
            units += [(head, token, count, position, row, start, blocks, last_page, kv_lens[row]) for head in heads]
    return units


row_lengths = st.tuples(st.one_of(st.just(1), st.integers(1, 15)), st.one_of(st.integers(0, 60), st.integers(0, 5000)))


@settings(max_examples=40)
@given(st.lists(row_lengths, min_size=1, max_size=ROWS), st.integers(0, ROWS), st.sampled_from([(32, None), (1, 100)]))
def test_every_unit_once_and_in_order(lengths: list[tuple[int, int]], num_decode: int, config) -> None:
    tokens, window = config
    meta = metadata([q_len for q_len, _ in lengths], [q_len + before for q_len, before in lengths])
    rows = list(range(len(lengths)))[num_decode:]
    q_lens = jnp.where(jnp.arange(ROWS) < num_decode, 0, meta.cu_q_lens[1:] - meta.cu_q_lens[:-1])
    records = np.asarray(_list(meta, q_lens, tokens, window))
    units = expected_units(meta, rows, tokens, window)
    assert records.shape == (plan.num_units(ROWS, TOKENS, HEADS, tokens), plan.RECORD)
    assert (records[:, plan.NUM_UNITS] == len(units)).all()
    assert [tuple(record[: plan.NUM_UNITS]) for record in records[: len(units)].tolist()] == units
    assert (records[len(units) :, [plan.NUM_TOKENS, plan.NUM_BLOCKS]] == 0).all()


@pytest.mark.parametrize(("head_dim", "itemsize"), list(product((64, 96, 128, 256), (1, 2))))
def test_tiles_fit_into_shared_memory_and_registers(head_dim: int, itemsize: int) -> None:
    if not has_prefill_tiles(head_dim, itemsize):
        assert (head_dim, itemsize) == (256, 1)
        return
    blocks = choose_prefill_blocks(head_dim, 132, itemsize)
    queries, tokens = 64 * blocks.consumers * blocks.query_buffers, 2 * blocks.block_kv
    raw_bytes = tokens * blocks.raw_stages * head_dim + (blocks.stages + 1) * tokens * 4 if itemsize == 1 else 0
    assert (queries + blocks.stages * tokens) * 2 * head_dim + raw_bytes <= 227 * 1024 - 8192
    assert blocks.stages >= 2
    # Scores and outputs in 32 bits, weights in 16: what a thread of a 64-row product keeps of them.
    registers = (blocks.block_kv + head_dim) / 2 + blocks.block_kv / 4
    of_a_thread = {(2, 2): 240 - 64, (3, 2): 160 - 32, (2, 1): 208 - 64}
    assert registers <= of_a_thread[blocks.consumers, itemsize]


def _split(q_lens: list[int], kv_lens: list[int], window: int | None = None) -> list[bool]:
    meta = metadata(q_lens, kv_lens)
    rows = plan.rows_to_split(
        meta,
        meta.cu_q_lens[1:] - meta.cu_q_lens[:-1],
        num_kv_heads=8,
        tokens=32,
        split_tokens=2,
        sliding_window=window,
        block_kv=BLOCK,
        multiprocessors=132,
    )
    return rows.tolist()[: len(q_lens)]


def test_short_chunks_of_long_rows_are_split() -> None:
    assert _split([16], [100_000]) == [True]
    assert _split([16, 60], [100_000, 60]) == [True, False]
    assert _split([17], [100_000]) == [False]  # too many of the decode kernel's tiles
    assert _split([16, 16], [100_000, 100_000]) == [False, False]  # so are these together
    assert _split([8, 8], [100_000, 100_000]) == [True, True]
    assert _split([16] * 6, [100_000] * 6) == [False] * 6
    assert _split([16], [100_000], window=100) == [True]  # which is short then, and still all that there is
    assert _split([0, 0], [100_000, 5]) == [False, False]


def test_a_step_is_run_by_tiles_if_there_are_enough() -> None:
    blocks = choose_prefill_blocks(128, 132)
    assert tile_tokens(64) == 1
    assert fills_the_chip(1024, 4, 8, blocks)
    assert not fills_the_chip(1024, 3, 3, blocks)
    assert not fills_the_chip(64, 4, 8, blocks)


@pytest.mark.parametrize(("tokens", "page_size"), list(product((64, 128), (8, 16, 24, 40, 128, 192, 256))))
def test_a_block_lies_in_no_more_pages_than_are_read(tokens: int, page_size: int) -> None:
    lies_in = [(start + tokens - 1) // page_size - start // page_size + 1 for start in range(0, 8000, tokens)]
    assert max(lies_in) == plan.most_pages(tokens, page_size)

"""The work list of the TPU kernel against a plain model of it."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import PagedMetadata
from jpaged.pallas_kernels.tpu_plan import NUM_FIELDS, TABLE_CHUNK, TPUWork, make_items, num_items, plan_tpu
from jpaged.pallas_kernels.tpu_tuning import TPUBlocks
from jpaged.pallas_kernels.write_plan_tpu import plan_write
from tests.arg_specs import ArgSpec, make_metadata

ROWS, TOKENS, BLOCK_KV = 5, 40, 32
NAMES = ("row", "token", "count", "position", "first", "end")
Item = dict[str, int]


def metadata(rows: list[tuple[int, int]]) -> PagedMetadata:
    """Rows of (query tokens, KV tokens), in as many rows and tokens as all tests have."""
    q_lens, kv_lens = ([row[i] for row in rows] + [0] * (ROWS - len(rows)) for i in (0, 1))
    return PagedMetadata(
        page_table=jnp.zeros((ROWS, 1), jnp.int32),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32),
        positions=jnp.zeros(TOKENS, jnp.int32),
        slot_mapping=jnp.zeros(TOKENS, jnp.int32),
        num_decode=jnp.int32(sum(q_len == 1 for q_len in q_lens)),
        num_seqs=jnp.int32(len(rows)),
    )


@partial(jax.jit, static_argnames=("block_q", "cores", "window"))
def _items(meta: PagedMetadata, *, block_q: int, cores: int, window: int | None):
    blocks = TPUBlocks(pages=2, buffers=3, block_q=block_q, block_k=BLOCK_KV, cores=cores)
    q_lens = meta.cu_q_lens[1:] - meta.cu_q_lens[:-1]
    return make_items(meta, q_lens, blocks, page_size=BLOCK_KV // 2, sliding_window=window)


def expected_items(rows: list[tuple[int, int]], block_q: int, window: int | None) -> tuple[list[Item], list[Item]]:
    """Decode items and prefill items, by loops."""
    decode, prefill, token = [], [], 0
    for row, (q_len, kv_len) in enumerate(rows):
        for offset in range(0, q_len, block_q if q_len > 1 else 1):
            count, position = min(block_q, q_len - offset), kv_len - q_len + offset
            seen = [
                key // BLOCK_KV
                for query in range(position, position + count)
                for key in range(0 if window is None else max(0, query - window + 1), query + 1)
            ]
            # Queries are neighbours, so they see one run of blocks.
            assert sorted(set(seen)) == list(range(min(seen), max(seen) + 1))
            values = (row, token + offset, count, position, min(seen), max(seen) + 1)
            (decode if q_len == 1 else prefill).append(dict(zip(NAMES, values, strict=True)))
        token += q_len
    return decode, prefill


@st.composite
def row_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    rows, left = [], TOKENS
    for _ in range(draw(st.integers(0, ROWS))):
        q_len = min(draw(st.sampled_from([1, 1, 2, 3, 4, 5, 8, 9, 17, 40])), left)
        if q_len:
            rows.append((q_len, q_len + draw(st.sampled_from([0, 1, 14, 15, 16, 31, 32, 33, 90, 1000]))))
            left -= q_len
    return rows


# Decode rows need not come first: `make_items` sorts.
@settings(max_examples=60)
@given(row_lists(), st.sampled_from([(1, 1, None), (4, 1, 1), (8, 2, 40), (16, 3, None)]))
def test_every_block_is_met_once(rows: list[tuple[int, int]], choice: tuple[int, int, int | None]) -> None:
    block_q, cores, window = choice
    items, bounds = map(np.asarray, _items(metadata(rows), block_q=block_q, cores=cores, window=window))
    decode, prefill = expected_items(rows, block_q, window)
    capacities = num_items(ROWS, TOKENS, block_q)
    assert len(decode) <= capacities[0]
    assert len(prefill) <= capacities[1]

    fields = items.reshape(NUM_FIELDS, -1)
    assert fields.shape[1] == sum(capacities) + 1
    listed = [dict(zip(NAMES, values, strict=True)) for values in fields.T.tolist()]
    phases = ((0, capacities[0], decode), (capacities[0], sum(capacities), prefill))
    starts, totals = np.split(bounds, [2 * (cores + 1)])
    for phase, (begin, stop, expected) in enumerate(phases):
        end = begin + len(expected)
        assert listed[begin:end] == expected
        # Whoever looks beyond the last item stays there: it has no last block.
        assert all(item["count"] == 0 and item["end"] > 2**20 for item in [*listed[end:stop], listed[-1]])

        blocks = [item["end"] - item["first"] for item in expected]
        of_cores = starts[phase * (cores + 1) : (phase + 1) * (cores + 1)] - begin
        assert of_cores[0] == 0
        assert of_cores[-1] == len(expected)
        assert (np.diff(of_cores) >= 0).all()
        loads = [sum(blocks[lo:hi]) for lo, hi in itertools.pairwise(of_cores)]
        assert totals[phase * cores : (phase + 1) * cores].tolist() == loads
        share = -(-sum(blocks) // cores)
        assert all(load < share + max(blocks) for load in loads if load)


@pytest.mark.parametrize(("block_q", "num_tokens"), [(1, 1), (8, 1), (8, 2), (8, 33), (256, 40)])
def test_capacity_is_enough_for_the_most_tiles(block_q: int, num_tokens: int) -> None:
    for num_rows in (1, 2, 5, 40):
        decode, prefill = num_items(num_rows, num_tokens, block_q)
        assert decode == min(num_rows, num_tokens)
        # The most tiles: as many rows as can be with two tokens or one more than whole tiles have, and a long one.
        for beyond in range(2, block_q + 2):
            short = min(num_rows - 1, num_tokens // beyond)
            long = num_tokens - short * beyond
            tiles = short * -(-beyond // block_q) + (-(-long // block_q) if long > 1 else 0)
            assert tiles <= prefill


def test_the_plan_has_runs_of_page_ids_and_no_tokens_for_padding() -> None:
    spec = ArgSpec("plan", (1, 7), (9, 20), page_size=16, pad_rows=1, pad_pages=TABLE_CHUNK, free_pages=400)
    meta = make_metadata(spec, np.random.default_rng(0))
    # Padding that is not as it should be is still no work.
    cu = meta.cu_q_lens.at[-1].set(11)
    page_spec = dataclasses.replace(spec.page_spec, implementation="mosaic_tpu")
    blocks = TPUBlocks(pages=2, buffers=3, block_q=8, block_k=16, cores=1)
    work = plan_tpu(dataclasses.replace(meta, cu_q_lens=cu), plan_write(meta, page_spec), blocks)
    assert isinstance(work, TPUWork)
    assert work.q_lens.tolist() == [1, 7, 0]
    runs = np.asarray(work.page_table).reshape(3, 2, TABLE_CHUNK)
    width = meta.page_table.shape[1]
    np.testing.assert_array_equal(runs.reshape(3, -1)[:, :width], meta.page_table)
    assert (runs.reshape(3, -1)[:, width:] == 0).all()

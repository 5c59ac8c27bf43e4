"""The GPU kernel's work list against a simple model: every block of every unit once, in order, in equal shares."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import PagedMetadata, PageSpec
from jpaged.pallas_kernels import gpu_plan as plan
from jpaged.pallas_kernels.tuning import HEAD_DIMS, TILE_ROWS, choose_gpu_blocks, fit_stages, shape_objection
from jpaged.pallas_kernels.xla_plan import plan_xla

BLOCK, HEADS, GROUP, WORKERS = 64, 3, 4, 24
ROWS, TOKENS = 6, 90


def metadata(q_lens: list[int], kv_lens: list[int], rows: int = ROWS, tokens: int = TOKENS) -> PagedMetadata:
    q, kv = np.zeros((2, rows), np.int32)
    q[: len(q_lens)], kv[: len(kv_lens)] = q_lens, kv_lens
    return PagedMetadata(
        page_table=jnp.zeros((rows, 1), jnp.int32),
        kv_lens=jnp.asarray(kv),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(q)]), jnp.int32),
        positions=jnp.zeros(tokens, jnp.int32),
        slot_mapping=jnp.zeros(tokens, jnp.int32),
        num_decode=jnp.int32(0),
        num_seqs=jnp.int32(len(q_lens)),
    )


@partial(jax.jit, static_argnames=("tokens", "window", "workers", "full_share"))
def _work_list(meta: PagedMetadata, tokens: int, window: int | None, workers: int, full_share: int) -> jax.Array:
    return plan.make_work_list(
        meta,
        meta.cu_q_lens[1:] - meta.cu_q_lens[:-1],
        num_kv_heads=HEADS,
        group=GROUP,
        tokens=tokens,
        sliding_window=window,
        block_kv=BLOCK,
        consumers=2,
        num_blocks=workers // 2,
        full_share=full_share,
    )


def work_list(
    meta: PagedMetadata, tokens: int, window: int | None, workers: int = WORKERS, full_share: int = 1
) -> np.ndarray:
    return np.asarray(_work_list(meta, tokens, window, workers, full_share))


def units_of(meta: PagedMetadata, tokens: int, window: int | None) -> dict[tuple[int, int], tuple]:
    """By (first token, head): row, tokens, position of the first, and the blocks that the tile sees."""
    cu, kv_lens = np.asarray(meta.cu_q_lens), np.asarray(meta.kv_lens)
    units = {}
    for row in range(int(meta.num_seqs)):
        for token in range(cu[row], cu[row + 1], tokens):
            count = min(tokens, cu[row + 1] - token)
            position = kv_lens[row] - cu[row + 1] + token
            start = 0 if window is None else max(position - window + 1, 0) // BLOCK
            blocks = [n * BLOCK for n in range(start, -(-(position + count) // BLOCK))]
            for head in range(HEADS):
                units[token, head] = row, count, position, blocks
    return units


def check(
    meta: PagedMetadata, tokens: int, window: int | None, workers: int = WORKERS, full_share: int = 1
) -> list[int]:
    """Walks the list as the workers do; returns each one's load in blocks."""
    records, units = work_list(meta, tokens, window, workers, full_share), units_of(meta, tokens, window)
    rows, capacity = meta.kv_lens.shape[0], meta.positions.shape[0]
    assert records.shape == (plan.num_records(rows, capacity, HEADS, tokens, workers), plan.RECORD)
    pieces: dict[tuple[int, int], list] = {}
    loads = []
    for worker in range(workers):
        load = 0
        for i in range(records[worker, plan.COUNT]):
            record = records[worker if i == 0 else records[worker, plan.FOLLOWING] + i - 1]
            row, count, position, _ = units[record[plan.TOKEN], record[plan.HEAD]]
            assert record[plan.ROW] == row
            assert record[plan.NUM_TOKENS] == count
            assert record[plan.POSITION] == position
            assert record[plan.LIVE_TOKENS] == meta.cu_q_lens[-1]
            assert record[plan.NUM_BLOCKS] >= 1
            pieces.setdefault((record[plan.TOKEN], record[plan.HEAD]), []).append((worker, record))
            load += record[plan.NUM_BLOCKS]
        loads.append(load)
    assert pieces.keys() == units.keys()
    slots = set()
    for key, found in pieces.items():
        blocks = []
        for nth, (worker, record) in enumerate(found):
            blocks += [record[plan.KV_START] + n * BLOCK for n in range(record[plan.NUM_BLOCKS])]
            assert record[plan.PIECES] == len(found)
            assert record[plan.FIRST_WORKER] + nth == worker
            assert record[plan.SHARED_PIECES] == 0
            if len(found) > 1:
                slot = 2 * worker + (nth == 0)
                assert record[plan.FIRST_RESULT] == (2 * record[plan.FIRST_WORKER] + 1) * tokens * GROUP
                assert slot not in slots
                slots.add(slot)
        assert blocks == units[key][3]
    return loads


row_lengths = st.tuples(st.one_of(st.just(1), st.integers(0, 15)), st.one_of(st.integers(0, 60), st.integers(0, 5000)))


@settings(max_examples=40)
@given(st.lists(row_lengths, min_size=1, max_size=ROWS), st.sampled_from([(16, None), (2, 100)]))
def test_every_block_once_and_shares_are_even(rows: list[tuple[int, int]], config: tuple[int, int | None]) -> None:
    meta = metadata([q_len for q_len, _ in rows], [q_len + before for q_len, before in rows])
    loads = check(meta, *config)
    even = -(-sum(loads) // WORKERS)
    assert max(loads) <= even + even // 6 + 1


def test_no_rows_make_no_work() -> None:
    records = work_list(metadata([], []), 2, None)
    assert (records[:WORKERS, plan.COUNT] == 0).all()
    assert (records[:, plan.LIVE_TOKENS] == 0).all()


@pytest.mark.parametrize(("rows", "length", "pieces"), [(1, 1024, 8), (4, 1024, 2), (8, 1024, 1), (16, 1024, 1)])
def test_equal_rows_are_cut_evenly_or_not_at_all(rows: int, length: int, pieces: int) -> None:
    """24 workers: 3 units are cut in 8 pieces each, 12 in 2; 24 and 48 units not at all."""
    meta = metadata([1] * rows, [length] * rows, rows=16, tokens=TOKENS)
    loads = check(meta, 2, None)
    records = work_list(meta, 2, None)
    live = [record for record in records[:WORKERS] if record[plan.COUNT]]
    assert {int(record[plan.PIECES]) for record in live} == {pieces}
    assert len({load for load in loads if load}) == 1


@pytest.mark.parametrize(("rows", "workers"), [(1, 18), (2, 24), (4, 24), (8, 24)])
def test_few_units_have_workers_of_their_own(rows: int, workers: int) -> None:
    """17 blocks a unit, which nothing divides: shares of 3, 5 and 9, or whole units; no worker has pieces of two."""
    meta = metadata([1] * rows, [1040] * rows, rows=8)
    loads = check(meta, 2, None)
    counts = work_list(meta, 2, None)[:WORKERS, plan.COUNT]
    assert counts.max() == 1
    assert counts.sum() == workers
    assert max(loads) == -(-17 * 3 * rows // workers)


@pytest.mark.parametrize(
    ("lengths", "share"),
    [
        ([1040, 1000, 1090, 1030], 9),
        ([1040, 1040, 1040, 1200], 10),  # 19 blocks would be three shares of 9
        ([1040] * 5, None),  # 15 units would need 30 workers
        ([100] * 3 + [3200], None),  # shares of 8 need 30 workers, and 10 are too long
    ],
)
def test_few_units_of_unequal_length_too_if_shares_stay_nearly_even(lengths: list[int], share: int | None) -> None:
    meta = metadata([1] * len(lengths), lengths)
    loads = check(meta, 2, None)
    counts = work_list(meta, 2, None)[:WORKERS, plan.COUNT]
    assert (counts.max() == 1) == (share is not None)
    assert share is None or max(loads) == share


def test_in_a_step_with_room_for_many_units_workers_go_on_with_a_second_one() -> None:
    meta = metadata([1] * 4, [1040] * 4, rows=16)
    check(meta, 2, None)
    assert work_list(meta, 2, None)[:WORKERS, plan.COUNT].max() == 2


@pytest.mark.parametrize(("rows", "busy"), [(1, 12), (2, 12), (3, 18), (4, 24)])
def test_second_consumers_have_work_only_if_shares_are_long(rows: int, busy: int) -> None:
    """12 blocks of 2 consumers; units of 16, of which 96 blocks are 8 for each of 12 workers."""
    loads = check(metadata([1] * rows, [1024] * rows, rows=16), 2, None, full_share=8)
    assert [bool(load) for load in loads] == [True] * busy + [False] * (WORKERS - busy)


def test_a_long_row_among_short_ones_fills_the_workers() -> None:
    loads = check(metadata([1] * 6, [3, 70, 6000, 1, 64, 65]), 2, None)
    assert min(loads[:-2]) > 0


@pytest.mark.parametrize(
    ("group", "num_tokens", "narrow", "tokens"),
    [(4, 99, False, 16), (3, 99, False, 21), (64, 99, False, 1), (4, 99, True, 2), (16, 99, True, 1), (1, 5, True, 5)],
)
def test_tiles_hold_whole_tokens(group: int, num_tokens: int, narrow: bool, tokens: int) -> None:
    assert plan.tile_tokens(group, num_tokens, narrow) == tokens


@pytest.mark.parametrize(("itemsize", "narrow"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("units", [8, 2048])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_shared_memory(head_dim: int, units: int, itemsize: int, narrow: bool) -> None:
    blocks = choose_gpu_blocks(head_dim, 132, itemsize, narrow=narrow, units=units)
    tiles = 2 * blocks.stages * blocks.block_kv * head_dim * itemsize
    rows = 8 if itemsize == 1 and narrow and head_dim != 96 else 64
    assert blocks.consumers * (tiles + rows * head_dim * 2) < 227 * 1024
    assert blocks.stages >= 3
    assert blocks.num_workers == 132 * blocks.consumers
    for group in range(1, TILE_ROWS + 1):
        blocks = choose_gpu_blocks(head_dim, 132, itemsize, narrow=narrow, units=units, group=group)
        rows = -(-group // 8) * 8 if itemsize == 1 and narrow else TILE_ROWS
        assert fit_stages(head_dim, itemsize, 16, blocks.consumers, rows, swapped=itemsize == 1) >= 2


@pytest.mark.parametrize(
    ("change", "num_heads", "q_dtype", "reason"),
    [
        ({"dtype": "int8"}, 8, "bfloat16", None),
        ({"dtype": "float8_e4m3fn"}, 8, "float16", None),
        ({"dtype": "int8"}, 8, "float32", "these are float32"),
        ({"dtype": "int8", "page_size": 8, "num_kv_heads": 1}, None, None, "16 scales"),
        ({"dtype": "float32"}, None, None, "these are float32"),
        ({"head_dim": 80}, None, None, "these pages have 80"),
        ({"head_dim": 512}, None, None, "these pages have 512"),
        ({"page_size": 4}, None, None, "these pages have 4"),
        ({}, 130, None, "130 over 2"),
        ({}, 8, "float32", "these are float32"),
        ({}, 8, "bfloat16", None),
    ],
)
def test_shapes_are_refused_by_name(change, num_heads, q_dtype, reason) -> None:
    spec = PageSpec(
        **{"num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", **change}
    )
    objection = shape_objection(spec, num_heads, q_dtype)
    assert objection is None if reason is None else reason in objection


def test_a_plan_is_for_the_pages_it_was_made_for() -> None:
    spec = PageSpec(64, 16, 2, 128, jnp.bfloat16, "mosaic_gpu")
    meta = metadata([1], [9])
    blocks = choose_gpu_blocks(128, 132)
    work = plan.plan_gpu(meta, plan_xla(meta, 16, "gpu"), spec, blocks)
    work.check(dataclasses.replace(spec, num_kv_heads=4))
    for change in ({"head_dim": 96}, {"dtype": "int8"}, {"page_size": 32}, {"num_pages": 65}):
        with pytest.raises(ValueError, match="call plan_attention with the spec of these pages"):
            work.check(dataclasses.replace(spec, **change))

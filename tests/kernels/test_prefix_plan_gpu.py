"""Shared prefixes against a simple model: which rows share, and that every block is read once for each of them."""

import dataclasses
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import PagedMetadata, PageSpec
from jpaged.pallas_kernels import gpu_plan as plan
from jpaged.pallas_kernels.indices_gpu import reduce_rows
from jpaged.pallas_kernels.prefix_plan_gpu import (
    JOIN_BLOCKS,
    STEP_BLOCKS,
    SharedPrefixes,
    find_prefixes,
    levels,
    num_tiles,
    pays,
    share_prefixes,
    sums_of_groups,
)
from jpaged.pallas_kernels.tuning import TILE_ROWS, choose_gpu_blocks
from jpaged.pallas_kernels.xla_plan import plan_xla

PAGE, BLOCK, HEADS, GROUP, TOKENS, WORKERS = 16, 64, 8, 16, 2, 6
ROWS, COLUMNS, STEP_TOKENS = 8, 100, 40
MEMBERS = TILE_ROWS // GROUP


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that begins with `shared` pages of a prompt and goes on with `own` tokens on pages of its own."""

    prompt: int
    shared: int
    own: int
    q_len: int


def metadata(rows: list[Row], num_decode: int) -> PagedMetadata:
    """Pages of a prompt are those of the prompt before it up to half of them, so that prompts share a beginning too."""
    page_table, kv_lens, q_lens = np.zeros((ROWS, COLUMNS), np.int32), np.zeros(ROWS, np.int32), np.zeros(ROWS, int)
    for i, row in enumerate(rows):
        own = -(-row.own // PAGE)
        first = min(row.shared, 40) if row.prompt else row.shared
        page_table[i, :first] = 1 + np.arange(first)
        page_table[i, first : row.shared] = 1000 * row.prompt + np.arange(first, row.shared)
        page_table[i, row.shared : row.shared + own] = 10000 + 100 * i + np.arange(own)
        kv_lens[i], q_lens[i] = row.shared * PAGE + row.own, row.q_len
    tokens = jnp.zeros(STEP_TOKENS, jnp.int32)
    return PagedMetadata(
        page_table=jnp.asarray(page_table),
        kv_lens=jnp.asarray(kv_lens),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        positions=tokens,
        slot_mapping=tokens,
        num_decode=jnp.int32(num_decode),
        num_seqs=jnp.int32(len(rows)),
    )


@jax.jit
def plan_all(meta: PagedMetadata) -> tuple[SharedPrefixes, jax.Array, jax.Array]:
    q_lens = meta.cu_q_lens[1:] - meta.cu_q_lens[:-1]
    sharing = (q_lens == 1) & (jnp.arange(ROWS) < meta.num_decode)
    prefixes = find_prefixes(meta.page_table, meta.kv_lens, sharing, page_size=PAGE, block_kv=BLOCK)
    records = plan.make_work_list(
        meta,
        q_lens,
        prefixes,
        num_kv_heads=HEADS,
        group=GROUP,
        tokens=TOKENS,
        sliding_window=None,
        block_kv=BLOCK,
        consumers=2,
        num_blocks=WORKERS // 2,
        full_share=2,
    )
    return prefixes, pays(prefixes, MEMBERS, HEADS, WORKERS), records


def groups_of(meta: PagedMetadata) -> list[tuple[list[int], int]]:
    """By the rule: rows and the blocks that they share."""
    table, kv_lens, cu = (np.asarray(x) for x in (meta.page_table, meta.kv_lens, meta.cu_q_lens))
    lengths = levels(COLUMNS, PAGE, BLOCK)
    most = [
        (kv_lens[s] - 1) // PAGE if cu[s + 1] - cu[s] == 1 and s < meta.num_decode else 0 for s in range(len(kv_lens))
    ]

    def key(s: int, level: int) -> list[int] | None:
        if most[s] < lengths[level]:
            return None
        return [table[s, pages - 1] for pages in lengths[: level + 1]]

    def peers(s: int, level: int) -> list[int]:
        return [t for t in range(ROWS) if key(s, level) is not None and key(s, level) == key(t, level)]

    saved = [[n * (1 - 1 / max(len(peers(s, level)), 1)) for level, n in enumerate(lengths)] for s in range(ROWS)]
    best = [int(np.argmax(x)) for x in saved]
    groups = defaultdict(list)
    for s in range(ROWS):
        same = [t for t in peers(s, best[s]) if best[t] == best[s]]
        leader = same[0] if same else s
        equal = table[s] == table[leader]
        common = min(COLUMNS if equal.all() else int(np.argmin(equal)), most[s])
        groups[leader if common >= lengths[best[s]] else s].append((s, common))
    return [
        ([s for s, _ in group], min(n for _, n in group) * PAGE // BLOCK) for group in groups.values() if len(group) > 1
    ]


def walk(records: np.ndarray):
    """The pieces of the workers: worker, whether of a shared unit, record."""
    first_shared = records.shape[0] - plan.num_shared_records(ROWS, HEADS, WORKERS)
    for worker in range(WORKERS):
        for first in (worker, first_shared + worker):
            for i in range(records[first, plan.COUNT]):
                at = first if i == 0 else records[first, plan.FOLLOWING] + i - 1
                yield worker, first != worker, records[at]


def check(meta: PagedMetadata) -> list[tuple[list[int], int]]:
    """Compares with the model, walks the list as the workers do, and returns the groups that share."""
    prefixes, shares, records = plan_all(meta)
    leader, place, size, blocks = (
        np.asarray(x) for x in (prefixes.leader, prefixes.place, prefixes.size, prefixes.blocks())
    )
    groups = groups_of(meta)
    found = [
        (sorted(np.flatnonzero(leader == s).tolist()), int(blocks[s]))
        for s in range(ROWS)
        if size[s] > 1 and leader[s] == s
    ]
    assert sorted(found) == sorted(groups)
    for rows, _ in groups:
        assert (place[rows] - place[rows[0]]).tolist() == list(range(len(rows)))
        assert (size[rows] == len(rows)).all()
    assert sorted(place.tolist()) == list(range(ROWS))
    unread = {tuple(rows): (len(rows) - -(-len(rows) // MEMBERS)) * n for rows, n in groups}
    groups = [(s, n) for s, n in groups if unread[tuple(s)] >= JOIN_BLOCKS * len(s)]
    if sum(unread[tuple(s)] for s, _ in groups) * HEADS < STEP_BLOCKS * WORKERS:
        groups = []
    assert np.flatnonzero(np.asarray(shares)).tolist() == sorted(s for rows, _ in groups for s in rows)

    records, cu, kv_lens = np.asarray(records), np.asarray(meta.cu_q_lens), np.asarray(meta.kv_lens)
    assert records.shape[0] == plan.num_records(ROWS, STEP_TOKENS, HEADS, TOKENS, WORKERS, sharing=True)
    assert (records[:WORKERS, plan.LIVE_TOKENS] == cu[-1]).all()
    parts = plan.PartialRows(WORKERS, TOKENS * GROUP, GROUP, ROWS, HEADS)
    page_table = np.asarray(meta.page_table)
    read, left, joined = defaultdict(list), defaultdict(list), {}
    taken: set[int] = set()

    def leave(slot: int, rows: int, bounds: tuple[int, int]) -> None:
        """A piece leaves its results where nobody else does."""
        mine = set(range(slot, slot + rows))
        assert not mine & taken
        assert bounds[0] <= slot <= slot + rows <= bounds[1]
        taken.update(mine)

    for worker, of_shared, record in walk(records):
        head, own_place = record[plan.HEAD], worker == record[plan.FIRST_WORKER]
        kv = [record[plan.KV_START] + n * BLOCK for n in range(record[plan.NUM_BLOCKS])]
        if of_shared:
            slot = record[plan.FIRST_RESULT] if own_place else parts.shared + 2 * worker * TILE_ROWS
            for nth in range(record[plan.NUM_TOKENS]):
                member = records[record[plan.TOKEN] + nth]
                unit = records[member[plan.FOLLOWING] + head]
                assert (unit[plan.TOKEN], unit[plan.HEAD]) == (member[plan.TOKEN], head)
                assert unit[plan.ROW] == member[plan.ROW]
                assert unit[plan.SHARED_PIECES] == record[plan.PIECES]
                columns = (kv[-1] + BLOCK - 1) // PAGE + 1
                assert (page_table[unit[plan.ROW], :columns] == page_table[record[plan.ROW], :columns]).all()
                assert kv[-1] + BLOCK <= kv_lens[unit[plan.ROW]] - 1
                read[unit[plan.TOKEN], head].extend(kv)
                left[unit[plan.TOKEN], head].append(slot + nth * GROUP)
                leave(slot + nth * GROUP, GROUP, (parts.shared, parts.total))
            continue
        unit = record[plan.TOKEN], head
        read[unit].extend(kv)
        if record[plan.PIECES] > 1:
            own = record[plan.PIECES] - record[plan.SHARED_PIECES]
            slot = record[plan.FIRST_RESULT] if own_place else 2 * worker * parts.tile_rows
            left[unit].append(slot)
            leave(slot, record[plan.NUM_TOKENS] * GROUP, (0, parts.shared))
            joined[unit] = [record[plan.FIRST_RESULT] + max(2 * k - 1, 0) * parts.tile_rows for k in range(own)]
            joined[unit] += [
                record[plan.SHARED_RESULT] + max(2 * k - 1, 0) * TILE_ROWS for k in range(record[plan.SHARED_PIECES])
            ]
    assert {unit: sorted(slots) for unit, slots in left.items()} == {unit: sorted(x) for unit, x in joined.items()}
    for row in range(int(meta.num_seqs)):
        for token in range(cu[row], cu[row + 1], TOKENS):
            last = kv_lens[row] - cu[row + 1] + min(token + TOKENS, cu[row + 1]) - 1
            for head in range(HEADS):
                assert sorted(read.pop((token, head))) == list(range(0, last + 1, BLOCK))
    assert not read
    return groups


rows = st.builds(
    Row,
    prompt=st.integers(0, 2),
    shared=st.sampled_from([0, 3, 15, 16, 17, 31, 40, 42, 64, 65, 70]),
    own=st.sampled_from([5, 64, 16, 17, 300]),
    q_len=st.sampled_from([1, 1, 1, 1, 1, 2, 5]),
)


@settings(max_examples=30)
@given(st.lists(rows, max_size=ROWS), st.integers(0, ROWS))
@example([Row(0, 64, 5, 1)] * ROWS, ROWS)
@example([Row(0, 20, 5, 1)] * 4 + [Row(1, 70, 17, 1)] * 3 + [Row(2, 64, 300, 5)], 7)
def test_every_block_is_read_once_for_each_row_and_results_have_places(some: list[Row], num_decode: int) -> None:
    check(metadata(some, min(num_decode, len(some))))


@pytest.mark.parametrize(
    ("some", "groups"),
    [
        ([Row(0, 64, 5, 1)] * 5, [([0, 1, 2, 3, 4], 16)]),
        ([Row(0, 65, 5, 1), Row(0, 70, 5, 1), Row(0, 67, 5, 1)], [([0, 1, 2], 16)]),  # whole blocks of 4 pages
        ([Row(0, 64, 5, 1), Row(1, 64, 5, 1), Row(0, 64, 5, 1), Row(1, 64, 5, 1)], [([0, 2], 16), ([1, 3], 16)]),
        ([Row(0, 16, 5, 1)] * 2 + [Row(0, 64, 5, 1)] * 3, [([0, 1], 4), ([2, 3, 4], 16)]),  # fewer share more
        ([Row(0, 15, 5, 1)] * 6, []),  # too short
        ([Row(0, 70, 5, 1)] * 2, []),  # too few
        ([Row(0, 64, 5, 1), Row(0, 64, 5, 2), *[Row(0, 64, 5, 1)] * 2], [([0, 2, 3], 16)]),  # several query tokens
    ],
)
def test_who_shares(some: list[Row], groups: list[tuple[list[int], int]]) -> None:
    assert check(metadata(some, len(some))) == groups


@pytest.mark.parametrize("sizes", [(3,), (31, 33), (3, 3, 2), (2, 2), (64,)])
def test_there_is_room_for_tiles_of_two_rows(sizes: tuple[int, ...]) -> None:
    leader = np.repeat(np.cumsum((0, *sizes[:-1])), sizes)
    count = len(leader)
    prefixes = SharedPrefixes(
        leader=jnp.asarray(leader, jnp.int32),
        place=jnp.arange(count, dtype=jnp.int32),
        size=jnp.asarray(np.repeat(sizes, sizes), jnp.int32),
        tokens=jnp.full(count, 10_000 * BLOCK, jnp.int32),
        page_size=PAGE,
        block_kv=BLOCK,
    )
    sums, longest = sums_of_groups(prefixes, 2, count)
    *of_groups, in_order, unread, blocks, most = reduce_rows(sums, most=[longest])
    groups = share_prefixes(prefixes, of_groups, 2, jnp.ones(count, bool))
    assert np.asarray(groups.size)[np.unique(leader)].tolist() == list(sizes)
    assert int(groups.size.sum()) == count
    tiles = sum(-(-size // 2) for size in sizes)
    assert int(groups.tiles.sum()) == tiles <= num_tiles(count)
    assert (np.asarray(blocks) == tiles * 10_000).all()
    assert (np.asarray(unread) == (count - tiles) * 10_000).all()
    assert (np.asarray(most) == 10_000).all()
    assert in_order.tolist() == list(range(count))


def test_a_prefix_leaves_a_token_to_each_row() -> None:
    """Rows with one and the same page table, as a caller may ask for; the last token's page is not shared."""
    meta = metadata([Row(0, 64, 0, 1)] * 3, 3)
    assert check(meta) == [([0, 1, 2], 15)]


@pytest.mark.parametrize(
    ("rows", "columns", "page_dtype", "shares"),
    [(2, 40, "bfloat16", True), (1, 40, "bfloat16", False), (2, 16, "bfloat16", False), (2, 40, "int8", False)],
)
def test_steps_that_cannot_share_have_no_prefixes(rows: int, columns: int, page_dtype: str, shares: bool) -> None:
    meta = metadata([], 0)
    meta = dataclasses.replace(
        meta,
        page_table=jnp.zeros((rows, columns), jnp.int32),
        kv_lens=jnp.zeros(rows, jnp.int32),
        cu_q_lens=jnp.zeros(rows + 1, jnp.int32),
    )
    spec, blocks = PageSpec(64, PAGE, HEADS, 128, page_dtype, "mosaic_gpu"), choose_gpu_blocks(128, 132)
    work = jax.eval_shape(lambda meta: plan.plan_gpu(meta, plan_xla(meta, PAGE, "gpu"), spec, blocks), meta)
    assert (work.prefixes is not None) == shares
    assert work.counters.shape[0] == blocks.num_workers + (rows * HEADS if shares else 0)
    for kv_heads, group, window, may in (
        (HEADS, 4, None, True),
        (HEADS, 32, None, True),
        (HEADS, 33, None, False),
        (HEADS, 4, 100, False),
        (HEADS + 1, 4, None, False),  # a plan may serve layers with other KV heads
    ):
        assert plan.may_share(work.counters.shape[0], blocks, rows, kv_heads, group, window) == (shares and may)

"""The XLA implementation's work list."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import PagedMetadata
from jpaged.pallas_kernels.xla_plan import choose_blocks, plan_xla


def metadata(q_lens: list[int], kv_lens: list[int], num_tokens: int, pad_rows: int) -> PagedMetadata:
    rows = len(q_lens) + pad_rows
    return PagedMetadata(
        page_table=jnp.zeros((rows, 1), jnp.int32),
        kv_lens=jnp.array([*kv_lens, *[0] * pad_rows], jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *q_lens, *[0] * pad_rows]), jnp.int32),
        positions=jnp.zeros(num_tokens, jnp.int32),
        slot_mapping=jnp.zeros(num_tokens, jnp.int32),
        num_decode=jnp.int32(0),
        num_seqs=jnp.int32(len(q_lens)),
    )


plan = jax.jit(plan_xla, static_argnums=(1, 2))


@settings(max_examples=30)
@given(st.lists(st.sampled_from([1, 1, 2, 63, 64, 65, 200]), min_size=1, max_size=6), st.sampled_from(["cpu", "gpu"]))
def test_every_query_is_in_one_item(q_lens: list[int], platform: str) -> None:
    work = plan(metadata(q_lens, q_lens, 1200, 6 - len(q_lens)), 16, platform)
    block_q = work.blocks.block_q
    decode = np.asarray(work.decode_rows)[: int(work.num_decode_rows)].tolist()
    assert sorted(decode) == [row for row, q_len in enumerate(q_lens) if q_len == 1]
    assert int(work.num_items) <= work.item_rows.shape[0]
    items = list(zip(np.asarray(work.item_rows).tolist(), np.asarray(work.item_offsets).tolist(), strict=True))
    expected = [(row, at) for row, q in enumerate(q_lens) if q > 1 for at in range(0, q, block_q)]
    assert items[: int(work.num_items)] == expected
    assert len(work.decode_rows) % work.blocks.decode_rows == len(items) % work.blocks.prefill_items == 0


def test_decode_rows_go_from_long_to_short() -> None:
    work = plan_xla(metadata([1, 3, 1, 1], [5, 99, 70, 6], 6, 1), 16, "cpu")
    assert np.asarray(work.decode_rows)[: int(work.num_decode_rows)].tolist() == [2, 3, 0]


def test_tiles_fit_small_steps() -> None:
    blocks = choose_blocks("cpu", page_size=256, num_tokens=3, num_rows=2)
    assert (blocks.decode_rows, blocks.block_q, blocks.decode_pages, blocks.prefill_pages) == (2, 3, 1, 1)


def test_the_list_is_long_enough_for_the_worst_mix() -> None:
    # Rows of block_q + 1 tokens take two items each and waste most of the second.
    q_lens = [65] * 4
    work = plan(metadata(q_lens, q_lens, sum(q_lens), 0), 16, "cpu")
    assert int(work.num_items) == 8 <= work.item_rows.shape[0]

"""Flops and bytes of a call."""

import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels import PageSpec
from jpaged.pallas_kernels.cost import attention_cost

SPEC = PageSpec(num_pages=9, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype("bfloat16"))
PAGE = 4 * 2 * 2 * 8 * 2


def test_prefill_sees_half_of_the_square() -> None:
    cost = attention_cost(SPEC, num_heads=4, q_lens=[6], kv_lens=[6])
    assert cost.flops == 4 * 4 * 8 * (1 + 2 + 3 + 4 + 5 + 6)
    assert cost.transcendentals == 4 * 21
    assert cost.kv_bytes == 2 * PAGE
    assert cost.other_bytes == 2 * 6 * 4 * 8 * 2
    assert cost.bytes_accessed == cost.kv_bytes + cost.other_bytes


def test_a_window_leaves_pages_unread() -> None:
    # The query at 9 sees 7, 8, 9: on pages 1 and 2 of 0, 1, 2.
    cost = attention_cost(SPEC, num_heads=4, q_lens=[1], kv_lens=[10], sliding_window=3)
    assert cost.flops == 4 * 4 * 8 * 3
    assert cost.kv_bytes == 2 * PAGE


def test_padding_rows_cost_nothing() -> None:
    alone = attention_cost(SPEC, num_heads=4, q_lens=[2], kv_lens=[5])
    assert attention_cost(SPEC, num_heads=4, q_lens=[2, 0], kv_lens=[5, 0]) == alone


def test_scales_are_counted() -> None:
    spec = PageSpec(num_pages=9, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype("int8"))
    cost = attention_cost(spec, num_heads=4, q_lens=[1], kv_lens=[4], q_itemsize=4)
    assert cost.kv_bytes == 4 * 2 * 2 * (8 + 4)
    assert cost.other_bytes == 2 * 4 * 8 * 4


def test_more_queries_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="q_len <= kv_len"):
        attention_cost(SPEC, num_heads=4, q_lens=[3], kv_lens=[2])

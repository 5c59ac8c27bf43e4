"""Where a thread's queries and weights lie: a few addresses and constants say the same as the swizzle."""

from typing import Any

import pytest

from tests.kernels.int_arith import building, value_of
from tests.kernels.test_decode_gpu import needs_jax_011

_THREADS = (0, 5, 31, 66, 127)


@needs_jax_011
@pytest.mark.parametrize(("n", "head_dim"), [(8, 64), (8, 256), (16, 96), (64, 96), (64, 128), (64, 256)])
def test_queries_lie_where_the_swizzle_says(monkeypatch: pytest.MonkeyPatch, n: int, head_dim: int) -> None:
    from jpaged.pallas_kernels import combine_gpu as ends
    from jpaged.pallas_kernels.narrow_gpu import query_layout, query_places, swizzled

    layout: Any = query_layout(n, head_dim).to_mgpu()
    width = layout.vec_size
    with building():
        for thread in _THREADS:
            monkeypatch.setattr(ends, "thread_index", lambda anew=False, thread=thread: ends.i32(thread))
            for i, (row, column, further) in enumerate(query_places(n, head_dim)):
                value = (thread + 128 * i) * width
                assert (value_of(row) + further, value_of(column)) == divmod(value, head_dim)
                place = swizzled(ends.i32(value // head_dim), ends.i32(value % head_dim), head_dim)
                assert value_of(swizzled(row, column, head_dim)) + 2 * head_dim * further == value_of(place)


@needs_jax_011
@pytest.mark.parametrize(("n", "columns"), [(8, 64), (8, 128), (24, 256), (64, 64)])
def test_weights_lie_where_the_swizzle_says(monkeypatch: pytest.MonkeyPatch, n: int, columns: int) -> None:
    from jpaged.pallas_kernels import combine_gpu as ends
    from jpaged.pallas_kernels.narrow_gpu import swizzled, weight_places

    with building():
        for thread in _THREADS:
            monkeypatch.setattr(ends, "thread_index", lambda anew=False, thread=thread: ends.i32(thread))
            keys, query = ends.own_rows()
            seen = set()
            for i, half, which, first, further in weight_places(query, keys[0], n, columns):
                row = ends.i32(value_of(query) + 8 * i + which)
                assert value_of(first) + further == value_of(swizzled(row, keys[half], columns))
                seen.add(value_of(first) + further)
            assert len(seen) == n // 2  # two keys, and two of each eight queries

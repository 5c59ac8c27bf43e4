"""Integer arithmetic of work lists against numpy's, in the range that it is made for."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import indices_gpu

NUMBERS = st.lists(st.integers(0, 2**30), min_size=5, max_size=5)


@settings(deadline=None, database=None, max_examples=20)
@given(a=NUMBERS, b=st.lists(st.integers(1, 2**30), min_size=5, max_size=5))
def test_of_what_is_not_negative_it_is_what_python_says(a: list[int], b: list[int]) -> None:
    x, y = np.array(a, np.int32), np.array(b, np.int32)
    for divisor in (y, int(y[0])):
        of = jnp.asarray(divisor) if isinstance(divisor, np.ndarray) else divisor
        np.testing.assert_array_equal(indices_gpu.div(jnp.asarray(x), of), x // divisor)
        np.testing.assert_array_equal(indices_gpu.rem(jnp.asarray(x), of), x % divisor)
        np.testing.assert_array_equal(indices_gpu.ceil_div(jnp.asarray(x), of), -(-x.astype(np.int64) // divisor))
    index = x % 5
    np.testing.assert_array_equal(indices_gpu.take(jnp.asarray(y), jnp.asarray(index)), y[index])


def test_rows_are_reduced_in_one_reduction() -> None:
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    total, diagonal, least, most = indices_gpu.reduce_rows(
        [jnp.asarray(x), indices_gpu.diagonal(jnp.arange(4), jnp.arange(3)[:, None], jnp.arange(4)[None, :])],
        least=[jnp.asarray(x) - 5],
        most=[jnp.asarray(x[:, :1])],
    )
    np.testing.assert_array_equal(total, x.sum(axis=1))
    np.testing.assert_array_equal(diagonal, np.arange(3))
    np.testing.assert_array_equal(least, x.min(axis=1) - 5)
    np.testing.assert_array_equal(most, x[:, 0])
    np.testing.assert_array_equal(indices_gpu.pad(jnp.arange(2), 4), [0, 1, 0, 0])

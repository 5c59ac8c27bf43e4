"""Heads taken apart and put together in a TPU's vector memory, in jax's TPU interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.pallas_kernels.heads_tpu import buffer_shape, in_pairs, put_heads, put_rows, rows_of, take_head, to_column
from jpaged.pallas_kernels.tpu_tuning import LANES

TOKENS = 8


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "by_words"),
    [("bfloat16", 4, 2 * LANES, True), ("bfloat16", 3, LANES, False), ("float32", 2, 2 * LANES, False)],
)
def test_heads_come_apart_and_together(dtype: str, heads: int, width: int, by_words: bool) -> None:
    """Rows of (token, head) to heads, bit for bit; then heads, a little larger, back to rows."""
    shape, kept = buffer_shape(TOKENS * heads, width, dtype, heads)
    assert in_pairs(dtype, heads) == by_words == (kept == jnp.uint32)
    slabs = range(width // LANES)

    def kernel(rows, apart, together, buffer):
        put_rows(buffer, rows[...], heads)
        for head in range(heads):
            for slab in slabs:
                taken = take_head(buffer, head, slab, parity=head % 2, heads=heads, tokens=TOKENS, dtype=rows.dtype)
                apart[head, :, slab * LANES : (slab + 1) * LANES] = taken
        if heads % 2:  # as outputs never are: they have heads that fill a tile
            together[...] = jnp.zeros_like(together)
            return
        for slab in slabs:
            lanes = slice(slab * LANES, (slab + 1) * LANES)
            for pair in range(heads // 2):
                even, odd = (apart[2 * pair + i, :, lanes].astype(jnp.float32) * 1.01 for i in (0, 1))
                put_heads(buffer, slab, pair, even, odd, heads=heads)
            together[:, lanes] = rows_of(buffer, slab, TOKENS * heads, rows.dtype)

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((TOKENS * heads, width)).astype(jnp.dtype(dtype))
    rows[3, :4] = np.array([np.inf, -np.inf, -0.0, 3e38]).astype(rows.dtype)
    rows[4, :2] = np.nan  # beside them, in the other half of a word
    apart, together = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((heads, TOKENS, width), rows.dtype),
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        ],
        scratch_shapes=[pltpu.VMEM(shape, kept)],
        interpret=pltpu.InterpretParams(),
    )(rows)
    expected = rows.reshape(TOKENS, heads, width).swapaxes(0, 1)
    np.testing.assert_array_equal(np.asarray(apart).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8))
    if heads % 2 == 0:
        with np.errstate(over="ignore"):
            larger = (rows.astype(np.float32) * np.float32(1.01)).astype(rows.dtype)
        np.testing.assert_array_equal(together.astype(jnp.float32), larger.astype(np.float32))


def test_a_row_of_lanes_becomes_a_column() -> None:
    lanes = jnp.arange(LANES, dtype=jnp.float32)[None]
    np.testing.assert_array_equal(to_column(lanes), np.broadcast_to(np.arange(LANES)[:, None], (LANES, LANES)))

"""`PagedMetadata` is data: one program for every mix of the same padded shapes."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages, PageSpec, paged_attention
from jpaged.pallas_kernels.reference import paged_attention_reference
from tests.arg_specs import ArgSpec, make_inputs

SPEC = PageSpec(num_pages=16, page_size=4, num_kv_heads=2, head_dim=16, dtype=jnp.dtype("float32"))
MIXES = (
    ArgSpec("decode", (1, 1, 1), (5, 9, 12), pad_rows=1, pad_tokens=9),
    ArgSpec("mixed", (1, 4), (12, 7), pad_rows=2, pad_tokens=7),
    ArgSpec("prefill", (12,), (12,), pad_rows=3, pad_tokens=0),
)


def test_the_mix_never_recompiles() -> None:
    traced = []

    @jax.jit
    def attend(q, data, meta):
        traced.append(q.shape)
        return paged_attention(q, KVPages(data=data, scales=None, spec=SPEC), meta)

    for mix in MIXES:
        inputs = make_inputs(mix)
        data = jnp.full(SPEC.data_shape, jnp.nan).at[: inputs.kv_pages.data.shape[0]].set(inputs.kv_pages.data)
        out = attend(inputs.q, data, inputs.meta)
        expected, _ = paged_attention_reference(inputs.q, inputs.kv_pages, inputs.meta)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)  # as in test_xla
    assert len(traced) == 1

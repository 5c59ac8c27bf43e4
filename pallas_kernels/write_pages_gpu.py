"""Whole pages written into a pool on Hopper, in place: what copy-on-write, compaction and swap-in end with.

XLA's scatter writes them value by value and finds each value's page again; here a block of threads moves a contiguous
part of one page. Plain Pallas, so that jax's GPU interpreter runs the very kernel.
"""

# `load` of jax 0.10 has an argument more.
# pyright: reportCallIssue=false

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

_THREADS = 128
_MOVE = 16  # bytes that a thread moves at once
_AT_ONCE = 4  # and how many such moves are under way


def shape_objection(pool: Array) -> str | None:
    """Why the kernel cannot write pages of this pool; `None` if it can."""
    values = math.prod(pool.shape[1:])
    if values % _THREADS:
        return f"it takes pages of a multiple of {_THREADS} values; these have {values}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def replace_pages_gpu(pool: Array, page_ids: Int32[Array, " n"], pages: Array, *, interpret: Any = None) -> Array:
    """The Mosaic GPU implementation of `replace_pages`, for one stored array.

    Example:
      >>> import jax.numpy as jnp
      >>> shape_objection(jnp.zeros((4, 3)))
      'it takes pages of a multiple of 128 values; these have 3'
    """
    num_pages, values = pool.shape[0], math.prod(pool.shape[1:])
    if not page_ids.shape[0]:
        return pool
    page_ids = jnp.clip(page_ids, -1, num_pages)  # computed, so in a buffer of its own: a slice may not be aligned
    width = _MOVE // pool.dtype.itemsize
    part = math.gcd(values, _THREADS * width * _AT_ONCE)
    layout = plgpu.Layout.WG_STRIDED((part,), vec_size=math.gcd(part // _THREADS, width))

    def body(ids, source, target):
        nth, at = lax.axis_index("page"), pl.ds(lax.axis_index("part") * part, part)
        page = ids[nth]

        @pl.when((page >= 0) & (page < num_pages))
        def _():
            target[page, at] = plgpu.load(source.at[nth, at], layout=layout)

    target = jax.new_ref(pool.reshape(num_pages, values), memory_space=plgpu.GMEM)
    plgpu.kernel(
        body,
        grid=(values // part, page_ids.shape[0]),
        grid_names=("part", "page"),
        kernel_name="replace_pages",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=mgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(page_ids, pages.reshape(-1, values), target)
    return jax.freeze(target).reshape(pool.shape)

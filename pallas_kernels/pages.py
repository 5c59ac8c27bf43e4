"""`KVPages`: the pages of one layer on the device, and `PageSpec`, their shape."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


@dataclass(frozen=True)
class PageSpec:
    """Shape and dtype of one layer's pages. Hashable, so it can be a static argument.

    The linear order of a page is [page_size, num_kv_heads, 2, head_dim] for every back end: K and V of a head adjacent.

    Attributes:
      num_pages: pages in the pool, the null page (0) included.
      page_size: token slots a page.
      num_kv_heads: KV heads of the layer.
      head_dim: width of a head.
      dtype: dtype of the stored K and V. int8 and float8_e4m3fn come with f32 scales a token and head.
      implementation: the back end whose compiler fixes the stored shape; the linear order is the same for all.
    """

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype
    implementation: str = "xla"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The pages of one layer: a pytree whose leaves are donated to the step and updated in place.

    Attributes:
      data: K and V; shape `spec.data_shape`.
      scales: f32 scales, shape `spec.scales_shape`, or `None` where the dtype needs none.
      spec: static.
    """

    data: Array
    scales: Array | None
    spec: PageSpec = field(metadata={"static": True})

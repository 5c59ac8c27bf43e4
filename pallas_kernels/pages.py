"""`KVPages`: the pages of one layer on the device, and `PageSpec`, their shape."""

import math
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

PAGE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "xla")


@dataclass(frozen=True)
class PageSpec:
    """Shape and dtype of one layer's pages. Hashable, so it can be a static argument.

    The linear order of a page is [page_size, num_kv_heads, 2, head_dim] for every back end: K and V of a head adjacent.

    Attributes:
      num_pages: pages in the pool, the null page (0) included.
      page_size: token slots a page.
      num_kv_heads: KV heads of the layer.
      head_dim: width of a head.
      dtype: of the stored K and V, kept as np.dtype. int8 and float8_e4m3fn come with f32 scales a token and head.
      implementation: the back end whose compiler fixes the stored shapes. The linear order of K and V is the same for
        all; that of the scales is not. `to_logical` and `to_stored` convert.

    Raises:
      ValueError: a size, the dtype or the implementation is out of range.

    Example:
      >>> spec = PageSpec(num_pages=64, page_size=16, num_kv_heads=3, head_dim=64, dtype="int8")
      >>> spec.data_shape, spec.scales_shape, spec.bytes_per_page
      ((64, 16, 6, 64), (64, 96), 6528)
      >>> spec = PageSpec(64, page_size=16, num_kv_heads=3, head_dim=64, dtype="int8", implementation="mosaic_tpu")
      >>> spec.data_shape, spec.scales_shape, spec.bytes_per_page
      ((64, 48, 128), (64, 2, 128), 7168)
    """

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    implementation: str = "xla"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.num_pages < 2:
            raise ValueError(f"num_pages is {self.num_pages}; expected at least 2, since page 0 is the null page")
        for name in ("page_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.num_pages * self.page_rows >= 2**31:
            raise ValueError(
                f"num_pages * page_size is {self.num_pages * self.page_size} slots of {self.rows_per_token} rows; rows "
                "are int32, so there must be less than 2**31: use fewer pages"
            )
        if self.dtype.name not in PAGE_DTYPES:
            raise ValueError(f"pages of dtype {self.dtype.name}; expected one of {', '.join(PAGE_DTYPES)}")
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation {self.implementation!r}; expected one of {', '.join(IMPLEMENTATIONS)}")

    @property
    def quantized(self) -> bool:
        """Whether K and V are stored with scales."""
        return self.dtype.name in QUANTIZED_DTYPES

    @property
    def rows_per_token(self) -> int:
        """Rows of a page that one token fills: one for each head on TPU, where rows are tiled by lanes; else one."""
        return self.num_kv_heads if self.implementation == "mosaic_tpu" else 1

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self.page_size * self.rows_per_token

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row: K | V of a head on TPU, else K and V of all heads."""
        return (2 * self.head_dim,) if self.implementation == "mosaic_tpu" else (2 * self.num_kv_heads, self.head_dim)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Stored shape of K and V: no back end's compiler pads or copies it."""
        return (self.num_pages, self.page_rows, *self.row_shape)

    @property
    def scales_by_row_shape(self) -> tuple[int, int, int]:
        """The scales with their pages' rows on the last axis, padding included; the middle one holds a row's scales."""
        width, lanes = 2 * self.num_kv_heads // self.rows_per_token, self.page_rows
        # Of pages that fill no whole lanes, XLA on TPU would store page ids on the lanes and copy all for each kernel.
        if self.implementation == "mosaic_tpu":
            lanes = -(-lanes // 128) * 128
        return (self.num_pages, width, lanes)

    @property
    def scales_shape(self) -> tuple[int, ...] | None:
        """Stored shape of the scales; `None` where there are none.

        On TPU the linear order of a page is [2, page_size, num_kv_heads], so that the scales of a tile of keys, or of
        values, are one row of lanes; each row is padded to whole registers of 128 lanes. Elsewhere the order is
        [num_kv_heads, 2, page_size], flat. A last axis of 2 would be padded to a whole register on TPU and is refused
        by TMA on GPU.
        """
        if not self.quantized:
            return None
        shape = self.scales_by_row_shape
        return shape if self.implementation == "mosaic_tpu" else (shape[0], shape[1] * shape[2])

    def to_logical(self, data: Any, scales: Any = None) -> tuple[Any, Any]:
        """From the stored shapes to the one that means the same for all back ends.

        Args:
          data: stored K and V of any number of pages n, a jax or numpy array.
          scales: their stored scales, or `None`.

        Returns:
          [n, page_size, num_kv_heads, 2, head_dim], and [n, page_size, num_kv_heads, 2] or `None`.

        Example:
          >>> spec = PageSpec(num_pages=4, page_size=16, num_kv_heads=2, head_dim=8, dtype="int8")
          >>> kv, scales = spec.to_logical(*(x[1:] for x in (make_pages(spec).data, make_pages(spec).scales)))
          >>> kv.shape, scales.shape
          ((3, 16, 2, 2, 8), (3, 16, 2, 2))
        """
        kinds = (data.shape[0], self.page_size, self.num_kv_heads, 2)
        if scales is not None:
            by_row = scales.reshape(data.shape[0], *self.scales_by_row_shape[1:])[:, :, : self.page_rows]
            scales = by_row.swapaxes(1, 2).reshape(kinds)
        return data.reshape(*kinds, self.head_dim), scales

    def to_stored(self, kv: Any, scales: Any = None) -> tuple[Any, Any]:
        """The inverse of `to_logical`.

        Example:
          >>> spec = PageSpec(num_pages=4, page_size=16, num_kv_heads=2, head_dim=8, dtype="int8")
          >>> data, scales = spec.to_stored(jnp.zeros((4, 16, 2, 2, 8), "int8"), jnp.zeros((4, 16, 2, 2)))
          >>> (data.shape, scales.shape) == (spec.data_shape, spec.scales_shape)
          True
        """
        if scales is not None:
            _, width, lanes = self.scales_by_row_shape
            by_row = scales.reshape(kv.shape[0], self.page_rows, width).swapaxes(1, 2)
            xp = jnp if isinstance(scales, jax.Array) else np
            by_row = xp.pad(by_row, ((0, 0), (0, 0), (0, lanes - self.page_rows)))
            scales = by_row if self.implementation == "mosaic_tpu" else by_row.reshape(kv.shape[0], width * lanes)
        return kv.reshape(kv.shape[0], *self.data_shape[1:]), scales

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, its scales and their padding included."""
        scales = 4 * math.prod(self.scales_by_row_shape[1:]) if self.quantized else 0
        return math.prod(self.data_shape[1:]) * self.dtype.itemsize + scales


@no_type_check  # trees are also made of placeholders, which have no shape
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


def make_pages(spec: PageSpec) -> KVPages:
    """Makes zeroed pages for one layer.

    Zeroed, because a masked weight of 0 times a NaN left in fresh memory would be NaN in kernels that multiply.

    Example:
      >>> kv_pages = make_pages(PageSpec(num_pages=4, page_size=16, num_kv_heads=2, head_dim=8, dtype="float32"))
      >>> kv_pages.data.shape
      (4, 16, 4, 8)
    """
    scales = None if spec.scales_shape is None else jnp.zeros(spec.scales_shape, jnp.float32)
    return KVPages(data=jnp.zeros(spec.data_shape, spec.dtype), scales=scales, spec=spec)

"""`KVPages`: the pages of one layer on the device, and `PageSpec`, their shape."""

from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
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
      implementation: the back end whose compiler fixes the stored shape; the linear order is the same for all.

    Raises:
      ValueError: a size, the dtype or the implementation is out of range.

    Example:
      >>> spec = PageSpec(num_pages=64, page_size=16, num_kv_heads=3, head_dim=64, dtype="int8")
      >>> spec.data_shape, spec.scales_shape, spec.bytes_per_page
      ((64, 16, 6, 64), (64, 96), 6528)
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
        if self.num_pages * self.page_size >= 2**31:
            raise ValueError(
                f"num_pages * page_size is {self.num_pages * self.page_size} slots; slots are int32, so it must stay "
                "below 2**31: use fewer pages"
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
    def data_shape(self) -> tuple[int, ...]:
        """Stored shape of K and V: no back end's compiler pads or copies it."""
        if self.implementation == "mosaic_tpu":
            return (self.num_pages, self.page_size * self.num_kv_heads, 2 * self.head_dim)
        return (self.num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def scales_shape(self) -> tuple[int, int] | None:
        """Stored shape of the scales, linear order of a page [num_kv_heads, 2, page_size]; `None` where there are none.

        Flat, because a last axis of 2 would be padded to a whole vector register on TPU and is refused by TMA on GPU.
        """
        return (self.num_pages, self.num_kv_heads * 2 * self.page_size) if self.quantized else None

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, its scales included."""
        values = self.page_size * self.num_kv_heads * 2 * self.head_dim * self.dtype.itemsize
        return values + (self.page_size * self.num_kv_heads * 2 * 4 if self.quantized else 0)


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

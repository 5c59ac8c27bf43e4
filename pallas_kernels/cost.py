"""What a call must compute and move: the numbers behind roofline fractions."""

from dataclasses import dataclass

import numpy as np

from .pages import PageSpec


@dataclass(frozen=True)
class AttentionCost:
    """Work of one `paged_attention` call on one layer.

    Attributes:
      flops: of the two matrix products, a multiply-add counted as 2; masked scores are not counted.
      transcendentals: exponentials.
      kv_bytes: of the live pages that some query sees, scales included, each read once.
      other_bytes: of the queries and the outputs.
    """

    flops: int
    transcendentals: int
    kv_bytes: int
    other_bytes: int

    @property
    def bytes_accessed(self) -> int:
        """All bytes that must be moved."""
        return self.kv_bytes + self.other_bytes


def attention_cost(
    spec: PageSpec,
    *,
    num_heads: int,
    q_lens: np.ndarray | list[int],
    kv_lens: np.ndarray | list[int],
    sliding_window: int | None = None,
    q_itemsize: int | None = None,
) -> AttentionCost:
    """Counts the flops and the bytes of live pages of a call, from the lengths of its rows.

    Args:
      q_itemsize: bytes of a query value; `None` for that of the pages' dtype.

    Raises:
      ValueError: the lengths are not of the same rows, or a row has more queries than KV tokens.

    Example:
      >>> spec = PageSpec(num_pages=9, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
      >>> cost = attention_cost(spec, num_heads=8, q_lens=[1], kv_lens=[100])
      >>> cost.flops, cost.kv_bytes
      (204800, 57344)
    """
    q, kv = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    if q.shape != kv.shape or q.ndim != 1 or bool((q > kv).any()):
        raise ValueError(f"q_lens {q.tolist()}, kv_lens {kv.tolist()}; expected one of each a row, q_len <= kv_len")
    window = int(kv.max(initial=1)) if sliding_window is None else sliding_window
    # Queries at positions [kv - q, kv); each sees min(position + 1, window) keys.
    seen = 0
    for q_len, kv_len in zip(q.tolist(), kv.tolist(), strict=True):
        seen += int(np.minimum(np.arange(kv_len - q_len, kv_len) + 1, window).sum())
    first = np.maximum(kv - q - window + 1, 0)
    pages = np.where(q > 0, -(-kv // spec.page_size) - first // spec.page_size, 0)
    itemsize = spec.dtype.itemsize if q_itemsize is None else q_itemsize
    return AttentionCost(
        flops=4 * num_heads * spec.head_dim * seen,
        transcendentals=num_heads * seen,
        kv_bytes=int(pages.sum()) * spec.bytes_per_page,
        other_bytes=2 * int(q.sum()) * num_heads * spec.head_dim * itemsize,
    )

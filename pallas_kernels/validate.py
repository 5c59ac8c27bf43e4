"""Checks of arguments: `validate_static` at trace time, `validate_dynamic` on values, for tests and debugging."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .metadata import PagedMetadata
from .pages import KVPages, PageSpec


def _expect(ok: bool | np.bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def validate_pages(kv_pages: KVPages) -> None:
    """Raises ValueError unless the arrays have the shapes and dtypes that their `PageSpec` gives."""
    spec, data, scales = kv_pages.spec, kv_pages.data, kv_pages.scales
    _expect(
        data.shape == spec.data_shape and data.dtype == spec.dtype,
        f"{data.shape=} {data.dtype=}; expected {spec.data_shape} {spec.dtype} from kv_pages.spec (see make_pages)",
    )
    if spec.scales_shape is None:
        _expect(scales is None, f"pages of dtype {spec.dtype} take no scales; got an array")
    elif scales is None:
        raise ValueError(f"pages of dtype {spec.dtype} need f32 scales of shape {spec.scales_shape}; got None")
    else:
        _expect(
            scales.shape == spec.scales_shape and scales.dtype == jnp.float32,
            f"{scales.shape=} {scales.dtype=}; expected {spec.scales_shape} float32 from kv_pages.spec",
        )


def validate_metadata(meta: PagedMetadata, num_tokens: int) -> None:
    """Raises ValueError unless the arrays' shapes agree with each other and with T, and all are int32."""
    rows = meta.kv_lens.shape[0]
    shapes = {
        "page_table": (rows, meta.page_table.shape[-1]),
        "kv_lens": (rows,),
        "cu_q_lens": (rows + 1,),
        "positions": (num_tokens,),
        "slot_mapping": (num_tokens,),
        "num_decode": (),
        "num_seqs": (),
    }
    for name, expected in shapes.items():
        x = getattr(meta, name)
        _expect(
            x.shape == expected and x.dtype == jnp.int32,
            f"meta.{name}: {x.shape=} {x.dtype=}; expected {expected} int32, with S = {rows} rows from meta.kv_lens "
            f"and T = {num_tokens} tokens from the first argument",
        )
    _expect(meta.page_table.shape[-1] >= 1, f"{meta.page_table.shape=}; expected at least one page a row")


def validate_new_kv(k: Array, v: Array, kv_pages: KVPages, meta: PagedMetadata) -> None:
    """Raises ValueError unless K and V of a step fit the pages and the metadata."""
    validate_pages(kv_pages)
    spec = kv_pages.spec
    expected = (k.shape[0], spec.num_kv_heads, spec.head_dim)
    _expect(
        k.shape == expected and v.shape == expected,
        f"{k.shape=} {v.shape=}; expected both [T, Hkv, D] = {expected} with Hkv and D from kv_pages.spec",
    )
    _expect(
        jnp.issubdtype(k.dtype, jnp.floating) and k.dtype == v.dtype,
        f"{k.dtype=} {v.dtype=}; expected one floating-point dtype; quantised pages quantise K and V themselves",
    )
    validate_metadata(meta, k.shape[0])


def validate_static(
    q: Array,
    kv_pages: KVPages,
    meta: PagedMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> None:
    """Checks shapes, dtypes and options of a `paged_attention` call; works on tracers.

    Raises:
      ValueError: says what was got, what was expected, and where the expectation comes from.
    """
    validate_pages(kv_pages)
    spec = kv_pages.spec
    _expect(q.ndim == 3, f"{q.shape=}; expected [T, Hq, D]")
    tokens, heads, head_dim = q.shape
    _expect(tokens >= 1, f"{q.shape=}; expected at least one token, padding included")
    _expect(head_dim == spec.head_dim, f"{q.shape=}; expected D = {spec.head_dim} from kv_pages.spec.head_dim")
    _expect(
        heads % spec.num_kv_heads == 0 and heads > 0,
        f"{q.shape=}; expected Hq to be a multiple of Hkv = {spec.num_kv_heads} from kv_pages.spec.num_kv_heads",
    )
    _expect(
        q.dtype.name in ("float32", "bfloat16", "float16"),
        f"{q.dtype=}; expected float32, bfloat16 or float16",
    )
    validate_metadata(meta, tokens)
    _expect(scale is None or (math.isfinite(scale) and scale > 0), f"{scale=}; expected None or a positive number")
    _expect(
        sliding_window is None or sliding_window >= 1,
        f"{sliding_window=}; expected None or at least 1, the query's own token",
    )
    _expect(
        soft_cap is None or (math.isfinite(soft_cap) and soft_cap > 0),
        f"{soft_cap=}; expected None or a positive number",
    )
    if sinks is not None:
        _expect(
            sinks.shape == (heads,) and sinks.dtype == jnp.float32,
            f"{sinks.shape=} {sinks.dtype=}; expected ({heads},) float32, one logit a query head of q",
        )


def validate_dynamic(meta: PagedMetadata, spec: PageSpec, *, max_decode_tokens: int = 1) -> None:
    """Checks the values of a step's metadata; needs concrete arrays, so it is for tests and debugging.

    Args:
      meta: the metadata of a step.
      spec: of the pages that it is for.
      max_decode_tokens: query tokens of a decode row at the most: 1, or the width of speculation.

    Raises:
      ValueError: names the field and the row or token of the first value that breaks the contract.

    Example:
      >>> i32 = lambda *x: jnp.array(x, jnp.int32)
      >>> meta = PagedMetadata(  # one row with one token, at position 1 on page 3, whose slot is 49
      ...     page_table=i32([3]), kv_lens=i32(2), cu_q_lens=i32(0, 1), positions=i32(1), slot_mapping=i32(48),
      ...     num_decode=jnp.int32(1), num_seqs=jnp.int32(1))
      >>> validate_dynamic(meta, PageSpec(num_pages=4, page_size=16, num_kv_heads=1, head_dim=2, dtype="float32"))
      Traceback (most recent call last):
      ...
      ValueError: token 0 of row 0 has slot 48; expected 49, by its position and page table
    """
    _expect(max_decode_tokens >= 1, f"{max_decode_tokens=}; expected at least 1")
    page_table, kv_lens, cu = (np.asarray(x) for x in (meta.page_table, meta.kv_lens, meta.cu_q_lens))
    positions, slots = np.asarray(meta.positions), np.asarray(meta.slot_mapping)
    num_seqs, num_decode = int(meta.num_seqs), int(meta.num_decode)
    rows, width = page_table.shape
    tokens, page_size = positions.shape[0], spec.page_size
    _expect(
        0 <= num_decode <= num_seqs <= rows,
        f"num_decode {num_decode}, num_seqs {num_seqs}; expected 0 <= num_decode <= num_seqs <= {rows} rows",
    )
    q_lens = np.diff(cu)
    _expect(cu[0] == 0 and bool((q_lens >= 0).all()), f"cu_q_lens {cu.tolist()}; expected prefix sums from 0, growing")
    _expect(cu[-1] <= tokens, f"cu_q_lens ends at {cu[-1]}; expected at most T = {tokens}")
    _expect(
        bool(((q_lens[:num_decode] >= 1) & (q_lens[:num_decode] <= max_decode_tokens)).all()),
        f"q_lens of rows [0, {num_decode}) are {q_lens[:num_decode].tolist()}; expected 1 to {max_decode_tokens} "
        "(max_decode_tokens): decode rows, which have few query tokens, come first",
    )
    _expect(
        bool((q_lens[num_seqs:] == 0).all() and (kv_lens[num_seqs:] == 0).all()),
        f"rows [{num_seqs}, {rows}) are padding; expected q_len 0 and kv_len 0",
    )
    _expect(
        bool((q_lens[:num_seqs] >= 1).all()),
        f"q_lens of live rows are {q_lens[:num_seqs].tolist()}; expected at least one query token each",
    )
    _expect(
        bool((q_lens <= kv_lens).all()),
        f"q_lens {q_lens.tolist()} against kv_lens {kv_lens.tolist()}; expected q_len <= kv_len in every row",
    )
    _expect(
        bool(((page_table >= 0) & (page_table < spec.num_pages)).all()),
        f"page_table holds an id outside [0, {spec.num_pages})",
    )
    live_pages = -(-kv_lens // page_size)
    for row in range(rows):
        _expect(
            live_pages[row] <= width,
            f"row {row} has {kv_lens[row]} tokens on {live_pages[row]} pages; the page table holds {width}",
        )
        _expect(
            bool((page_table[row, live_pages[row] :] == 0).all()),
            f"row {row}: entries after its {live_pages[row]} pages must be 0, the null page",
        )
    _validate_tokens(page_table, kv_lens, cu, positions, slots, page_size, num_seqs)


def _validate_tokens(page_table, kv_lens, cu, positions, slots, page_size: int, num_seqs: int) -> None:
    """Each token's position and slot are those of its row, on a page that no other row sees."""
    holders: dict[int, set[int]] = {}
    for row in range(num_seqs):
        for page in page_table[row, : -(-kv_lens[row] // page_size)].tolist():
            holders.setdefault(page, set()).add(row)
    written: dict[int, int] = {}
    for row in range(num_seqs):
        q_len = int(cu[row + 1] - cu[row])
        for i in range(q_len):
            token, position = int(cu[row]) + i, int(kv_lens[row]) - q_len + i
            page = int(page_table[row, position // page_size])
            slot = page * page_size + position % page_size
            _expect(
                positions[token] == position,
                f"token {token} of row {row} has position {positions[token]}; expected {position} from its kv_len",
            )
            _expect(
                slots[token] == slot,
                f"token {token} of row {row} has slot {slots[token]}; expected {slot}, by its position and page table",
            )
            _expect(page != 0, f"token {token} of row {row} would be written to the null page")
            _expect(
                holders[page] == {row},
                f"token {token} of row {row} would be written to page {page}, which rows {sorted(holders[page])} share",
            )
            _expect(slot not in written, f"tokens {written.get(slot)} and {token} would be written to slot {slot}")
            written[slot] = token
    padding = slice(int(cu[-1]), None)
    _expect(
        bool((slots[padding] == 0).all() and (positions[padding] == 0).all()),
        f"tokens from {int(cu[-1])} on are padding; expected slot 0 (in the null page) and position 0",
    )

"""The shapes that every implementation of paged attention is tested on, and inputs for them.

Inputs are hostile: page ids are shuffled, and everything that no query may see (free pages, the null page, the tail of
a row's last page, pages that a sliding window has left behind, padding tokens) is NaN.

They are made by numpy, and moved by `jax.device_put`: jax compiles a program for each other operation on each shape,
`jnp.asarray` of an array included, and that takes longer than most tests.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, make_pages
from jpaged.pallas_kernels.quantization import quantize


@dataclass(frozen=True)
class ArgSpec:
    """One call. Rows with one query token come first; `num_decode` says how many of them are announced as decode rows.

    `pad_rows` and `pad_tokens` are appended; `pad_pages` widens the page table, `free_pages` the pool.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    dtype: str = "float32"
    page_dtype: str = "float32"
    implementation: str = "xla"
    scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    pad_rows: int = 0
    pad_tokens: int = 0
    pad_pages: int = 1
    free_pages: int = 2
    slow: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens) + self.pad_tokens

    @property
    def num_decode(self) -> int:
        return next((i for i, q_len in enumerate(self.q_lens) if q_len != 1), len(self.q_lens))

    @property
    def num_live_pages(self) -> int:
        return sum(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def page_spec(self) -> PageSpec:
        return PageSpec(
            num_pages=1 + self.num_live_pages + self.free_pages,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=jnp.dtype(self.page_dtype),
            implementation=self.implementation,
        )


_S = 4  # page size of the plain specs
_DECODE = {"q_lens": (1,) * 6, "kv_lens": (1, _S - 1, _S, _S + 1, 3 * _S + 2, 5 * _S)}
_PREFILL = {"q_lens": (_S - 1, _S, _S + 1, 11), "kv_lens": (_S - 1, _S, 3 * _S + 2, 11)}
_MIXED = {
    "q_lens": (1, 1, 1, 7, 2, 13),
    "kv_lens": (1, 9, 17, 7, 12, 21),
    "pad_rows": 2,
    "pad_tokens": 7,
}

ARG_SPECS = (
    ArgSpec("one_token", (1,), (1,)),
    ArgSpec("one_row", (1,), (4 * _S + 3,)),
    ArgSpec("decode", **_DECODE),
    ArgSpec("decode_padded", **_DECODE, pad_rows=3, pad_tokens=3),
    ArgSpec("decode_uneven", (1,) * 11, (150, 2, 1, 33, 4, 70, 5, 1, 9, 3, 149)),
    ArgSpec("prefill", **_PREFILL),
    ArgSpec("prefill_padded", **_PREFILL, pad_rows=1, pad_tokens=9),
    ArgSpec("prefill_long", (150,), (150,)),
    ArgSpec("prefill_chunk_of_long", (65, 64), (210, 140), page_size=16),
    ArgSpec("mixed", **_MIXED),
    ArgSpec("mha", **_MIXED, num_heads=3, num_kv_heads=3),
    ArgSpec("mqa", **_MIXED, num_heads=4, num_kv_heads=1),
    ArgSpec("smollm2_heads", **_MIXED, num_heads=9, num_kv_heads=3, head_dim=64, page_size=16),
    ArgSpec("scale", **_MIXED, scale=0.7),
    ArgSpec("window", **_MIXED, sliding_window=5),
    ArgSpec("window_of_one", **_MIXED, sliding_window=1),
    ArgSpec("window_decode_far", (1, 1, 1), (300, 290, 3), sliding_window=9),
    ArgSpec("window_prefill_far", (1, 70, 3), (300, 290, 3), sliding_window=9),
    ArgSpec("soft_cap", **_MIXED, soft_cap=3.0),
    ArgSpec("sinks", **_MIXED, sinks=True),
    ArgSpec("everything", **_MIXED, scale=0.3, sliding_window=6, soft_cap=4.0, sinks=True, page_dtype="int8"),
    ArgSpec("bfloat16", **_MIXED, dtype="bfloat16", page_dtype="bfloat16"),
    ArgSpec("float16", **_MIXED, dtype="float16", page_dtype="float16"),
    ArgSpec("int8", **_MIXED, page_dtype="int8"),
    ArgSpec("float8", **_MIXED, page_dtype="float8_e4m3fn"),
    ArgSpec("float8_for_bfloat16", **_MIXED, dtype="bfloat16", page_dtype="float8_e4m3fn"),
    ArgSpec("int8_for_float16", **_MIXED, dtype="float16", page_dtype="int8"),
    ArgSpec("float8_for_float16", **_MIXED, dtype="float16", page_dtype="float8_e4m3fn"),
    ArgSpec("page_of_one", **_MIXED, page_size=1),
    ArgSpec("page_of_128", **_MIXED, page_size=128),
    ArgSpec("long_32k", (1, 1, 40), (32768, 5, 32000), num_heads=2, num_kv_heads=1, page_size=16, slow=True),
)

ARG_SPEC_PARAMS = [
    pytest.param(spec, id=spec.name, marks=[pytest.mark.slow] if spec.slow else []) for spec in ARG_SPECS
]


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call. `k` and `v` are the step's own; the pages hold them already, `pages_before` do not."""

    q: jnp.ndarray
    k: jnp.ndarray
    v: jnp.ndarray
    sinks: jnp.ndarray | None
    kv_pages: KVPages
    pages_before: KVPages
    meta: PagedMetadata

    def options(self, spec: ArgSpec) -> dict:
        return {
            "scale": spec.scale,
            "sliding_window": spec.sliding_window,
            "soft_cap": spec.soft_cap,
            "sinks": self.sinks,
        }


def make_metadata(spec: ArgSpec, rng: np.random.Generator, *, forget_behind_window: bool = True) -> PagedMetadata:
    """Metadata with shuffled page ids; rows that slid past a page have the null page in its place."""
    rows = len(spec.q_lens) + spec.pad_rows
    width = max(-(-kv_len // spec.page_size) for kv_len in spec.kv_lens) + spec.pad_pages
    free = (rng.permutation(spec.page_spec.num_pages - 1) + 1).tolist()
    page_table = np.zeros((rows, width), np.int32)
    positions, slots = (np.zeros(spec.num_tokens, np.int32) for _ in range(2))
    token = 0
    for row, (q_len, kv_len) in enumerate(zip(spec.q_lens, spec.kv_lens, strict=True)):
        for column in range(-(-kv_len // spec.page_size)):
            page_table[row, column] = free.pop()
        for position in range(kv_len - q_len, kv_len):
            positions[token] = position
            slots[token] = page_table[row, position // spec.page_size] * spec.page_size + position % spec.page_size
            token += 1
        if spec.sliding_window is not None and forget_behind_window:
            page_table[row, : max(0, kv_len - q_len - spec.sliding_window + 1) // spec.page_size] = 0
    cu_q_lens = np.zeros(rows + 1, np.int32)
    cu_q_lens[1:] = np.cumsum([*spec.q_lens, *[0] * spec.pad_rows])
    return PagedMetadata(
        page_table=jax.device_put(page_table),
        kv_lens=jax.device_put(np.array([*spec.kv_lens, *[0] * spec.pad_rows], np.int32)),
        cu_q_lens=jax.device_put(cu_q_lens),
        positions=jax.device_put(positions),
        slot_mapping=jax.device_put(slots),
        num_decode=jax.device_put(np.int32(spec.num_decode)),
        num_seqs=jax.device_put(np.int32(len(spec.q_lens))),
    )


def poisoned_pages(spec: PageSpec) -> tuple[np.ndarray, np.ndarray | None]:
    """Logical host copies of a pool that is all NaN (int8 has none: its scales are NaN); see `PageSpec.to_logical`."""
    shape = (spec.num_pages, spec.page_size, spec.num_kv_heads, 2, spec.head_dim)
    data = np.full(shape, 113 if spec.dtype == jnp.int8 else np.nan).astype(spec.dtype)
    scales = None
    if spec.quantized:
        scales = np.full(shape[:-1], np.nan, np.float32)
    return data, scales


def _device_pages(spec: PageSpec, kv: np.ndarray, kv_scales: np.ndarray | None) -> KVPages:
    data, scales = spec.to_stored(kv, kv_scales)
    return KVPages(jax.device_put(data), None if scales is None else jax.device_put(scales), spec)


# All rows in one program, not one for each operation on each length.
_quantize_at_once = functools.partial(jax.jit, static_argnums=1)(quantize)


def make_inputs(spec: ArgSpec, seed: int = 0) -> Inputs:
    """Random inputs of a call, on poisoned pages."""
    rng = np.random.default_rng(seed)
    meta = make_metadata(spec, rng)
    page_spec, page_table = spec.page_spec, np.asarray(meta.page_table)
    data, scales = poisoned_pages(page_spec)
    before, scales_before = data.copy(), None if scales is None else scales.copy()

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(spec.dtype))

    def tokens(heads: int) -> np.ndarray:
        x = normal(spec.num_tokens, heads, spec.head_dim)
        x[sum(spec.q_lens) :] = np.nan
        return x

    new_k, new_v = (tokens(spec.num_kv_heads) for _ in range(2))
    rows = []
    for q_len, kv_len, begin in zip(spec.q_lens, spec.kv_lens, np.asarray(meta.cu_q_lens), strict=False):
        own = np.stack([new_k[begin : begin + q_len], new_v[begin : begin + q_len]], axis=2)
        rows.append(np.concatenate([normal(kv_len, spec.num_kv_heads, 2, spec.head_dim)[: kv_len - q_len], own]))
    kvs, kv_scales = np.concatenate(rows), None
    if page_spec.quantized:
        kvs, kv_scales = map(np.asarray, _quantize_at_once(kvs, page_spec.dtype))
    ends = np.cumsum(spec.kv_lens)
    for row, (q_len, kv_len, end) in enumerate(zip(spec.q_lens, spec.kv_lens, ends, strict=True)):
        own = slice(end - kv_len, end)
        kv = kvs[own].astype(page_spec.dtype)
        positions = np.arange(kv_len)
        pages, offsets = page_table[row, positions // spec.page_size], positions % spec.page_size
        for pool, pool_scales, until in ((data, scales, kv_len), (before, scales_before, kv_len - q_len)):
            seen = np.flatnonzero((pages != 0) & (positions < until))
            pool[pages[seen], offsets[seen]] = kv[seen]
            if pool_scales is not None and kv_scales is not None:
                pool_scales[pages[seen], offsets[seen]] = kv_scales[own][seen]
    return Inputs(
        q=jax.device_put(tokens(spec.num_heads)),
        k=jax.device_put(new_k),
        v=jax.device_put(new_v),
        sinks=jax.device_put(rng.standard_normal(spec.num_heads).astype(np.float32)) if spec.sinks else None,
        kv_pages=_device_pages(page_spec, data, scales),
        pages_before=_device_pages(page_spec, before, scales_before),
        meta=meta,
    )


def zero_pages(spec: ArgSpec) -> KVPages:
    """Pages of the spec as an engine starts with them."""
    return make_pages(spec.page_spec)

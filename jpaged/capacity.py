"""`plan_capacity`: what fits into a device's memory, in pages and in contiguous reservations. Imports no jax.

    device memory        |######################## device_bytes ########################|
      memory_fraction    |################## may be in use ##################|   rest   |
                         | weights | sampler state |         pool            |
                                                     pages = pool // bytes of a page

The pool is the one that the engine makes (`jpaged.kv_cache.plan_pool`), to the byte, where its device reports
`device_bytes` as the limit and the weights as all that is in use.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from jpaged.config import DEFAULT_PAGE_SIZE, MAX_SLOTS, CacheConfig, SchedulerConfig
from jpaged.errors import ConfigError
from jpaged.lengths import Lengths
from jpaged.model_bytes import kv_bytes_per_page, sampler_bytes, weight_bytes
from jpaged.models.config import LlamaConfig
from jpaged.residency import (
    RESERVATIONS,
    Reservation,
    Residency,
    contiguous,
    final_wasted_fraction,
    paged,
    paged_at_end,
)

PAGE_SIZES: Final = (8, 16, 32, 64, 128, 256)
SHORT_TOKENS: Final = (10, 40, 160)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to give memory to sequences.

    Attributes:
      name: "paged", or a reservation, with " buddy" behind it where runs are powers of two.
      residency: slots of a running sequence in the steady state.
      sequences: sequences at once in the steady state, on average.
      sequences_at_end: the same running sequences, if all of them are at the end of their lives.
      shares: parts of the pool by what is in them, steady state; they add up to 1.
    """

    name: str
    residency: Residency
    sequences: float
    sequences_at_end: float
    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PageSizeRow:
    """The same memory in pages of another size.

    Attributes:
      page_size, num_pages, bytes_per_page: of the pool.
      pages_per_sequence: that a running sequence holds on average.
      sequences, sequences_at_end: see `Scheme`.
      wasted_fraction: empty part of the slots that sequences hold, steady state.
      final_wasted_fraction: the same at the end of each request, each counted once.
      short_sequences: sequences at once of so many tokens each.
    """

    page_size: int
    num_pages: int
    bytes_per_page: int
    pages_per_sequence: float
    sequences: float
    sequences_at_end: float
    wasted_fraction: float
    final_wasted_fraction: float
    short_sequences: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """What fits, and what is wasted.

    Attributes:
      device_bytes, memory_fraction: what was given.
      num_parameters, dtype, weights, weight_bytes: the model's weights; `weights` is the form of the layers' kernels,
        if it is another.
      max_num_seqs, sampler_bytes: rows that the sampler's state has, and what it takes.
      kv_dtype, page_size, num_pages: the pool, the null page included.
      bytes_per_page, bytes_per_token: K, V and scales over all layers.
      max_model_len: tokens of a sequence at the most.
      sliding_window: of the model, or `None`.
      source, num_requests, num_refused: the workload, its requests, and those that are longer than `max_model_len`.
      mean_prompt_tokens, mean_output_tokens: of the others.
      paged: the steady state in pages.
      contiguous: the same memory in contiguous reservations, best first.
      page_sizes: the same memory in pages of other sizes.
    """

    device_bytes: int
    memory_fraction: float
    num_parameters: int
    dtype: str
    weights: str | None
    weight_bytes: int
    max_num_seqs: int
    sampler_bytes: int
    kv_dtype: str
    page_size: int
    num_pages: int
    bytes_per_page: int
    bytes_per_token: int
    max_model_len: int
    sliding_window: int | None
    source: str
    num_requests: int
    num_refused: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    paged: Scheme
    contiguous: tuple[Scheme, ...]
    page_sizes: tuple[PageSizeRow, ...]

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.bytes_per_page

    @property
    def token_capacity(self) -> int:
        """Tokens that the pool holds; the null page holds none."""
        return (self.num_pages - 1) * self.page_size

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        given = asdict(self)
        for scheme in (given["paged"], *given["contiguous"]):
            scheme["wasted_fraction"] = 1.0 - scheme["shares"]["tokens"]
        return given | {"pool_bytes": self.pool_bytes, "token_capacity": self.token_capacity}


def plan_capacity(
    config: LlamaConfig,
    lengths: Lengths,
    *,
    device_bytes: int,
    memory_fraction: float = CacheConfig.memory_fraction,
    page_size: int = DEFAULT_PAGE_SIZE,
    dtype: str = "bfloat16",
    weights: str | None = None,
    kv_dtype: str | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    chunk_tokens: int = SchedulerConfig.max_num_batched_tokens,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> CapacityPlan:
    """Counts pages and sequences before anything is allocated. That sequences may share pages is not counted on.

    Args:
      config: the model's shape.
      lengths: the workload.
      device_bytes: memory of the device.
      memory_fraction: part of it that weights, sampler's state and pages may take together.
      page_size: token slots a page; by default what engines take on CPU and GPU.
      dtype: of the weights: "float32", "bfloat16" or "float16".
      weights: "int8" or "fp8": the layers' kernels are held so.
      kv_dtype: of K and V, also "int8" or "float8_e4m3fn". `None`: that of the weights.
      max_num_seqs: sequences that the engine is told to run at once. `None`: as many as the pages hold on average.
      max_model_len: tokens of a sequence at the most. `None`: what the model and the pool allow.
      chunk_tokens: prompt tokens that one step may compute; with a sliding window, a sequence may hold so many
        beside it.
      page_sizes: what to compare.

    Raises:
      ConfigError: the weights do not fit, not even one page does, or a length or size is out of range; the message
        holds the sum.

    Example:
      >>> from jpaged.lengths import fixed_lengths
      >>> from jpaged.model_shapes import model_shape
      >>> plan = plan_capacity(model_shape("llama-3-8b"), fixed_lengths(1000, 200), device_bytes=141 * 10**9)
      >>> plan.bytes_per_token, plan.num_pages, int(plan.paged.sequences), int(plan.contiguous[0].sequences)
      (131072, 52612, 760, 701)
    """
    kv_dtype = kv_dtype or dtype
    CacheConfig(page_size=page_size, memory_fraction=memory_fraction)  # refuses what is out of range
    for size in page_sizes:
        CacheConfig(page_size=size)
    counts = {"device_bytes": device_bytes, "max_num_seqs": max_num_seqs, "chunk_tokens": chunk_tokens}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1")
    known = config.max_position_embeddings
    longest = known if max_model_len is None else max_model_len
    if not 2 <= longest <= known:
        raise ConfigError(f"max_model_len is {longest}, expected 2 to {known}, the positions that the model knows")

    of_weights, per_page = weight_bytes(config, dtype, weights), kv_bytes_per_page(config, page_size, kv_dtype)
    usable = int(device_bytes * memory_fraction)
    lives = _Lives(_served(lengths, longest), config.sliding_window, chunk_tokens)

    def pool_bytes(num_seqs: int) -> int:
        return usable - of_weights - sampler_bytes(num_seqs, config.vocab_size)

    def pages(num_seqs: int) -> int:
        return _num_pages(pool_bytes(num_seqs), page_size, per_page)

    if max_num_seqs is None:
        slots = lives.paged(page_size).slots
        max_num_seqs = _most_sequences(lambda num_seqs: (pages(num_seqs) - 1) * page_size / slots)
    num_pages = pages(max_num_seqs)
    if num_pages < 2:
        parts = {
            f"weights in {weights or dtype}": of_weights,
            f"the sampler's state (max_num_seqs {max_num_seqs})": sampler_bytes(max_num_seqs, config.vocab_size),
            "the null page and another": 2 * per_page,
        }
        raise ConfigError(_too_small(device_bytes, memory_fraction, usable, parts))
    capacity = (num_pages - 1) * page_size
    if max_model_len is not None and max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the pool holds {capacity} tokens ({num_pages} pages x {page_size}, "
            "one reserved); take more memory or lower max_model_len"
        )
    longest = min(longest, capacity)
    lives = _Lives(_served(lengths, longest), config.sliding_window, chunk_tokens)
    return CapacityPlan(
        device_bytes=device_bytes,
        memory_fraction=memory_fraction,
        num_parameters=config.num_parameters,
        dtype=dtype,
        weights=weights,
        weight_bytes=of_weights,
        max_num_seqs=max_num_seqs,
        sampler_bytes=sampler_bytes(max_num_seqs, config.vocab_size),
        kv_dtype=kv_dtype,
        page_size=page_size,
        num_pages=num_pages,
        bytes_per_page=per_page,
        bytes_per_token=kv_bytes_per_page(config, 1, kv_dtype),
        max_model_len=longest,
        sliding_window=config.sliding_window,
        source=lengths.source,
        num_requests=len(lengths),
        num_refused=len(lengths) - len(lives.lengths),
        mean_prompt_tokens=lives.lengths.mean_prompt_tokens,
        mean_output_tokens=lives.lengths.mean_output_tokens,
        paged=_paged_scheme(lives, page_size, num_pages),
        contiguous=tuple(
            _contiguous_scheme(lives, reservation, buddy, longest, num_pages * page_size)
            for reservation in RESERVATIONS
            for buddy in (False, True)
        ),
        page_sizes=tuple(
            _page_size_row(lives, size, kv_bytes_per_page(config, size, kv_dtype), pool_bytes(max_num_seqs))
            for size in page_sizes
        ),
    )


@dataclass(frozen=True)
class _Lives:
    """The workload that is served, and how much of a sequence is kept."""

    lengths: Lengths
    window: int | None
    chunk_tokens: int

    def paged(self, page_size: int) -> Residency:
        return paged(self.lengths, page_size, sliding_window=self.window)

    def paged_at_end(self, page_size: int) -> Residency:
        return paged_at_end(self.lengths, page_size, sliding_window=self.window, chunk_tokens=self.chunk_tokens)


def _served(lengths: Lengths, max_model_len: int) -> Lengths:
    shortest = lengths.total_tokens.min()
    if shortest > max_model_len:
        raise ConfigError(
            f"the shortest request of {lengths.source} has {shortest} tokens, but a sequence may have {max_model_len}; "
            "take a model with a longer context, more memory, or shorter requests"
        )
    return lengths.select(max_total=max_model_len)


def _num_pages(pool_bytes: int, page_size: int, bytes_per_page: int) -> int:
    return max(min(pool_bytes // bytes_per_page, MAX_SLOTS // page_size), 0)


def _most_sequences(held_beside: Callable[[int], float]) -> int:
    """The most sequences, at least 1, that are held by the pages beside the state of so many: more state, fewer pages.

    Example:
      >>> _most_sequences(lambda num_seqs: 100 - num_seqs)
      50
    """
    beyond = range(2, max(int(held_beside(0)), 1) + 2)
    return 1 + bisect.bisect_left(beyond, True, key=lambda num_seqs: held_beside(num_seqs) < num_seqs)


def _too_small(device_bytes: int, fraction: float, usable: int, parts: Mapping[str, int]) -> str:
    taken = ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in parts.items())
    return (
        f"the memory is too small: {fraction:.0%} of {device_bytes / 1e9:.2f} GB are {usable / 1e9:.2f} GB, but there "
        f"must be room for {taken}: {(sum(parts.values()) - usable) / 1e9:.2f} GB are lacking; take more memory or a "
        "smaller dtype, or divide the model among devices"
    )


def _paged_scheme(lives: _Lives, page_size: int, num_pages: int) -> Scheme:
    residency, slots = lives.paged(page_size), (num_pages - 1) * page_size
    return Scheme(
        name="paged",
        residency=residency,
        sequences=slots / residency.slots,
        sequences_at_end=slots / lives.paged_at_end(page_size).slots,
        shares=_shares(residency, (num_pages - 1) / num_pages) | {"null_page": 1 / num_pages},
    )


def _contiguous_scheme(
    lives: _Lives, reservation: Reservation, buddy: bool, max_model_len: int, pool_slots: int
) -> Scheme:
    residency = contiguous(
        lives.lengths,
        reservation,
        max_model_len=max_model_len,
        pool_slots=pool_slots,
        buddy=buddy,
        sliding_window=lives.window,
        chunk_tokens=lives.chunk_tokens,
    )
    sequences = pool_slots / residency.slots
    return Scheme(
        name=f"{reservation} buddy" if buddy else reservation,
        residency=residency,
        sequences=sequences,
        sequences_at_end=sequences,  # all of it was reserved from the start
        shares=_shares(residency, 1.0) | {"null_page": 0.0},
    )


def _shares(residency: Residency, of_pool: float) -> dict[str, float]:
    parts = asdict(residency)
    slots = parts.pop("slots")
    return {name: of_pool * part / slots for name, part in parts.items()}


def _page_size_row(lives: _Lives, page_size: int, bytes_per_page: int, pool_bytes: int) -> PageSizeRow:
    num_pages = _num_pages(pool_bytes, page_size, bytes_per_page)
    free, residency = max(num_pages - 1, 0), lives.paged(page_size)
    return PageSizeRow(
        page_size=page_size,
        num_pages=num_pages,
        bytes_per_page=bytes_per_page,
        pages_per_sequence=residency.slots / page_size,
        sequences=free * page_size / residency.slots,
        sequences_at_end=free * page_size / lives.paged_at_end(page_size).slots,
        wasted_fraction=residency.wasted_fraction,
        final_wasted_fraction=final_wasted_fraction(lives.lengths, page_size, sliding_window=lives.window),
        short_sequences={tokens: free // -(-tokens // page_size) for tokens in SHORT_TOKENS},
    )

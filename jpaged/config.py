"""Settings of the page pool, the scheduler and the engine: frozen, checked when they are made.

Nothing here imports jax. Values that depend on the model or on the device (`None` below) are filled in by the engine
at start, which logs what it chose.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from jpaged.errors import ConfigError
from jpaged.token_buckets import default_token_buckets, rows_of

MAX_SLOTS: Final = 2**31 - 1  # of a page pool: they are counted in 32 bits
# Host memory is shared with everything else that runs there, and zeroing a large pool delays the start.
MAX_DEFAULT_CPU_POOL_BYTES: Final = 1 << 30
MAX_BIAS_IDS: Final = 300  # of a request
MAX_BANNED_IDS: Final = 80  # 64 stop token ids and 16 end-of-sequence ids
DEFAULT_PAGE_SIZE: Final = 16  # of every back end but the Mosaic TPU kernel: see `jpaged.kv_cache.default_page_size`


def _require(ok: bool, what: str, got: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{what} is {got!r}, expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The page pool.

    Attributes:
      page_size: token slots a page. Small pages waste less, large pages make longer memory transfers. `None`: 16, or 64
        or 128 for the Mosaic TPU kernel, to which a page is one transfer (`Engine.pool_plan` says what it came to).
      num_pages: pages in the pool, the null page included. `None`: as many as `memory_fraction` allows.
      memory_fraction: part of the device's memory that weights, sampler state and pages may take together; the rest is
        left to the temporaries of a step.
      dtype: how K and V are stored: "float32", "bfloat16", "float16", "float8_e4m3fn" or "int8" (the last two with a
        scale per token and head). `None`: the dtype of the model's activations.
      prefix_cache: keep the pages of ended sequences until they are needed, and share them with later requests that
        begin with the same tokens.
      host_pages: pages of host memory that preempted sequences may be moved to, as big as those of the pool.

    Example:
      >>> CacheConfig(page_size=16, num_pages=65).page_size
      16
      >>> CacheConfig(page_size=12)
      Traceback (most recent call last):
      ...
      jpaged.errors.ConfigError: page_size is 12, expected a multiple of 8, or None
    """

    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float = 0.9
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"] | None = None
    prefix_cache: bool = True
    host_pages: int = 0

    def __post_init__(self) -> None:
        size = self.page_size
        _require(
            size is None or (_is_int(size) and size > 0 and size % 8 == 0),
            "page_size",
            size,
            "a multiple of 8, or None",
        )
        pages = self.num_pages
        _require(
            pages is None or (_is_int(pages) and pages >= 2), "num_pages", pages, "at least 2 (page 0 is the null page)"
        )
        fraction = self.memory_fraction
        _require(_is_number(fraction) and 0 < fraction <= 1, "memory_fraction", fraction, "a number in (0, 1]")
        dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
        _require(self.dtype in (None, *dtypes), "dtype", self.dtype, f"one of {', '.join(dtypes)}, or None")
        _require(isinstance(self.prefix_cache, bool), "prefix_cache", self.prefix_cache, "True or False")
        host = self.host_pages
        _require(_is_int(host) and host >= 0, "host_pages", host, "an integer of at least 0")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
      max_num_seqs: sequences that run at once, so the rows of a step at the most.
      max_num_batched_tokens: the token budget of a step, prefill and decode together.
      max_num_prefill_tokens: the token budget of a step in which no row waits for its next token, and which it fills;
        `None`: `max_num_batched_tokens`.
      max_model_len: tokens of a sequence at the most, prompt and output together. `None`: what the model was trained
        for, or what the page pool can hold if that is less.
      policy: who is served first: "fcfs", in the order of arrival; "priority", by the requests' `priority`, lower
        first.
      priority_aging_s: with "priority", a request gains one level of priority over later ones for each so many seconds
        that it came before them, so that none waits for ever.
      max_chunk_tokens: prompt tokens of one sequence in one step at the most, so that a long prompt leaves room for
        others; `None`: the whole budget of the step.
      headroom_pages: pages that must be left for each running sequence when another one is admitted, but no more than a
        twelfth of the pool.
      max_passes: younger requests that may be admitted past one that does not fit into the pool yet; then all wait
        until it does. 0: the order is strict.
      preemption: what becomes of the KV of a preempted sequence: "recompute", compute it again; "swap", move it to the
        host, while `host_pages` are free; "auto", whatever `preemption_costs` says is cheaper.
      preemption_costs: a file that `scripts/bench_swap.py` wrote, for "auto"; without it "auto" means "recompute".
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_num_prefill_tokens: int | None = None
    max_model_len: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority_aging_s: float = 10.0
    max_chunk_tokens: int | None = None
    headroom_pages: int = 2
    max_passes: int = 32
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    preemption_costs: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer of at least 1")
        length = self.max_model_len
        _require(
            length is None or (_is_int(length) and length >= 2), "max_model_len", length, "an integer of at least 2"
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs ({self.max_num_seqs}), so that every running sequence can decode in one step",
        )
        prefill, least = self.max_num_prefill_tokens, self.max_num_batched_tokens
        expected = f"an integer of at least max_num_batched_tokens ({least}), or None"
        _require(
            prefill is None or (_is_int(prefill) and prefill >= least), "max_num_prefill_tokens", prefill, expected
        )
        _require(self.policy in ("fcfs", "priority"), "policy", self.policy, '"fcfs" or "priority"')
        aging = self.priority_aging_s
        _require(_is_number(aging) and 0 < aging <= 1e9, "priority_aging_s", aging, "a positive number of seconds")
        chunk = self.max_chunk_tokens
        _require(
            chunk is None or (_is_int(chunk) and chunk >= 1), "max_chunk_tokens", chunk, "an integer of at least 1"
        )
        for name in ("headroom_pages", "max_passes"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, name, value, "an integer of at least 0")
        ways = ("auto", "recompute", "swap")
        _require(self.preemption in ways, "preemption", self.preemption, f"one of {', '.join(ways)}")
        costs = self.preemption_costs
        _require(costs is None or isinstance(costs, str), "preemption_costs", costs, "a path or None")
        unread = f"None with preemption {self.preemption!r}, which does not read it"
        _require(costs is None or self.preemption == "auto", "preemption_costs", costs, unread)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step: of the larger of both budgets.

        Example:
          >>> SchedulerConfig().max_step_tokens, SchedulerConfig(max_num_prefill_tokens=1024).max_step_tokens
          (512, 1024)
        """
        return self.max_num_prefill_tokens or self.max_num_batched_tokens


_TOKENS_A_ROW: Final = 4  # of all rows together, where they guess


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding by prompt lookup: guesses of the next tokens, found in the prompt and in the output so far.

    They are computed and checked by one step, and change no answer. Rows guess only while that makes none of them the
    slower, by what steps take and by how often each was right of late.

    Attributes:
      num_tokens: tokens that a row guesses in one step at the most.
      shortest_match: last tokens of a text that must have stood before, for what came after them to be a guess.
      longest_match: last tokens that are compared, to find the place that is most alike.
      max_rows: if more sequences run, nobody guesses.
      token_cost: what a step takes longer for each further token, padding included, as a part of what it takes for one.
      wait_cost: what it takes longer because it is read before the next one is planned, as a part of the same. If both
        are given, they hold; else what steps take is measured while they run, and these are what is expected before.

    Example:
      >>> SpeculationConfig(num_tokens=7).num_tokens
      7
    """

    num_tokens: int = 15
    shortest_match: int = 2
    longest_match: int = 8
    max_rows: int = 64
    token_cost: float | None = None
    wait_cost: float | None = None

    def num_samples(self, token_buckets: Sequence[int], max_num_seqs: int) -> dict[int, int]:
        """After how many tokens a step samples at the most, by its padded size; of sizes that guesses may fill.

        Those are sizes up to four tokens a row, and at least one that holds all guesses of a row. Larger ones are for
        prompts, and sample once a row.

        Example:
          >>> SpeculationConfig(num_tokens=7).num_samples((4, 16, 32, 256), 8)
          {4: 4, 16: 16, 32: 32}
        """
        most = max(max_num_seqs, 1 + self.num_tokens, _TOKENS_A_ROW * min(max_num_seqs, self.max_rows))
        sizes = [size for size in token_buckets if size <= most]
        if max(max_num_seqs, *sizes, 0) <= self.num_tokens:
            sizes += [size for size in token_buckets if size > most][:1]
        return {size: min(size, most) for size in sizes}

    def __post_init__(self) -> None:
        for name in ("num_tokens", "shortest_match", "max_rows"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer of at least 1")
        longest, least = self.longest_match, self.shortest_match
        _require(_is_int(longest) and longest >= least, "longest_match", longest, f"an integer of at least {least}")
        for name in ("token_cost", "wait_cost"):
            value = getattr(self, name)
            _require(
                value is None or (_is_number(value) and 0 <= value <= 100), name, value, "a number in [0, 100], or None"
            )


MAX_DECODE_STEP_ROWS: Final = 256
_MOST_STEPS: Final = 64


@dataclass(frozen=True)
class StepShape:
    """The padded sizes of one compiled step: tokens T, rows S, pages a row P; decode steps that it does one by one.

    Example:
      >>> str(StepShape(32, 8, 64)), str(StepShape(8, 8, 64, num_steps=4))
      ('T32 S8 P64', 'T8 S8 P64 x4')
    """

    num_tokens: int
    num_rows: int
    pages_per_row: int
    num_steps: int = 1

    def __str__(self) -> str:
        several = f" x{self.num_steps}" if self.num_steps > 1 else ""
        return f"T{self.num_tokens} S{self.num_rows} P{self.pages_per_row}{several}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine is told.

    Attributes:
      cache: the page pool.
      scheduler: what one step may hold.
      token_buckets: padded numbers of tokens T, ascending; the last one is at least the larger token budget. If that is
        `max_num_prefill_tokens`, one is above the ordinary budget and not above this one. `None`: chosen by
        `default_token_buckets`. A step of T tokens has min(T, max_num_seqs) rows, so there is one compiled step for
        each entry of this list and of `page_buckets`. With `speculation` it has at least min(T, 1 + num_tokens) rows.
        On a GPU steps that hold the budget are also compiled for 64 and 256 rows, larger ones for 64, if these are
        entries below `max_num_seqs`.
      page_buckets: padded numbers of pages a row P, ascending; the last one holds `max_model_len`. `None`: that one
        alone. Attention walks only live pages, so wide tables cost it nothing; but rows x P page ids go over to the
        device in every step, which is a megabyte for 32 rows of 131,072 tokens: give smaller buckets there.
      speculation: guess tokens ahead; `None`: never. Off by default: it pays where answers repeat what is in the
        prompt, and in 16-bit arithmetic an answer may change where two tokens are as good as equally likely, since a
        step of more tokens rounds in other places.
      decode_steps: tokens that a program decodes for each row while nobody waits for a turn, where at most
        `MAX_DECODE_STEP_ROWS` rows run; 1: never more than one. The host then has so many times as long for a step, and
        tokens come in bursts. Answers are the same, but for what 16-bit arithmetic rounds elsewhere in another program.
        `None`: 4 on a GPU if reading the weights takes it less than a host needs for a step
        (`jpaged.kv_cache.choose_decode_steps`), else 1.
      max_logprobs: entries of top-logprobs that a request may ask for.
      warmup: "eager" compiles every step shape at start; "lazy" compiles a shape when it first comes.
      recompile: what happens when a shape compiles after an eager warm-up: "warn" or "error".
      run_ahead: plan and dispatch step k+1 before the tokens of step k are read.
      check_invariants: check the page accounting after every step (tests; costs time on large pools).
      implementation: attention back end: "xla", "mosaic_gpu", "mosaic_tpu"; `None` picks one by the devices in use.
      seed: of the seeds that requests without one get; a new engine, given the same requests in the same order, repeats
        the answers.
      compilation_cache: keep compiled steps on disk between runs, in jax's own cache folder if one is set, else in
        `jax/` under the jpaged cache folder. Turn it off where constants of jpaged are changed at run time.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    token_buckets: Sequence[int] | None = None
    page_buckets: Sequence[int] | None = None
    speculation: SpeculationConfig | None = None
    decode_steps: int | None = None
    max_logprobs: int = 20
    warmup: Literal["eager", "lazy"] = "lazy"
    recompile: Literal["warn", "error"] = "warn"
    run_ahead: bool = True
    check_invariants: bool = False
    implementation: Literal["xla", "mosaic_gpu", "mosaic_tpu"] | None = None
    seed: int = 0
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("cache", CacheConfig), ("scheduler", SchedulerConfig)):
            _require(isinstance(getattr(self, name), kind), name, getattr(self, name), f"a {kind.__name__}")
        guesses = self.speculation
        expected = "a SpeculationConfig, or None"
        _require(guesses is None or isinstance(guesses, SpeculationConfig), "speculation", guesses, expected)
        if not self.cache.host_pages:
            how, costs, why = self.scheduler.preemption, self.scheduler.preemption_costs, "there are no host_pages"
            _require(how != "swap", "preemption", how, f"'auto' or 'recompute': {why} (CacheConfig)")
            _require(costs is None, "preemption_costs", costs, f"None: {why} (CacheConfig)")
        for name in ("run_ahead", "check_invariants", "compilation_cache"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name, least in (("token_buckets", self.scheduler.max_step_tokens), ("page_buckets", 1)):
            sizes = getattr(self, name)
            if sizes is None:
                continue
            _require(isinstance(sizes, Sequence), name, sizes, "a list of ascending integers")
            sizes = tuple(sizes)
            object.__setattr__(self, name, sizes)
            _require(
                len(sizes) > 0
                and all(_is_int(s) and s >= 1 for s in sizes)
                and list(sizes) == sorted(set(sizes))
                and sizes[-1] >= least,
                name,
                sizes,
                f"ascending integers, the last at least {least}",
            )
        budget, prefill = self.scheduler.max_num_batched_tokens, self.scheduler.max_step_tokens
        _require(  # steps above the budget only ever fill one: without it the setting would be of no effect
            self.token_buckets is None or prefill == budget or any(budget < s <= prefill for s in self.token_buckets),
            "token_buckets",
            self.token_buckets,
            f"one of more than max_num_batched_tokens ({budget}) that max_num_prefill_tokens ({prefill}) can fill",
        )
        steps, expected = self.decode_steps, f"an integer in [1, {_MOST_STEPS}], or None"
        _require(steps is None or (_is_int(steps) and 1 <= steps <= _MOST_STEPS), "decode_steps", steps, expected)
        _require(_is_int(self.max_logprobs) and self.max_logprobs >= 0, "max_logprobs", self.max_logprobs, ">= 0")
        _require(_is_int(self.seed) and self.seed >= 0, "seed", self.seed, "an integer of at least 0")
        names = ("xla", "mosaic_gpu", "mosaic_tpu")
        expected = f"one of {', '.join(names)}, or None"
        _require(self.implementation in (None, *names), "implementation", self.implementation, expected)
        _require(self.warmup in ("eager", "lazy"), "warmup", self.warmup, '"eager" or "lazy"')
        _require(self.recompile in ("warn", "error"), "recompile", self.recompile, '"warn" or "error"')

    def step_shapes(self, max_model_len: int, page_size: int, platform: str = "cpu") -> tuple[StepShape, ...]:
        """Every shape that a step may have, in ascending order.

        Args:
          max_model_len: tokens of a sequence at the most (resolved).
          page_size: token slots a page (resolved).
          platform: of the device, which decides on default buckets, and on steps of few rows.

        Raises:
          ConfigError: the largest page bucket cannot hold `max_model_len` tokens.

        Example:
          >>> config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
          >>> [str(shape) for shape in config.step_shapes(64, page_size=16)]
          ['T1 S1 P4', 'T4 S4 P4', 'T16 S4 P4']
        """
        scheduler, seqs = self.scheduler, self.scheduler.max_num_seqs
        budget, prefill = scheduler.max_num_batched_tokens, scheduler.max_num_prefill_tokens
        tokens = self.token_buckets or default_token_buckets(seqs, budget, platform, prefill)
        needed = -(-max_model_len // page_size)
        pages = self.page_buckets or (needed,)
        _require(pages[-1] >= needed, "page_buckets", pages, f"a last entry of at least {needed} pages")
        samples = dict.fromkeys(tokens, seqs)
        if self.speculation is not None:
            samples |= self.speculation.num_samples(tokens, seqs)
        rows = {t: rows_of(t, samples[t], tokens, budget, platform) for t in tokens}
        shapes = [StepShape(t, s, p) for t in tokens for s in rows[t] for p in pages]
        if (steps := self.decode_steps or 1) > 1:
            few = min(seqs, MAX_DECODE_STEP_ROWS)
            sizes = [t for t in tokens if t <= few] or [few]
            shapes += [StepShape(t, t, p, steps) for t in sizes for p in pages]
        return tuple(shapes)

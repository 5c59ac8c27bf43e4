"""Settings: what is refused, and which step shapes follow from them."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
    StepShape,
)
from jpaged.errors import ConfigError

SMALL = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
LARGER = dataclasses.replace(SMALL, max_num_prefill_tokens=32)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: CacheConfig(page_size=12), "page_size is 12, expected a multiple of 8, or None"),
        (lambda: CacheConfig(page_size=0), "page_size is 0"),
        (lambda: CacheConfig(page_size=-8), "page_size is -8"),
        (lambda: CacheConfig(page_size=16.0), "page_size is 16.0"),  # pyright: ignore[reportArgumentType]
        (lambda: CacheConfig(num_pages=1), "num_pages is 1, expected at least 2"),
        (lambda: CacheConfig(num_pages=True), "num_pages is True"),
        (lambda: CacheConfig(memory_fraction=0), r"memory_fraction is 0, expected a number in \(0, 1\]"),
        (lambda: CacheConfig(memory_fraction=1.5), "memory_fraction is 1.5"),
        (lambda: CacheConfig(memory_fraction=float("nan")), "memory_fraction is nan"),
        (lambda: CacheConfig(memory_fraction=True), "memory_fraction is True"),
        (lambda: CacheConfig(dtype="float64"), "dtype is 'float64', expected one of float32, .*int8, or None"),
        (lambda: CacheConfig(prefix_cache=None), "prefix_cache is None, expected True or False"),
        (lambda: CacheConfig(prefix_cache=1), "prefix_cache is 1"),
        (lambda: CacheConfig(host_pages=-1), "host_pages is -1, expected an integer of at least 0"),
        (lambda: CacheConfig(host_pages=1.0), "host_pages is 1.0"),
        (lambda: CacheConfig(host_pages=True), "host_pages is True"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs is 0, expected an integer of at least 1"),
        (lambda: SchedulerConfig(max_num_seqs=True), "max_num_seqs is True"),
        (lambda: SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens is 0"),
        (
            lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7),
            r"is 7, expected at least max_num_seqs \(8\)",
        ),
        (
            lambda: SchedulerConfig(max_num_prefill_tokens=511),
            r"max_num_prefill_tokens is 511, expected an integer of at least max_num_batched_tokens \(512\), or None",
        ),
        (lambda: SchedulerConfig(max_num_prefill_tokens=1024.0), "max_num_prefill_tokens is 1024.0"),
        (lambda: SchedulerConfig(max_num_batched_tokens=32, max_num_prefill_tokens=True), "tokens is True"),
        (lambda: SchedulerConfig(max_model_len=1), "max_model_len is 1, expected an integer of at least 2"),
        (lambda: SchedulerConfig(policy="lifo"), 'policy is \'lifo\', expected "fcfs" or "priority"'),
        (lambda: SchedulerConfig(priority_aging_s=0), "priority_aging_s is 0, expected a positive number of seconds"),
        (lambda: SchedulerConfig(priority_aging_s=float("inf")), "priority_aging_s is inf"),
        (lambda: SchedulerConfig(priority_aging_s=float("nan")), "priority_aging_s is nan"),
        (lambda: SchedulerConfig(priority_aging_s=True), "priority_aging_s is True"),
        (lambda: SchedulerConfig(max_chunk_tokens=0), "max_chunk_tokens is 0, expected an integer of at least 1"),
        (lambda: SchedulerConfig(max_chunk_tokens=2.0), "max_chunk_tokens is 2.0"),
        (lambda: SchedulerConfig(headroom_pages=-1), "headroom_pages is -1, expected an integer of at least 0"),
        (lambda: SchedulerConfig(headroom_pages=None), "headroom_pages is None"),
        (lambda: SchedulerConfig(max_passes=-1), "max_passes is -1, expected an integer of at least 0"),
        (lambda: SchedulerConfig(max_passes=None), "max_passes is None"),
        (lambda: SchedulerConfig(preemption="drop"), "preemption is 'drop', expected one of auto, recompute, swap"),
        (lambda: SchedulerConfig(preemption_costs=3), "preemption_costs is 3, expected a path or None"),
        (
            lambda: SchedulerConfig(preemption="swap", preemption_costs="costs.json"),
            "preemption_costs is 'costs.json', expected None with preemption 'swap', which does not read it",
        ),
        (
            lambda: EngineConfig(scheduler=SchedulerConfig(preemption="swap")),
            "preemption is 'swap', expected 'auto' or 'recompute': there are no host_pages",
        ),
        (
            lambda: EngineConfig(scheduler=SchedulerConfig(preemption_costs="costs.json")),
            "preemption_costs is 'costs.json', expected None: there are no host_pages",
        ),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets=[]), r"token_buckets is \(\), expected ascending"),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets=[8]), "the last at least 16"),
        (lambda: EngineConfig(scheduler=LARGER, token_buckets=[16]), "the last at least 32"),
        (
            lambda: EngineConfig(scheduler=LARGER, token_buckets=[8, 64]),
            r"\(16\) that max_num_prefill_tokens \(32\) can",
        ),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets=[16, 8]), r"token_buckets is \(16, 8\)"),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets=[16, 16]), r"token_buckets is \(16, 16\)"),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets=[0, 16]), r"token_buckets is \(0, 16\)"),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets=16), "token_buckets is 16, expected a list"),
        (lambda: EngineConfig(scheduler=SMALL, token_buckets="16"), "token_buckets is .*expected ascending integers"),
        (lambda: EngineConfig(page_buckets=[2.0]), r"page_buckets is \(2.0,\)"),
        (lambda: EngineConfig(max_logprobs=-1), "max_logprobs is -1, expected >= 0"),
        (lambda: EngineConfig(warmup="never"), 'warmup is \'never\', expected "eager" or "lazy"'),
        (lambda: EngineConfig(recompile="ignore"), 'recompile is \'ignore\', expected "warn" or "error"'),
        (lambda: EngineConfig(cache=SMALL), "cache is SchedulerConfig.*, expected a CacheConfig"),
        (lambda: EngineConfig(cache={"page_size": 16}), "cache is {'page_size': 16}, expected a CacheConfig"),
        (lambda: EngineConfig(scheduler=None), "scheduler is None, expected a SchedulerConfig"),
        (lambda: EngineConfig(run_ahead=1), "run_ahead is 1, expected True or False"),
        (lambda: EngineConfig(check_invariants=None), "check_invariants is None, expected True or False"),
        (lambda: EngineConfig(compilation_cache="~/cache"), "compilation_cache is '~/cache', expected True or False"),
        (lambda: EngineConfig(seed=-1), "seed is -1, expected an integer of at least 0"),
        (lambda: EngineConfig(seed=True), "seed is True"),
        (lambda: EngineConfig(seed=1.0), "seed is 1.0"),
        (lambda: EngineConfig(seed=None), "seed is None"),
        (lambda: EngineConfig(implementation="cuda"), "implementation is 'cuda', expected one of xla, .*, or None"),
        (lambda: EngineConfig(implementation=""), "implementation is ''"),
        (lambda: EngineConfig(speculation=5), "speculation is 5, expected a SpeculationConfig, or None"),
        (lambda: SpeculationConfig(num_tokens=0), "num_tokens is 0, expected an integer of at least 1"),
        (lambda: SpeculationConfig(num_tokens=True), "num_tokens is True"),
        (lambda: SpeculationConfig(shortest_match=0), "shortest_match is 0"),
        (lambda: SpeculationConfig(longest_match=1), "longest_match is 1, expected an integer of at least 2"),
        (lambda: SpeculationConfig(max_rows=0), "max_rows is 0"),
        (lambda: SpeculationConfig(token_cost=-0.1), r"token_cost is -0.1, expected a number in \[0, 100\], or None"),
        (lambda: SpeculationConfig(wait_cost=float("nan")), "wait_cost is nan"),
    ],
)
def test_refuses(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_takes_every_implementation_that_the_kernels_know():
    from jpaged.pallas_kernels.pages import IMPLEMENTATIONS

    for name in (*IMPLEMENTATIONS, None):
        assert EngineConfig(implementation=name).implementation == name


def test_takes_the_ends_of_the_ranges():
    SchedulerConfig(max_chunk_tokens=1, headroom_pages=0, max_passes=0, priority_aging_s=1e-3, policy="priority")
    scheduler = SchedulerConfig(preemption="swap")
    config = EngineConfig(cache=CacheConfig(prefix_cache=False, host_pages=1), scheduler=scheduler)
    assert config.scheduler is scheduler
    scheduler = SchedulerConfig(preemption="auto", preemption_costs="costs.json")
    assert EngineConfig(cache=CacheConfig(host_pages=1), scheduler=scheduler).scheduler is scheduler


def test_the_largest_step_is_that_of_the_larger_budget():
    assert (SMALL.max_step_tokens, LARGER.max_step_tokens) == (16, 32)
    assert dataclasses.replace(SMALL, max_num_prefill_tokens=16).max_step_tokens == 16
    assert EngineConfig(scheduler=LARGER, token_buckets=[16, 32]).token_buckets == (16, 32)


def test_defaults_are_valid_and_frozen():
    config = EngineConfig()
    assert config.step_shapes(2048, page_size=16)[-1] == StepShape(512, 32, 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_logprobs = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_buckets_are_kept_as_given():
    config = EngineConfig(scheduler=SMALL, token_buckets=[2, 16], page_buckets=[1, 4])
    assert (config.token_buckets, config.page_buckets) == ((2, 16), (1, 4))
    shapes = [str(shape) for shape in config.step_shapes(64, page_size=16)]
    assert shapes == ["T2 S2 P1", "T2 S2 P4", "T16 S4 P1", "T16 S4 P4"]


def test_a_step_has_room_for_the_samples_of_rows_that_guess():
    def shapes(num_rows: int, *buckets: int) -> list[str]:
        scheduler = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=buckets[-1])
        guesses = SpeculationConfig(num_tokens=7)
        config = EngineConfig(scheduler=scheduler, token_buckets=buckets, speculation=guesses, decode_steps=1)
        return [str(shape) for shape in config.step_shapes(64, 16)]

    assert shapes(2, 1, 4, 32) == ["T1 S1 P4", "T4 S4 P4", "T32 S8 P4"]
    assert shapes(16, 1, 16, 32, 64, 128) == ["T1 S1 P4", "T16 S16 P4", "T32 S32 P4", "T64 S64 P4", "T128 S16 P4"]
    assert shapes(4, 32) == ["T32 S16 P4"]
    assert shapes(16, 16, 256) == ["T16 S16 P4", "T256 S16 P4"]


def test_page_buckets_must_hold_the_longest_sequence():
    config = EngineConfig(scheduler=SMALL, page_buckets=[1, 4])
    assert config.step_shapes(64, page_size=16)[-1].pages_per_row == 4
    with pytest.raises(ConfigError, match=r"page_buckets is \(1, 4\), expected a last entry of at least 5 pages"):
        config.step_shapes(65, page_size=16)


def test_steps_are_those_of_the_platform_unless_they_are_given():
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256))
    shapes = [(shape.num_tokens, shape.num_rows) for shape in config.step_shapes(64, 16, "gpu")]
    assert shapes == [(1, 1), (8, 8), (32, 32), (64, 64), (128, 64), (256, 64)]
    given = dataclasses.replace(config, token_buckets=(256,))
    assert [shape.num_tokens for shape in given.step_shapes(64, 16, "gpu")] == [256]


@pytest.mark.parametrize(
    ("prefill", "platform", "added"),
    [
        (512, "gpu", {512: [64, 128]}),
        (1024, "gpu", {512: [64, 128], 1024: [64, 128]}),
        (256, "gpu", {}),
        (512, "cpu", {512: [128]}),
        (1024, "tpu", {1024: [128]}),
    ],
)
def test_a_budget_of_prompts_adds_steps_and_changes_no_other(prefill, platform, added):
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=256))
    without = config.step_shapes(64, 16, platform)
    larger = dataclasses.replace(config.scheduler, max_num_prefill_tokens=prefill)
    shapes = dataclasses.replace(config, scheduler=larger).step_shapes(64, 16, platform)
    assert shapes == (*without, *(StepShape(t, s, 4) for t, rows in added.items() for s in rows))


def test_only_the_ordinary_budget_has_all_small_numbers_of_rows():
    scheduler = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=2048, max_num_prefill_tokens=4096)
    shapes = EngineConfig(scheduler=scheduler).step_shapes(64, 16, "gpu")
    found = {t: [shape.num_rows for shape in shapes if shape.num_tokens == t] for t in (1024, 2048, 4096)}
    assert found == {1024: [512], 2048: [64, 256, 512], 4096: [64, 512]}


@pytest.mark.parametrize(
    ("num_seqs", "rows"),
    [
        (300, [1, 8, 32, 64, 128, 160, 192, 224, 256]),
        (256, [1, 8, 32, 64, 128, 160, 192, 224, 256]),
        (100, [1, 8, 32, 64, 100]),
    ],
)
def test_several_steps_are_for_up_to_256_rows(num_seqs, rows):
    scheduler = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=2048)
    shapes = EngineConfig(scheduler=scheduler, decode_steps=4).step_shapes(64, 16, "gpu")
    several = [shape for shape in shapes if shape.num_steps > 1]
    assert several == [StepShape(n, n, 4, 4) for n in rows]
    without = EngineConfig(scheduler=scheduler, decode_steps=1).step_shapes(64, 16, "gpu")
    assert shapes == (*without, *several)


@pytest.mark.parametrize(
    ("num_rows", "buckets", "rows"),
    [
        (512, None, [64, 256, 512]),
        (300, None, [64, 256, 300]),
        (256, None, [64, 256]),
        (65, None, [64, 65]),
        (64, None, [64]),
        (2048, None, [2048]),  # its largest step decodes
        (512, (64, 1024, 4096), [64, 512]),  # 256 rows would be another sampling program
        (512, (32, 512, 2048), [512]),
        (512, (4096,), [512]),
    ],
)
@pytest.mark.parametrize("pages", [None, (1, 4)])
def test_the_largest_step_of_a_gpu_has_shapes_of_fewer_rows(num_rows, buckets, rows, pages):
    def rows_by_tokens(platform: str) -> dict[int, list[int]]:
        shapes = config.step_shapes(64, 16, platform)
        assert len(set(shapes)) == len(shapes)
        assert list(shapes) == sorted(shapes, key=lambda s: (s.num_tokens, s.num_rows, s.pages_per_row))
        tokens = {shape.num_tokens for shape in shapes}
        found = {t: [shape.num_rows for shape in shapes if shape.num_tokens == t] for t in sorted(tokens)}
        return {t: found[t][:: len(pages or "1")] for t in found}

    scheduler = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=2048)
    config = EngineConfig(scheduler=scheduler, token_buckets=buckets, page_buckets=pages)
    *others, largest = (found := rows_by_tokens("gpu"))
    assert found[largest] == rows
    assert [found[t] for t in others] == [[min(t, num_rows)] for t in others]
    assert set(rows[:-1]) <= {found[t][0] for t in others}  # no sampling program is for them alone
    for platform in ("cpu", "tpu"):
        assert all(found == [min(t, num_rows)] for t, found in rows_by_tokens(platform).items())


def test_few_rows_have_no_shape_where_all_rows_of_the_largest_step_may_guess():
    scheduler = SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=512)
    config = EngineConfig(scheduler=scheduler, token_buckets=(64, 128, 512))

    def shapes(num_tokens: int) -> list[str]:
        guesses = dataclasses.replace(config, speculation=SpeculationConfig(num_tokens=num_tokens))
        return [str(shape) for shape in guesses.step_shapes(16, 16, "gpu")]

    assert shapes(15) == ["T64 S64 P1", "T128 S128 P1", "T512 S64 P1", "T512 S128 P1"]
    assert shapes(511) == ["T64 S64 P1", "T128 S128 P1", "T512 S512 P1"]


@settings(deadline=None, database=None, max_examples=50)
@given(
    seqs=st.integers(1, 100),
    more=st.integers(0, 500),
    larger=st.sampled_from((None, 0, 1, 300)),
    max_model_len=st.integers(2, 4096),
    num_tokens=st.integers(1, 864),
    num_rows=st.integers(1, 100),
    page_size=st.sampled_from((8, 16, 128)),
    platform=st.sampled_from(("cpu", "gpu")),
)
def test_every_plan_fits_some_step_shape(seqs, more, larger, max_model_len, num_tokens, num_rows, page_size, platform):
    prefill = None if larger is None else seqs + more + larger
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=seqs + more, max_num_prefill_tokens=prefill)
    config = EngineConfig(scheduler=scheduler)
    shapes = config.step_shapes(max_model_len, page_size, platform)
    assert list(shapes) == sorted(shapes, key=lambda s: (s.num_tokens, s.num_rows, s.pages_per_row))
    num_tokens = min(num_tokens, scheduler.max_step_tokens)
    num_rows = min(num_rows, seqs, num_tokens)  # each row has at least one token
    size = next(shape.num_tokens for shape in shapes if shape.num_tokens >= num_tokens)
    shape = next(shape for shape in shapes if shape.num_tokens == size and shape.num_rows >= num_rows)
    assert shape.pages_per_row * page_size >= max_model_len

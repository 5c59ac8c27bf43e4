"""Padded sizes: how far apart they are, and for how many rows they are compiled."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.token_buckets import default_token_buckets, rows_of


@settings(deadline=None, database=None, max_examples=50)
@given(seqs=st.integers(1, 300), more=st.integers(0, 9000))
def test_default_token_buckets_waste_at_most_three_quarters(seqs, more):
    for platform, least in (("cpu", 1), ("tpu", min(seqs, 8)), ("gpu", 1)):
        buckets = default_token_buckets(seqs, seqs + more, platform)
        assert list(buckets) == sorted(set(buckets))
        assert (buckets[0], buckets[-1]) == (least, seqs + more)
        assert seqs in buckets  # a step in which everybody decodes is not padded
        if platform == "gpu":  # small steps take as long as they take to read the weights
            assert all(large <= 2 * max(small, 32) for small, large in itertools.pairwise(buckets))
            decode = [size for size in buckets if 64 <= size <= seqs]
            assert all(2 * large <= 3 * small for small, large in itertools.pairwise(decode) if small > 64)
        else:
            assert all(large <= 4 * small for small, large in itertools.pairwise(buckets))


@settings(deadline=None, database=None, max_examples=50)
@given(seqs=st.integers(1, 300), more=st.integers(0, 3000), larger=st.integers(0, 9000))
def test_a_larger_budget_of_prompts_adds_sizes_above_the_ordinary_one(seqs, more, larger):
    budget, largest = seqs + more, seqs + more + larger
    for platform in ("cpu", "tpu", "gpu"):
        ordinary = default_token_buckets(seqs, budget, platform)
        buckets = default_token_buckets(seqs, budget, platform, largest)
        assert buckets[: len(ordinary)] == ordinary == default_token_buckets(seqs, budget, platform, budget)
        assert buckets[-1] == largest
        if platform == "gpu":
            assert all(large <= 2 * max(small, 32) for small, large in itertools.pairwise(buckets))
        else:
            assert len(buckets) == len(ordinary) + (larger > 0)


@pytest.mark.parametrize(
    ("platform", "rows"),
    [
        ("gpu", {64: [64], 256: [256], 1024: [512], 2048: [64, 256, 512], 4096: [64, 512], 8192: [64, 512]}),
        ("cpu", {64: [64], 256: [256], 1024: [512], 2048: [512], 4096: [512], 8192: [512]}),
        ("tpu", {64: [64], 256: [256], 1024: [512], 2048: [512], 4096: [512], 8192: [512]}),
    ],
)
def test_steps_that_hold_the_budget_have_fewer_rows_on_a_gpu_and_larger_ones_the_fewest(platform, rows):
    buckets = (64, 256, 1024, 2048, 4096, 8192)
    for budget in (2048, 1500):  # the first size that holds it
        assert {size: rows_of(size, 512, buckets, budget, platform) for size in buckets} == rows


@pytest.mark.parametrize(
    ("most", "buckets", "rows"),
    [
        (64, (64, 2048, 4096), [64]),  # no fewer than all
        (65, (64, 65, 2048, 4096), [64, 65]),
        (512, (256, 2048, 4096), [256, 512]),  # 64 rows would be another sampling program
        (512, (32, 2048, 4096), [512]),
        (4096, (64, 2048, 4096), [4096]),  # all of them decode
    ],
)
def test_few_rows_are_sizes_that_are_there(most, buckets, rows):
    assert rows_of(4096, most, buckets, 2048, "gpu") == rows

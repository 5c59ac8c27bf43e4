"""What running sequences hold: closed sums against lives that are walked step by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths, fixed_lengths
from jpaged.residency import contiguous, final_wasted_fraction, paged, paged_at_end

requests = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=5)
page_sizes = st.sampled_from([1, 3, 8, 16, 64])
windows = st.one_of(st.none(), st.integers(1, 90))


def lengths_of(rows) -> Lengths:
    prompts, outputs, weights = zip(*rows, strict=True)
    return Lengths(source="rows", prompt_tokens=prompts, output_tokens=outputs, weights=weights)


def visible(num_tokens: int, window: int | None) -> range:
    """Positions that the next token of a sequence may see, its own included."""
    return range(0 if window is None else max(num_tokens - window, 0), num_tokens)


def steps(rows):
    """Each step of each request: (request, tokens). Requests of weight w are run w times."""
    for prompt, output, weight in rows:
        for _ in range(weight):
            for step in range(max(output, 1)):
                yield (prompt, output), prompt + step


@settings(max_examples=50)
@given(requests, page_sizes, windows)
def test_the_steady_state_is_the_mean_over_all_steps(rows, page_size, window):
    pages = [len({p // page_size for p in visible(n, window)}) for _, n in steps(rows)]
    tokens = [len(visible(n, window)) for _, n in steps(rows)]
    found = paged(lengths_of(rows), page_size, sliding_window=window)
    assert found.slots == pytest.approx(page_size * np.mean(pages))
    assert found.tokens == pytest.approx(np.mean(tokens))
    assert found.partly_filled == pytest.approx(found.slots - found.tokens)


@settings(max_examples=50)
@given(requests, page_sizes)
def test_at_the_end_the_same_sequences_hold_all_of_their_tokens(rows, page_size):
    totals = np.array([prompt + output for (prompt, output), _ in steps(rows)])
    found = paged_at_end(lengths_of(rows), page_size)
    assert found.slots == pytest.approx(page_size * np.mean(-(-totals // page_size)))
    assert found.tokens == pytest.approx(totals.mean())
    assert found.slots >= paged(lengths_of(rows), page_size).slots - 1e-9


@settings(max_examples=50)
@given(st.integers(1, 70), st.integers(0, 40), page_sizes, st.integers(1, 90), st.integers(1, 30))
def test_with_a_window_no_step_holds_more_than_window_and_chunk(prompt, output, page_size, window, chunk):
    """Every step, prefills in chunks and decodes alike: what its first token sees up to its last one."""
    needed, begin = 0, 0
    while begin < prompt + output:
        end = min(begin + chunk, prompt) if begin < prompt else begin + 1
        first = max(begin + 1 - window, 0)
        needed = max(needed, len({p // page_size for p in range(first, end)}))
        begin = end
    most = paged_at_end(fixed_lengths(prompt, output), page_size, sliding_window=window, chunk_tokens=chunk)
    assert needed * page_size <= most.slots
    assert most.tokens <= window + chunk
    if window >= prompt + output:
        assert most.slots == needed * page_size


@settings(max_examples=50)
@given(requests, st.sampled_from(["oracle", "pow2", "max"]), st.booleans())
def test_contiguous_runs_stay_as_they_were_reserved(rows, reservation, buddy):
    run = {
        "oracle": lambda prompt, output: prompt + output,
        "pow2": lambda prompt, output: prompt + next(2**i for i in range(9) if 2**i >= output) * (output > 0),
        "max": lambda prompt, output: 150,
    }[reservation]
    reserved = np.array([run(*request) for request, _ in steps(rows)])
    runs = np.array([next(2**i for i in range(9) if 2**i >= r) for r in reserved]) if buddy else reserved
    final = np.array([sum(request) for request, _ in steps(rows)])
    tokens = np.array([n for _, n in steps(rows)])
    found = contiguous(lengths_of(rows), reservation, max_model_len=150, pool_slots=1000, buddy=buddy)
    assert found.slots == pytest.approx(runs.mean())
    assert found.tokens == pytest.approx(tokens.mean())
    assert found.not_yet_used == pytest.approx((final - tokens).mean())
    assert found.internal == pytest.approx((reserved - final).mean())
    assert found.rounding == pytest.approx((runs - reserved).mean())
    assert found.partly_filled == 0


def test_runs_are_no_longer_than_model_pool_and_window_allow():
    lengths = fixed_lengths(100, 65)
    assert contiguous(lengths, "pow2", max_model_len=170, pool_slots=1000).slots == 170, "not 100 + 128"
    assert contiguous(lengths, "max", max_model_len=170, pool_slots=200, buddy=True).slots == 200, "not 256"
    ring = contiguous(lengths, "max", max_model_len=170, pool_slots=1000, sliding_window=32, chunk_tokens=16)
    assert (ring.slots, ring.tokens, ring.not_yet_used) == (48, 32, 16)


def test_the_final_state_counts_each_request_once():
    """Four requests of 8, 9, 16 and 17 tokens: 50 in 8 pages of 8, and in 6 pages of 16."""
    lengths = Lengths(source="four", prompt_tokens=[1, 8, 15, 2], output_tokens=[7, 1, 1, 15])
    assert final_wasted_fraction(lengths, 8) == pytest.approx(1 - 50 / 64)
    assert final_wasted_fraction(lengths, 16) == pytest.approx(1 - 50 / 80)
    # With a window of 9, pages wholly left of it are gone: 8, 9, 9 (positions 7 to 15) and 9 tokens (8 to 16).
    assert final_wasted_fraction(lengths, 8, sliding_window=9) == pytest.approx(1 - 35 / 56)


def test_long_lives_do_not_overflow():
    found = paged(fixed_lengths(10**9, 10**9), page_size=8)
    assert found.tokens == pytest.approx(1.5e9)
    assert found.slots == pytest.approx(found.tokens, rel=1e-6)


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match="a request of fixed 8\\+4 has 12 tokens, max_model_len is 11"):
        contiguous(fixed_lengths(8, 4), "max", max_model_len=11, pool_slots=100)
    with pytest.raises(ConfigError, match="reservation is 'half', expected one of oracle, pow2, max"):
        contiguous(fixed_lengths(8, 4), "half", max_model_len=12, pool_slots=100)

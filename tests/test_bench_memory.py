"""The memory benchmark: its buddy allocator, its replays against figures computed by hand, and what it prints."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.lengths import Lengths, fixed_lengths
from jpaged.preemption import PreemptionCosts
from jpaged.residency import Reservation
from scripts import bench_memory, bench_swap, render_benchmarks
from scripts.memory import figures
from scripts.memory.beam_scores import BeamScores
from scripts.memory.buddy import BuddyAllocator
from scripts.memory.contiguous import reserved_slots, serve_contiguous
from scripts.memory.feed import ChatFeed, all_at_once, poisson
from scripts.memory.hardware import HARDWARE, Hardware
from scripts.memory.hits import same_prompt_again, serve_blocks
from scripts.memory.parts import thinned
from scripts.memory.prompts import Prompts
from scripts.memory.replay import Replay, Settings, replay

BOUNDS = {"max_num_seqs": 9, "max_num_batched_tokens": 99}
STEADY = Hardware(slots=1 << 20, weights_s=1.0, token_s=0.0, kv_token_s=0.0)  # every step takes a second


# --- buddy allocator --------------------------------------------------------------------------------------------------
@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60), st.randoms())
@settings(deadline=None, max_examples=60)
def test_runs_are_aligned_disjoint_and_joined_again(
    num_slots: int, moves: list[tuple[bool, int]], rng: random.Random
) -> None:
    pool, held = BuddyAllocator(num_slots), []
    for takes, size in moves:
        if takes and (start := pool.allocate(size)) is not None:
            run = pool.size_of(start)
            assert size <= run < 2 * size
            assert run & (run - 1) == 0
            assert start % run == 0
            assert start + run <= num_slots
            assert all(start + run <= other or other + pool.size_of(other) <= start for other in held)
            held.append(start)
        elif held:
            pool.free(held.pop(rng.randrange(len(held))))
        assert pool.num_free == num_slots - sum(map(pool.size_of, held))
    for start in held:
        pool.free(start)
    # Whole again: the powers of two that the pool is made of can be had, each once.
    for bit in range(num_slots.bit_length()):
        if num_slots >> bit & 1:
            assert pool.allocate(1 << bit) is not None
    assert pool.num_free == 0


def test_the_buddy_allocator_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="0 slots, expected"):
        BuddyAllocator(0)
    with pytest.raises(ValueError, match="0 slots were asked"):
        BuddyAllocator(4).allocate(0)
    with pytest.raises(ValueError, match="slot 2"):
        BuddyAllocator(4).free(2)


# --- replays ----------------------------------------------------------------------------------------------------------
def test_waste_is_that_of_the_page_size() -> None:
    # 5 to 8 tokens in pages of 4: 8 slots all the time, of which 3, 2, 1, 0 are empty.
    result = replay(fixed_lengths(5, 4), all_at_once(fixed_lengths(5, 4)), STEADY, Settings(slots=64, page_size=4))
    assert (result.num_steps, result.seconds, result.num_requests) == (4, 4.0, 1)
    assert result.wasted_fraction == pytest.approx(6 / 32)
    assert result.mean_requests == 1
    assert result.used_fraction == pytest.approx(8 / 64)
    assert (result.saturated_fraction, result.max_times_computed, result.recomputed_fraction) == (0, 1, 0)


def test_what_is_preempted_is_computed_again_once() -> None:
    lengths = fixed_lengths(4, 24, count=6)
    tight = Settings(slots=4 * 13, page_size=4, headroom_pages=0, host_slots=4 * 13)
    made = Replay(lengths, all_at_once(lengths), STEADY, tight)
    result = made.run()
    assert result.num_requests == 6
    assert result.num_preemptions > 0
    assert result.max_times_computed == 2
    assert 0 < result.recomputed_fraction < 0.5
    assert made.computations.num_computed - made.computations.num_recomputed == 6 * 27
    assert result.saturated_fraction > 0
    assert sum(result.saturated_shares.values()) == pytest.approx(1)
    made.scheduler.check_invariants()
    assert made.allocator.num_used == 0


@pytest.mark.parametrize("count", [2, 3])
def test_parallel_samples_share_the_full_pages_of_the_prompt(count: int) -> None:
    prompt, output, size = 11, 9, 4
    lengths = fixed_lengths(prompt, output)
    result = replay(lengths, all_at_once(lengths), STEADY, Settings(slots=256, page_size=size, num_sequences=count))
    # In the first step the samples are there, but share everything; then each has its own last page.
    alone = [math.ceil((prompt + step) / size) for step in range(output)]
    shared = [alone[0]] + [prompt // size + count * (pages - prompt // size) for pages in alone[1:]]
    assert result.shared_fraction == pytest.approx(1 - sum(shared) / (count * sum(alone)))
    assert result.num_copied_pages == count - 1
    assert result.mean_sequences == count


def test_beams_share_more_the_less_they_are_alike() -> None:
    lengths = fixed_lengths(20, 60, count=2)
    settings = Settings(slots=4096, page_size=4, num_sequences=3, beams=True)
    found = [
        replay(lengths, all_at_once(lengths), STEADY, settings, scores=BeamScores(6, own=own)).shared_fraction
        for own in (0.0, 1.0)
    ]
    assert 0.1 < found[0] < found[1] < 2 / 3


def test_scores_are_probabilities_and_repeat() -> None:
    rows = [BeamScores(4, seed=seed)._rows for seed in (0, 1)]
    assert rows[0] == rows[1]
    for row in rows[0]:
        values = [logprob for _, logprob in row]
        assert values == sorted(values, reverse=True)
        assert 0 < sum(map(math.exp, values)) <= 1
    assert math.exp(rows[0][0][0][1]) == pytest.approx(0.0916, abs=1e-3)
    assert math.exp(rows[0][-1][0][1]) == pytest.approx(0.924, abs=1e-3)


def test_conversations_find_what_was_said_before() -> None:
    lengths = Lengths(
        source="chats",
        prompt_tokens=np.array([10, 20, 35, 8]),
        output_tokens=np.array([4, 4, 4, 4]),
        conversation_ids=np.array([0, 0, 0, 1]),
    )
    result = replay(lengths, ChatFeed(lengths.conversation_ids, 1), STEADY, Settings(slots=512, page_size=4))  # type: ignore[arg-type]
    # Of the 14 tokens after the first turn the last one was never computed; nor of the 24 after the second.
    assert result.hit_fraction == pytest.approx((13 + 23) / 73)
    assert result.num_requests == 4
    no_cache = Settings(slots=512, page_size=4, prefix_cache=False)
    assert replay(lengths, all_at_once(lengths), STEADY, no_cache).hit_fraction == 0


def test_users_talk_one_turn_at_a_time() -> None:
    feed = ChatFeed(np.array([0, 0, 1, 2]), 2)
    assert [feed.take(), feed.take()] == [0, 2]
    assert feed.next_s is None
    feed.ended(2, 3.0)  # that user goes on with the third conversation
    feed.ended(0, 5.0)
    assert (feed.next_s, feed.take(), feed.next_s, feed.take()) == (3.0, 3, 5.0, 1)
    feed.ended(1, 6.0)
    assert feed.next_s is None


def test_outputs_end_where_the_trace_says_though_the_scheduler_does_not_know() -> None:
    lengths = Lengths(source="two", prompt_tokens=np.array([4, 6]), output_tokens=np.array([3, 9]))
    known, unknown = (
        Settings(slots=256, page_size=4),
        Settings(slots=256, page_size=4, known_lengths=False, max_model_len=40),
    )
    results = [replay(lengths, all_at_once(lengths), STEADY, given).as_dict() for given in (known, unknown)]
    assert results[0] == results[1]
    assert results[0]["num_steps"] == 9


def test_arrivals_are_waited_for() -> None:
    lengths = fixed_lengths(4, 2, count=3)
    feed = poisson(lengths, 0.01)
    assert replay(lengths, feed, STEADY, Settings(slots=64, page_size=4)).mean_requests == 1
    assert feed.next_s is None


# --- contiguous -------------------------------------------------------------------------------------------------------
def test_contiguous_by_hand() -> None:
    # Reserved: 3 + 5 = 8, 3 + 8 = 11 in a run of 16, and 16. In 32 slots: 4, 2 and 2 at once.
    lengths = fixed_lengths(3, 5, count=8)
    expected: dict[Reservation, tuple[int, dict[str, int]]] = {
        "oracle": (4, {"tokens": 20, "not_yet_used": 12, "internal": 0, "rounding": 0}),
        "pow2": (2, {"tokens": 10, "not_yet_used": 6, "internal": 6, "rounding": 10}),
        "max": (2, {"tokens": 10, "not_yet_used": 6, "internal": 16, "rounding": 0}),
    }
    reservation: Reservation
    for reservation, (at_once, slots) in expected.items():
        result = serve_contiguous(
            lengths,
            all_at_once(lengths),
            STEADY,
            reservation,
            slots=32,
            max_model_len=16,
            **BOUNDS,
        )
        assert result["saturated_mean_requests"] == result["mean_requests"] == at_once
        shares = {cause: 32 * share for cause, share in result["saturated_shares"].items()}
        # tokens: 3, 4, ..., 7 of each request
        assert shares == pytest.approx(slots | {"free": 0}, abs=1e-3)


def test_prompts_share_the_budget_of_a_step() -> None:
    # Two prompts of 6, budget 4. Steps compute 4 + 0, 2 + 2 (the second one is admitted, as budget is left), 1 + 3 (the
    # first one decodes, and ends), 0 + 1, 0 + 1 tokens.
    lengths = fixed_lengths(6, 2, count=2)
    bounds = BOUNDS | {"max_num_batched_tokens": 4}
    result = serve_contiguous(lengths, all_at_once(lengths), STEADY, "oracle", slots=16, max_model_len=8, **bounds)
    assert result["mean_requests"] == pytest.approx((1 + 2 + 2 + 1 + 1) / 5)
    assert result["saturated_fraction"] == pytest.approx(1 / 5)
    settings = Settings(slots=64, page_size=4, max_num_batched_tokens=4, max_num_seqs=4, headroom_pages=0)
    paged = replay(lengths, all_at_once(lengths), STEADY, settings)
    assert (paged.num_steps, paged.mean_requests) == (5, pytest.approx(result["mean_requests"], abs=1e-6))


def test_contiguous_refuses_what_never_fits() -> None:
    lengths = fixed_lengths(3, 5)
    with pytest.raises(ValueError, match="16 slots for one request"):
        serve_contiguous(lengths, all_at_once(lengths), STEADY, "max", slots=8, max_model_len=16, **BOUNDS)
    assert reserved_slots("pow2", 100, 1000, 1024) == 1024


# --- hits -------------------------------------------------------------------------------------------------------------
def hashed(ids: list[tuple[int, ...]], prompts: list[int]) -> Lengths:
    return Lengths(
        source="hashed",
        prompt_tokens=np.array(prompts),
        output_tokens=np.ones(len(prompts), np.int64),
        hash_ids=tuple(ids),
        tokens_per_hash_id=4,
    )


def test_blocks_hit_and_are_evicted() -> None:
    # The second prompt finds two full pages of the first; its own third one differs. The third finds its tail too.
    lengths = hashed([(1, 2, 3), (1, 2, 4), (1, 2, 4)], [11, 11, 11])
    full = serve_blocks(lengths, None, keep_tails=False)
    assert full["hit_fraction"] == full["with_partial_fraction"] == pytest.approx(16 / 33, abs=1e-6)
    tails = serve_blocks(lengths, None, keep_tails=True)
    assert tails["with_partial_fraction"] == pytest.approx((8 + 8 + 2) / 33, abs=1e-6)
    assert tails["num_evictions"] == 0
    apart = hashed([(1, 2), (3, 4), (1, 2)], [8, 8, 8])
    assert serve_blocks(apart, 2, keep_tails=False)["hit_fraction"] == 0  # gone when it comes again
    assert serve_blocks(apart, 4, keep_tails=False)["hit_fraction"] > 0


def test_the_same_prompt_again() -> None:
    found = same_prompt_again(fixed_lengths(10, 1), 4)
    assert found == {"hit_fraction": 0.8, "with_partial_fraction": 0.9}


def test_prompts_are_equal_where_they_should_be() -> None:
    prompts = Prompts(hashed([(1, 2), (1, 3)], [7, 8]))
    first, second = prompts.prompt(0, 0), prompts.prompt(1, 100)
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])
    bases = Prompts(fixed_lengths(5, 3, count=2), num_sequences=2).bases()
    assert bases.tolist() == [0, 11]


# --- the script -------------------------------------------------------------------------------------------------------
def test_thinning_spreads_evenly() -> None:
    lengths = Lengths(source="ten", prompt_tokens=np.arange(1, 11), output_tokens=np.ones(10, np.int64))
    assert thinned(lengths, 5).prompt_tokens.tolist() == [1, 3, 5, 7, 9]
    assert thinned(lengths, 11) is lengths


def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["bench_memory.py", *words])
    code = bench_memory.main()
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    few = {"swept_requests": 8, "sampled_requests": 4, "beam_requests": 2, "chats": 2, "users": 2}
    make = bench_memory.make_workload
    monkeypatch.setattr(bench_memory, "make_workload", lambda args: replace(make(args), **few))


SHAREGPT = "num_prefill_tokens,num_decode_tokens\n30,20\n60,5\n20,12\n15,30\n"
MOONCAKE = "".join(
    json.dumps({"timestamp": 10 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i]}) + "\n"
    for i in range(3)
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,37,4\n2023-11-16 18:15:50.93,39,10\n"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (SHAREGPT, {"fragmentation", "batches", "page_sizes", "sharing", "chat"}),
        (MOONCAKE, {"fragmentation", "batches", "blocks"}),
        (AZURE, {"fragmentation", "batches"}),
    ],
    ids=["sharegpt", "mooncake", "azure"],
)
def test_every_format_is_measured_tabled_and_rendered(
    text: str, parts: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    code, out, _ = run_main(
        monkeypatch, capsys, "--trace", str(trace), "--rate", "1", "--max-num-batched-tokens", "1024"
    )
    assert code == 0
    line = json.loads(out.splitlines()[-1])
    assert line["script"] == "bench_memory"
    assert set(line["results"]) == parts | {"workload"}
    assert "NaN" not in out
    assert "Empty slots when every request" in out
    results: dict[str, Any] = line["results"]
    for schemes in results["batches"].values():
        assert schemes["paged"]["num_requests"] == results["workload"]["num_requests"]
        assert schemes["paged"]["max_times_computed"] == 1
    record = render_benchmarks.Record.from_line("memory-sharegpt", out.splitlines()[-1])
    for part, render in render_benchmarks.render_memory.PARTS.items():
        assert len({row.count(" | ") for row in render([record]).splitlines()}) == 1, part
    assert "ShareGPT, first turns" in render_benchmarks.render_memory.waste_table([record])
    drawn: dict[str, int] = {}
    monkeypatch.setattr(figures, "save_figure", lambda path, *panels: drawn.update({path.name: len(panels)}))
    assert [path.name for path in figures.draw([record], tmp_path)] == list(drawn)
    expected = {"memory-causes.png": 2, "memory-batches.png": 1}
    if "sharing" in parts:
        expected |= {"memory-page-sizes.png": 3, "memory-sharing.png": 2}
    if parts & {"chat", "blocks"}:
        expected |= {"memory-hits.png": 1}
    assert drawn == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "/nowhere/trace"], "does not exist"),
        (["--lengths", "hist:10,2,3"], "has weights"),
        (["--lengths", "10+2", "--part", "blocks"], "no part 'blocks'"),
        (["--lengths", "1000+20", "--slots", "160", "--part", "batches"], "expected at most"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(monkeypatch, capsys, *words, "--json")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err


def test_hardware_is_that_of_the_paper() -> None:
    opt = HARDWARE["opt-13b-a100-40gb"]
    assert opt.kv_token_s * 1.555e12 == 800 * 1024
    assert opt.step_s(1, 0) == pytest.approx(26e9 / 1.555e12)


# --- swapping ---------------------------------------------------------------------------------------------------------
def test_swap_costs_are_what_the_scheduler_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Everything but the engine's prefill, which has its own tests and would take seconds to compile.
    monkeypatch.setattr(bench_swap, "measure_prefill", lambda config, dtype, lengths, repeats: {8: 0.1, 16: 0.2})
    words = {
        "--layers": "1",
        "--page-size": "8",
        "--page-sizes": "8",
        "--tokens": "16",
        "--repeats": "1",
        "--pages": "1",
    }
    monkeypatch.setattr(sys, "argv", ["bench_swap.py", *(word for pair in words.items() for word in pair)])
    assert bench_swap.main() == 0
    out = capsys.readouterr().out
    path = tmp_path / "costs.json"
    path.write_text(out.splitlines()[-1])
    costs = PreemptionCosts.load(path)
    assert costs.prefill_s_per_token == pytest.approx(0.0125)
    assert "16 in pages of 8" in out
    record = render_benchmarks.Record.from_line("swap", out.splitlines()[-1])
    assert "| 16 | 8 |" in render_benchmarks.render_memory.swap_table([record])

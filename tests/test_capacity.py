"""`plan_capacity` against the engine's own sizing, against sums by hand, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from jpaged.capacity import PAGE_SIZES, plan_capacity
from jpaged.config import CacheConfig, SchedulerConfig
from jpaged.errors import ConfigError
from jpaged.kv_cache import plan_pool
from jpaged.lengths import Lengths, fixed_lengths, log_normal_lengths
from jpaged.model_bytes import kv_bytes_per_page, sampler_bytes, weight_bytes
from jpaged.model_shapes import model_shape
from jpaged.sampler_state import sampler_state_bytes
from tests.fakes import tiny_config, tiny_llama

CONFIG = tiny_config()
BYTES = 4_000_000


class Device:
    """A device that holds the weights and nothing else."""

    def __init__(self, limit: int, used: int):
        self._stats = {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self) -> dict[str, int]:
        return self._stats


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize("fraction", [0.5, 0.9])
@pytest.mark.parametrize("max_model_len", [None, 100])
def test_the_pool_is_the_engines_to_the_byte(llama, kv_dtype, page_size, fraction, max_model_len):
    plan = plan_capacity(
        CONFIG,
        fixed_lengths(20, 30),
        device_bytes=BYTES,
        memory_fraction=fraction,
        page_size=page_size,
        dtype="float32",
        kv_dtype=kv_dtype,
        max_num_seqs=7,
        max_model_len=max_model_len,
    )
    pool = plan_pool(
        llama,
        CacheConfig(page_size=page_size, memory_fraction=fraction),
        SchedulerConfig(max_num_seqs=7, max_model_len=max_model_len),
        dtype=kv_dtype,
        implementation="xla",
        device=Device(BYTES, used=plan.weight_bytes),
        reserved_bytes=sampler_state_bytes(7, CONFIG.vocab_size),
    )
    assert (plan.num_pages, plan.bytes_per_page) == (pool.num_pages, pool.bytes_per_page)
    assert (plan.pool_bytes, plan.token_capacity) == (pool.pool_bytes, pool.token_capacity)
    assert plan.max_model_len == pool.max_model_len == (max_model_len or 256)
    assert plan.weight_bytes + plan.sampler_bytes + plan.pool_bytes <= BYTES * fraction


def test_a_pool_that_is_smaller_than_the_context_shortens_it_as_the_engine_does(llama):
    bytes_left = 21 * kv_bytes_per_page(CONFIG, 8, "float32")
    limit = weight_bytes(CONFIG, "float32") + sampler_bytes(1, CONFIG.vocab_size) + bytes_left
    lengths = Lengths(source="x", prompt_tokens=[100, 200], output_tokens=[10, 10])
    arguments = {"device_bytes": limit, "memory_fraction": 1.0, "page_size": 8, "dtype": "float32", "max_num_seqs": 1}
    plan = plan_capacity(CONFIG, lengths, **arguments)
    device = Device(limit, used=plan.weight_bytes)
    cache, reserved = CacheConfig(page_size=8, memory_fraction=1.0), plan.sampler_bytes
    pool = plan_pool(
        llama, cache, SchedulerConfig(), dtype="float32", implementation="xla", device=device, reserved_bytes=reserved
    )
    assert plan.max_model_len == pool.max_model_len == 160
    assert (plan.num_requests, plan.num_refused, plan.mean_prompt_tokens) == (2, 1, 100)
    with pytest.raises(ConfigError, match=r"max_model_len is 200, but the pool holds 160 tokens \(21 pages x 8"):
        plan_capacity(CONFIG, lengths, max_model_len=200, **arguments)


def test_sequences_by_hand():
    """8 prompt and 4 output tokens hold 8, 9, 10 and 11 of them: 1, 2, 2 and 2 pages of 8."""
    plan = plan_capacity(
        CONFIG, fixed_lengths(8, 4), device_bytes=BYTES, page_size=8, dtype="float32", max_num_seqs=3, max_model_len=32
    )
    usable = plan.num_pages - 1
    assert plan.paged.sequences == pytest.approx(usable / 1.75)
    assert plan.paged.sequences_at_end == pytest.approx(usable / 2)
    shares = plan.paged.shares
    assert shares["tokens"] == pytest.approx(9.5 / 14 * usable / plan.num_pages)
    assert shares["partly_filled"] == pytest.approx(4.5 / 14 * usable / plan.num_pages)
    assert shares["null_page"] == pytest.approx(1 / plan.num_pages)

    slots = plan.num_pages * 8
    at_once = {scheme.name: scheme.sequences for scheme in plan.contiguous}
    runs = {"oracle": 12, "oracle buddy": 16, "pow2": 12, "pow2 buddy": 16, "max": 32, "max buddy": 32}
    assert at_once == pytest.approx({name: slots / run for name, run in runs.items()})
    (longest,) = [scheme for scheme in plan.contiguous if scheme.name == "max"]
    expected = {"tokens": 9.5 / 32, "not_yet_used": 2.5 / 32, "internal": 20 / 32}
    assert {k: v for k, v in longest.shares.items() if v} == pytest.approx(expected)


@pytest.mark.parametrize("window", [None, 24])
def test_shares_add_up_and_pages_hold_most(window):
    config = tiny_config(sliding_window=window)
    plan = plan_capacity(config, log_normal_lengths(30, 40, count=500), device_bytes=BYTES, dtype="float32")
    for scheme in (plan.paged, *plan.contiguous):
        assert sum(scheme.shares.values()) == pytest.approx(1)
        assert min(scheme.shares.values()) >= 0
        assert scheme.sequences_at_end <= scheme.sequences
    assert all(plan.paged.sequences > scheme.sequences for scheme in plan.contiguous)
    assert plan.sliding_window == window


def test_a_window_lets_more_long_sequences_run():
    lengths = fixed_lengths(150, 50)
    plans = [
        plan_capacity(tiny_config(sliding_window=w), lengths, device_bytes=BYTES, dtype="float32", chunk_tokens=16)
        for w in (None, 32)
    ]
    assert plans[1].paged.sequences > 3 * plans[0].paged.sequences
    # 32 and a chunk of 16 tokens, anywhere in pages of 16.
    assert plans[1].paged.sequences_at_end == pytest.approx((plans[1].num_pages - 1) / 4)


def test_rows_of_the_sampler_are_as_many_as_its_pages_hold():
    """One row more would leave too few pages for as many sequences."""
    lengths = fixed_lengths(20, 30)

    def at_once(num_seqs: int) -> float:
        plan = plan_capacity(CONFIG, lengths, device_bytes=BYTES, dtype="float32", max_num_seqs=num_seqs)
        return plan.paged.sequences

    chosen = plan_capacity(CONFIG, lengths, device_bytes=BYTES, dtype="float32").max_num_seqs
    assert chosen > 100
    assert at_once(chosen) >= chosen
    assert at_once(chosen + 1) < chosen + 1


def test_page_sizes_share_one_memory():
    plan = plan_capacity(CONFIG, fixed_lengths(5, 5), device_bytes=BYTES, dtype="float32", max_num_seqs=10)
    assert [row.page_size for row in plan.page_sizes] == list(PAGE_SIZES)
    memory = BYTES * 9 // 10 - plan.weight_bytes - plan.sampler_bytes
    for row in plan.page_sizes:
        assert row.num_pages == memory // kv_bytes_per_page(CONFIG, row.page_size, "float32")
        assert row.sequences == pytest.approx((row.num_pages - 1) / row.pages_per_sequence)
        for tokens, count in row.short_sequences.items():
            assert count == (row.num_pages - 1) // -(-tokens // row.page_size)
    small, large = plan.page_sizes[0], plan.page_sizes[-1]
    assert large.pages_per_sequence == 1
    assert small.short_sequences[10] > 15 * large.short_sequences[10], "a page of 256 for 10 tokens"
    assert large.final_wasted_fraction == pytest.approx(246 / 256)
    assert large.wasted_fraction == pytest.approx(249 / 256)  # 5 to 9 tokens are held


def test_the_plan_is_ready_for_json():
    plan = plan_capacity(model_shape("llama-3-8b"), fixed_lengths(1000, 200), device_bytes=141 * 10**9)
    report = json.loads(json.dumps(plan.as_dict()))
    assert report["weight_bytes"] == 16_060_522_496
    assert report["bytes_per_token"] == 131_072
    assert report["pool_bytes"] == plan.num_pages * 16 * 131_072
    assert report["paged"]["wasted_fraction"] == pytest.approx(1 - report["paged"]["shares"]["tokens"])
    assert report["page_sizes"][0]["short_sequences"]["10"] > 50_000


def test_weights_that_do_not_fit_are_refused_with_the_sum():
    expected = (
        r"90% of 141.00 GB are 126.90 GB, but there must be room for weights in bfloat16 141.11 GB, the sampler's "
        r"state \(max_num_seqs 1\) 0.00 GB, the null page and another 0.01 GB: 14.22 GB are lacking"
    )
    with pytest.raises(ConfigError, match=expected):
        plan_capacity(model_shape("llama-3-70b"), fixed_lengths(1000, 200), device_bytes=141 * 10**9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 12}, "page_size is 12"),
        ({"page_sizes": [8, 12]}, "page_size is 12"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"kv_dtype": "int4"}, "dtype of K and V is 'int4'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"device_bytes": 0}, "device_bytes is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"max_model_len": 257}, "max_model_len is 257, expected 2 to 256"),
        ({"max_model_len": 1}, "max_model_len is 1, expected 2"),
        ({"max_model_len": 49}, r"the shortest request of fixed 20\+30 has 50 tokens, but a sequence may have 49"),
    ],
)
def test_what_is_out_of_range_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan_capacity(CONFIG, fixed_lengths(20, 30), **{"device_bytes": BYTES, "dtype": "float32", **changes})


def test_the_documents_example_runs(capsys):
    text = (Path(__file__).parent.parent / "docs" / "capacity.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/capacity.md", "exec"), {})
    num_pages, sequences, wasted = map(float, capsys.readouterr().out.split())
    assert num_pages > 10_000
    assert sequences > 500
    assert 0 < wasted < 0.04

"""Sizes by the chip, against the engine's own rules, which need jax."""

import itertools

import pytest
from flax import nnx

from jpaged.accelerators import ACCELERATORS
from jpaged.config import EngineConfig, SchedulerConfig
from jpaged.kv_cache import default_page_size as engine_page_size
from jpaged.models import Llama
from jpaged.pallas_kernels import PageSpec
from jpaged.pallas_kernels.tpu_tuning import shape_objection
from jpaged.serving_sizes import (
    attention_of,
    default_page_size,
    page_buckets,
    prefill_budget,
    token_budget,
    tpu_kernel_takes,
)
from jpaged.token_buckets import default_token_buckets
from tests.fakes import tiny_config

SHAPES = list(itertools.product((1, 3, 8), (32, 64, 96, 128, 256)))
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def shaped(kv_heads, head_dim):
    return tiny_config(num_attention_heads=kv_heads, num_key_value_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
def test_the_kernel_for_tpu_takes_what_it_says_it_takes(kv_heads, head_dim):
    for dtype, size in itertools.product(DTYPES, (8, 12, 16, 24, 64, 128, 512, 520)):
        spec = PageSpec(2, size, kv_heads, head_dim, dtype, "mosaic_tpu")
        assert tpu_kernel_takes(shaped(kv_heads, head_dim), size, dtype) == (shape_objection(spec) is None)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 64), (8, 64), (8, 128), (1, 128), (8, 256)])
def test_pages_are_as_large_as_the_engine_makes_them(kv_heads, head_dim):
    config = shaped(kv_heads, head_dim)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn"):
        chosen = default_page_size(config, dtype, ACCELERATORS["v6e"])
        assert chosen == engine_page_size(model, dtype=dtype, implementation="mosaic_tpu")
        assert default_page_size(config, dtype, ACCELERATORS["cpu"]) == 16
        assert attention_of(config, chosen, dtype, ACCELERATORS["v6e"]) == "mosaic_tpu"


def test_what_the_kernel_cannot_take_goes_to_xla_with_its_pages():
    odd = shaped(2, 96)
    assert default_page_size(odd, "bfloat16", ACCELERATORS["v5e"]) == 16
    assert attention_of(odd, 16, "bfloat16", ACCELERATORS["v5e"]) == "xla"


@pytest.mark.parametrize("name", list(ACCELERATORS))
@pytest.mark.parametrize("rows", [1, 4, 8, 24, 256])
def test_every_step_has_a_bucket(name, rows):
    chip = ACCELERATORS[name]
    budget = token_budget(rows, chip)
    assert budget >= max(rows, 2 * chip.ridge_tokens)
    for most in (budget, rows):
        buckets = default_token_buckets(rows, most, chip.platform)
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=most)
        assert EngineConfig(scheduler=scheduler, token_buckets=buckets).step_shapes(64, 16)
        assert rows in buckets
        if chip.platform == "tpu":
            assert buckets[0] >= min(rows, 8)


@pytest.mark.parametrize("name", list(ACCELERATORS))
def test_steps_in_which_nobody_decodes_are_larger_on_gpus_alone(name):
    chip = ACCELERATORS[name]
    for rows in (8, 256, 5000):
        budget = token_budget(rows, chip)
        assert prefill_budget(budget, chip) == (2 * budget if chip.platform == "gpu" else None)


@pytest.mark.parametrize(("rows", "length", "size"), [(1, 2, 16), (32, 8192, 64), (256, 131072, 64), (256, 131000, 16)])
def test_page_tables_hold_the_longest_sequence(rows, length, size):
    buckets = page_buckets(rows, length, size)
    assert buckets[-1] * size >= length > (buckets[-1] - 1) * size
    assert list(buckets) == sorted(set(buckets))
    assert (len(buckets) == 2) == (4 * rows * buckets[-1] > 2**20)

"""What fits where, and what the engine is told."""

import json
from dataclasses import replace

import pytest

from jpaged.accelerators import ACCELERATORS, Topology, parse_topology
from jpaged.division import engine_config
from jpaged.errors import ConfigError
from jpaged.kv_cache import choose_decode_steps
from jpaged.model_shapes import model_shape
from jpaged.models.weights import abstract_llama
from jpaged.serving_plan import ServingPlan, Wishes, plan_serving, smallest_topology

TOPOLOGIES = ("v5e-1", "v5e-8", "v6e-1", "v6e-8", "v5p-8", "tpu7x-4", "h200", "cpu")
MODELS = ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B")


def plan(model: str, topology: str, degree: int | None = None, **wishes) -> ServingPlan:
    return plan_serving(model, model_shape(model), parse_topology(topology), Wishes(**wishes), degree=degree)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("model", MODELS)
def test_every_way_that_fits_fits(model, topology):
    found = plan(model, topology)
    assert found.divisions
    for one in found.divisions:
        assert one.degree * one.num_replicas == found.topology.num_devices
        if one.objection is None:
            assert one.num_pages >= 2
            assert one.bytes_used <= one.device_bytes
            assert one.bytes_used + one.parts["reserve"] + one.bytes_per_page > 0.999 * one.device_bytes or (
                found.topology.accelerator.platform == "cpu"  # pages take a GiB of host memory
            )
            assert one.max_model_len <= one.token_capacity
            assert one.page_buckets[-1] * one.page_size >= one.max_model_len
            assert one.sequences(one.max_model_len) >= 1
            assert one.sequences(one.max_model_len + 1) == 0
            platform = found.topology.accelerator.platform
            assert engine_config(one).step_shapes(one.max_model_len, one.page_size, platform) == one.step_shapes
        else:
            assert one.num_pages == one.token_capacity == one.max_model_len == 0
            assert "are lacking" in one.objection
    assert json.loads(json.dumps(found.as_dict()))["fits"] == (found.chosen.objection is None)


def test_what_the_issue_asks_for():
    assert plan("Llama-3.1-8B", "v5e-1").chosen.objection is None
    assert plan("Llama-3.1-70B", "v6e-8").chosen.objection is None
    refused = plan("Llama-3.1-70B", "v5e-8")
    assert refused.chosen.degree == 8
    taken = refused.chosen.parts["weights"]
    assert taken == pytest.approx(70_553_706_496 * 2 / 8, rel=1e-3)
    assert taken > refused.chosen.device_bytes
    assert "weights 17.64 GB" in str(refused.chosen.objection)
    assert "of 16.91 GB" in str(refused.chosen.objection)


def test_the_sum_is_the_sum():
    one = plan("Llama-3.1-70B", "v5e-8").chosen
    total = sum(one.parts.values()) + 2 * one.bytes_per_page
    lacking = (total - one.device_bytes) / 1e9
    assert f": {total / 1e9:.2f} GB of {one.device_bytes / 1e9:.2f} GB; {lacking:.2f} GB are lacking" in str(
        one.objection
    )


def test_more_devices_hold_more_in_sum():
    divisions = plan("Llama-3.1-8B", "v6e-8").divisions
    assert [one.degree for one in divisions] == [1, 2, 4, 8]
    weights = [one.parts["weights"] for one in divisions]
    assert weights == sorted(weights, reverse=True)
    tokens = [one.num_replicas * one.token_capacity for one in divisions]
    assert tokens == sorted(tokens)


def test_devices_that_a_model_cannot_be_divided_by_serve_side_by_side():
    found = plan("smollm2-135m", "v5e-8")
    assert [(one.degree, one.num_replicas) for one in found.divisions] == [(1, 8)]
    with pytest.raises(ConfigError, match=r"cannot be shared by 2 devices: 9 query heads.*expected one of 1$"):
        plan("smollm2-135m", "v5e-8", degree=2)
    with pytest.raises(ConfigError, match=r"by 3 devices: v5e-8 has 8 devices; expected one of 1, 2, 4, 8"):
        plan("llama-3.1-8b", "v5e-8", degree=3)
    with pytest.raises(ConfigError, match="by 0 devices"):
        plan("llama-3.1-8b", "v5e-8", degree=0)


def test_kv_heads_are_repeated_where_there_are_more_devices():
    assert "each KV head and its pages, on 2 devices" in plan("Llama-3.1-70B", "v5e-16").chosen.repeated
    assert plan("Llama-3.1-70B", "v6e-8").chosen.repeated[:2] == ("norms", "sampler's state")
    assert plan("Llama-3.1-8B", "v6e-1").chosen.repeated == ()


def test_a_core_of_a_chip_of_two_is_a_device():
    found = plan("Llama-3.1-8B", "tpu7x-4")
    assert found.chosen.degree == 8
    assert found.as_dict()["bytes_per_chip"] == 2 * found.chosen.bytes_used


def test_steps_of_few_rows_are_planned_for_too():
    few, many = (plan("Llama-3.1-8B", "h200", max_num_seqs=rows).chosen for rows in (64, 256))
    for size in (2048, 4096):
        of_size = [{shape.num_rows for shape in one.step_shapes if shape.num_tokens == size} for one in (few, many)]
        assert of_size == [{64}, {64, 256}]
    for one in (few, many):
        assert one.parts["programs"] == 8_000_000 * len(one.step_shapes)
        assert one.as_dict()["step_shapes"][-1] == f"T4096 S{one.max_num_seqs} P{one.page_buckets[-1]}"


@pytest.mark.parametrize(
    ("topology", "wishes", "prefill"),
    [
        ("h200", {}, 4096),
        ("h200", {"max_num_seqs": 4096}, 8192),  # twice what it takes for so many rows
        ("h200", {"max_num_batched_tokens": 2048}, None),
        ("h200", {"token_buckets": (64, 2048)}, None),  # which need not hold more
        ("h200", {"max_num_batched_tokens": 1024, "max_num_prefill_tokens": 3000}, 3000),
        ("h200", {"max_num_prefill_tokens": 2048}, 2048),
        ("v6e-1", {}, None),
        ("v6e-1", {"max_num_prefill_tokens": 4096}, 4096),
        ("cpu", {}, None),
    ],
)
def test_prompts_alone_have_a_larger_budget_on_a_gpu_unless_sizes_are_given(topology, wishes, prefill):
    one = plan("Llama-3.2-1B", topology, **{"max_num_seqs": 64} | wishes).chosen
    scheduler = engine_config(one).scheduler
    assert one.max_num_prefill_tokens == scheduler.max_num_prefill_tokens == prefill
    assert one.as_dict()["max_num_prefill_tokens"] == prefill
    assert one.max_step_tokens == scheduler.max_step_tokens == one.token_buckets[-1]
    assert max(shape.num_tokens for shape in one.step_shapes) == one.token_buckets[-1]


def test_memory_is_planned_for_the_largest_step():
    sizes = {"max_num_batched_tokens": 2048}
    small, large = (plan("Llama-3.1-8B", "h200", **sizes, max_num_prefill_tokens=n) for n in (None, 4096))
    for part in ("step's inputs", "temporaries", "programs", "step's outputs"):
        assert large.chosen.parts[part] > small.chosen.parts[part]
    assert large.chosen.num_pages < small.chosen.num_pages
    config = model_shape("mistral-7b-v0.1")  # its window of 4,096 tokens and a chunk must fit

    def longest(**wishes) -> int:
        sizes = {"num_pages": 60, "page_size": 128, "max_num_batched_tokens": 2048} | wishes
        return plan_serving("m", config, parse_topology("h200"), Wishes(**sizes)).chosen.max_model_len

    assert longest() == config.max_position_embeddings
    assert longest(max_num_prefill_tokens=4096) == 59 * 128


# Of Llama-3.1-8B in 8 bits the floating-point weights alone, the tables and norms, would be few enough for four steps.
@pytest.mark.parametrize(
    ("model", "wishes", "steps"),
    [
        ("smollm2-135m", {}, 4),
        ("Llama-3.2-1B", {}, 4),
        ("Llama-3.2-1B", {"dtype": "float32"}, 1),
        ("Llama-3.1-8B", {}, 1),
        ("Llama-3.1-8B", {"weights": "int8"}, 1),
        ("Llama-3.1-8B", {"weights": "fp8"}, 1),
        ("Llama-3.2-3B", {"weights": "int8"}, 1),
    ],
)
def test_the_steps_of_a_gpu_are_those_that_its_engine_would_choose(model, wishes, steps):
    found = plan(model, "h200", **wishes)
    one, weights = found.chosen, abstract_llama(found.config, found.dtype, found.weights)
    for platform in ("cpu", "tpu"):
        assert choose_decode_steps(weights, platform) == 1
    assert one.decode_steps == choose_decode_steps(weights, "gpu") == steps
    config = engine_config(one)
    assert config.decode_steps == steps
    assert config.step_shapes(one.max_model_len, one.page_size, "gpu") == one.step_shapes
    several = [(shape.num_rows, shape.pages_per_row) for shape in one.step_shapes if shape.num_steps > 1]
    rows = [1, 8, 32, 64, 128, 160, 192, 224, 256] if steps > 1 else []
    assert several == [(n, pages) for n in rows for pages in one.page_buckets]
    assert one.parts["programs"] == 8_000_000 * len(one.step_shapes)
    assert one.as_dict()["decode_steps"] == steps


def test_wishes_are_kept():
    asked = {
        "dtype": "float32",
        "kv_dtype": "int8",
        "page_size": 128,
        "num_pages": 500,
        "memory_fraction": 0.8,
        "max_model_len": 4096,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 640,
    }
    found = plan("Llama-3.2-1B", "v5e-1", **asked)
    one, config = found.chosen, engine_config(found.chosen, dtype=found.kv_dtype, num_pages=500, host_pages=8)
    assert (found.dtype, found.kv_dtype) == ("float32", "int8")
    for name in (
        "page_size",
        "num_pages",
        "memory_fraction",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    ):
        assert getattr(one, name) == asked[name]
    assert (config.cache.dtype, config.cache.page_size, config.cache.num_pages) == ("int8", 128, 500)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_model_len) == (24, 4096)
    assert (config.scheduler.preemption, config.warmup, config.cache.host_pages) == ("swap", "eager", 8)
    assert config.token_buckets == (8, 24, 96, 384, 640)


@pytest.mark.parametrize(
    ("wishes", "why"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected one of float32"),
        ({"kv_dtype": "int4"}, "of K and V is 'int4'"),
        ({"page_size": 12}, "page_size is 12"),
        ({"num_pages": 1}, "num_pages is 1"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_model_len": 200_000}, "the model knows positions up to 131072"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "at least max_num_seqs"),
        ({"max_num_batched_tokens": 640, "max_num_prefill_tokens": 639}, "max_num_prefill_tokens is 639"),
        ({"max_num_prefill_tokens": 511}, r"at least max_num_batched_tokens \(512\), or None"),
        ({"max_num_prefill_tokens": "many"}, "max_num_prefill_tokens is 'many'"),
    ],
)
def test_wishes_out_of_range_are_refused(wishes, why):
    with pytest.raises(ConfigError, match=why):
        plan("Llama-3.2-1B", "v5e-1", **wishes)


@pytest.mark.parametrize(
    ("wishes", "why"),
    [
        ({"num_pages": 1_000_000}, "1,000,000 pages"),
        ({"num_pages": 10, "max_model_len": 4096}, "max_model_len is 4,096, but the pages hold 576 tokens"),
        ({"memory_fraction": 1.0}, "are lacking"),
        ({"max_num_seqs": 20_000}, "sampler's state"),
    ],
)
def test_wishes_that_do_not_fit_are_told(wishes, why):
    assert why in str(plan("Llama-3.2-1B", "v5e-1", **wishes).chosen.objection)


def test_rows_are_as_many_as_sequences_fit():
    assert plan("Llama-3.1-8B", "v5e-1").chosen.max_num_seqs == 8
    assert plan("Llama-3.1-8B", "v6e-1").chosen.max_num_seqs == 64
    assert plan("Llama-3.2-1B", "v5e-1", max_num_batched_tokens=48).chosen.max_num_seqs == 32
    assert plan("Llama-3.2-1B", "v5e-1", max_num_batched_tokens=4).chosen.max_num_seqs == 4
    assert plan("smollm2-135m", "cpu").chosen.max_num_seqs == 32


def test_a_window_lets_sequences_be_longer_than_the_pool():
    config = model_shape("mistral-7b-v0.1")
    found = plan_serving("m", config, parse_topology("v5e-1"), Wishes(num_pages=100))
    assert found.chosen.max_model_len == config.max_position_embeddings > found.chosen.token_capacity
    tight = plan_serving("m", config, parse_topology("v5e-1"), Wishes(num_pages=50))
    assert tight.chosen.max_model_len == 49 * 64


def test_what_a_device_says_of_its_memory_decides():
    small = replace(ACCELERATORS["v6e"], device_bytes=ACCELERATORS["v6e"].device_bytes // 2)
    topology = Topology(accelerator=small, num_chips=1)
    less = plan_serving("m", model_shape("llama-3.1-8b"), topology)
    assert less.chosen.num_pages < plan("Llama-3.1-8B", "v6e-1").chosen.num_pages / 10


def test_the_smallest_that_would_hold_it():
    refused = plan("Llama-3.1-70B", "v5e-8")
    found = {name: smallest_topology(refused, chip) for name, chip in ACCELERATORS.items()}
    assert {name: found[name] and f"{found[name]}" for name in ("v5e", "v6e", "v5p", "tpu7x", "h200", "cpu")} == {
        "v5e": "v5e-16",
        "v6e": "v6e-8",
        "v5p": "v5p-4",
        "tpu7x": "tpu7x-4",
        "h200": "h200-2",
        "cpu": found["cpu"] and "cpu",
    }
    huge = plan_serving("m", replace(refused.config, num_hidden_layers=1000, num_key_value_heads=64), refused.topology)
    assert smallest_topology(huge, ACCELERATORS["h200"]) is None

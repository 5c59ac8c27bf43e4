"""How many pages fit is computed before anything is allocated, and explained."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.errors import ConfigError
from jpaged.kv_cache import (
    GIB,
    choose_decode_steps,
    choose_implementation,
    default_page_size,
    fit_engine,
    free_device_bytes,
    model_weights,
    plan_pool,
)
from jpaged.pallas_kernels import PageSpec, make_pages
from tests.fakes import tiny_llama, tpu_mesh


class FakeDevice:
    """A device that reports its memory, as GPUs and TPUs do."""

    def __init__(self, limit: int, used: int, platform: str = "tpu"):
        self._stats = {"bytes_limit": limit, "bytes_in_use": used}
        self.platform = platform

    def memory_stats(self):
        return self._stats


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def plan(model, *, dtype="float32", device=None, reserved_bytes=0, length=None, **cache):
    return plan_pool(
        model,
        CacheConfig(page_size=8, **cache),
        SchedulerConfig(max_model_len=length),
        dtype=dtype,
        implementation="xla",
        device=device or jax.devices("cpu")[0],
        reserved_bytes=reserved_bytes,
    )


def test_a_given_number_of_pages_is_taken_as_it_is(model):
    pool = plan(model, num_pages=11)
    # 2 layers x 8 tokens x 2 KV heads x (K and V) x 8 wide x 4 bytes.
    assert pool.bytes_per_page == 2 * 8 * 2 * 2 * 8 * 4
    assert (pool.num_pages, pool.token_capacity, pool.pool_bytes) == (11, 80, 11 * pool.bytes_per_page)
    assert pool.max_model_len == 80
    assert "11 pages x 8 tokens = 80 tokens" in str(pool)


def test_scales_of_quantised_pages_are_counted(model):
    assert plan(model, num_pages=11, dtype="int8").bytes_per_page == 2 * 8 * 2 * 2 * (8 + 4)


def test_memory_that_is_left_is_filled(model):
    per_page = plan(model, num_pages=2).bytes_per_page
    device = FakeDevice(limit=100 * per_page, used=30 * per_page)
    pool = plan(model, device=device, memory_fraction=0.5, reserved_bytes=5 * per_page)
    assert pool.num_pages == 15
    assert "50%" in pool.reason


def test_what_the_steps_of_a_gpu_write_over_is_left_free(model, monkeypatch):
    first, *others = model_weights(model)
    config = EngineConfig(
        cache=CacheConfig(page_size=8, memory_fraction=0.5),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        token_buckets=(4, 16),
        page_buckets=(2, 4),
        decode_steps=1,
    )
    # Logits of 4 rows, hidden states of 4 and 16 tokens, token ids of 4 steps, fields.
    kept = 4 * (4 * 64 + 20 * 32 + 4 * 4 + 17 * 4)

    def num_pages(platform: str) -> int:
        device = FakeDevice(limit=1 << 30, used=0, platform=platform)
        fake = SimpleNamespace(devices=lambda: {device}, dtype=first.dtype, shape=first.shape, size=first.size)
        monkeypatch.setattr("jpaged.kv_cache.model_weights", lambda model: [fake, *others])
        return fit_engine(model, config).pool_plan.num_pages

    per_page = plan(model, num_pages=2).bytes_per_page
    assert num_pages("tpu") - num_pages("gpu") in (kept // per_page, kept // per_page + 1)


def test_the_larger_budget_of_prompts_is_planned_for(model, monkeypatch):
    first, *others = model_weights(model)
    device = FakeDevice(limit=1 << 30, used=0, platform="gpu")
    fake = SimpleNamespace(devices=lambda: {device}, dtype=first.dtype, shape=first.shape, size=first.size)
    monkeypatch.setattr("jpaged.kv_cache.model_weights", lambda model: [fake, *others])

    def num_pages(prefill: int | None) -> int:
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_num_prefill_tokens=prefill)
        config = EngineConfig(cache=CacheConfig(page_size=8), scheduler=scheduler, decode_steps=1)
        return fit_engine(model, config).pool_plan.num_pages

    per_page = plan(model, num_pages=2).bytes_per_page
    # Hidden states of 64, 128, 256 and 512 tokens more, which are 32 wide.
    kept = 4 * 32 * (64 + 128 + 256 + 512)
    assert num_pages(None) - num_pages(512) in (kept // per_page, kept // per_page + 1)


def test_beside_a_window_there_is_room_for_the_largest_chunk():
    model = FakeModel((2, 8))
    model.sliding_window = 64  # type: ignore[attr-defined]

    def longest(prefill: int | None) -> int:
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_num_prefill_tokens=prefill)
        options = {"dtype": "float32", "implementation": "xla", "device": jax.devices("cpu")[0]}
        return plan_pool(model, CacheConfig(page_size=8, num_pages=12), scheduler, **options).max_model_len

    assert [longest(prefill) for prefill in (None, 16, 32)] == [256, 256, 88]


def test_several_steps_are_decoded_at_once_where_the_device_is_sooner_done_than_the_host(model, monkeypatch):
    assert [choose_decode_steps(model, platform) for platform in ("gpu", "cpu", "tpu")] == [4, 1, 1]
    size = sum(weight.nbytes for weight in model_weights(model))
    for limit, steps in ((size + 1, 4), (size, 1)):
        monkeypatch.setattr("jpaged.serving_sizes.SOON_READ_BYTES", limit)
        assert choose_decode_steps(model, "gpu") == steps


def test_host_memory_is_not_filled():
    free, reason = free_device_bytes(jax.devices("cpu")[0], 0.9)
    assert 0 < free <= GIB
    assert "host memory" in reason


def test_host_memory_is_known_where_the_system_does_not_say_what_is_free(monkeypatch):
    names = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2}  # as on macOS
    monkeypatch.setattr("os.sysconf_names", names)
    monkeypatch.setattr("os.sysconf", lambda name: {1: 1000, 2: 4096}[names[name]])
    assert free_device_bytes(jax.devices("cpu")[0], 0.5)[0] == 500 * 4096


def test_what_cannot_fit_is_refused_with_the_sum(model):
    with pytest.raises(ConfigError, match=r"no page fits.*memory_fraction"):
        plan(model, device=FakeDevice(limit=1000, used=900))
    with pytest.raises(ConfigError, match=r"num_pages is 200, which takes .* lower num_pages to less than 100"):
        plan(model, num_pages=200, device=FakeDevice(limit=100 * plan(model, num_pages=2).bytes_per_page, used=0))
    with pytest.raises(ConfigError, match="counted in 32 bits"):
        plan(model, num_pages=2**28, device=FakeDevice(limit=2**60, used=0))
    with pytest.raises(ConfigError, match="positions up to 256"):
        plan(model, num_pages=100, length=257)
    with pytest.raises(ConfigError, match="max_model_len is 81, but the pool holds 80 tokens"):
        plan(model, num_pages=11, length=81)


def test_the_pool_is_zeroed_and_as_planned(model):
    fit = fit_engine(model, EngineConfig(cache=CacheConfig(page_size=8, num_pages=11, dtype="int8")))
    leaves = jax.tree.leaves([make_pages(spec) for spec in fit.page_specs])
    assert sum(leaf.nbytes for leaf in leaves) == fit.pool_plan.pool_bytes
    assert not any(leaf.any() for leaf in leaves)


class FakeModel:
    """A model's pages alone: KV heads and width of a head for each layer."""

    def __init__(self, *layers: tuple[int, int]):
        self.layers, self.max_position = layers, 256

    def page_specs(self, *, num_pages, page_size, dtype, implementation) -> list[PageSpec]:
        return [PageSpec(num_pages, page_size, heads, width, dtype, implementation) for heads, width in self.layers]


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        (FakeModel((8, 64)), "bfloat16", 64),  # 128 KiB
        (FakeModel((8, 64)), "int8", 128),
        (FakeModel((16, 64)), "int8", 64),
        (FakeModel((3, 64)), "bfloat16", 128),
        (FakeModel((3, 64)), "float32", 128),
        (FakeModel((8, 64), (3, 64)), "bfloat16", 128),
        (FakeModel((5, 256)), "bfloat16", 64),
        (FakeModel((5, 256)), "int8", 128),  # 320 scales would leave 64 lanes of a register empty
    ],
)
def test_a_page_of_the_kernel_for_tpu_is_a_long_transfer(model, dtype, expected):
    assert default_page_size(model, dtype=dtype, implementation="mosaic_tpu") == expected
    assert default_page_size(model, dtype=dtype, implementation="xla") == 16


def test_the_pool_has_pages_of_the_default_size():
    model = FakeModel((8, 64))
    for name, size in (("xla", 16), ("mosaic_tpu", 128)):
        pool = plan_pool(
            model,
            CacheConfig(num_pages=3),
            SchedulerConfig(),
            dtype="int8",
            implementation=name,
            device=jax.devices("cpu")[0],
        )
        specs = model.page_specs(num_pages=3, page_size=size, dtype=jnp.dtype("int8"), implementation=name)
        assert (pool.page_size, pool.max_model_len) == (size, min(2 * size, 256))
        assert pool.bytes_per_page == sum(spec.bytes_per_page for spec in specs)


def chosen(model, *, dtype="float32", page_size=None, implementation=None) -> tuple[str, str]:
    config = EngineConfig(cache=CacheConfig(page_size=page_size), implementation=implementation)
    return choose_implementation(model, config, dtype=dtype, activations=jnp.float32)


def test_the_kernel_for_tpu_is_chosen_if_all_layers_suit_it():
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        for model in (FakeModel((2, 64)), FakeModel((8, 64), (3, 64))):
            for dtype in ("float32", "int8"):
                assert chosen(model, dtype=dtype) == ("mosaic_tpu", "'mosaic_tpu' is the first choice on tpu")
                assert chosen(model, dtype=dtype, implementation="mosaic_tpu")[0] == "mosaic_tpu"
                assert chosen(model, dtype=dtype, implementation="xla") == ("xla", "'xla' was asked for")
        name, reason = chosen(FakeModel((2, 8)))
        assert name == "xla"
        assert "head_dim" in reason
        with pytest.raises(NotImplementedError, match=r"head_dim of .* have 8$"):
            chosen(FakeModel((2, 8)), implementation="mosaic_tpu")
        assert chosen(FakeModel((2, 64), (2, 8)))[0] == "xla"
    assert chosen(FakeModel((2, 64)))[0] == "xla"
    with pytest.raises(NotImplementedError, match=r"needs a TPU .* are cpu$"):
        chosen(FakeModel((2, 64)), implementation="mosaic_tpu")


def test_a_page_size_that_the_kernel_for_tpu_cannot_take_is_told():
    few = FakeModel((2, 64))
    remedy = "use a page_size that is a multiple of 64"
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        name, reason = chosen(few, dtype="int8", page_size=32)
        assert name == "xla"
        assert remedy in reason
        with pytest.raises(NotImplementedError, match=f"cannot run on tpu.*{remedy}"):
            chosen(few, dtype="int8", page_size=32, implementation="mosaic_tpu")
        assert chosen(few, dtype="int8", page_size=64)[0] == "mosaic_tpu"
        assert chosen(few, page_size=32)[0] == "mosaic_tpu"

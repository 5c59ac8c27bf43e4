"""How many pages fit is computed before anything is allocated, and explained."""

import jax
import pytest

from jpaged.config import CacheConfig, SchedulerConfig
from jpaged.errors import ConfigError
from jpaged.kv_cache import GIB, allocate_pool, free_device_bytes, plan_pool
from tests.fakes import tiny_llama


class FakeDevice:
    """A device that reports its memory, as GPUs and TPUs do."""

    def __init__(self, limit: int, used: int):
        self._stats = {"bytes_limit": limit, "bytes_in_use": used}

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
    pool = plan(model, num_pages=11)
    pages = allocate_pool(model, pool, dtype="float32", implementation="xla")
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == pool.pool_bytes
    assert not any(leaf.any() for leaf in jax.tree.leaves(pages))

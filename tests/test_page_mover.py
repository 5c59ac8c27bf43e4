"""Pages move bit by bit, in the order of the plan's fields, in place, and by few small programs."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import page_mover
from jpaged.page_mover import PageMover
from jpaged.pallas_kernels import KVPages, PageSpec, make_pages
from jpaged.step_plan import PageTransfers
from tests.kernels.hlo import pool_copies

PAGES, HOST = 90, 60
KINDS = (("float32", "xla"), ("bfloat16", "xla"), ("int8", "xla"), ("int8", "mosaic_tpu"))


def make_pool(dtype: str, stored_for: str = "xla", num_pages: int = PAGES) -> list[KVPages]:
    """Two layers of different widths, filled with random bits: NaN, infinities and subnormals among them."""
    rng = np.random.default_rng(7)

    def noise(leaf: jax.Array) -> jax.Array:
        values = np.frombuffer(rng.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape).copy()
        if leaf.dtype == jnp.bfloat16:  # XLA for CPUs scatters it as f32, and all NaN of a sign become one
            words = values.view(np.uint16)
            is_nan = (words & 0x7F80 == 0x7F80) & (words & 0x7F != 0)
            words[is_nan] = words[is_nan] & 0xFF80 | 0x40
        return jnp.array(values)

    specs = [PageSpec(num_pages, 8, heads, width, dtype, stored_for) for heads, width in ((1, 4), (2, 8))]
    return [jax.tree.map(noise, make_pages(spec)) for spec in specs]


def bits(kv_pages: list[KVPages]) -> list[np.ndarray]:
    """Each leaf as bytes, a row a page."""
    # Of copies: an array that numpy has a view of cannot be donated.
    copies = [np.asarray(leaf.copy()) for leaf in jax.tree.leaves(kv_pages)]
    return [copy.reshape(len(copy), -1).view(np.uint8).copy() for copy in copies]


def moved(pool: np.ndarray, host: np.ndarray, transfers: PageTransfers) -> None:
    """What `move` does to one leaf, in place, by its definition."""
    for page, host_page in transfers.swapped_out:
        host[host_page] = pool[page]
    for host_page, page in transfers.swapped_in:
        pool[page] = host[host_page]
    for source, copy in transfers.copies:
        pool[copy] = pool[source]


@pytest.mark.parametrize(("dtype", "stored_for"), KINDS)
def test_pages_move_bit_by_bit_whatever_their_number(dtype, stored_for):
    kv_pages = make_pool(dtype, stored_for)
    assert len(jax.tree.leaves(kv_pages)) == (4 if dtype == "int8" else 2)  # with scales
    mover = PageMover(kv_pages, num_host_pages=HOST)
    pools = bits(kv_pages)
    hosts = [np.zeros((HOST + 1, pool.shape[1]), np.uint8) for pool in pools]
    rng = np.random.default_rng(3)
    on_host = np.zeros(0, np.int64)
    # One page, a list that is just full, one more than that, and one more than the longest list.
    for count in (1, 4, 5, 33):
        pages = rng.permutation(np.arange(1, PAGES))
        free = np.setdiff1d(np.arange(1, HOST + 1), on_host)[:count]
        out, back = pages[:count], pages[: len(on_host)]  # the pages saved are given out again in the same plan
        copies = pages[-2 * min(count, 20) :].reshape(2, -1)
        transfers = PageTransfers(
            tuple(zip(out.tolist(), free.tolist(), strict=False)),
            tuple(zip(on_host.tolist(), back.tolist(), strict=True)),
            tuple(zip(*copies.tolist(), strict=True)),
        )
        on_host = free
        old = jax.tree.leaves(kv_pages)
        kv_pages = mover.move(kv_pages, transfers)
        assert all(leaf.is_deleted() for leaf in old)
        for pool, host, leaf in zip(pools, hosts, bits(kv_pages), strict=True):
            moved(pool, host, transfers)
            np.testing.assert_array_equal(leaf[1:], pool[1:])  # what the null page holds does not matter


def test_pages_are_saved_before_others_come_and_come_before_they_are_copied():
    kv_pages = make_pool("float32")
    mover = PageMover(kv_pages, num_host_pages=2)
    before = bits(kv_pages)
    kv_pages = mover.move(kv_pages, PageTransfers(swapped_out=((5, 1),)))
    # Page 6 goes out, what was page 5 comes to where 6 was, and is copied from there.
    kv_pages = mover.move(kv_pages, PageTransfers(((6, 2),), ((1, 6),), ((6, 7),)))
    kv_pages = mover.move(kv_pages, PageTransfers(swapped_in=((2, 8),)))
    for leaf, old in zip(bits(kv_pages), before, strict=True):
        np.testing.assert_array_equal(leaf[[5, 6, 7, 8]], old[[5, 5, 5, 6]])


@pytest.mark.parametrize(("dtype", "stored_for"), KINDS)
def test_no_program_copies_the_pool(dtype, stored_for):
    kv_pages = make_pool(dtype, stored_for)
    pages = np.zeros(4, np.int32)
    leaves = jax.tree.leaves(kv_pages)
    values = [np.zeros((4, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    write = partial(page_mover._write.lower, implementation=kv_pages[0].spec.implementation)
    donating = (page_mover._copy.lower(kv_pages, pages, pages), write(leaves, pages, values))
    for lowered in donating:
        compiled = lowered.compile()
        assert [line for layer in kv_pages for line in pool_copies(compiled, layer.spec)] == []
        # All of it is aliased to the outputs, so there is no second pool while it runs.
        assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.nbytes for leaf in leaves)
    compiled = page_mover._read.lower(leaves, pages).compile()
    assert [line for layer in kv_pages for line in pool_copies(compiled, layer.spec)] == []
    assert compiled.memory_analysis().output_size_in_bytes < sum(leaf.nbytes for leaf in leaves) / 10


@pytest.mark.parametrize("num_host_pages", [0, 4])
def test_after_a_warm_up_nothing_is_compiled(num_host_pages, monkeypatch):
    num_pages = PAGES + 1 + num_host_pages  # nobody else has as many
    make = lambda: jax.device_put(make_pool("bfloat16", num_pages=num_pages), jax.devices()[0])  # noqa: E731, as engines do
    pools = [make(), make()]
    mover = PageMover(pools[0], num_host_pages=num_host_pages)
    before = bits(pools[0])
    pools[0] = mover.warm_up(pools[0])
    for leaf, old in zip(bits(pools[0]), before, strict=True):
        np.testing.assert_array_equal(leaf[1:], old[1:])
    swaps = ((1, 1), (2, 2)) if num_host_pages else ()
    with monkeypatch.context() as patch:
        patch.setattr("jax._src.compiler.compile_or_get_cached", lambda *args, **kwargs: pytest.fail("compiles"))
        for kv_pages in pools:
            for count in (1, 4, 5, 32, 33):
                copies = tuple((page, page + 40) for page in range(1, count + 1))
                kv_pages = mover.move(kv_pages, PageTransfers(swaps, swaps, copies))
            mover = PageMover(kv_pages, num_host_pages=num_host_pages)  # as an engine makes it that begins anew


def test_without_host_pages_no_host_memory_is_taken():
    kv_pages = make_pool("int8")
    assert PageMover(kv_pages, num_host_pages=0)._host == [None] * 4
    taken = PageMover(kv_pages, num_host_pages=3)._host
    page_bytes = sum(layer.spec.bytes_per_page for layer in kv_pages)
    assert sum(host.nbytes for host in taken if host is not None) == 4 * page_bytes  # one is the null page


def test_nothing_to_move_gives_the_same_pages_back():
    kv_pages = make_pool("float32")
    assert PageMover(kv_pages, num_host_pages=0).move(kv_pages, PageTransfers()) is kv_pages
    assert not dataclasses.astuple(kv_pages[0])[0].is_deleted()

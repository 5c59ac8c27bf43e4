"""The tiles that are chosen for the TPU kernel, and the shapes that it refuses."""

import itertools
import re

import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels import PageSpec
from jpaged.pallas_kernels.compat import describe_tpu
from jpaged.pallas_kernels.tpu_plan import TABLE_CHUNK
from jpaged.pallas_kernels.tpu_tuning import LANES, choose_tpu_blocks, padded_heads, shape_objection, sublanes

CHIPS = {"TPU v4": 1, "TPU v5 lite": 1, "TPU v5": 2, "TPU v6 lite": 1, "TPU7x": 1}


def spec(page_size: int = 16, num_kv_heads: int = 8, head_dim: int = 128, dtype: str = "bfloat16") -> PageSpec:
    return PageSpec(4, page_size, num_kv_heads, head_dim, jnp.dtype(dtype), "mosaic_tpu")


@pytest.mark.parametrize("kind", CHIPS)
def test_blocks_divide_what_they_should(kind: str) -> None:
    chip, checked = describe_tpu(kind, CHIPS[kind]), 0
    for page_size, num_kv_heads, head_dim, dtype, num_tokens in itertools.product(
        (8, 16, 24, 48, 64, 128, 256, 384, 640, 1024),
        (1, 2, 3, 8),
        (64, 128, 256),
        ("float32", "bfloat16", "int8"),
        (1, 2, 27, 4096),
    ):
        page_spec = spec(page_size, num_kv_heads, head_dim, dtype)
        if shape_objection(page_spec) is not None:
            continue
        checked += 1
        blocks = choose_tpu_blocks(page_spec, chip, num_tokens)
        assert blocks.pages & (blocks.pages - 1) == 0 < blocks.pages <= TABLE_CHUNK  # a run of ids holds whole blocks
        assert blocks.block_q & (blocks.block_q - 1) == 0 < blocks.block_q < 2 * num_tokens
        assert blocks.pages * page_size % blocks.block_k == 0, (page_spec, blocks)
        assert (
            blocks.block_k * num_kv_heads % (LANES if page_spec.quantized else sublanes(page_spec.dtype.itemsize)) == 0
        )
        assert blocks.buffers >= 2
        assert blocks.cores == CHIPS[kind]
    assert checked > 500


def test_blocks_grow_with_the_speed_of_the_memory() -> None:
    chosen = [choose_tpu_blocks(spec(64), describe_tpu(kind), 4096) for kind in ("TPU v4", "TPU v5e", "TPU7x")]
    pages = [blocks.pages for blocks in chosen]
    assert pages == sorted(set(pages))


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        (spec(dtype="float16"), "float32, bfloat16, int8, float8_e4m3fn pages; these are float16"),
        (spec(head_dim=80), "head_dim of 64, 128, 256; these pages have 80"),
        (spec(page_size=4), "page_size that is a multiple of 8, .* these pages have 4 and 32"),
        (spec(page_size=24, num_kv_heads=1), "a multiple of 16 for bfloat16; these pages have 24 and 24"),
        (
            spec(num_kv_heads=3, dtype="int8", page_size=64),
            "a multiple of 128 for int8; these pages have 64 and 192: .* a multiple of 128$",
        ),
        (spec(num_kv_heads=4, dtype="float8_e4m3fn"), "these pages have 16 and 64: .* a multiple of 32$"),
    ],
)
def test_pages_are_refused_with_what_would_do(pages: PageSpec, said: str) -> None:
    assert re.search(said, shape_objection(pages) or "")


@pytest.mark.parametrize(
    ("num_heads", "q_dtype", "said"),
    [(1032, "bfloat16", "up to 1024 query heads; these are 1032"), (8, "float16", "queries; these are float16")],
)
def test_queries_are_refused(num_heads: int, q_dtype: str, said: str) -> None:
    assert said in (shape_objection(spec(), num_heads, q_dtype) or "")
    assert shape_objection(spec(), 1024, "float32") is None


def test_advice_on_the_page_size_is_good() -> None:
    for heads in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 128):
        objections = [shape_objection(spec(size, heads, dtype="int8")) for size in range(32, 257, 32)]
        for advised in {int(objection.split()[-1]) for objection in objections if objection is not None}:
            assert shape_objection(spec(advised, heads, dtype="int8")) is None


@pytest.mark.parametrize(("heads", "padded"), [(1, 16), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_heads_fill_whole_tiles(heads: int, padded: int) -> None:
    assert padded_heads(heads) == padded

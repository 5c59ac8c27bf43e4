"""Tiles that fit the vector memory of each TPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels import PageSpec, resolve_implementation
from jpaged.pallas_kernels.compat import describe_tpu
from jpaged.pallas_kernels.fit_tpu import KernelSpec, buffers, fit, memory_objection, vmem_limit
from jpaged.pallas_kernels.tpu_tuning import choose_tpu_blocks, padded_bytes
from jpaged.pallas_kernels.xla import AttentionOptions
from tests.fakes import tpu_mesh

CHIPS = {"TPU v4": 1, "TPU v5 lite": 1, "TPU v5": 2, "TPU v6 lite": 1, "TPU7x": 1}


def pages(page_size: int, num_kv_heads: int, dtype: str, head_dim: int = 128) -> PageSpec:
    return PageSpec(8, page_size, num_kv_heads, head_dim, jnp.dtype(dtype), "mosaic_tpu")


def kernel(spec: PageSpec, num_heads: int, kind: str) -> KernelSpec:
    return KernelSpec(
        spec=spec,
        blocks=choose_tpu_blocks(spec, describe_tpu(kind, CHIPS[kind]), num_tokens=4096),
        options=AttentionOptions(1.0, None, None),
        num_heads=num_heads,
        num_rows=256,
        num_tokens=4096,
        chunks=1,
        q_dtype=jnp.dtype("bfloat16"),
        with_lse=False,
        with_sinks=False,
    )


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize(
    ("num_heads", "spec"),
    [
        (32, pages(64, 8, "bfloat16")),
        (64, pages(64, 8, "int8")),
        (32, pages(64, 32, "bfloat16")),
        (32, pages(64, 8, "int8", head_dim=64)),
        (16, pages(256, 2, "float32", head_dim=256)),
    ],
    ids=str,
)
def test_tiles_of_usual_models_stay_large(kind: str, num_heads: int, spec: PageSpec) -> None:
    chip, chosen = describe_tpu(kind, CHIPS[kind]), kernel(spec, num_heads, kind)
    fitted = fit(chosen, chip)
    assert padded_bytes(buffers(fitted).values()) < vmem_limit(chip)
    # A tile of few queries reads the keys of a chunk so much more often.
    assert fitted.blocks.block_q >= (32 if kind == "TPU v4" else 64)
    assert fitted.blocks.pages >= chosen.blocks.pages // 2
    assert fitted.blocks.pages * spec.page_size % fitted.blocks.block_k == 0


def test_what_fits_is_left_as_it_is() -> None:
    chosen = kernel(pages(64, 8, "bfloat16"), 32, "TPU v6 lite")
    assert fit(chosen, describe_tpu("TPU v6 lite")) == chosen


def test_too_much_for_a_chip_is_refused_before_the_call() -> None:
    spec, chip = pages(64, 64, "bfloat16"), describe_tpu("TPU v4")
    objection = memory_objection(spec, 64, "bfloat16", chip)
    assert objection is not None
    assert "64 query heads, 64 KV heads" in objection
    assert "use a smaller page_size" in objection
    assert memory_objection(pages(16, 64, "bfloat16"), 64, "bfloat16", chip) is None
    q = jax.ShapeDtypeStruct((1, 64, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(tpu_mesh("TPU v4")):
        name, reason = resolve_implementation(spec=spec, q=q, stored=False)
        assert (name, objection in reason) == ("xla", True)
        with pytest.raises(NotImplementedError, match="vector memory"):
            resolve_implementation("mosaic_tpu", spec=spec, q=q)


def test_more_rows_than_scalar_memory_holds_are_refused() -> None:
    chip, chosen = describe_tpu("TPU v5 lite"), kernel(pages(64, 8, "bfloat16"), 32, "TPU v5 lite")
    fit(replace(chosen, num_rows=8192, num_tokens=8192), chip)
    with pytest.raises(NotImplementedError, match=r"40000 rows and 40000 tokens .* KiB of scalar memory"):
        fit(replace(chosen, num_rows=40_000, num_tokens=40_000), chip)


def test_float32_factors_are_counted_twice() -> None:
    """v4 with 16 MiB: the compiler had no room for what this refuses."""
    assert memory_objection(pages(512, 8, "float32", head_dim=64), 32, "bfloat16", describe_tpu("TPU v4")) is not None

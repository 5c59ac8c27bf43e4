"""Which implementation is chosen, and what is said of the others."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels import (
    PageSpec,
    current_platform,
    default_implementation,
    resolve_implementation,
    supported_implementations,
)
from jpaged.pallas_kernels.compat import GPU, current_gpu, jax_version


def spec(implementation: str) -> PageSpec:
    return PageSpec(2, 4, 1, 8, jnp.dtype("float32"), implementation)


def test_cpu_runs_xla() -> None:
    assert resolve_implementation(None, platform="cpu") == ("xla", "'xla' is the first choice on cpu")


@pytest.mark.parametrize(("platform", "passed_over"), [("gpu", "mosaic_gpu"), ("tpu", "mosaic_tpu")])
def test_the_reason_names_what_was_passed_over(platform: str, passed_over: str) -> None:
    name, reason = resolve_implementation(platform=platform)
    assert name == "xla" == default_implementation(platform)
    assert f"'{passed_over}': " in reason
    assert supported_implementations(platform) == ("xla",)


def test_cuda_is_a_gpu() -> None:
    assert resolve_implementation(platform="cuda") == resolve_implementation(platform="gpu")


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_tpu"])
def test_a_missing_kernel_is_an_error_with_the_reason(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name!r} cannot run on gpu: the Mosaic"):
        resolve_implementation(name, platform="gpu")


def gpu_mesh(kind: str) -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)


def test_of_gpus_of_several_kinds_the_default_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("NVIDIA H200", "9.0", 132), ("NVIDIA A100", "8.0", 108)
    names = "device_kind", "compute_capability", "core_count"
    first, second = (SimpleNamespace(platform="gpu", **dict(zip(names, kind, strict=True))) for kind in kinds)

    def seen(default: object) -> GPU | None:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            patch.setattr(jax, "devices", lambda: [first, second])
            patch.setattr(jax, "config", SimpleNamespace(jax_default_device=default))
            return current_gpu()

    assert seen(None) == seen("gpu") == seen(SimpleNamespace(platform="cpu")) == GPU(*kinds[0])
    assert seen(second) == GPU(*kinds[1])


PAGES = PageSpec(2, 16, 1, 64, jnp.dtype("bfloat16"))


@pytest.mark.skipif(jax_version() < (0, 11), reason="the kernel needs jax 0.11")
def test_hopper_runs_the_kernel_on_pages_that_it_takes() -> None:
    with jax.sharding.use_abstract_mesh(gpu_mesh("NVIDIA H200")):
        assert resolve_implementation(spec=PAGES) == ("mosaic_gpu", "'mosaic_gpu' is the first choice on gpu")
        assert supported_implementations(spec=PAGES) == ("mosaic_gpu", "xla")
        name, reason = resolve_implementation(spec=spec("xla"))
        assert name == "xla"
        assert "these are float32" in reason
        q = jax.ShapeDtypeStruct((1, 65, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="65 over 1"):
            resolve_implementation("mosaic_gpu", spec=PAGES, q=q)
        q = jax.ShapeDtypeStruct((1 << 20, 32, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=r"less than 2\*\*31 values; these are 1048576 x 32 x 64"):
            resolve_implementation("mosaic_gpu", spec=PAGES, q=q)
        assert resolve_implementation()[0] == "xla"  # which runs whatever comes


@pytest.mark.skipif(jax_version() < (0, 11), reason="the kernel needs jax 0.11")
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_other_gpus_are_refused_by_name(kind: str) -> None:
    with jax.sharding.use_abstract_mesh(gpu_mesh(kind)):
        assert resolve_implementation(spec=PAGES)[0] == "xla"
        with pytest.raises(NotImplementedError, match=f"sm_90.*{kind}"):
            resolve_implementation("mosaic_gpu", spec=PAGES)


@pytest.mark.skipif(jax_version() >= (0, 11), reason="this jax has what the kernel needs")
def test_an_old_jax_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"jax 0\.11 or newer; this is 0\.10"):
        resolve_implementation("mosaic_gpu", platform="gpu", spec=PAGES)


def tpu_mesh(kind: str) -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)


def tpu_pages(**changes) -> PageSpec:
    shape = {"page_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "implementation": "mosaic_tpu"}
    return PageSpec(num_pages=2, **{**shape, **changes})


def test_a_tpu_runs_the_kernel_on_pages_that_it_takes() -> None:
    with jax.sharding.use_abstract_mesh(tpu_mesh("TPU v5 lite")):
        pages = tpu_pages()
        assert resolve_implementation(spec=pages) == ("mosaic_tpu", "'mosaic_tpu' is the first choice on tpu")
        assert supported_implementations(spec=pages) == ("mosaic_tpu",)
        # Pages that are still to be made will be stored as the kernel wants them.
        assert resolve_implementation(spec=PAGES, stored=False)[0] == "mosaic_tpu"
        name, reason = resolve_implementation(spec=PAGES)
        assert name == "xla"
        assert "'mosaic_tpu': the pages are stored for 'xla'; make them with PageSpec(implementation=" in reason
        q = jax.ShapeDtypeStruct((1, 8, 128), jnp.float16)
        with pytest.raises(NotImplementedError, match="these are float16"):
            resolve_implementation("mosaic_tpu", spec=pages, q=q)
        assert resolve_implementation()[0] == "xla"  # which runs whatever comes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float16"}, "pages; these are float16"),
        ({"head_dim": 80}, "head_dim of 64, 128, 256; these pages have 80"),
        ({"dtype": "int8", "page_size": 64, "num_kv_heads": 3}, r"page_size \* num_kv_heads a multiple of 128"),
    ],
)
def test_pages_that_the_tpu_kernel_does_not_take_are_refused_by_name(changes: dict, said: str) -> None:
    with jax.sharding.use_abstract_mesh(tpu_mesh("TPU v6 lite")):
        with pytest.raises(NotImplementedError, match=f"'mosaic_tpu' cannot run on tpu: .*{said}"):
            resolve_implementation("mosaic_tpu", spec=tpu_pages(**changes))
        # Before there are any, pages for XLA can be made instead.
        name, reason = resolve_implementation(spec=tpu_pages(**changes), stored=False)
        assert name == "xla"
        assert "'mosaic_tpu': the Mosaic TPU kernel: it takes" in reason or "it reads" in reason


@pytest.mark.parametrize("kind", ["TPU v2", "TPU v3"])
def test_old_tpus_are_refused_by_name(kind: str) -> None:
    with jax.sharding.use_abstract_mesh(tpu_mesh(kind)):
        with pytest.raises(NotImplementedError, match=f"generation 4 or newer; this is a {kind}"):
            resolve_implementation("mosaic_tpu", spec=tpu_pages())
        assert resolve_implementation(spec=tpu_pages(), stored=False)[0] == "xla"


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'triton'; expected None .* mosaic_gpu, mosaic_tpu, xla"):
        resolve_implementation("triton")


def test_pages_stored_for_another_back_end_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="stored for 'mosaic_tpu'"):
        resolve_implementation("xla", spec=spec("mosaic_tpu"))


def test_reasons_are_collected_over_the_candidates() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        resolve_implementation(platform="tpu", spec=spec("mosaic_tpu"))
    reasons = [str(error) for error in caught.value.exceptions]
    assert all(isinstance(error, NotImplementedError) for error in caught.value.exceptions)
    assert [reason.split(":")[0] for reason in reasons] == ["'mosaic_tpu'", "'xla'"]
    assert supported_implementations("tpu", spec("mosaic_tpu")) == ()


def test_the_mesh_in_use_decides() -> None:
    assert current_platform() != "tpu"
    with jax.sharding.use_abstract_mesh(tpu_mesh("TPU v5e")):
        assert current_platform() == "tpu"


def test_the_default_device_decides_without_a_mesh() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_platform() == "cpu"

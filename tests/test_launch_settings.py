"""What a server sets before jax is imported, and what it leaves alone."""

import pytest

from jpaged.launch_settings import launch_settings

CHIP = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")


def values(*arguments, **options) -> dict[str, str]:
    return {one.name: one.value for one in launch_settings(*arguments, **options)}


def test_nothing_is_set_for_a_cpu():
    assert launch_settings("cpu", {}, chip=0) == []


@pytest.mark.parametrize(("platform", "name"), [("tpu", "tpu,cpu"), ("gpu", "cuda,cpu")])
def test_without_its_device_jax_fails(platform, name):
    assert values(platform, {})["JAX_PLATFORMS"] == name


def test_what_the_user_set_stays():
    mine = {"JAX_PLATFORMS": "tpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5", "TPU_VISIBLE_CHIPS": "3"}
    settings = launch_settings("tpu", mine, chip=0)
    assert {one.name: one.value for one in settings} == mine
    assert all(one.is_users for one in settings)


def test_one_chip_of_several():
    assert {name: values("tpu", {}, chip=3)[name] for name in CHIP} == dict(
        zip(CHIP, ("3", "1,1,1", "1,1,1"), strict=True)
    )
    assert not set(CHIP) & set(values("tpu", {}))


def test_of_the_two_names_of_the_memory_fraction_one_is_set():
    assert values("gpu", {})["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    mine = launch_settings("gpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})
    assert {one.name: (one.value, one.is_users) for one in mine if "FRACTION" in one.name} == {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ("0.5", True)
    }


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_each_has_a_reason(platform):
    assert all(len(one.reason) > 20 for one in launch_settings(platform, {}, chip=0))

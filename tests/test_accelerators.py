"""Names of topologies and of devices."""

import pytest

from jpaged.accelerators import ACCELERATORS, GIB, accelerator_of, parse_topology
from jpaged.errors import ConfigError
from scripts.tpu.chips import CHIPS


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices", "hosts"),
    [
        ("v5e-1", "v5e", 1, 1, 1),
        ("v5litepod-8", "v5e", 8, 8, 1),
        (" V6E-16 ", "v6e", 16, 16, 2),
        ("v5p-8", "v5p", 8, 8, 2),
        ("tpu7x-4", "tpu7x", 4, 8, 1),
        ("ironwood-4", "tpu7x", 4, 8, 1),
        ("h200", "h200", 1, 1, 1),
        ("cpu", "cpu", 1, 1, 1),
    ],
)
def test_topologies_are_named_by_chips(text, name, chips, devices, hosts):
    topology = parse_topology(text)
    assert (topology.accelerator.name, topology.num_chips) == (name, chips)
    assert (topology.num_devices, topology.num_hosts) == (devices, hosts)
    assert parse_topology(f"{topology}") == topology


@pytest.mark.parametrize("text", ["", "v5e-0", "v5e-", "v5e-99999", "v9-1", "v5e8", "-8", "v5e-8-8", "v5e-٣"])
def test_other_names_are_refused(text):
    with pytest.raises(ConfigError, match="expected one of v4, v5e, v5p, v6e, tpu7x, h200, cpu, and a number of chips"):
        parse_topology(text)


def test_a_cpu_is_one_device():
    with pytest.raises(ConfigError, match="all of its cores are one device"):
        parse_topology("cpu-2")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
    ],
)
def test_devices_are_known_by_what_jax_calls_them(kind, name):
    assert accelerator_of("tpu", kind, None) == ACCELERATORS[name]


def test_what_a_device_says_of_its_memory_counts():
    assert accelerator_of("tpu", "TPU v5 lite", 15 * GIB).device_bytes == 15 * GIB
    assert accelerator_of("cpu", "cpu", 5).device_bytes is None
    unknown = accelerator_of("gpu", "Tesla T4", 14 * GIB)
    assert (unknown.name, unknown.device_bytes, unknown.ridge_tokens) == ("Tesla T4", 14 * GIB, 0)


def test_devices_that_cannot_be_planned_for_are_refused():
    with pytest.raises(ConfigError, match="does not say how much memory"):
        accelerator_of("gpu", "Tesla T4", None)
    with pytest.raises(ConfigError, match="expected tpu, gpu or cpu"):
        accelerator_of("rocm", "MI300", GIB)
    assert accelerator_of("gpu", "TPU v4", GIB).platform == "gpu"  # a name of another platform's table


def test_memory_is_what_hbm_leaves_and_rates_are_those_of_the_cost_model():
    for name, chip in CHIPS.items():
        known, num_cores = ACCELERATORS[name], 2 if name in ("v4", "v5p") else 1  # that act as one device
        assert 0.95 < known.device_bytes / chip.hbm_bytes <= 1.0
        assert known.vmem_bytes == chip.vmem_bytes
        assert known.hbm_rate == pytest.approx(num_cores * chip.hbm_rate)
        assert known.matrix_flops == pytest.approx(num_cores * chip.matrix_flops)

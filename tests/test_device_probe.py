"""What is asked of jax in another process. One real start of jax; the rest by a program in its place."""

import os
import sys

import pytest

from jpaged import device_probe
from jpaged.accelerators import GIB
from jpaged.device_probe import probe_devices
from jpaged.errors import ConfigError


@pytest.fixture
def answer(monkeypatch):
    """Makes the other process run something else."""

    def use(program: str) -> None:
        monkeypatch.setattr(device_probe, "_PROGRAM", program)

    return use


def test_the_cpu_is_found():
    found = probe_devices({**os.environ, "JAX_PLATFORMS": "cpu"})
    assert (found.accelerator.name, f"{found.topology}") == ("cpu", "cpu")


def test_chips_are_counted_by_their_devices(answer):
    answer(f"print('noise'); print('[\"tpu\", \"TPU7x\", 8, {90 * GIB}]')")
    found = probe_devices(os.environ)
    assert (found.num_devices, f"{found.topology}", found.accelerator.device_bytes) == (8, "tpu7x-4", 90 * GIB)


def test_a_gpu_is_asked_with_the_memory_that_the_server_will_have(answer):
    answer("import json, os; print(json.dumps(['gpu', os.environ['XLA_CLIENT_MEM_FRACTION'], 1, 2**34]))")
    assert probe_devices({}).accelerator.name == "0.95"
    assert probe_devices({"XLA_CLIENT_MEM_FRACTION": "0.5"}).accelerator.name == "0.5"
    answer("import json, os; print(json.dumps(['cuda', str('XLA_CLIENT_MEM_FRACTION' in os.environ), 1, 2**34]))")
    assert probe_devices({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}).accelerator.name == "False"


def test_one_chip_is_looked_at_where_others_are_busy(answer):
    answer(
        "import json, os\n"
        "assert os.environ['TPU_PROCESS_BOUNDS'] == '1,1,1' and 'JAX_PLATFORMS' not in os.environ\n"
        "print(json.dumps(['tpu', 'TPU v5 lite', int(os.environ['TPU_VISIBLE_CHIPS']), 2**33]))"
    )
    assert probe_devices({}, chip=3).num_devices == 3


def test_what_keeps_jax_from_a_device_is_told(answer):
    answer("import sys; sys.exit('RuntimeError: The TPU is already in use by process with pid 1')")
    with pytest.raises(ConfigError, match=r"already in use by process with pid 1; .*name a free chip \(--chip\)"):
        probe_devices(os.environ)
    answer("import os; os._exit(7)")
    with pytest.raises(ConfigError, match="its process ended with 7"):
        probe_devices(os.environ)


def test_waiting_has_an_end(answer):
    answer("import time; time.sleep(60)")
    with pytest.raises(ConfigError, match=r"within 0 s. It waits for the other hosts of a slice.*--chip 0"):
        probe_devices(os.environ, timeout_s=0.2)


def test_this_process_is_not_asked():
    assert sys.executable
    assert "jax" not in vars(device_probe)

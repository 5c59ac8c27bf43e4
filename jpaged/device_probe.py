"""`probe_devices`: what jax finds here, asked in a process that ends, for a TPU belongs to one process at a time."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from jpaged.accelerators import Accelerator, Topology, accelerator_of
from jpaged.errors import ConfigError
from jpaged.launch_settings import GPU_MEMORY_FRACTION, launch_settings

_PROGRAM: Final = """
import json, jax
devices = jax.local_devices()
stats = devices[0].memory_stats() or {}
print(json.dumps([devices[0].platform, devices[0].device_kind, len(devices), stats.get("bytes_limit")]))
"""


@dataclass(frozen=True)
class FoundDevices:
    """What jax would use.

    Attributes:
      accelerator: their kind, with the memory that they say they have.
      num_devices: how many there are, as jax counts them.
    """

    accelerator: Accelerator
    num_devices: int

    @property
    def topology(self) -> Topology:
        """All of them."""
        return Topology(
            accelerator=self.accelerator, num_chips=max(self.num_devices // self.accelerator.devices_per_chip, 1)
        )


def probe_devices(environ: Mapping[str, str], *, chip: int | None = None, timeout_s: float = 120.0) -> FoundDevices:
    """Starts jax in another process and asks it.

    Args:
      environ: its environment, as the user made it.
      chip: the TPU chip to look at, where others may be in use.
      timeout_s: for it to answer.

    Raises:
      ConfigError: it found nothing that can be used, or did not answer.
    """
    given = {"XLA_CLIENT_MEM_FRACTION": GPU_MEMORY_FRACTION}  # what counts on a GPU, and nothing elsewhere
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in environ:
        given = {}
    if chip is not None:
        settings = launch_settings("tpu", environ, chip=chip)
        given |= {one.name: one.value for one in settings if one.name.startswith("TPU_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**given, **environ},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"jax found no device within {timeout_s:.0f} s. It waits for the other hosts of a slice, or for a TPU that "
            "another process holds; name one chip of this host (--chip 0), or end the other process"
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else f"its process ended with {done.returncode}"
        raise ConfigError(
            f"jax finds no device it can use: {why:.400}; another process may hold it (a TPU serves one at a time): "
            "name a free chip (--chip), or set JAX_PLATFORMS=cpu to run on the CPU"
        )
    platform, kind, count, limit = json.loads(done.stdout.splitlines()[-1])
    return FoundDevices(accelerator_of("gpu" if platform in ("cuda", "gpu") else platform, kind, limit), count)

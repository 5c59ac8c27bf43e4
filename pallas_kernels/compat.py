"""What differs between the versions of jax, and between GPUs: asked here and nowhere else."""

from dataclasses import dataclass
from typing import Any

import jax

# Multiprocessors by words of a device's name, for devices that are described and not there.
_MULTIPROCESSORS = {"H200": 132, "H100 PCIe": 114, "H100": 132, "H800": 132, "GH200": 132, "H20": 78}


def jax_version() -> tuple[int, ...]:
    """Major and minor version of jax.

    Example:
      >>> jax_version() >= (0, 10)
      True
    """
    return tuple(int(part) for part in jax.__version__.split(".")[:2])


@dataclass(frozen=True)
class GPU:
    """The GPU that kernels are made for.

    Attributes:
      kind: its name.
      capability: its compute capability, e.g. "9.0"; "" where only the name is known.
      multiprocessors: how many it has.
    """

    kind: str
    capability: str
    multiprocessors: int

    @property
    def is_hopper(self) -> bool:
        """Whether it has Hopper's instructions (sm_90)."""
        if self.capability:
            return self.capability == "9.0"
        return any(word in self.kind for word in _MULTIPROCESSORS)


def current_gpu() -> GPU | None:
    """The GPU of the mesh in use, else the first one there is, or `None`."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform in ("gpu", "cuda") and not _devices():
        kind = described.device_kind
        return GPU(kind, "", next((n for word, n in _MULTIPROCESSORS.items() if word in kind), 132))
    for device in _devices():
        return GPU(device.device_kind, str(device.compute_capability), int(device.core_count))
    return None


def _devices() -> list[Any]:
    return jax.devices() if jax.default_backend() == "gpu" else []

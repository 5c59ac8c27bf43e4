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
    """The GPU of the mesh in use, else jax's default device, else the first one there is, or `None`.

    Arrays do not say where they are while a program is traced. Who has GPUs of several kinds, and puts arrays on one
    that is not the first, sets `jax_default_device` to it: a kernel for the first may be none for that one, or wait for
    ever for multiprocessors that it lacks.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform in ("gpu", "cuda") and not _devices():
        kind = described.device_kind
        return GPU(kind, "", next((n for word, n in _MULTIPROCESSORS.items() if word in kind), 132))
    for device in _devices():
        return GPU(device.device_kind, str(device.compute_capability), int(device.core_count))
    return None


def _devices() -> list[Any]:
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(default, "platform", None) == "gpu":
        return [default]
    return jax.devices() if jax.default_backend() == "gpu" else []


# Generation and bytes of vector memory a core, by words of a device's name; the first that fits.
_TPUS = {
    "v2": (2, 16),
    "v3": (3, 16),
    "v4": (4, 16),
    "v5 lite": (5, 128),
    "v5e": (5, 128),
    "v5": (5, 64),
    "v6": (6, 128),
    "7": (7, 64),
}


@dataclass(frozen=True)
class TPU:
    """The TPU that kernels are made for.

    Attributes:
      kind: its name.
      generation: from 2 on; 4, the least that kernels are made for, where the name is not known.
      cores: cores that act as one device.
      vmem_bytes: vector memory of a core.
    """

    kind: str
    generation: int
    cores: int
    vmem_bytes: int


def current_tpu() -> TPU | None:
    """The TPU of the mesh in use, else the first one there is, or `None`."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform != "tpu":
        device = jax.devices()[0] if jax.default_backend() == "tpu" else None
    return None if device is None else describe_tpu(device.device_kind, device.num_cores or 1)


def describe_tpu(kind: str, cores: int = 1) -> TPU:
    """What is known of a TPU by its name.

    Example:
      >>> describe_tpu("TPU v5 lite").vmem_bytes >> 20
      128
    """
    generation, mib = next((known for words, known in _TPUS.items() if words in kind.lower()), (4, 16))
    return TPU(kind, generation, cores, mib << 20)

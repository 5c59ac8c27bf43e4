"""`ACCELERATORS` and `Topology`: the devices that a server may run on, known by name. Imports no jax.

    v5e, v6e    a device is a chip, which has one core
    v4, v5p     a device is a chip; its two cores act as one
    tpu7x       a device is half a chip: a core and its own HBM

Bytes of TPUs are what libtpu's compiler (0.0.42) says that a program may use: "exceeds available HBM (15.75G)". Rates
and peaks are those of jax's own table (`jax.experimental.pallas.tpu.get_tpu_info`), and of NVIDIA's data sheet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from jpaged.errors import ConfigError

Platform = Literal["tpu", "gpu", "cpu"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of chip.

    Attributes:
      name: as in the name of a topology.
      platform: as jax calls it.
      kind: jax's `device_kind`.
      device_bytes: memory of a device that programs may use; `None` where it is the host's.
      devices_per_chip: what jax makes of a chip.
      chips_per_host: at the most.
      hbm_rate: bytes/s of a device; 0 where nothing is planned by it.
      matrix_flops: bf16 flops/s of a device; 0 likewise.
      vmem_bytes: vector memory of a TPU's core.
      sizes: numbers of chips to recommend.
    """

    name: str
    platform: Platform
    kind: str
    device_bytes: int | None
    devices_per_chip: int = 1
    chips_per_host: int = 8
    hbm_rate: float = 0.0
    matrix_flops: float = 0.0
    vmem_bytes: int = 0
    sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256)

    @property
    def ridge_tokens(self) -> int:
        """Tokens of a step in bfloat16 from which the matrix units bound it, not the reading of weights.

        Example:
          >>> ACCELERATORS["v5e"].ridge_tokens, ACCELERATORS["cpu"].ridge_tokens
          (240, 0)
        """
        return round(self.matrix_flops / self.hbm_rate) if self.hbm_rate else 0


_CUBES: Final = (4, 8, 16, 32, 64, 128, 256)
_TPUS: Final = (
    Accelerator(
        name="v4",
        platform="tpu",
        kind="TPU v4",
        device_bytes=int(30.75 * GIB),
        chips_per_host=4,
        hbm_rate=1.23e12,
        matrix_flops=275e12,
        vmem_bytes=16 * MIB,
        sizes=_CUBES,
    ),
    Accelerator(
        name="v5e",
        platform="tpu",
        kind="TPU v5 lite",
        device_bytes=int(15.75 * GIB),
        hbm_rate=0.82e12,
        matrix_flops=197e12,
        vmem_bytes=128 * MIB,
    ),
    Accelerator(
        name="v5p",
        platform="tpu",
        kind="TPU v5",
        device_bytes=int(95.74 * GIB),
        chips_per_host=4,
        hbm_rate=2.46e12,
        matrix_flops=459e12,
        vmem_bytes=64 * MIB,
        sizes=_CUBES,
    ),
    Accelerator(
        name="v6e",
        platform="tpu",
        kind="TPU v6 lite",
        device_bytes=int(31.25 * GIB),
        hbm_rate=1.64e12,
        matrix_flops=920e12,
        vmem_bytes=128 * MIB,
    ),
    Accelerator(
        name="tpu7x",
        platform="tpu",
        kind="TPU7x",
        device_bytes=int(94.75 * GIB),
        devices_per_chip=2,
        chips_per_host=4,
        hbm_rate=3.70e12,
        matrix_flops=1155e12,
        vmem_bytes=64 * MIB,
        sizes=_CUBES,
    ),
)
# 141 GB, of which 139.8 GiB can be allocated; jax takes 95 % of them when it is told to (`jpaged.launch_settings`).
_H200: Final = Accelerator(
    name="h200",
    platform="gpu",
    kind="NVIDIA H200",
    device_bytes=int(0.95 * 139.8 * GIB),
    hbm_rate=4.8e12,
    matrix_flops=989e12,
    sizes=(1, 2, 4, 8),
)
_CPU: Final = Accelerator(name="cpu", platform="cpu", kind="cpu", device_bytes=None, chips_per_host=1, sizes=(1,))
ACCELERATORS: Final[Mapping[str, Accelerator]] = MappingProxyType({one.name: one for one in (*_TPUS, _H200, _CPU)})
# Other names of the same, most of them Google's.
_ALIASES: Final = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
_MAX_CHIPS: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Topology:
    """So many chips of one kind.

    Attributes:
      accelerator: their kind.
      num_chips: how many. (Google's "v5p-8" counts cores, and is 4 chips.)
    """

    accelerator: Accelerator
    num_chips: int

    @property
    def num_devices(self) -> int:
        """As jax counts them."""
        return self.num_chips * self.accelerator.devices_per_chip

    @property
    def num_hosts(self) -> int:
        return -(-self.num_chips // self.accelerator.chips_per_host)

    def __str__(self) -> str:
        name = self.accelerator.name
        return name if self.accelerator.platform == "cpu" else f"{name}-{self.num_chips}"


def parse_topology(text: str) -> Topology:
    """The topology of a name: a kind and its number of chips, 1 if left out.

    Raises:
      ConfigError: no such kind, or no such number.

    Example:
      >>> parse_topology("tpu7x-4").num_devices, str(parse_topology("v5e")), parse_topology("v5e-16").num_hosts
      (8, 'v5e-1', 2)
      >>> parse_topology("v9-1")
      Traceback (most recent call last):
      ...
      jpaged.errors.ConfigError: the topology is 'v9-1', expected one of v4, v5e, v5p, v6e, tpu7x, h200, cpu, and a
        number of chips behind it, such as v5e-8
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d{1,5}))?", text.strip().lower(), re.ASCII)
    name = _ALIASES.get(match[1], match[1]) if match else ""
    count = int(match[2] or 1) if match else 0
    if name not in ACCELERATORS or not 1 <= count <= _MAX_CHIPS:
        kinds = ", ".join(ACCELERATORS)
        raise ConfigError(
            f"the topology is {text!r:.40}, expected one of {kinds}, and a number of chips behind it, such as v5e-8"
        )
    if ACCELERATORS[name].platform == "cpu" and count > 1:
        raise ConfigError(f"the topology is {text!r}, expected cpu: all of its cores are one device")
    return Topology(accelerator=ACCELERATORS[name], num_chips=count)


def accelerator_of(platform: str, kind: str, device_bytes: int | None) -> Accelerator:
    """What is known of a device that jax found.

    Args:
      platform: "tpu", "gpu" or "cpu".
      kind: its `device_kind`.
      device_bytes: what it says that programs may use; it counts more than the table. `None`: it does not say.

    Raises:
      ConfigError: another platform, or a device that is not in the table and does not say how much memory it has.

    Example:
      >>> accelerator_of("tpu", "TPU v5e", 16 * GIB).name
      'v5e'
      >>> accelerator_of("gpu", "Tesla T4", 14 * GIB).name
      'Tesla T4'
    """
    if platform not in ("tpu", "gpu", "cpu"):
        raise ConfigError(f"the platform is {platform!r:.40}, expected tpu, gpu or cpu")
    known = _known(platform, kind)
    if known is None and device_bytes is None:
        raise ConfigError(f"{kind!r:.60} is not known, and it does not say how much memory it has; name a --topology")
    if known is None:
        return Accelerator(name=kind, platform=platform, kind=kind, device_bytes=device_bytes)  # type: ignore[arg-type]
    memory = known.device_bytes if device_bytes is None or platform == "cpu" else device_bytes
    return replace(known, device_bytes=memory)


def _known(platform: str, kind: str) -> Accelerator | None:
    if platform == "cpu":
        return _CPU
    whole, words = kind.lower(), kind.lower().split()
    exact = (one for one in ACCELERATORS.values() if one.kind.lower() == whole)
    by_word = (ACCELERATORS[word] for word in words if word in ACCELERATORS)
    found = next(exact, None) or next(by_word, None)
    return found if found is not None and found.platform == platform else None

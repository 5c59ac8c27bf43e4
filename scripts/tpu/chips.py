"""`CHIPS`: what the models know of each TPU generation. Imports no jax.

HBM, VMEM and the matrix units' peak are those of jax's own table (`jax.experimental.pallas.tpu.get_tpu_info`), for what
jax calls a device: a core of tpu7x, two cores of v4 and v5p, whose rates are those of one. The clock is in no table. It
follows from the peak: the compiler's utilization dump books a product of 16 rows with a weight tile as 16 cycles of one
of 4 units of 128 x 128 (v4, v5) or 8 cycles of one of 2 units of 256 x 256 (v6e, tpu7x), which fixes the flops a cycle.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
      name: as in `topology`.
      topology: the smallest that libtpu compiles for.
      hbm_bytes: of a device.
      hbm_rate: bytes/s that a kernel on one core can read.
      vmem_bytes: of a core.
      matrix_flops: bf16 flops/s of a core.
      units, unit_size, rows_per_cycle: the matrix units, by the compiler's utilization dump.
      delay_slots: bundles after a branch that run before it jumps.
      dma_granule: bytes that a DMA counts in.
      config: libtpu's name of the mode in which two cores act as one device, where it is not the first it knows.
    """

    name: str
    topology: str
    hbm_bytes: float
    hbm_rate: float
    vmem_bytes: int
    matrix_flops: float
    units: int
    unit_size: int
    rows_per_cycle: int
    delay_slots: int
    dma_granule: int = 32
    config: str | None = None

    @property
    def flops_per_cycle(self) -> int:
        return 2 * self.units * self.rows_per_cycle * self.unit_size**2

    @property
    def clock(self) -> float:
        """Cycles/s, an assumption: the peak of the matrix units over their flops a cycle."""
        return self.matrix_flops / self.flops_per_cycle


_MIB: Final = 1 << 20
CHIPS: Final = {
    chip.name: chip
    for chip in (
        Chip("v4", "v4:2x2x1", 34.4e9, 0.615e12, 16 * _MIB, 137.5e12, 4, 128, 1, 1, 512, config="megacore"),
        Chip("v5e", "v5e:2x2", 17.2e9, 0.82e12, 128 * _MIB, 197e12, 4, 128, 1, 4),
        Chip("v5p", "v5p:2x2x1", 103e9, 1.23e12, 64 * _MIB, 229.5e12, 4, 128, 1, 4),
        Chip("v6e", "v6e:2x2", 34.4e9, 1.64e12, 128 * _MIB, 920e12, 2, 256, 2, 4),
        Chip("tpu7x", "tpu7x:2x2x1", 103e9, 3.70e12, 64 * _MIB, 1155e12, 2, 256, 2, 6),
    )
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as "v5e:2x2".

    Raises:
      ValueError: no such generation.

    Example:
      >>> f"{chip_of('v5e:2x2').clock / 1e9:.2f} GHz"
      '1.50 GHz'
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ValueError(
            f"the topology is {topology!r}; expected one of {', '.join(c.topology for c in CHIPS.values())}"
        )
    return CHIPS[name]

"""What vLLM reaches on the same card, and what jpaged is to reach: the figures that a run is read against.

vLLM 0.25.0, torch 2.11.0+cu130, FlashAttention-3, CUDA graphs, async scheduling, random weights in bfloat16, prefix
caching on, blocks of 16, at most 512 sequences; one NVIDIA H200 (driver 580.159), 2026-11-29. Where a range was seen,
its better end stands here.
"""

from dataclasses import dataclass, field
from typing import Final

SOURCE: Final = "vLLM 0.25.0, torch 2.11.0+cu130, 2026-11-29"
DEVICE: Final = "NVIDIA H200"
DTYPE: Final = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Figures for one model shape.

    Attributes:
      decode_ms: "rows@context" -> milliseconds of a decode step.
      loads: workload -> its figure, in the unit that the workload is given in.
    """

    decode_ms: dict[str, float] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)

    def figure(self, workload: str, cell: str | None = None) -> float | None:
        """The figure of a workload, or of one cell of the workload "decode"; `None`: there is none."""
        return self.decode_ms.get(cell) if cell else self.loads.get(workload)


VLLM: Final = {
    "llama-3.1-8b": Peer(
        decode_ms={
            "1@1024": 5.00,
            "1@4096": 5.12,
            "8@1024": 5.26,
            "8@4096": 6.08,
            "32@1024": 6.35,
            "32@4096": 8.98,
            "64@1024": 7.41,
            "64@4096": 13.09,
            "128@1024": 10.70,
            "256@1024": 17.85,
        },
        loads={
            "prefill": 40551.0,
            "uniform": 9899.0,
            "azure": 28203.0,
            "shared-prefix": 1.93,
            "start cold": 142.0,
            "start warm": 25.0,
        },
    ),
    "smollm2-135m": Peer(
        decode_ms={
            "1@1024": 1.9,
            "1@4096": 1.9,
            "8@1024": 1.8,
            "8@4096": 1.9,
            "32@1024": 2.2,
            "32@4096": 2.8,
            "64@1024": 3.1,
            "64@4096": 3.7,
            "128@1024": 4.7,
            "256@1024": 5.0,
        },
        loads={"uniform": 32371.0, "azure": 81371.0, "start cold": 197.0, "start warm": 32.0},
    ),
}

REACH: Final = {
    "llama-3.1-8b": Peer(
        decode_ms={
            "1@1024": 4.3,
            "8@1024": 4.5,
            "32@1024": 5.5,
            "32@4096": 8.4,
            "64@4096": 12.8,
            "128@1024": 9.4,
            "256@1024": 15.2,
        },
        loads={"prefill": 42000.0, "uniform": 11000.0, "azure": 31000.0, "shared-prefix": 1.4, "start warm": 20.0},
    ),
    "smollm2-135m": Peer(decode_ms={"1@1024": 0.8, "64@1024": 1.3, "256@1024": 2.6}, loads={"uniform": 64000.0}),
}


@dataclass(frozen=True)
class Yardstick:
    """Both, for the runs that may be compared with them; empty for others.

    Example:
      >>> Yardstick.of("llama-3.1-8b", "NVIDIA H200", "bfloat16", 1.0).compare(4.0, "decode", "1@1024")
      {'vllm': 5.0, 'times_vllm': 1.25, 'reach': 4.3, 'reached': True}
      >>> Yardstick.of("llama-3.1-8b", "TPU v5e", "bfloat16", 1.0).compare(4.0, "decode", "1@1024")
      {}
    """

    vllm: Peer
    reach: Peer

    @classmethod
    def of(cls, model: str, device: str, dtype: str, scale: float) -> "Yardstick":
        """Figures exist for one device, one dtype, and whole workloads."""
        shape = model.removesuffix("-instruct")
        if device != DEVICE or dtype != DTYPE or scale != 1:
            return cls(Peer(), Peer())
        return cls(VLLM.get(shape, Peer()), REACH.get(shape, Peer()))

    def compare(
        self, value: float, workload: str, cell: str | None = None, *, is_rate: bool = False
    ) -> dict[str, float | bool]:
        """What a figure is beside these.

        Args:
          value: measured; milliseconds, seconds or tokens a second.
          workload, cell: as in `Peer.figure`.
          is_rate: more is better.
        """
        found: dict[str, float | bool] = {}
        if theirs := self.vllm.figure(workload, cell):
            found |= {"vllm": theirs, "times_vllm": round(value / theirs if is_rate else theirs / value, 3)}
        if wanted := self.reach.figure(workload, cell):
            found |= {"reach": wanted, "reached": value >= wanted if is_rate else value <= wanted}
        return found

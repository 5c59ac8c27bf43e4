"""`Division`: what each device holds where so many of them share a model, and what then fits. Imports no jax."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, StepShape

LENGTHS: Final = (1024, 4096, 16384)


@dataclass(frozen=True, kw_only=True)
class Division:
    """One way to spread a model over the devices of a topology.

    Attributes:
      degree: devices that share one model.
      num_replicas: models that then run side by side.
      device_bytes: memory of a device that programs may use.
      parts: bytes of a device but for the pages, by what they are for.
      page_size, bytes_per_page: token slots of a page, and what it takes of a device over all layers.
      num_pages: of each replica, the null page included; 0 where not even two fit.
      max_model_len: tokens of a sequence at the most; 0 where nothing fits.
      max_num_seqs, max_num_batched_tokens: sequences and tokens of a step.
      max_num_prefill_tokens: tokens of a step in which nobody waits for a next one, if they are more.
      token_buckets, page_buckets, decode_steps: see `EngineConfig`.
      step_shapes: what is compiled at the start.
      attention: the back end.
      memory_fraction: for `CacheConfig`.
      repeated: what is whole on every device that shares the model.
      objection: why it does not fit, with the sum; `None` if it does.
    """

    degree: int
    num_replicas: int
    device_bytes: int
    parts: Mapping[str, int]
    page_size: int
    bytes_per_page: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int | None
    token_buckets: tuple[int, ...]
    page_buckets: tuple[int, ...]
    decode_steps: int
    step_shapes: tuple[StepShape, ...]
    attention: str
    memory_fraction: float
    repeated: tuple[str, ...]
    objection: str | None

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step."""
        return self.max_num_prefill_tokens or self.max_num_batched_tokens

    @property
    def token_capacity(self) -> int:
        """Tokens of KV that a replica holds; the null page holds none."""
        return max(self.num_pages - 1, 0) * self.page_size

    @property
    def pool_bytes(self) -> int:
        """Of a device."""
        return self.num_pages * self.bytes_per_page

    @property
    def bytes_used(self) -> int:
        """Of a device: all parts but the reserve, and the pages."""
        return sum(size for name, size in self.parts.items() if name != "reserve") + self.pool_bytes

    def sequences(self, num_tokens: int) -> int:
        """Sequences of that many tokens each that the pages of all replicas hold at once."""
        free = max(self.num_pages - 1, 0)
        return self.num_replicas * (free // -(-num_tokens // self.page_size)) if num_tokens <= self.max_model_len else 0

    def lengths(self) -> list[int]:
        """Lengths to tell `sequences` for."""
        return sorted({*(n for n in LENGTHS if n < self.max_model_len), self.max_model_len} - {0})

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        derived = ("token_capacity", "pool_bytes", "bytes_used")
        return {
            **asdict(self),
            **{name: getattr(self, name) for name in derived},
            "step_shapes": [f"{shape}" for shape in self.step_shapes],
            "sequences": {f"{length}": self.sequences(length) for length in self.lengths()},
        }


def engine_config(division: Division, *, warmup: str = "eager", policy: str = "fcfs", **cache: Any) -> EngineConfig:
    """What the engine is told, so that it does as planned.

    Args:
      division: of one device.
      warmup, policy: see `EngineConfig` and `SchedulerConfig`.
      cache: fields of `CacheConfig` that the plan does not decide.
    """
    return EngineConfig(
        cache=CacheConfig(page_size=division.page_size, memory_fraction=division.memory_fraction, **cache),
        scheduler=SchedulerConfig(
            max_num_seqs=division.max_num_seqs,
            max_num_batched_tokens=division.max_num_batched_tokens,
            max_num_prefill_tokens=division.max_num_prefill_tokens,
            max_model_len=division.max_model_len,
            policy=policy,  # type: ignore[arg-type]
            preemption="swap" if cache.get("host_pages") else "auto",
        ),
        token_buckets=division.token_buckets,
        page_buckets=division.page_buckets,
        decode_steps=division.decode_steps,
        warmup=warmup,  # type: ignore[arg-type]
    )

"""`SamplerTuning`: how the sampler is compiled for a platform."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jpaged.sampling_rows import SAMPLING_KINDS, SamplingKind


@dataclass(frozen=True)
class SamplerTuning:
    """How the sampler is compiled; what it samples is the same.

    Attributes:
      bits: of a threshold that one pass over the rows finds. One: the passes are a loop. More: they are unrolled, each
        counts for 2**bits - 1 thresholds at once.
      branches: the device skips the stages that no row needs. A GPU's host would have to look for it whether they are.
      kernels: Hopper GPUs filter by `pallas_kernels.filtered_draw`. Off, as one row with top_p takes longer by it.
    """

    bits: int
    branches: bool
    kernels: bool = False

    @property
    def kinds(self) -> tuple[SamplingKind, ...]:
        """The kinds worth a program of their own: with branches "full" does no more than it must."""
        return ("greedy", "full") if self.branches else SAMPLING_KINDS


TUNINGS: Final = {
    "cpu": SamplerTuning(bits=1, branches=True),
    "gpu": SamplerTuning(bits=2, branches=False),
    "tpu": SamplerTuning(bits=1, branches=True),
}


def where_needed(tuning: SamplerTuning, rows: Bool[Array, " S"], stage: Callable[[], Array], otherwise: Array) -> Array:
    """What a stage of the sampler gives, or, if no row needs it, perhaps `otherwise`.

    Args:
      tuning: whether the device may look.
      rows: that need it; what it gives for the others is of no account.
      stage: to be run.
      otherwise: like what it gives.

    Example:
      >>> nobody = jnp.zeros(2, bool)
      >>> [where_needed(TUNINGS[name], nobody, lambda: jnp.ones(2), jnp.zeros(2)).tolist() for name in ("cpu", "gpu")]
      [[0.0, 0.0], [1.0, 1.0]]
    """
    return jax.lax.cond(jnp.any(rows), stage, lambda: otherwise) if tuning.branches else stage()

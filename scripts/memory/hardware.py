"""`Hardware`: the memory for K and V, and how long a step takes, of a model on a device that is not there."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A roofline, which decides when requests meet; nothing else in a replay depends on it.

    A step takes max(`weights_s`, tokens * `token_s`) + KV tokens read * `kv_token_s`: the weights are read once or
    multiplied with each token, whichever takes longer, and each sequence reads its past.

    Attributes:
      slots: tokens whose K and V fit.
      weights_s: time to read the weights.
      token_s: time to compute one token.
      kv_token_s: time to read K and V of one token.
    """

    slots: int
    weights_s: float
    token_s: float
    kv_token_s: float

    def step_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of a step.

        Example:
          >>> hardware = Hardware(slots=100, weights_s=0.5, token_s=0.125, kv_token_s=0.25)
          >>> hardware.step_s(2, 4), hardware.step_s(8, 4)
          (1.5, 2.0)
        """
        return max(self.weights_s, num_tokens * self.token_s) + num_kv_tokens * self.kv_token_s


def _roofline(slots: int, *, parameters: float, kv_bytes: float, bytes_per_s: float, flops_per_s: float) -> Hardware:
    """16-bit weights and KV at the device's bandwidth; half of its dense 16-bit arithmetic."""
    return Hardware(
        slots=slots,
        weights_s=2 * parameters / bytes_per_s,
        token_s=2 * parameters / (0.5 * flops_per_s),
        kv_token_s=kv_bytes / bytes_per_s,
    )


# The first is that of the PagedAttention paper's figures 2 and 13: 12 GB for K and V, so 15.7K tokens. The others have
# what 90 % of 141 GB leave beside the weights, the last as `jpaged plan` has it.
_KV_13B: Final = 2 * 40 * 5120 * 2
HARDWARE: Final = {
    "opt-13b-a100-40gb": _roofline(15_700, parameters=13e9, kv_bytes=_KV_13B, bytes_per_s=1.555e12, flops_per_s=312e12),
    "opt-13b-h200": _roofline(
        int((0.9 * 141e9 - 2 * 13e9) / _KV_13B),
        parameters=13e9,
        kv_bytes=_KV_13B,
        bytes_per_s=4.8e12,
        flops_per_s=989e12,
    ),
    "llama-3-8b-h200": _roofline(
        52_618 * 16, parameters=8.03e9, kv_bytes=2 * 32 * 1024 * 2, bytes_per_s=4.8e12, flops_per_s=989e12
    ),
}

"""`PreemptionCosts`: whether a preempted sequence had better be moved to the host or computed again."""

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from jpaged.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PreemptionCosts:
    """Seconds that it takes to get the KV of a preempted sequence back, by a linear model.

    Computing again costs `prefill_s_per_token` a token. Swapping costs, out and in together, a fixed
    `swap_s` and `swap_s_per_page` a page. `scripts/bench_swap.py` measures the three and prints them as JSON.

    Raises:
      ConfigError: a constant is no positive number.

    Example:
      >>> costs = PreemptionCosts(prefill_s_per_token=1e-4, swap_s=2e-3, swap_s_per_page=1e-4)
      >>> costs.prefers_swap(num_tokens=16, num_pages=1), costs.prefers_swap(num_tokens=160, num_pages=10)
      (False, True)

    Reference:
      Kwon et al., SOSP 2023, sections 4.5 and 7.3.
    """

    prefill_s_per_token: float
    swap_s: float
    swap_s_per_page: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
                raise ConfigError(f"{field.name} is {value!r}, expected a positive number of seconds")

    def prefers_swap(self, *, num_tokens: int, num_pages: int) -> bool:
        """Whether moving `num_pages` out and in is cheaper than computing `num_tokens` again."""
        return self.swap_s + self.swap_s_per_page * num_pages < self.prefill_s_per_token * num_tokens

    @classmethod
    def load(cls, path: str | Path) -> "PreemptionCosts":
        """Reads what `scripts/bench_swap.py` printed: the last line, an object of which the three constants are read.

        Raises:
          ConfigError: there is no such file, or it does not hold them.
        """
        try:
            text = Path(path).read_text()
            found = json.loads(text[text.rfind("\n{") + 1 :])  # tables may stand before it
        except (OSError, ValueError) as error:
            raise ConfigError(f"no preemption costs in {path}: {error}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(found, dict) or not all(name in found for name in names):
            raise ConfigError(f"no preemption costs in {path}: expected an object with {', '.join(names)}")
        return cls(**{name: found[name] for name in names})

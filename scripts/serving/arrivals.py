"""When the requests of a load test arrive."""

import numpy as np

from jpaged.errors import ConfigError


def random_arrivals(count: int, rate: float, rng: np.random.Generator, *, burstiness: float = 1.0) -> np.ndarray:
    """Arrivals whose gaps are independent, seconds since the start, f64[count]; the first one is at 0.

    Args:
      count: of requests.
      rate: requests a second on average.
      rng: where the gaps come from.
      burstiness: coefficient of variation of the gaps: 1 is a Poisson process, 0 a constant rate, above 1 comes in
        bursts (Azure's conversations have 1.1, its code completions 13). The gaps are gamma-distributed.

    Raises:
      ConfigError: the rate or the burstiness is out of range.

    Example:
      >>> random_arrivals(4, 2.0, np.random.default_rng(0), burstiness=0.0).tolist()
      [0.0, 0.5, 1.0, 1.5]
    """
    if not 0 < rate < float("inf"):
        raise ConfigError(f"the rate is {rate}, expected requests a second, above 0")
    if not 0 <= burstiness <= 1000:
        raise ConfigError(f"the burstiness is {burstiness}, expected the gaps' coefficient of variation, 0 to 1000")
    if burstiness == 0:
        gaps = np.full(max(count - 1, 0), 1 / rate)
    else:
        shape = burstiness**-2.0
        gaps = rng.gamma(shape, 1 / (rate * shape), max(count - 1, 0))
    return np.concatenate([[0.0], np.cumsum(gaps)])[:count]


def traced_arrivals(arrival_s: np.ndarray | None, *, scale: float = 1.0) -> np.ndarray:
    """Arrivals as a trace has them, seconds since the first one, f64[n].

    Args:
      arrival_s: of the trace.
      scale: 2 is twice as fast.

    Raises:
      ConfigError: the workload has no times, or the scale is out of range.

    Example:
      >>> traced_arrivals(np.array([3.0, 5.0]), scale=2.0).tolist()
      [0.0, 1.0]
    """
    if arrival_s is None:
        raise ConfigError("the lengths have no times; use --rate or --concurrency, or a trace with times (Azure's)")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"the scale is {scale}, expected a factor above 0")
    return (arrival_s - arrival_s[:1]) / scale

"""`summarise`: the figures of a load test, from the records of its requests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from jpaged.errors import ConfigError
from scripts.serving.load import Share
from scripts.serving.record import Record

PERCENTILES: Final = (50, 90, 95, 99)
LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
_OBJECTIVES: Final = ("ttft", "tpot", "e2e")
_BUSY: Final = 0.7


def read_objective(text: str) -> dict[str, float]:
    """What an answer must keep to be a good one, in seconds.

    Raises:
      ConfigError: another text.

    Example:
      >>> read_objective("ttft=0.5,tpot=0.05")
      {'ttft': 0.5, 'tpot': 0.05}
    """
    objective = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in _OBJECTIVES or name in objective or not equals or not 0 < seconds < float("inf"):
            expected = f"NAME=SECONDS,... with each of {', '.join(_OBJECTIVES)} at most once"
            raise ConfigError(f"the objective is {text!r}, expected {expected}")
        objective[name] = seconds
    return objective


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; `None`: there is nothing.

    Example:
      >>> percentiles_ms([0.001, 0.003])["mean"], percentiles_ms([0.001, 0.003])["p50"]
      (2.0, 2.0)
    """
    if not len(seconds):
        return None
    ms = 1e3 * np.asarray(seconds, float)
    values = np.percentile(ms, PERCENTILES)
    return {
        "mean": round(float(ms.mean()), 3),
        **{f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, values, strict=True)},
        "max": round(float(ms.max()), 3),
    }


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by kind, of answers without an error: time to first token, time per output token (one a request), gaps
    between events with text (all of them), end to end."""
    good = [record for record in records if record.error is None]
    return {
        "ttft": [record.ttft_s for record in good],
        "tpot": [record.tpot_s for record in good if record.tpot_s is not None],
        "itl": [gap for record in good for gap in np.diff(record.event_s).tolist()],
        "e2e": [record.e2e_s for record in good],
    }


def is_good(record: Record, objective: Mapping[str, float]) -> bool:
    """Whether an answer kept the objective; one token has no time per output token to miss."""
    if record.error is not None:
        return False
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all((value := values[name]) is None or value <= most for name, most in objective.items())


def summarise(shares: Sequence[Share], objective: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All figures.

    Args:
      shares: what the client's processes did.
      objective: see `read_objective`.
    """
    records = [record for share in shares for record in share.records]
    good = [record for record in records if record.error is None]
    wall_s = max(record.end_s for record in records) - min(record.due_s for record in records)
    tokens = sum(record.num_output_tokens for record in records)
    errors = Counter(record.error for record in records if record.error is not None)
    messages = {record.error: record.message for record in reversed(records) if record.error is not None}
    figures = {
        "requests": len(records),
        "answered": len(good),
        "errors": dict(sorted(errors.items())),
        "first_messages": dict(sorted(messages.items())),
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tokens_per_s": round(tokens / wall_s, 2),
        "prompt_tokens_per_s": round(sum(record.num_prompt_tokens for record in good) / wall_s, 2),
        "output_tokens": tokens,
        "prompt_tokens": sum(record.num_prompt_tokens for record in good),
        "cached_prompt_tokens": sum(record.num_cached_tokens for record in good),
        "mean_at_once": round(sum(record.end_s - record.sent_s for record in records) / wall_s, 2),
        **{f"{name}_ms": percentiles_ms(values) for name, values in latencies(records).items()},
        "client": _client(shares, records, tokens),
    }
    if objective:
        kept = sum(is_good(record, objective) for record in records)
        figures["objective_s"] = dict(objective)
        figures["goodput_requests_per_s"] = round(kept / wall_s, 3)
        figures["good_fraction"] = round(kept / len(records), 4)
    return figures


def _client(shares: Sequence[Share], records: Sequence[Record], tokens: int) -> dict[str, Any]:
    """What the client cost, and whether it may have been what was measured."""
    busy = max(share.cpu_s / max(share.wall_s, 1e-9) for share in shares)
    return {
        "processes": len(shares),
        "cpu_us_per_token": round(1e6 * sum(share.cpu_s for share in shares) / max(tokens, 1), 2),
        "busiest_fraction": round(busy, 4),
        "is_bottleneck": busy > _BUSY,
        "loop_late_ms": percentiles_ms([lag for share in shares for lag in share.lags_s]),
        "sent_late_ms": percentiles_ms([record.sent_s - record.due_s for record in records]),
    }

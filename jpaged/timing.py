"""`RequestTiming`: when a request came, began to run, gave tokens and ended."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Moments of one request, seconds of the monotonic clock, taken in the engine's process.

    Attributes:
      arrival_s: it arrived.
      scheduled_s: it first got a row of a step; `None` if it ended before.
      first_token_s: its first output token was read from the device; `None` if there was none.
      last_token_s: the last one was.
      finished_s: it ended.

    Example:
      >>> timing = RequestTiming(arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0, last_token_s=5.0, finished_s=5.0)
      >>> timing.queue_s, timing.prefill_s, timing.decode_s, timing.inference_s, timing.ttft_s, timing.e2e_s
      (0.5, 0.5, 3.0, 3.5, 1.0, 4.0)
    """

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float

    @property
    def queue_s(self) -> float:
        """From arrival until it first ran, or ended without."""
        return (self.finished_s if self.scheduled_s is None else self.scheduled_s) - self.arrival_s

    @property
    def inference_s(self) -> float | None:
        """From its first row to its end."""
        return None if self.scheduled_s is None else self.finished_s - self.scheduled_s

    @property
    def prefill_s(self) -> float | None:
        """From its first row to its first token."""
        if self.scheduled_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """From its first token to its last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the end."""
        return self.finished_s - self.arrival_s

"""`Record`: what became of one request."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Times are in seconds of `time.monotonic`, which is one clock for all processes of a machine.

    Attributes:
      index: of the `Work`.
      due_s: when it was to be sent; latencies count from here, so that a client that is late hides nothing.
      sent_s: when it was.
      event_s: when each event with text came; one entry, the end, if the answer came in one piece.
      end_s: when the answer was whole.
      num_prompt_tokens, num_output_tokens, num_cached_tokens: as the server's usage says; output tokens are the events
        with text if it says nothing.
      error: what went wrong, by kind, such as "http 503"; `None`: nothing.
      message: of the error.
    """

    index: int
    due_s: float
    sent_s: float
    event_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.event_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time a token after the first one; `None`: there is no second one, or all came in one piece."""
        if self.num_output_tokens < 2 or len(self.event_s) < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_output_tokens - 1)

"""`RequestMetrics`: histograms of how requests were served."""

from collections import Counter

from jpaged.metrics import Histogram, HistogramSnapshot, PageLives
from jpaged.request import FinishReason, Output, SamplingParams
from jpaged.structured import is_refusal

_GAP_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)
_TTFT_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_LATENCY_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_FEW = (0, 1, 2, 3, 5, 10, 20, 50, 100)

_BOUNDS = {
    "time_to_first_token_seconds": _TTFT_S,
    "inter_token_latency_seconds": _GAP_S,
    "request_time_per_output_token_seconds": _GAP_S,
    "e2e_request_latency_seconds": _LATENCY_S,
    "request_queue_time_seconds": _LATENCY_S,
    "request_inference_time_seconds": _LATENCY_S,
    "request_prefill_time_seconds": _LATENCY_S,
    "request_decode_time_seconds": _LATENCY_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_n": _FEW,
    "request_params_max_tokens": _TOKENS,
    "request_num_preemptions": _FEW,
    "iteration_tokens_total": _TOKENS,
}


class RequestMetrics:
    """Counts what the `Collector` and the engine tell it. Names and meanings are those of vLLM's metrics.

    Args:
      pages: of the pool that the requests are served from.

    Attributes:
      finished: requests that ended, by the finish reason of their first answer.
      num_refused: requests that were taken, and refused when the form of their output was compiled or followed. They
        count nowhere else.
      num_prompt_tokens: of requests that ended.
      num_cached_tokens: those of them that were found in the prefix cache.
    """

    def __init__(self, pages: PageLives | None = None) -> None:
        self._histograms = {name: Histogram(bounds) for name, bounds in _BOUNDS.items()}
        self._pages = PageLives(0) if pages is None else pages
        self.finished: Counter[FinishReason] = Counter()
        self.num_refused = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def step(self, num_tokens: int, times: int = 1) -> None:
        """So many steps of so many tokens each, padding not counted, were dispatched."""
        self._histograms["iteration_tokens_total"].observe(num_tokens, times)

    def gap(self, seconds: float, times: int, num_tokens: int = 1) -> None:
        """So many requests got so many tokens each, so long after those before.

        Tokens that come together have no time between them: the first one came late, and the others with it. So the sum
        is the time of decoding, the mean that of a token, and the upper quantiles show what bursts make readers wait.
        """
        gaps = self._histograms["inter_token_latency_seconds"]
        gaps.observe(seconds, times)
        if num_tokens > 1:
            gaps.observe(0.0, times * (num_tokens - 1))

    def ended(self, output: Output, params: SamplingParams) -> None:
        """A request ended; `output.timing` is set."""
        if output.error is not None and is_refusal(output.error):
            self.num_refused += 1
            return
        timing = output.timing
        assert timing is not None
        num_tokens = sum(len(completion.token_ids) for completion in output.completions)
        self.finished[output.finish_reason or "error"] += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        decode_s, longest = timing.decode_s, max((len(c.token_ids) for c in output.completions), default=0)
        values = {
            "time_to_first_token_seconds": timing.ttft_s,
            "request_time_per_output_token_seconds": (
                decode_s / (longest - 1) if decode_s is not None and longest > 1 else None
            ),
            "e2e_request_latency_seconds": timing.e2e_s,
            "request_queue_time_seconds": timing.queue_s,
            "request_inference_time_seconds": timing.inference_s,
            "request_prefill_time_seconds": timing.prefill_s,
            "request_decode_time_seconds": decode_s,
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": num_tokens,
            "request_max_num_generation_tokens": longest,
            "request_params_n": params.n,
            "request_params_max_tokens": params.max_tokens,
            "request_num_preemptions": output.num_preemptions,
        }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """All of them, by name."""
        own = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        return own | self._pages.histograms()

"""What is counted of a request that ended, and of what it lacked."""

from dataclasses import replace

import pytest

from jpaged.metrics import PageLives
from jpaged.request import Completion, FinishReason, Output, SamplingParams
from jpaged.request_metrics import RequestMetrics
from jpaged.timing import RequestTiming


def output(reason: FinishReason, counts: tuple[int, ...], timing: RequestTiming) -> Output:
    completions = tuple(
        Completion(index=i, text="", token_ids=(7,) * count, finish_reason=reason) for i, count in enumerate(counts)
    )
    return Output(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        completions=completions,
        finished=True,
        num_cached_tokens=2,
        num_preemptions=1,
        timing=timing,
    )


def test_a_request_is_counted_once_in_each():
    metrics = RequestMetrics()
    timing = RequestTiming(arrival_s=0, scheduled_s=1, first_token_s=3, last_token_s=7, finished_s=8)
    metrics.ended(output("stop", (5, 3), timing), SamplingParams(n=2, max_tokens=10))
    sums = {name: snapshot.sum for name, snapshot in metrics.histograms().items() if snapshot.count == 1}
    assert sums == {
        "time_to_first_token_seconds": 3,
        "request_time_per_output_token_seconds": 1,  # 4 s for the 4 tokens after the first
        "e2e_request_latency_seconds": 8,
        "request_queue_time_seconds": 1,
        "request_inference_time_seconds": 7,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 8,
        "request_max_num_generation_tokens": 5,
        "request_params_n": 2,
        "request_params_max_tokens": 10,
        "request_num_preemptions": 1,
    }
    assert (metrics.finished, metrics.num_prompt_tokens, metrics.num_cached_tokens) == ({"stop": 1}, 3, 2)


def test_what_there_was_not_is_not_counted():
    metrics = RequestMetrics()
    timing = RequestTiming(arrival_s=0, finished_s=8)
    metrics.ended(output("abort", (0,), timing), SamplingParams(max_tokens=None))
    lacking = {name for name, snapshot in metrics.histograms().items() if not snapshot.count}
    assert lacking - PageLives(0).histograms().keys() == {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_params_max_tokens",
        "iteration_tokens_total",
    }


def test_steps_and_gaps():
    metrics = RequestMetrics()
    metrics.step(12)
    metrics.gap(0.004, 3)
    histograms = metrics.histograms()
    assert (histograms["iteration_tokens_total"].count, histograms["iteration_tokens_total"].sum) == (1, 12)
    assert histograms["inter_token_latency_seconds"].count == 3


def test_bursts_show_in_the_gaps_and_not_in_their_mean():
    metrics = RequestMetrics()
    metrics.gap(0.4, times=3, num_tokens=4)
    gaps = metrics.histograms()["inter_token_latency_seconds"]
    assert (gaps.count, gaps.sum) == (12, pytest.approx(1.2))  # the mean is that of single tokens
    at = gaps.bounds.index(0.25)
    assert (gaps.cumulative[at], gaps.cumulative[at + 1]) == (9, 12)  # what came with another one waited for nothing


def test_a_refused_form_is_no_failure_and_has_no_latency():
    metrics = RequestMetrics()
    refused = replace(
        output("error", (0,), RequestTiming(arrival_s=0, finished_s=8)), error="structured.regex is refused"
    )
    metrics.ended(refused, SamplingParams())
    assert (metrics.num_refused, metrics.finished) == (1, {})
    assert not any(snapshot.count for snapshot in metrics.histograms().values())
    metrics.ended(replace(refused, error="the model produced NaN"), SamplingParams())
    assert (metrics.num_refused, metrics.finished) == (1, {"error": 1})

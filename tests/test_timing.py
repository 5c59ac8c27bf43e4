"""Spans of requests that ended early are those that there were."""

from jpaged.timing import RequestTiming


def test_a_request_that_never_ran_waited_all_its_life():
    timing = RequestTiming(arrival_s=1.0, finished_s=4.0)
    assert (timing.queue_s, timing.e2e_s) == (3.0, 3.0)
    assert timing.prefill_s is timing.decode_s is timing.ttft_s is None


def test_a_request_without_tokens_has_no_first_one():
    timing = RequestTiming(arrival_s=1.0, scheduled_s=2.0, finished_s=4.0)
    assert (timing.queue_s, timing.e2e_s) == (1.0, 3.0)
    assert timing.prefill_s is timing.decode_s is timing.ttft_s is None

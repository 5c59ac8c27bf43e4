"""The deltas of an answer, joined, are its completion, wherever the steps cut it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.delta import Delta
from jpaged.request import Output
from tests.test_collector import TOKENIZER, Steps


def joined(deltas: list[Delta], index: int) -> tuple:
    own = [delta for delta in deltas if delta.index == index]
    text = "".join(delta.text for delta in own)
    tokens = tuple(token for delta in own for token in delta.token_ids)
    logprobs = tuple(entry for delta in own for entry in delta.logprobs or ())
    ends = [(delta.finish_reason, delta.stop_reason) for delta in own if delta.finish_reason]
    return text, tokens, logprobs, ends


def follow(steps: Steps) -> tuple[list[Delta], Output]:
    """All deltas of the one request, and its output."""
    deltas, outputs = [], []
    while len(steps.collector):
        outputs += steps.step()
        news = steps.collector.take_news()
        deltas += [delta for _, delta in news.deltas]
    (output,) = outputs
    return deltas, output


@settings(max_examples=40)
@given(
    st.text("abc", min_size=20, max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 12),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([None, 0, 2]),
)
def test_joined_deltas_are_the_completion(text, stop, max_tokens, include, n, logprobs):
    steps = Steps(text)
    params = {"stop": stop, "max_tokens": max_tokens, "include_stop_str_in_output": include}
    steps.add("a", stream="deltas", n=n, logprobs=logprobs, **params)
    deltas, output = follow(steps)
    assert len(output.completions) == n
    for completion in output.completions:
        assert joined(deltas, completion.index) == (
            completion.text,
            completion.token_ids,
            completion.logprobs or (),
            [(completion.finish_reason, completion.stop_reason)],
        )


def test_text_that_may_become_a_stop_string_comes_later():
    steps = Steps("abcabd" + "x" * 8)
    steps.add("a", stream="deltas", stop=["abd"], max_tokens=8)
    deltas, _ = follow(steps)
    assert [delta.text for delta in deltas] == ["", "", "abc", "", "", ""]
    assert [delta.stop_reason for delta in deltas] == [None] * 5 + ["abd"]


def test_the_start_comes_once_and_before_the_first_delta():
    steps = Steps()
    steps.add("a", (5, 6, 7), stream="deltas", prompt_logprobs=0)
    steps.add("b", stream=True)
    steps.add("c")
    steps.step()
    news = steps.collector.take_news()
    (start,) = news.starts
    assert (start.request_id, start.num_cached_tokens) == ("a", 0)
    assert start.prompt_logprobs[0] is None
    assert [entry.token_id for entry in start.prompt_logprobs[1:]] == [6, 7]
    assert [name for name, _ in news.deltas] == ["a"]
    steps.step()
    assert steps.collector.take_news().starts == []


@pytest.mark.parametrize("ran", [False, True])
def test_an_abort_is_told(ran):
    steps = Steps()
    steps.add("a", stream="deltas", stop=["bX"])
    if ran:
        steps.step()
        steps.step()  # "a" was given out, "b" is held back
        steps.collector.take_news()
    output = steps.collector.abort("a")
    news = steps.collector.take_news()
    assert len(news.starts) == (not ran)
    assert news.deltas == [("a", Delta(0, "b" if ran else "", (), None, "abort"))]
    assert output.timing.finished_s >= output.timing.arrival_s
    assert steps.collector.take_news() == ([], [])


def test_a_failed_answer_is_told_and_dropped_requests_are_not():
    steps = Steps()
    steps.add("bad", stream="deltas")
    steps.add("gone", stream="deltas")
    steps.bad["bad"] = -1
    steps.step()
    told = [(name, delta.finish_reason) for name, delta in steps.collector.take_news().deltas]
    assert told == [("gone", None), ("bad", "error")] or told == [("bad", "error"), ("gone", None)]
    steps.step()
    steps.collector.drop_all()
    assert steps.collector.take_news() == ([], [])


def test_the_vocabulary_has_a_token_a_letter():
    assert len(TOKENIZER.encode("abc")) == 3

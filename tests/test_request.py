"""Sampling parameters at the door, and what an output shows."""

import dataclasses

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.request import Completion, Output, SamplingParams, TokenLogprobs

BEAMS = {"use_beam_search": True, "best_of": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1, expected a number in \[0, 2\]"),
        ({"temperature": 2.01}, "temperature is 2.01"),
        ({"temperature": float("nan")}, "temperature is nan, expected a finite number"),
        ({"temperature": float("inf")}, "temperature is inf, expected a finite number"),
        ({"temperature": 10**400}, "temperature is 1000.*, expected a finite number"),
        ({"temperature": "1"}, "temperature is '1', expected a finite number"),
        ({"temperature": True}, "temperature is True, expected a finite number"),
        ({"temperature": None}, "temperature is None, expected a finite number"),
        ({"top_p": 0}, r"top_p is 0.0, expected a number in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"top_k": -2}, "top_k is -2, expected an integer of at least -1"),
        ({"top_k": 1.0}, "top_k is 1.0, expected an integer"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0.0, expected a number in \[0.01, 100\]"),
        ({"repetition_penalty": 101}, "repetition_penalty is 101"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        ({"logit_bias": {3: 101}}, r"logit_bias\[3\] is 101, expected a number in \[-100, 100\]"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\] is nan, expected a finite number"),
        ({"logit_bias": {-1: 1}}, "a key of logit_bias is -1, expected an integer of at least 0"),
        ({"logit_bias": {"3": 1}}, "a key of logit_bias is '3'"),
        ({"logit_bias": [3]}, "logit_bias must be a mapping"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "at most 300 entries"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, r"seed is 9223372036854775808, expected an integer in \[0, 2\*\*63\)"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"max_tokens": -1}, "max_tokens is -1, expected an integer of at least 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens is 5, expected at most max_tokens \(4\)"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0"),
        ({"stop": ""}, "stop holds '', expected non-empty strings"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": [3]}, "stop holds 3"),
        ({"stop": 3}, "stop must be a string or a list"),
        ({"stop": ["a"] * 65}, "at most 64 strings"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3, expected a list of token ids"),
        ({"stop_token_ids": "3"}, "stop_token_ids is '3', expected a list"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids is b'ab', expected a list"),
        ({"stop_token_ids": bytearray(b"ab")}, "stop_token_ids is bytearray"),
        ({"stop_token_ids": memoryview(b"ab")}, "stop_token_ids is <memory"),
        ({"stop": b"ab"}, "stop holds 97, expected non-empty strings"),
        ({"stop_token_ids": [-1]}, "an entry of stop_token_ids is -1"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids has 65 entries, expected at most 64"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output is 'no'"),
        ({"n": 0}, "n is 0, expected an integer of at least 1"),
        ({"n": True}, "n is True"),
        ({"n": 1.0}, "n is 1.0"),
        ({"n": None}, "n is None"),
        ({"best_of": 0}, "best_of is 0, expected an integer of at least 1"),
        ({"n": 3, "best_of": 2}, "best_of is 2, expected an integer of at least 3"),
        ({"n": 2, "best_of": "3"}, "best_of is '3'"),
        ({"n": 2, "temperature": 0}, "n or best_of is 2 with temperature 0, expected 1: .*raise the temperature"),
        ({"best_of": 2, "temperature": 0}, "n or best_of is 2 with temperature 0"),
        ({"n": 2, "max_tokens": 0}, "n or best_of is 2 with max_tokens 0, expected 1"),
        ({"use_beam_search": 1}, "use_beam_search is 1, expected True or False"),
        ({"use_beam_search": True, "temperature": 0}, r"with one beam, expected best_of \(or n\) of at least 2"),
        ({"length_penalty": float("nan")}, "length_penalty is nan, expected a finite number"),
        ({"length_penalty": "1"}, "length_penalty is '1', expected a finite number"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0 without use_beam_search, which alone reads it"),
        ({"early_stopping": True}, "early_stopping is True without use_beam_search"),
        ({"early_stopping": "never"}, "early_stopping is 'never' without use_beam_search"),
        ({**BEAMS, "early_stopping": "always"}, "early_stopping is 'always', expected True, False or \"never\""),
        ({**BEAMS, "early_stopping": None}, "early_stopping is None"),
        ({**BEAMS, "early_stopping": 1}, "early_stopping is 1"),
        ({**BEAMS, "temperature": 1.0}, "temperature is 1.0 with use_beam_search, .*leave it out"),
        ({**BEAMS, "top_k": 5}, "top_k is 5 with use_beam_search"),
        ({**BEAMS, "top_p": 0.5}, "top_p is 0.5 with use_beam_search"),
        ({**BEAMS, "min_p": 0.5}, "min_p is 0.5 with use_beam_search"),
        ({**BEAMS, "presence_penalty": 0.5}, "a penalty is set with use_beam_search"),
        ({**BEAMS, "repetition_penalty": 1.5}, "a penalty is set with use_beam_search"),
        ({**BEAMS, "logit_bias": {1: 1}}, "logit_bias is set with use_beam_search"),
        ({**BEAMS, "stop": "x"}, "stop is set with use_beam_search"),
        ({**BEAMS, "logprobs": 0}, "logprobs are not given with use_beam_search"),
        ({**BEAMS, "max_tokens": 0}, "n or best_of is 4 with max_tokens 0"),
    ],
)
def test_sampling_params_refuse(params, match):
    with pytest.raises(RequestError, match=match):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 2, "top_p": 1, "min_p": 1, "top_k": -1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 100},
        {"logit_bias": {0: -100, 5: 100}, "seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 4, "min_tokens": 4},
        {"max_tokens": 0},
        {"logprobs": 0, "stop": [], "stop_token_ids": ()},
        {"n": 5, "best_of": 5},
        {"n": 1, "best_of": 1, "temperature": 0},
        {**BEAMS, "n": 4, "length_penalty": -2.0, "early_stopping": "never"},
        {**BEAMS, "top_k": -1, "early_stopping": True, "stop_token_ids": [3], "min_tokens": 5},
        {**BEAMS, "prompt_logprobs": 0},
    ],
)
def test_sampling_params_take_the_ends_of_the_ranges(params):
    made = SamplingParams(**params)
    for name, value in params.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("params", "num_sequences"),
    [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({"best_of": 3}, 3), ({**BEAMS, "n": 2}, 4)],
)
def test_how_many_sequences_run(params, num_sequences):
    assert SamplingParams(**params).num_sequences == num_sequences


def test_stops_become_tuples():
    assert SamplingParams(stop="END").stop == ("END",)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))


def test_logit_bias_is_checked_once_and_cannot_change_later():
    mine = {3: 1.0}
    params = SamplingParams(logit_bias=mine)
    mine[4] = 1e9
    assert params.logit_bias == {3: 1.0}


def test_replace_checks_again():
    with pytest.raises(RequestError, match="top_p is 7"):
        dataclasses.replace(SamplingParams(), top_p=7)
    assert dataclasses.replace(SamplingParams(stop="x"), top_k=3).stop == ("x",)


@pytest.mark.parametrize(
    ("params", "greedy", "uses_penalties"),
    [
        ({}, False, False),
        ({"temperature": 0.0}, True, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"temperature": 0, "frequency_penalty": 0.1}, True, True),
    ],
)
def test_what_sampling_needs(params, greedy, uses_penalties):
    made = SamplingParams(**params)
    assert (made.greedy, made.uses_penalties) == (greedy, uses_penalties)


def test_an_output_shows_its_first_answer():
    logprobs = (TokenLogprobs(7, -0.5),)
    best = Completion(
        index=0,
        text="x",
        token_ids=(7,),
        finish_reason="stop",
        stop_reason=7,
        logprobs=logprobs,
        cumulative_logprob=-0.5,
    )
    other = Completion(index=1, text="y", token_ids=(8, 9), finish_reason="length")
    output = Output(request_id="a", prompt=None, prompt_token_ids=(1,), completions=(best, other), finished=True)
    shown = (output.text, output.token_ids, output.finish_reason, output.stop_reason, output.logprobs)
    assert shown == ("x", (7,), "stop", 7, logprobs)
    assert (output.num_cached_tokens, output.num_preemptions, output.error) == (0, 0, None)
    assert (other.score, other.cumulative_logprob, other.logprobs, other.stop_reason) == (None, None, None, None)
    running = dataclasses.replace(output, completions=(dataclasses.replace(best, finish_reason=None),), finished=False)
    assert running.finish_reason is None


def test_numpy_numbers_become_python_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.int64(7),
        max_tokens=np.int32(4),
        logit_bias={np.int64(5): np.float32(1.5)},
        stop_token_ids=[np.int64(9)],
        n=np.int64(2),
        best_of=np.int32(3),
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=7, max_tokens=4, logit_bias={5: 1.5}, stop_token_ids=[9], n=2, best_of=3
    )
    assert {type(v) for v in (params.temperature, *params.logit_bias.values())} == {float}
    assert {
        type(v) for v in (params.top_k, params.seed, params.max_tokens, params.n, params.best_of, *params.logit_bias)
    } == {int}

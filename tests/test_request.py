"""Sampling parameters at the door, and what a sequence counts."""

import dataclasses

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.request import Output, Request, SamplingParams, Sequence, SequenceStatus


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
        ({"max_tokens": 0}, "max_tokens is 0, expected an integer of at least 1"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens is -1, expected an integer of at least 0"),
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
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"logprobs": 0, "stop": [], "stop_token_ids": ()},
    ],
)
def test_sampling_params_take_the_ends_of_the_ranges(params):
    made = SamplingParams(**params)
    for name, value in params.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)


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


def test_a_sequence_counts_read_and_pending_output():
    request = Request(request_id="a", prompt_token_ids=(5, 6, 7), params=SamplingParams())
    seq, other = Sequence(request), Sequence(request)
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.num_output_tokens, seq.output_token_ids) == (3, 3, 0, [])
    seq.tokens.append(8)
    seq.num_pending = 2
    assert (seq.num_prompt_tokens, seq.num_tokens, seq.num_output_tokens, seq.output_token_ids) == (3, 6, 3, [8])
    assert other.tokens == list(request.prompt_token_ids) == [5, 6, 7]
    assert seq != other  # two sequences are never equal, whatever they hold
    assert len({seq, other}) == 2
    assert not seq.is_finished
    seq.status = SequenceStatus.FINISHED
    assert seq.is_finished


def test_an_output_is_finished_once_it_has_a_reason():
    running = Output(request_id="a", prompt=None, prompt_token_ids=(1,), text="", token_ids=(), finish_reason=None)
    assert not running.finished
    assert dataclasses.replace(running, finish_reason="length").finished


def test_numpy_numbers_become_python_ones():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.int64(7),
        max_tokens=np.int32(4),
        logit_bias={np.int64(5): np.float32(1.5)},
        stop_token_ids=[np.int64(9)],
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=7, max_tokens=4, logit_bias={5: 1.5}, stop_token_ids=[9]
    )
    assert {type(v) for v in (params.temperature, *params.logit_bias.values())} == {float}
    assert {type(v) for v in (params.top_k, params.seed, params.max_tokens, *params.logit_bias)} == {int}

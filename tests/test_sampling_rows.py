"""Packing of the rows' parameters on the host and unpacking on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.request import SamplingParams
from jpaged.sampling_rows import NUM_SAMPLING_FIELDS, SamplingRow, sampling_fields, unpack_sampling_rows
from jpaged.structured import StructuredOutput


def unpacked(rows, num_rows=4, null_entry=9):
    return jax.jit(unpack_sampling_rows)(jnp.asarray(sampling_fields(rows, num_rows, null_entry)))


def test_every_field_survives():
    params = SamplingParams(
        temperature=0.7,
        top_k=12,
        top_p=0.85,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=-0.3,
        frequency_penalty=0.4,
        logit_bias={1: 2.0},
        min_tokens=3,
        allowed_token_ids=[4],
    )
    seed = 0x7123456789ABCDEF
    rows = unpacked([SamplingRow(params, seed, 6, 77, samples=True, num_output_tokens=2, num_logprobs=5)])
    found = {name: getattr(rows, name)[0].item() for name in vars(rows)}
    expected = {
        "state_index": 6,
        "temperature": np.float32(0.7).item(),
        "top_k": 12,
        "top_p": np.float32(0.85).item(),
        "min_p": np.float32(0.02).item(),
        "repetition_penalty": np.float32(1.1).item(),
        "presence_penalty": np.float32(-0.3).item(),
        "frequency_penalty": np.float32(0.4).item(),
        "seed_high": 0x71234567,
        "seed_low": 0x89ABCDEF,
        "position": 77,
        "samples": True,
        "uses_penalties": True,
        "uses_bias": True,
        "bans_stops": True,
        "uses_mask": True,
        "num_logprobs": 5,
    }
    assert found == expected
    assert len(expected) == NUM_SAMPLING_FIELDS


def test_padding_points_at_the_null_entry_and_changes_nothing():
    rows = unpacked([])
    for name, value in {
        "state_index": 9,
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "samples": False,
        "uses_penalties": False,
        "uses_bias": False,
        "bans_stops": False,
        "num_logprobs": -1,
    }.items():
        assert getattr(rows, name).tolist() == [value] * 4, name


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (3, 3), (10**15, 2**31 - 1)])
def test_top_k(top_k, expected):
    row = SamplingRow(SamplingParams(top_k=top_k), 0, 0, position=0, samples=True, num_output_tokens=0)
    assert unpacked([row]).top_k[0] == expected


@pytest.mark.parametrize(("num_output_tokens", "expected"), [(0, True), (2, True), (3, False)])
def test_stops_are_banned_below_min_tokens(num_output_tokens, expected):
    row = SamplingRow(SamplingParams(min_tokens=3), 0, 0, 0, samples=True, num_output_tokens=num_output_tokens)
    assert bool(unpacked([row]).bans_stops[0]) is expected


def test_log_probabilities_are_asked_for_by_the_row_not_by_its_parameters():
    row = SamplingRow(SamplingParams(logprobs=5), 0, 0, 0, samples=True, num_output_tokens=0)
    assert unpacked([row, row._replace(num_logprobs=8)]).num_logprobs.tolist() == [-1, 8, -1, -1]


def test_rows_keep_their_order():
    rows = [SamplingRow(SamplingParams(), i, i, i * 10, samples=i % 2 == 0, num_output_tokens=0) for i in range(4)]
    found = unpacked(rows)
    assert found.position.tolist() == [0, 10, 20, 30]
    assert found.samples.tolist() == [True, False, True, False]


def test_too_many_rows():
    row = SamplingRow(SamplingParams(), 0, 0, 0, samples=True, num_output_tokens=0)
    with pytest.raises(ValueError, match="3 live rows, expected at most num_rows"):
        sampling_fields([row] * 3, num_rows=2, null_entry=9)


def test_another_number_of_fields():
    with pytest.raises(ValueError, match="expected 17 fields"):
        unpack_sampling_rows(jnp.zeros((15, 4), jnp.int32))


def test_a_form_decides_itself_when_the_output_may_end():
    params = SamplingParams(min_tokens=3, structured=StructuredOutput(regex="a+"))
    rows = unpacked([SamplingRow(params, 0, 0, 0, samples=True, num_output_tokens=0)])
    assert (bool(rows.uses_mask[0]), bool(rows.bans_stops[0])) == (True, False)

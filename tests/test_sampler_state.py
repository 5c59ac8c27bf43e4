"""Entries of the sampler's state: loading, remembering, counting, isolation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import sampler_state
from jpaged.errors import RequestError
from jpaged.request import SamplingParams
from jpaged.sampler_state import (
    MAX_BANNED_IDS,
    MAX_BIAS_IDS,
    count_output,
    entry_for,
    load_entry,
    load_masks,
    make_sampler_state,
    mask_row_counts,
    needs_entry,
    remember,
    warm_up_masks,
)
from jpaged.structured import StructuredOutput
from jpaged.token_mask import ALL_TOKENS, pack_mask, unpack_mask

R, V = 5, 37


class TestEntryFor:
    def test_pads_with_the_vocabulary_size(self):
        entry = entry_for(SamplingParams(logit_bias={4: 1.5, 9: -2.0}, stop_token_ids=[8, 3]), (2, 3), V)
        assert entry.bias_ids.tolist() == [4, 9] + [V] * (MAX_BIAS_IDS - 2)
        assert entry.bias_values.tolist() == [1.5, -2.0] + [0.0] * (MAX_BIAS_IDS - 2)
        assert entry.banned_ids.tolist() == [2, 3, 8] + [V] * (MAX_BANNED_IDS - 3)
        assert [array.dtype for array in entry] == [np.int32, np.float32, np.int32, np.int32, np.bool_, np.uint32]
        assert not entry.output_counts.any()
        assert not entry.prompt_mask.any()

    def test_holds_the_tokens_of_the_sequence(self):
        entry = entry_for(SamplingParams(), (), V, prompt=[3, 3, V - 1], output=[7, 0, 7])
        assert entry.prompt_mask.nonzero()[0].tolist() == [3, V - 1]
        assert {token: int(entry.output_counts[token]) for token in entry.output_counts.nonzero()[0]} == {0: 1, 7: 2}
        assert entry.output_counts.shape == entry.prompt_mask.shape == (V,)

    def test_the_longest_lists_fit(self):
        params = SamplingParams(
            logit_bias=dict.fromkeys(range(300), 1.0), stop_token_ids=range(64), min_tokens=1, ignore_eos=True
        )
        entry = entry_for(params, range(100, 116), 1000)
        assert (entry.bias_ids < 1000).all()
        assert (entry.banned_ids < 1000).all()

    def test_stop_ids_outside_the_vocabulary_are_left_out(self):
        entry = entry_for(SamplingParams(stop_token_ids=[V, 2**40, 1]), (-1,), V)
        assert entry.banned_ids[:2].tolist() == [1, V]

    def test_a_bias_outside_the_vocabulary_is_refused(self):
        with pytest.raises(RequestError, match=r"logit_bias names token id 37, expected ids below .* 37"):
            entry_for(SamplingParams(logit_bias={V: 1.0}), (), V)

    def test_too_many_bans_are_refused_only_where_they_matter(self):
        stops = tuple(range(64))
        entry_for(SamplingParams(stop_token_ids=stops), range(64, 90), 1000)
        form = StructuredOutput(regex="a")  # its masks do it
        entry_for(SamplingParams(stop_token_ids=stops, min_tokens=1, structured=form), range(64, 90), 1000)
        with pytest.raises(RequestError, match=r"min_tokens would ban 90 .* at most 80"):
            entry_for(SamplingParams(stop_token_ids=stops, min_tokens=1), range(64, 90), 1000)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"top_p": 0.5, "temperature": 0.3, "stop_token_ids": [1]}, False),
            ({"logit_bias": {1: 1.0}}, True),
            ({"min_tokens": 1}, True),
            ({"repetition_penalty": 1.1}, True),
            ({"presence_penalty": -0.1}, True),
            ({"frequency_penalty": 0.1}, True),
            ({"allowed_token_ids": [0]}, True),
        ],
        ids=str,
    )
    def test_needs_entry(self, fields, expected):
        assert needs_entry(SamplingParams(**fields)) is expected


def test_what_is_sampled_is_remembered_and_counted_from_step_to_step():
    rng = np.random.default_rng(0)
    last_token, counts = jnp.arange(10, 10 + R + 1, dtype=jnp.int32), jnp.zeros((R + 1, V), jnp.int32)
    expected_last, expected_counts = np.array(last_token), np.zeros((R + 1, V), int)
    for _ in range(20):
        token_ids = rng.integers(-1, V, R)
        entry, samples, penalised = rng.permutation(R), rng.random(R) < 0.5, rng.random(R) < 0.5
        arrays = [jnp.asarray(array, jnp.int32) for array in (entry, token_ids)]
        last_token = remember(last_token, arrays[0], jnp.asarray(samples), arrays[1])
        counts = count_output(counts, arrays[0], jnp.asarray(samples & penalised), arrays[1])
        for row in np.flatnonzero(samples):
            expected_last[entry[row]] = max(token_ids[row], 0)  # a failed row feeds token 0 on, not -1
            if penalised[row] and token_ids[row] >= 0:
                expected_counts[entry[row], token_ids[row]] += 1
    np.testing.assert_array_equal(last_token, expected_last)
    np.testing.assert_array_equal(counts, expected_counts)
    assert expected_counts.sum() > 9


class TestLoadEntry:
    @pytest.mark.parametrize(("prompt", "output"), [((), ()), ((1, 1, 4), (4, 30, 30))])
    def test_sets_one_entry(self, prompt, output):
        rng = np.random.default_rng(5)
        state = dataclasses.replace(
            make_sampler_state(R, V),
            last_token=jnp.arange(10, 10 + R + 1, dtype=jnp.int32),
            output_counts=jnp.asarray(rng.integers(0, 3, (R + 1, V)), jnp.int32),
            prompt_mask=jnp.asarray(rng.random((R + 1, V)) < 0.5),
        )
        before = [np.asarray(leaf) for leaf in (state.output_counts, state.prompt_mask)]
        entry = entry_for(
            SamplingParams(logit_bias={4: 1.5}, stop_token_ids=[8]), (2,), V, prompt=prompt, output=output
        )
        state = load_entry(state, 2, entry)
        others = np.arange(R + 1) != 2
        new = (entry.output_counts, entry.prompt_mask)
        for leaf, old, values in zip((state.output_counts, state.prompt_mask), before, new, strict=True):
            assert old[2].any()
            np.testing.assert_array_equal(np.asarray(leaf)[2], values)
            np.testing.assert_array_equal(np.asarray(leaf)[others], old[others])
        assert np.asarray(state.output_counts)[2].sum() == len(output)
        for name in ("bias_ids", "bias_values", "banned_ids"):
            np.testing.assert_array_equal(np.asarray(getattr(state, name))[2], getattr(entry, name))
        assert (np.asarray(state.bias_ids)[others] == V).all()
        assert (np.asarray(state.banned_ids)[others] == V).all()
        assert state.last_token.tolist() == [10, 11, 0, 13, 14, 15]

    def test_the_old_state_is_consumed(self):
        old = make_sampler_state(R, V)
        load_entry(old, 0, entry_for(SamplingParams(), (), V))
        assert old.output_counts.is_deleted()

    @pytest.mark.parametrize("index", [-1, R, R + 1])
    def test_refuses_the_null_entry_and_what_is_no_entry(self, index):
        with pytest.raises(ValueError, match=rf"index is {index}, expected an entry in \[0, {R}\)"):
            load_entry(make_sampler_state(R, V), index, entry_for(SamplingParams(), (), V))

    @pytest.mark.parametrize(
        ("name", "shape", "expected"),
        [
            ("banned_ids", (3,), r"\(80,\)"),
            ("output_counts", (V + 1,), rf"\({V},\)"),
            ("prompt_mask", (1,), rf"\({V},\)"),
        ],
    )
    def test_refuses_a_list_of_another_length(self, name, shape, expected):
        entry = entry_for(SamplingParams(), (), V)
        entry = entry._replace(**{name: np.zeros(shape, getattr(entry, name).dtype)})
        with pytest.raises(ValueError, match=rf"{name}.shape is \({shape[0]},\), expected {expected}"):
            load_entry(make_sampler_state(R, V), 0, entry)


class TestMasks:
    def test_an_entry_allows_what_its_request_does(self):
        free = entry_for(SamplingParams(), (), V)
        bound = entry_for(SamplingParams(allowed_token_ids=[3, 36, 3]), (), V)
        state = load_entry(load_entry(make_sampler_state(R, V), 1, bound), 3, free)
        assert unpack_mask(np.asarray(state.token_mask)[1]) == [3, 36]
        assert (np.asarray(state.token_mask)[[0, 2, 3, 4]] == ALL_TOKENS).all()

    @pytest.mark.parametrize("count", range(1, R + 1))
    def test_sets_the_masks_of_the_entries_alone(self, count):
        masks = [(index, pack_mask([index, 36 - index], V)) for index in range(count)]
        state = load_masks(make_sampler_state(R, V), masks)
        for index in range(R):
            expected = {index, 36 - index} if index < count else set(range(64))
            assert set(unpack_mask(np.asarray(state.token_mask)[index])) == expected

    @pytest.mark.parametrize("count", [0, R + 1])
    def test_refuses_no_masks_and_too_many(self, count):
        with pytest.raises(ValueError, match=rf"got {count} masks, expected 1 to {R}"):
            load_masks(make_sampler_state(R, V), [(0, pack_mask([1], V))] * count)

    def test_the_old_state_is_consumed(self):
        old = make_sampler_state(R, V)
        load_masks(old, [(0, pack_mask([1], V))])
        assert old.token_mask.is_deleted()

    def test_warming_up_changes_nothing_and_leaves_nothing_to_compile(self):
        state = load_masks(make_sampler_state(9, V), [(2, pack_mask([1], V))])
        before = np.asarray(state.token_mask)
        state = warm_up_masks(state)
        np.testing.assert_array_equal(np.asarray(state.token_mask)[:9], before[:9])
        num_programs = sampler_state._load_masks._cache_size  # type: ignore[attr-defined]
        before = num_programs()
        for count in range(1, 10):
            state = load_masks(state, [(index, pack_mask([1], V)) for index in range(count)])
        assert num_programs() == before
        assert mask_row_counts(9) == (1, 8, 9)

"""`sample` against straightforward numpy, its independence of the batch, and what it compiles to."""

import contextlib
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import sampler
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.filtered_draw import TILE, Drawn
from jpaged.request import SamplingParams
from jpaged.sampler import choose_tokens, sample
from jpaged.sampler_state import entry_for, load_entry, make_sampler_state, remember
from jpaged.sampler_tuning import TUNINGS
from jpaged.sampling_rows import SAMPLING_KINDS, SamplingRow, sampling_fields, sampling_kind, unpack_sampling_rows
from tests.kernels.test_decode_gpu import abstract_hopper
from tests.kernels.test_filtered_draw import by_sorting

V = 131  # prime: no power of two, no multiple of anything
S = 32
NULL = S

CPU, GPU = TUNINGS["cpu"], TUNINGS["gpu"]

jit_sample = jax.jit(sample, static_argnums=3)
jit_choose = jax.jit(choose_tokens, static_argnums=(2, 3))


def row(params, *, seed=0, state_index=NULL, position=10, samples=True, num_output_tokens=0):
    return SamplingRow(params, seed, state_index, position, samples, num_output_tokens)


def rows_on_device(rows, num_rows=S):
    return unpack_sampling_rows(jnp.asarray(sampling_fields(rows, num_rows, NULL)))


def sample_rows(logits, rows, state=None, tuning=CPU):
    """Samples live rows of a batch of S; returns their token ids."""
    state = make_sampler_state(S, logits.shape[1]) if state is None else state
    padded = np.zeros((S, logits.shape[1]), np.float32)
    padded[: len(rows)] = logits
    return np.asarray(jit_sample(jnp.asarray(padded), rows_on_device(rows), state, tuning).token_ids)[: len(rows)]


def random_logits(seed, num_rows=S, vocab_size=V, scale=3.0):
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)


def kept_tokens(logits, params):
    """Reference: which tokens min_p, then top_k, then top_p leave, ties included; float64, by sorting."""
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    keep = p >= params.min_p
    if 0 < params.top_k < len(x):
        keep &= x >= np.sort(x)[-params.top_k]
    if params.top_p < 1:
        kept_p = np.where(keep, p, 0) / p[keep].sum()
        order = np.sort(kept_p)[::-1]
        last = np.searchsorted(np.cumsum(order), params.top_p)
        keep &= kept_p >= order[min(last, len(order) - 1)]
    return keep


class TestGreedy:
    @pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}], ids=str)
    def test_is_argmax_with_the_first_of_ties(self, fields):
        logits = random_logits(5)
        logits[1] = np.round(logits[1])
        logits[2] = 0.0
        logits[3, :7] = -np.inf
        logits[4] = -1e30
        rows = [row(SamplingParams(**fields), seed=i) for i in range(S)]
        np.testing.assert_array_equal(sample_rows(logits, rows), logits.argmax(axis=1))

    def test_ignores_seed_and_position_beside_rows_that_draw(self):
        logits = np.repeat(random_logits(7, num_rows=1), S, axis=0)
        rows = [row(SamplingParams(temperature=i % 2), seed=i, position=i) for i in range(S)]
        tokens = sample_rows(logits, rows)
        assert (tokens[::2] == logits[0].argmax()).all()
        assert len(set(tokens[1::2])) > 3


class TestDraw:
    def draws(self, logits, params, num_batches):
        """Token ids of S * num_batches draws from one row of logits: position and seed run through values."""
        batch = np.repeat(logits[None], S, axis=0)
        found = []
        for i in range(num_batches):
            rows = [row(params, seed=(i << 40) + 7 * i, position=s) for s in range(S)]
            found.append(sample_rows(batch, rows))
        return np.concatenate(found)

    @pytest.mark.parametrize(
        "fields",
        [{}, {"temperature": 2.0}, {"temperature": 0.5, "top_p": 0.9}, {"top_k": 4}, {"min_p": 0.2}],
        ids=str,
    )
    def test_follows_the_softmax_of_what_is_kept(self, fields):
        params = SamplingParams(**fields)
        logits = np.full(V, -np.inf, np.float32)
        logits[[3, 17, 40, 66, 90, 129]] = [1.0, 0.3, 2.0, -1.0, 0.0, 1.5]
        p = np.exp(logits.astype(np.float64) / params.temperature) * kept_tokens(logits, params)
        p /= p.sum()
        counts = np.bincount(self.draws(logits, params, 100), minlength=V)
        assert counts[p == 0].sum() == 0
        expected = p[p > 0] * counts.sum()
        chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
        assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in 1,000 sets of seeds; these seeds are fixed

    def test_reaches_very_unlikely_tokens_as_often_as_it_should(self):
        # 100 tokens of 1e-5 each beside one likely token: about 1 in 1,000 draws.
        logits = np.full(V, -np.inf, np.float32)
        logits[0], logits[1:101] = 0.0, np.log(1e-5)
        rare = (self.draws(logits, SamplingParams(), 200) > 0).sum()
        assert 1 <= rare <= 16  # 6.4 expected

    @pytest.mark.parametrize("word", ["seed_low", "seed_high", "position"])
    def test_depends_on_both_words_of_the_seed_and_on_the_position(self, word):
        logits = np.repeat(random_logits(8, num_rows=1), S, axis=0)
        varied = {
            "seed_low": [row(SamplingParams(), seed=i) for i in range(S)],
            "seed_high": [row(SamplingParams(), seed=i << 32) for i in range(S)],
            "position": [row(SamplingParams(), position=i) for i in range(S)],
        }[word]
        assert len(set(sample_rows(logits, varied))) > 5
        np.testing.assert_array_equal(sample_rows(logits, varied), sample_rows(logits, varied))


def mixed_requests():
    """S different ways to sample, with loaded state entries where they need one."""
    choices = [
        {"temperature": 0.0},
        {"seed": 1},
        {"top_p": 0.8},
        {"top_k": 10, "temperature": 0.6},
        {"min_p": 0.1, "temperature": 1.7},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3},
        {"logit_bias": {3: 4.0, 9: -100.0}, "top_p": 0.95},
        {"min_tokens": 5, "stop_token_ids": (0, 1, 2, 3), "temperature": 0.0, "repetition_penalty": 0.8},
    ]
    state, rows = make_sampler_state(S, V), []
    rng = np.random.default_rng(9)
    for i in range(S):
        params = SamplingParams(**choices[i % len(choices)])
        tokens = rng.integers(0, V, 20).tolist()
        state = load_entry(state, i, entry_for(params, (5,), V, prompt=tokens[:9], output=tokens[9:]))
        rows.append(row(params, seed=1000 + i, state_index=i, position=50 + i, num_output_tokens=2))
    return rows, state


@pytest.fixture(scope="module")
def mixed():
    rows, state = mixed_requests()
    logits = random_logits(10, scale=1.5)
    return rows, state, logits, sample_rows(logits, rows, state)


class TestIndependenceOfTheBatch:
    def test_alone(self, mixed):
        rows, state, logits, together = mixed
        alone = [
            int(jit_sample(jnp.asarray(logits[i : i + 1]), rows_on_device([rows[i]], 1), state).token_ids[0])
            for i in range(S)
        ]
        np.testing.assert_array_equal(alone, together)

    def test_compiled_in_another_way(self, mixed):
        rows, state, logits, together = mixed
        np.testing.assert_array_equal(sample_rows(logits, rows, state, GPU), together)

    def test_where_a_kernel_filters(self, mixed, monkeypatch):
        """All but the kernel: which rows are drawn how, and what is handed over."""

        def drawn(logits, maxima, filters, params):
            np.testing.assert_array_equal(maxima.shape, (len(logits), -(-V // TILE)))
            least, token_ids = by_sorting(logits, params)
            return Drawn(jnp.where(filters, token_ids, V - 1), least)

        monkeypatch.setattr(sampler, "can_draw_filtered", lambda shape: True)
        monkeypatch.setattr(sampler, "draw_filtered", drawn)
        rows, state, logits, together = mixed
        tuning = replace(GPU, kernels=True)
        everything = jax.jit(lambda *args: sample(*args, tuning).token_ids)
        np.testing.assert_array_equal(everything(jnp.asarray(logits), rows_on_device(rows), state), together)
        kinds = [sampling_kind(sampling_fields([one], 1, NULL)) for one in rows]
        chosen = [i for i in range(S) if kinds[i] in ("greedy", "filter")]
        of_kind = rows_on_device([rows[i] for i in chosen], len(chosen))
        found = jax.jit(lambda *args: choose_tokens(*args, "filter", tuning))(jnp.asarray(logits[chosen]), of_kind)
        np.testing.assert_array_equal(found, together[chosen])

    def test_by_the_least_kind_of_program(self, mixed):
        rows, _, logits, together = mixed
        kinds = [sampling_kind(sampling_fields([one], 1, NULL)) for one in rows]
        assert set(kinds) == set(SAMPLING_KINDS)
        assert sampling_kind(sampling_fields(rows[1:3], 2, NULL)) == "full"  # one draws from all, one from what is left
        for kind in SAMPLING_KINDS[:-1]:
            chosen = [i for i in range(S) if kinds[i] == kind]
            of_kind = rows_on_device([rows[i] for i in chosen])
            padded = np.zeros((S, V), np.float32)
            padded[: len(chosen)] = logits[chosen]
            for tuning in (CPU, GPU):
                token_ids = jit_choose(padded, of_kind, kind, tuning)
                np.testing.assert_array_equal(token_ids[: len(chosen)], together[chosen])

    def test_other_index_and_other_neighbours(self, mixed):
        rows, state, logits, together = mixed
        order = np.random.default_rng(11).permutation(S)[: S // 2]
        np.testing.assert_array_equal(sample_rows(logits[order], [rows[i] for i in order], state), together[order])

    def test_however_jax_is_told_to_make_noise(self, mixed):
        rows, state, logits, together = mixed
        with jax.threefry_partitionable(False):
            np.testing.assert_array_equal(sample_rows(logits, rows, state), together)

    def test_a_neighbour_with_nan(self, mixed):
        rows, state, logits, together = mixed
        broken = logits.copy()
        broken[4, 100] = np.nan
        expected = together.copy()
        expected[4] = -1
        np.testing.assert_array_equal(sample_rows(broken, rows, state), expected)


class TestAdjustments:
    def loaded(self, params, prompt=(), output=(), eos=(), index=2):
        entry = entry_for(params, eos, V, prompt=prompt, output=output)
        return load_entry(make_sampler_state(S, V), index, entry)

    @pytest.mark.parametrize(
        "fields",
        [
            {"repetition_penalty": 1.3},
            {"repetition_penalty": 0.7},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.9},
            {"frequency_penalty": -1.1},
            {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.6},
        ],
        ids=str,
    )
    def test_penalties_are_those_of_the_formulas(self, fields):
        # Each row shifts the unpenalised tokens so that the penalised one is just above or just below all others.
        params = SamplingParams(temperature=0.0, **fields)
        prompt, output = [10, 11], [11, 12, 12, 13, 13, 13]
        state = self.loaded(params, prompt, output)
        for token in range(10, 15):
            for raw in (2.0, -2.0):
                value = np.float32(raw)
                if token in prompt + output:
                    value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
                value -= params.frequency_penalty * output.count(token)
                value -= params.presence_penalty * (token in output)
                logits = np.full((2, V), -50.0, np.float32)
                logits[:, token] = raw
                logits[:, 100] = [value - 1e-3, value + 1e-3]
                tokens = sample_rows(logits, [row(params, state_index=2)] * 2, state)
                assert tokens.tolist() == [token, 100], (token, raw)

    def test_bias_and_bans(self):
        params = SamplingParams(temperature=0.0, logit_bias={7: 100.0, 8: 50.0}, min_tokens=2, stop_token_ids=[7])
        state = self.loaded(params, eos=(8,))
        logits = random_logits(12, num_rows=3)
        logits[:, 20] = 10.0
        rows = [row(params, state_index=2, num_output_tokens=n) for n in (0, 1, 2)]
        assert sample_rows(logits, rows, state).tolist() == [20, 20, 7]

    def test_entries_are_isolated(self):
        biased, plain = SamplingParams(temperature=0.0, logit_bias={7: 100.0}), SamplingParams(temperature=0.0)
        state = self.loaded(biased)
        logits = random_logits(13, num_rows=3)
        # The null entry, a fresh entry, and the loaded entry through a row that does not use it.
        rows = [row(biased, state_index=NULL), row(biased, state_index=3), row(plain, state_index=2)]
        np.testing.assert_array_equal(sample_rows(logits, rows, state), logits.argmax(axis=1))
        assert sample_rows(logits[:1], [row(biased, state_index=2)], state).tolist() == [7]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_all_but_one_token_banned(self, temperature):
        params = SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=range(64))
        state = self.loaded(params, eos=range(64, 80))
        logits = random_logits(14)
        logits[:, 81:] = -np.inf
        rows = [row(params, state_index=2, position=i) for i in range(S)]
        assert (sample_rows(logits, rows, state) == 80).all()

    def test_every_token_banned_is_an_error(self):
        params = SamplingParams(min_tokens=1, stop_token_ids=range(64))
        logits = random_logits(14)
        logits[:, 64:] = -np.inf
        assert (sample_rows(logits, [row(params, state_index=2)] * S, self.loaded(params)) == -1).all()


class TestResult:
    @pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
    @pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"frequency_penalty": 1.0}], ids=str)
    def test_broken_logits_give_minus_one(self, value, fields):
        logits = random_logits(15)
        logits[0, 0] = logits[1, V - 1] = logits[2, 60] = logits[3, :] = value
        logits[4] = -np.inf
        tokens = sample_rows(logits, [row(SamplingParams(**fields))] * S)
        assert (tokens[:5] == -1).all()
        assert (tokens[5:] >= 0).all()

    def test_a_ban_does_not_hide_nan(self):
        params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[9], logit_bias={9: 1.0})
        state = load_entry(make_sampler_state(S, V), 0, entry_for(params, (), V))
        logits = random_logits(16, num_rows=1)
        logits[0, 9] = np.nan
        assert sample_rows(logits, [row(params, state_index=0)], state).tolist() == [-1]

    def test_last_token_is_set_for_rows_that_sample(self):
        greedy = SamplingParams(temperature=0.0)
        logits = random_logits(17)
        logits[2, 3] = np.nan
        rows = [row(greedy, state_index=9), row(greedy, state_index=4, samples=False), row(greedy, state_index=1)]
        state = make_sampler_state(S, V)
        state = jax.tree.map(lambda x: x + 5 if x.shape == (S + 1,) else x, state)
        result = jit_sample(jnp.asarray(logits), rows_on_device(rows), state)
        best = logits[0].argmax()
        assert result.token_ids.tolist() == [best, 0, -1] + [0] * (S - 3)
        expected = np.full(S + 1, 5)
        expected[[9, 1]] = best, 0  # a failed row feeds token 0 on, not -1
        np.testing.assert_array_equal(result.state.last_token, expected)

    def test_what_is_sampled_is_counted_where_there_are_penalties(self):
        penalised, plain = SamplingParams(temperature=0.0, presence_penalty=1.0), SamplingParams(temperature=0.0)
        logits = random_logits(18, num_rows=4)
        logits[3, 5] = np.nan
        rows = [row(penalised, state_index=2), row(plain, state_index=3), row(penalised, state_index=4, samples=False)]
        rows.append(row(penalised, state_index=5))
        padded = np.zeros((S, V), np.float32)
        padded[:4] = logits
        result = jit_sample(padded, rows_on_device(rows), make_sampler_state(S, V))
        expected = np.zeros((S + 1, V), np.int32)
        expected[2, logits[0].argmax()] = 1
        np.testing.assert_array_equal(result.state.output_counts, expected)


@pytest.fixture(scope="module")
def compiled():
    def program(logits, fields, state):
        return sample(logits, unpack_sampling_rows(fields), state, GPU)

    fields = jnp.asarray(sampling_fields([row(SamplingParams())], 4, 4))
    args = (jnp.zeros((4, 1000)), fields, make_sampler_state(4, 1000))
    return jax.jit(program, donate_argnums=2).lower(*args).compile(), args[2]


class TestCompiled:
    def test_the_state_is_updated_in_place(self, compiled):
        compiled, state = compiled
        copies = re.findall(r"= \(?(?:s32|pred)\[5,1000\]\S* copy(?:-start)?\(.*", compiled.as_text())
        assert copies == []
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert compiled.memory_analysis().alias_size_in_bytes == state_bytes

    def test_nothing_is_sorted(self, compiled):
        assert not re.search(r"\b(sort|topk|top-k)\(", compiled[0].as_text(), re.IGNORECASE)

    def test_temporaries_are_a_few_times_the_logits(self, compiled):
        assert compiled[0].memory_analysis().temp_size_in_bytes < 10 * 4 * 1000 * 4

    @pytest.mark.parametrize("kind", [*SAMPLING_KINDS, "filter on Hopper"])
    def test_a_gpu_is_never_asked_which_way_to_go(self, kind):
        kind, _, hopper = kind.partition(" on ")
        if hopper and jax_version() < (0, 11):
            pytest.skip("the kernel needs jax 0.11")
        tuning = replace(GPU, kernels=bool(hopper))

        def program(logits, fields, state):
            rows = unpack_sampling_rows(fields)
            if kind == "full":
                return sample(logits, rows, state, tuning)
            return remember(state.last_token, rows.state_index, rows.samples, choose_tokens(logits, rows, kind, tuning))

        fields = jnp.asarray(sampling_fields([row(SamplingParams())], 4, 4))
        with jax.sharding.use_abstract_mesh(abstract_hopper()) if hopper else contextlib.nullcontext():
            vocab_size = 1001  # on Hopper, a kernel for rows that are no whole 16 bytes
            traced = jax.jit(program).trace(jnp.zeros((4, vocab_size)), fields, make_sampler_state(4, vocab_size))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert not re.search(r"stablehlo\.(while|case|if|sort)\b", text)
        kernels = re.findall(r"custom_call @(\w+)", text)
        assert [name[: len("mosaic_gpu")] for name in kernels] == ["mosaic_gpu"] * (4 if hopper else 0)

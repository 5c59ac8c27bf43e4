"""`sample`: from logits to token ids, on the device.

    logits -> mask -> bias and bans -> penalties -> greedy: argmax
                                                 -> else: / temperature -> min_p -> top_k -> top_p -> Gumbel-max draw

The order is vLLM's. What a step's rows need at most is known to the host, so it is a static choice (`SamplingKind`):
a greedy step costs one argmax. A row's token depends on its logits, its parameters, its seed and its position, never on
the other rows, and so not on the kind of program that sampled it.

Nothing is sorted (`jpaged.token_filter`).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.pallas_kernels.filtered_draw import TILE, DrawParams, can_draw_filtered, draw_filtered
from jpaged.pallas_kernels.noise import gumbel, gumbel_of
from jpaged.sampler_state import SamplerState, count_output, remember
from jpaged.sampler_tuning import TUNINGS, SamplerTuning, where_needed
from jpaged.sampling_rows import MIN_TEMPERATURE, SamplingKind, SamplingRows
from jpaged.token_filter import filter_logits

_TILE = 256
_MIN_TILE = 32
_LARGEST = float(jnp.finfo(jnp.float32).max)


class SampleResult(NamedTuple):
    """What a step sampled.

    Attributes:
      token_ids: the sampled tokens; -1 where the logits hold NaN or +inf, or where no token is left to sample; 0 in
        rows that do not sample.
      state: with `last_token` and, where they have penalties, `output_counts` of the sampling rows brought up to date.
    """

    token_ids: Int32[Array, " S"]
    state: SamplerState


def sample(
    logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState, tuning: SamplerTuning = TUNINGS["cpu"]
) -> SampleResult:
    """Samples one token for each row, each in its own way: the kind "full".

    Args:
      logits: raw logits of the model, one row a sequence.
      rows: how each row samples.
      state: donated by the program around.
      tuning: static.

    Example:
      >>> from jpaged.request import SamplingParams
      >>> from jpaged.sampler_state import make_sampler_state
      >>> from jpaged.sampling_rows import SamplingRow, sampling_fields, unpack_sampling_rows
      >>> row = SamplingRow(SamplingParams(temperature=0), 0, 1, position=9, samples=True, num_output_tokens=0)
      >>> rows = unpack_sampling_rows(jnp.asarray(sampling_fields([row], num_rows=1, null_entry=2)))
      >>> result = sample(jnp.array([[0.0, 3.0, 1.0]]), rows, make_sampler_state(2, 3))
      >>> result.token_ids.tolist(), result.state.last_token.tolist()
      ([1], [0, 1, 0])

    Reference: Holtzman et al. 2019 (top-p, https://arxiv.org/abs/1904.09751); Nguyen et al. 2024 (min-p,
      https://arxiv.org/abs/2407.01082); Keskar et al. 2019 (repetition penalty, https://arxiv.org/abs/1909.05858).
    """
    listed = rows.samples & (rows.uses_bias | rows.bans_stops)
    logits = where_needed(tuning, rows.samples & rows.uses_mask, lambda: _mask(logits, rows, state), logits)
    logits = where_needed(tuning, listed, lambda logits=logits: _add_bias(logits, rows, state), logits)
    penalised = rows.samples & rows.uses_penalties
    logits = where_needed(tuning, penalised, lambda logits=logits: _penalise(logits, rows, state), logits)
    token_ids = choose_tokens(logits, rows, "full", tuning)
    entry, counts = rows.state_index, rows.samples & rows.uses_penalties
    state = replace(
        state,
        last_token=remember(state.last_token, entry, rows.samples, token_ids),
        output_counts=count_output(state.output_counts, entry, counts, token_ids),
    )
    return SampleResult(token_ids, state)


def choose_tokens(
    logits: Float32[Array, "S V"], rows: SamplingRows, kind: SamplingKind, tuning: SamplerTuning
) -> Int32[Array, " S"]:
    """The token of each row, as in `SampleResult`, of logits to which no adjustment is to be made.

    Args:
      logits: of the model, adjusted where rows ask for it.
      rows: how each row samples.
      kind: static, at least what the rows need: "greedy", no row draws; "draw", no row that does filters; "filter", all
        rows that do filter; "full", anything.
      tuning: static.

    Example:
      >>> from jpaged.request import SamplingParams
      >>> from jpaged.sampling_rows import SamplingRow, sampling_fields, unpack_sampling_rows
      >>> row = SamplingRow(SamplingParams(temperature=0), 0, 1, position=9, samples=True, num_output_tokens=0)
      >>> rows = unpack_sampling_rows(jnp.asarray(sampling_fields([row], num_rows=2, null_entry=2)))
      >>> choose_tokens(jnp.array([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]]), rows, "greedy", TUNINGS["gpu"]).tolist()
      [1, 0]
    """
    draws = rows.samples & (rows.temperature >= MIN_TEMPERATURE) & (rows.top_k != 1)
    if kind == "draw" and not tuning.branches:
        best, token_ids = _draw_or_take(logits, rows, draws, tuning)
        return _checked(best, token_ids, rows)
    in_kernel = tuning.kernels and kind in ("filter", "full") and can_draw_filtered(logits.shape)
    best, token_ids, maxima = _argmax(_tiles(_without_nan(logits), TILE if in_kernel else None), tuning)
    if kind != "greedy":
        filters = draws & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        if in_kernel:
            params = DrawParams(_temperature(rows, draws), rows.top_k, rows.top_p, rows.min_p, _keys(rows))
            drawn = draw_filtered(logits, maxima, filters, params).token_ids
            if kind == "full":
                drawn = jnp.where(filters, drawn, _draw(logits, rows, draws, tuning))
        else:
            filters = None if kind == "draw" else filters
            drawn = where_needed(tuning, draws, lambda: _draw(logits, rows, draws, tuning, filters), token_ids)
        token_ids = jnp.where(draws, drawn, token_ids)
    return _checked(best, token_ids, rows)


def _checked(best: Float32[Array, " S"], token_ids: Int32[Array, " S"], rows: SamplingRows) -> Int32[Array, " S"]:
    """-1 where the best score is none, 0 in rows that do not sample."""
    return jnp.where(rows.samples, jnp.where(jnp.isfinite(best), token_ids, -1), 0)


def _mask(logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState) -> Float32[Array, "S V"]:
    """-inf for the tokens that a row's mask does not allow; NaN stays, so that a broken row is still seen."""
    num_rows, vocab_size = logits.shape
    words = state.token_mask.at[rows.state_index].get(mode="clip")
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(num_rows, -1)[:, :vocab_size] != 0
    keeps = allowed | ~rows.uses_mask[:, None] | jnp.isnan(logits)
    return jnp.where(keeps, logits, -jnp.inf)


def _add_bias(logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState) -> Float32[Array, "S V"]:
    """Adds logit_bias, and -inf to banned tokens: adding keeps a NaN a NaN, so that a broken row is still seen."""
    num_rows, vocab_size = logits.shape
    bias_ids = state.bias_ids.at[rows.state_index].get(mode="clip")
    bias_values = state.bias_values.at[rows.state_index].get(mode="clip")
    banned_ids = state.banned_ids.at[rows.state_index].get(mode="clip")
    ids = jnp.concatenate(
        [
            jnp.where(rows.uses_bias[:, None], bias_ids, vocab_size),
            jnp.where(rows.bans_stops[:, None], banned_ids, vocab_size),
        ],
        axis=1,
    )
    values = jnp.concatenate([bias_values, jnp.full(banned_ids.shape, -jnp.inf, jnp.float32)], axis=1)
    bias = jnp.zeros_like(logits).at[jnp.arange(num_rows)[:, None], ids].add(values, mode="drop")
    return logits + bias  # a scatter into the logits would make XLA copy them in every step, biased or not


def _penalise(logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState) -> Float32[Array, "S V"]:
    counts = state.output_counts.at[rows.state_index].get(mode="clip")
    in_prompt = state.prompt_mask.at[rows.state_index].get(mode="clip")
    in_output = counts > 0
    repetition = jnp.where(in_prompt | in_output, rows.repetition_penalty[:, None], 1.0)
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalised = penalised - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    penalised = penalised - jnp.where(in_output, rows.presence_penalty[:, None], 0.0)
    return jnp.where(rows.uses_penalties[:, None], penalised, logits)


def _tiles(logits: Float32[Array, "S V"], tile: int | None = None) -> Float32[Array, "S N t"]:
    """Rows in tiles of that size, or of a good one; past the vocabulary's end -inf."""
    num_rows, vocab_size = logits.shape
    size = tile or math.gcd(vocab_size, _TILE)
    size = size if size >= _MIN_TILE else _TILE
    padding = -vocab_size % size
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(num_rows, -1, size)


def _without_nan(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
    """With +inf for NaN, which a compiled maximum need not keep."""
    return jnp.where(logits <= jnp.inf, logits, jnp.inf)


class _Best(NamedTuple):
    """Of rows in tiles.

    Attributes:
      value: the largest of each row.
      token_ids: the first token that has it.
      maxima: the largest of each tile.
    """

    value: Float32[Array, " S"]
    token_ids: Int32[Array, " S"]
    maxima: Float32[Array, "S N"]


def _argmax(tiles: Float32[Array, "S N t"], tuning: SamplerTuning) -> _Best:
    """The best of tiles first, then of a row's tiles: an argmax of the row keeps one multiprocessor of a GPU busy.

    A GPU finds the place with the value, so nothing looks at the logits again. A CPU takes several times as long for
    such pairs as for values, so it looks for the place in the tile that wins.

    Args:
      tiles: without NaN; what comes out of a row that has one is of no account.
      tuning: static.
    """
    _, num_tiles, size = tiles.shape
    if not tuning.branches:
        maxima, within = _first_largest(tiles, jax.lax.broadcasted_iota(jnp.int32, tiles.shape, 2))
        token_ids = within + jnp.arange(num_tiles, dtype=jnp.int32) * size
        return _Best(*_first_largest(maxima, token_ids), maxima)
    # The barrier keeps the compiler from making one maximum of these and of the one over them, by a second pass.
    maxima = jax.lax.optimization_barrier(jnp.max(tiles, axis=2))
    tile = jnp.argmax(maxima, axis=1).astype(jnp.int32)
    within = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    token_ids = tile * size + jnp.argmax(within, axis=1).astype(jnp.int32)
    return _Best(jnp.max(maxima, axis=1), token_ids, maxima)


def _first_largest(
    values: Float32[Array, "*B n"], token_ids: Int32[Array, "*B n"]
) -> tuple[Float32[Array, "*B"], Int32[Array, "*B"]]:
    """The largest value along the last axis, and the least token that has it; token 0 if none is more than -inf."""

    def better(a, b):
        wins = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(wins, a[0], b[0]), jnp.where(wins, a[1], b[1])

    least = jnp.float32(-jnp.inf), jnp.int32(0)
    return jax.lax.reduce((values, token_ids), least, better, (values.ndim - 1,))


def _draw(
    logits: Float32[Array, "S V"],
    rows: SamplingRows,
    draws: Bool[Array, " S"],
    tuning: SamplerTuning,
    filters: Bool[Array, " S"] | None = None,
) -> Int32[Array, " S"]:
    """Gumbel-max: the argmax of logits plus Gumbel noise is a draw from their softmax.

    Args:
      logits: raw.
      rows: how each row samples.
      draws: the rows that are of account.
      tuning: static.
      filters: those that filter first, if there are any.
    """
    keys = _keys(rows)
    logits = _scaled(logits, rows, draws)
    if filters is not None:
        logits = where_needed(tuning, filters, lambda: filter_logits(logits, rows, filters, tuning), logits)
    if tuning.branches:
        with jax.threefry_partitionable(True):  # as `gumbel` makes them, whatever the program is set to
            bits = jax.vmap(lambda key: jax.random.bits(key, (logits.shape[1],), jnp.uint32))(_wrapped(keys))
        return _argmax(_tiles(logits + gumbel_of(bits)), tuning).token_ids
    return _argmax(_tiles(logits + _noise(keys, draws, logits.shape[1])), tuning).token_ids


def _draw_or_take(
    logits: Float32[Array, "S V"], rows: SamplingRows, draws: Bool[Array, " S"], tuning: SamplerTuning
) -> tuple[Float32[Array, " S"], Int32[Array, " S"]]:
    """`_argmax` of the scores that decide: with noise in rows that draw, the logits themselves in the others.

    So a step whose rows do both goes through the logits once, and the largest score still tells whether the row is
    broken.
    """
    scores = _scaled(logits, rows, draws) + _noise(_keys(rows), draws, logits.shape[1])
    best = _argmax(_tiles(scores), tuning)
    return best.value, best.token_ids


def _scaled(logits: Float32[Array, "S V"], rows: SamplingRows, draws: Bool[Array, " S"]) -> Float32[Array, "S V"]:
    """Logits divided by the temperature, in rows that draw; +inf for NaN.

    Finite ones stay finite, whatever they are divided by: a token that overflows is still likelier than one that is
    banned, at -inf, and a row of such tokens is not broken.
    """
    scaled = logits / _temperature(rows, draws)[:, None]
    return jnp.where(jnp.isfinite(logits), jnp.clip(scaled, -_LARGEST, _LARGEST), _without_nan(logits))


def _noise(keys: UInt32[Array, "S 2"], draws: Bool[Array, " S"], vocab_size: int) -> Float32[Array, "S V"]:
    """Gumbel noise in rows that draw, 0 in the others, where a GPU makes none.

    It computes both sides of a select. What is taken out of an array that was padded it computes only where the place
    is not padding, so rows that do not draw are taken from there.
    """
    num_rows = draws.shape[0]
    noise = gumbel(keys, jnp.arange(vocab_size, dtype=jnp.uint32)[None])
    row = jnp.where(draws, jnp.arange(num_rows, dtype=jnp.int32), num_rows)
    return jnp.pad(noise, ((0, 1), (0, 0))).at[row].get(mode="promise_in_bounds")


def _temperature(rows: SamplingRows, draws: Bool[Array, " S"]) -> Float32[Array, " S"]:
    return jnp.where(draws, rows.temperature, 1.0)


def _keys(rows: SamplingRows) -> UInt32[Array, "S 2"]:
    """Of the noise: it depends on (seed, position) only."""
    keys = _wrapped(jnp.stack([rows.seed_high, rows.seed_low], axis=1))
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, rows.position.astype(jnp.uint32)))


def _wrapped(keys: UInt32[Array, "S 2"]) -> Array:
    return jax.random.wrap_key_data(keys, impl="threefry2x32")

"""`sample`: from logits to token ids, on the device.

    logits -> mask -> bias and bans -> penalties -> greedy: argmax
                                                 -> else: / temperature -> min_p -> top_k -> top_p -> Gumbel-max draw

The order is vLLM's. What a step's rows need at most is known to the host, so it is a static choice (`SamplingKind`):
a greedy step costs one argmax. A row's token depends on its logits, its parameters, its seed and its position, never on
the other rows, and so not on the kind of program that sampled it.

Nothing is sorted (`jpaged.token_filter`).
"""

import math
from collections.abc import Callable
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
    in_kernel = tuning.kernels and kind in ("filter", "full") and can_draw_filtered(logits.shape)
    tiles = _tiles(logits, TILE if in_kernel else None)
    maxima = _maxima(tiles)
    if in_kernel:  # where they are used several times the compiler would look at all logits again
        maxima = jax.lax.optimization_barrier(maxima)
    best, token_ids = _argmax(maxima, lambda tile: _taken(tiles, tile))
    if kind != "greedy":
        draws = rows.samples & (rows.temperature >= MIN_TEMPERATURE) & (rows.top_k != 1)
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
    token_ids = jnp.where(jnp.isfinite(best), token_ids, -1)
    return jnp.where(rows.samples, token_ids, 0)


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


def _maxima(tiles: Float32[Array, "S N t"]) -> Float32[Array, "S N"]:
    """The largest of each tile; NaN counts as infinity, because a compiled maximum need not keep it."""
    return jnp.max(jnp.where(tiles <= jnp.inf, tiles, jnp.inf), axis=2)


def _taken(tiles: Float32[Array, "S N t"], tile: Int32[Array, " S"]) -> Float32[Array, "S t"]:
    """One tile of each row."""
    return jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]


def _argmax(
    maxima: Float32[Array, "S N"], tile_of: Callable[[Int32[Array, " S"]], Float32[Array, "S t"]]
) -> tuple[Float32[Array, " S"], Int32[Array, " S"]]:
    """The largest value of each row, +inf if the row holds a NaN, and the first token that has it.

    Tiles first, then the tokens of one tile: the maximum of each tile is all that is taken of a whole row, where an
    argmax of the row is several times slower on a CPU, and keeps one multiprocessor of a GPU busy.

    Args:
      maxima: of tiles.
      tile_of: a tile of each row.
    """
    best_tile = jnp.argmax(maxima, axis=1).astype(jnp.int32)
    within = tile_of(best_tile)
    return jnp.max(maxima, axis=1), best_tile * within.shape[1] + jnp.argmax(within, axis=1).astype(jnp.int32)


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
    logits = logits / _temperature(rows, draws)[:, None]
    if filters is not None:
        logits = where_needed(tuning, filters, lambda: filter_logits(logits, rows, filters, tuning), logits)
    tiles = _tiles(logits)
    _, num_tiles, size = tiles.shape
    if tuning.branches:
        with jax.threefry_partitionable(True):  # as `gumbel` makes them, whatever the program is set to
            bits = jax.vmap(lambda key: jax.random.bits(key, (logits.shape[1],), jnp.uint32))(_wrapped(keys))
        noisy = _tiles(logits + gumbel_of(bits))
        return _argmax(_maxima(noisy), lambda tile: _taken(noisy, tile))[1]

    def noise(tile: Int32[Array, "#S n"]) -> Float32[Array, "S m"]:
        """Of whole tiles. A GPU would store noise that two kernels need; it is made anew for the one tile that wins."""
        ids = tile[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)
        return gumbel(keys, ids.reshape(ids.shape[0], -1))

    all_noise = noise(jnp.arange(num_tiles, dtype=jnp.int32)[None]).reshape(tiles.shape)
    return _argmax(_maxima(tiles + all_noise), lambda tile: _taken(tiles, tile) + noise(tile[:, None]))[1]


def _temperature(rows: SamplingRows, draws: Bool[Array, " S"]) -> Float32[Array, " S"]:
    return jnp.where(draws, rows.temperature, 1.0)


def _keys(rows: SamplingRows) -> UInt32[Array, "S 2"]:
    """Of the noise: it depends on (seed, position) only."""
    keys = _wrapped(jnp.stack([rows.seed_high, rows.seed_low], axis=1))
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, rows.position.astype(jnp.uint32)))


def _wrapped(keys: UInt32[Array, "S 2"]) -> Array:
    return jax.random.wrap_key_data(keys, impl="threefry2x32")

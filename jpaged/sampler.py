"""`sample`: from logits to token ids, inside the jitted step.

    logits -> mask -> bias and bans -> penalties -> greedy: argmax
                                                 -> else: / temperature -> min_p -> top_k -> top_p -> Gumbel-max draw

The order is vLLM's. Each stage runs only if some row of the step needs it (`lax.cond`), so a greedy step costs one
argmax. A row's token depends on its logits, its parameters, its seed and its position, never on the other rows.

Nothing is sorted. Top-k and top-p each look for a threshold: f32 is mapped to i32 so that the order is kept, and the 32
bits of the largest threshold that still keeps enough tokens (or enough probability mass) are found one by one, each by
one pass over the row. The result is exact, and equal logits are kept or dropped together. Probability masses are summed
as integers, whose sum does not depend on the order of summation and thus not on the shape of the batch.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.sampler_state import SamplerState
from jpaged.sampling_rows import SamplingRows

MIN_TEMPERATURE = 1e-5  # below it a row is greedy: dividing by less overflows
_LOWEST_KEY = -(2**31)
_NUM_FOLDS = 16
_ARGMAX_TILE = 256
_MIN_ARGMAX_TILE = 32
_MASS_BITS = 30


class SampleResult(NamedTuple):
    """What a step sampled.

    Attributes:
      token_ids: the sampled tokens; -1 where the logits hold NaN or +inf, or where no token is left to sample; 0 in
        rows that do not sample.
      state: with `last_token` of the sampling rows set.
    """

    token_ids: Int32[Array, " S"]
    state: SamplerState


def sample(logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState) -> SampleResult:
    """Samples one token for each row.

    Args:
      logits: raw logits of the model, one row a sequence.
      rows: how each row samples.
      state: donated by the step around; this step's input tokens are counted already (`update_counts`).

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
    draws = rows.samples & (rows.temperature >= MIN_TEMPERATURE) & (rows.top_k != 1)
    adjusts = rows.samples & (rows.uses_bias | rows.bans_stops | rows.uses_mask | rows.uses_penalties)
    best, token_ids = jax.lax.cond(
        jnp.any(draws | adjusts),
        lambda: _adjust_and_draw(logits, rows, state, draws),
        lambda: _argmax(logits),
    )
    token_ids = jnp.where(jnp.isfinite(best), token_ids, -1)
    token_ids = jnp.where(rows.samples, token_ids, 0)
    entry = jnp.where(rows.samples, rows.state_index, state.null_entry)
    last_token = state.last_token.at[entry].set(jnp.maximum(token_ids, 0), mode="drop")
    return SampleResult(token_ids, replace(state, last_token=last_token))


def _adjust_and_draw(
    logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState, draws: Bool[Array, " S"]
) -> tuple[Float32[Array, " S"], Int32[Array, " S"]]:
    """The largest adjusted logit of each row, and its token: drawn, or the likeliest where the row is greedy."""
    listed = jnp.any(rows.samples & (rows.uses_mask | rows.uses_bias | rows.bans_stops))
    logits = jax.lax.cond(listed, lambda: _mask_and_add_bias(logits, rows, state), lambda: logits)
    penalised = jnp.any(rows.samples & rows.uses_penalties)
    logits = jax.lax.cond(penalised, lambda: _penalise(logits, rows, state), lambda: logits)
    best, likeliest = _argmax(logits)
    drawn = jax.lax.cond(jnp.any(draws), lambda: _draw(logits, rows, draws), lambda: likeliest)
    return best, jnp.where(draws, drawn, likeliest)


def _mask_and_add_bias(logits: Float32[Array, "S V"], rows: SamplingRows, state: SamplerState) -> Float32[Array, "S V"]:
    masked = jnp.any(rows.samples & rows.uses_mask)
    logits = jax.lax.cond(masked, lambda: _mask(logits, rows, state), lambda: logits)
    biased = jnp.any(rows.samples & (rows.uses_bias | rows.bans_stops))
    return jax.lax.cond(biased, lambda: _add_bias(logits, rows, state), lambda: logits)


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


def _fold_sum(vocab_size: int, part: Callable[[slice], Array]) -> Int32[Array, " S"]:
    """Sums an integer expression over the vocabulary; `part` gives [S, n] of a slice of n tokens.

    Slices of the row are added up element by element first. This compiles to one loop of wide vector code that stores
    nothing of the size of a row, where a plain sum on a CPU would first store all that it is to sum.
    """
    width = -(-vocab_size // _NUM_FOLDS)
    folded = part(slice(0, width))
    for start in range(width, vocab_size, width):
        piece = part(slice(start, min(start + width, vocab_size)))
        folded = folded + jnp.pad(piece, ((0, 0), (0, width - piece.shape[1])))
    return jnp.sum(folded, axis=1, dtype=jnp.int32)


def _argmax(logits: Float32[Array, "S V"]) -> tuple[Float32[Array, " S"], Int32[Array, " S"]]:
    """The largest logit, NaN if the row holds one, and the first token that has it.

    Tiles first, then the tokens of one tile: the maximum of each tile is all that is taken of a whole row, where an
    argmax of the row is several times slower on a CPU. NaN is counted because a compiled maximum need not keep it.
    """
    num_rows, vocab_size = logits.shape
    tile = math.gcd(vocab_size, _ARGMAX_TILE)
    if tile < _MIN_ARGMAX_TILE:
        tile = _ARGMAX_TILE
        tiles = jnp.pad(logits, ((0, 0), (0, -vocab_size % tile)), constant_values=-jnp.inf)
    else:
        tiles = logits
    tiles = tiles.reshape(num_rows, -1, tile)
    maxima = jnp.max(tiles, axis=2)
    best_tile = jnp.argmax(maxima, axis=1).astype(jnp.int32)
    within = jnp.take_along_axis(tiles, best_tile[:, None, None], axis=1)[:, 0]
    token_ids = best_tile * tile + jnp.argmax(within, axis=1).astype(jnp.int32)

    num_nan = _fold_sum(vocab_size, lambda columns: jnp.where(logits[:, columns] <= jnp.inf, 0, 1))
    return jnp.where(num_nan > 0, jnp.nan, jnp.max(maxima, axis=1)), token_ids


def _draw(logits: Float32[Array, "S V"], rows: SamplingRows, draws: Bool[Array, " S"]) -> Int32[Array, " S"]:
    """Gumbel-max: the argmax of logits plus Gumbel noise is a draw from their softmax."""
    logits = logits / jnp.where(draws, rows.temperature, 1.0)[:, None]
    filters = draws & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    logits = jax.lax.cond(jnp.any(filters), lambda: filter_logits(logits, rows, filters), lambda: logits)
    return _argmax(logits + _gumbel(rows, logits.shape[1]))[1]


def _gumbel(rows: SamplingRows, vocab_size: int) -> Float32[Array, "S V"]:
    """Standard Gumbel noise that depends on (seed, position) only.

    The uniform number keeps 31 bits, and log1p is exact where it is small, that is where the noise is large: with the
    usual 23 bits no token less likely than 1e-7 could ever be drawn.
    """
    keys = jax.random.wrap_key_data(jnp.stack([rows.seed_high, rows.seed_low], axis=1), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, rows.position.astype(jnp.uint32))
    bits = jax.vmap(lambda key: jax.random.bits(key, (vocab_size,), jnp.uint32))(keys)
    uniform = ((bits >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-31
    uniform = jnp.minimum(uniform, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _order_key(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Maps f32 to i32 so that the order is kept and -0 equals 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest_key(reaches: Callable[[Int32[Array, " S"]], Bool[Array, " S"]], num_rows: int) -> Int32[Array, " S"]:
    """The largest threshold for which `reaches` holds; if it holds for a key, it must hold for every lower one."""

    def try_bit(i: Int32[Array, ""], threshold: UInt32[Array, " S"]) -> UInt32[Array, " S"]:
        candidate = threshold | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
        return jnp.where(reaches(_signed(candidate)), candidate, threshold)

    return _signed(jax.lax.fori_loop(0, 32, try_bit, jnp.zeros((num_rows,), jnp.uint32)))


def _signed(x: UInt32[Array, " S"]) -> Int32[Array, " S"]:
    """Shifts [0, 2**32) to the i32 range, keeping the order."""
    return jax.lax.bitcast_convert_type(x ^ jnp.uint32(2**31), jnp.int32)


def filter_logits(
    logits: Float32[Array, "S V"], rows: SamplingRows, filters: Bool[Array, " S"]
) -> Float32[Array, "S V"]:
    """Sets to -inf what min_p, then top_k, then top_p drop; top_p is of the distribution that the other two leave.

    Args:
      logits: already divided by the temperature.
      rows: of these, min_p, top_k and top_p are read.
      filters: rows to filter; the others keep all.

    Example:
      >>> from jpaged.request import SamplingParams
      >>> from jpaged.sampling_rows import SamplingRow, sampling_fields, unpack_sampling_rows
      >>> row = SamplingRow(SamplingParams(top_k=2), 0, 0, position=9, samples=True, num_output_tokens=0)
      >>> rows = unpack_sampling_rows(jnp.asarray(sampling_fields([row], num_rows=1, null_entry=2)))
      >>> filter_logits(jnp.array([[0.0, 3.0, 1.0]]), rows, rows.samples).tolist()
      [[-inf, 3.0, 1.0]]
    """
    num_rows, vocab_size = logits.shape
    best = jnp.max(logits, axis=1)
    keys = _order_key(logits)
    lowest = jnp.full((num_rows,), _LOWEST_KEY, jnp.int32)

    limits_k = filters & (rows.top_k > 0) & (rows.top_k < vocab_size)
    top_k_key = jax.lax.cond(jnp.any(limits_k), lambda: _top_k_key(keys, rows.top_k), lambda: lowest)
    min_p_key = _order_key(best + jnp.log(rows.min_p))
    threshold = jnp.maximum(jnp.where(limits_k, top_k_key, lowest), jnp.where(filters, min_p_key, lowest))

    limits_p = filters & (rows.top_p < 1)
    top_p_key = jax.lax.cond(
        jnp.any(limits_p),
        lambda: _top_p_key(jnp.where(keys >= threshold[:, None], logits, -jnp.inf), keys, best, rows.top_p),
        lambda: lowest,
    )
    threshold = jnp.maximum(threshold, jnp.where(limits_p, top_p_key, lowest))
    threshold = jnp.minimum(threshold, _order_key(best))  # the likeliest token always stays
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def _top_k_key(keys: Int32[Array, "S V"], top_k: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """The largest key such that at least top_k tokens have it or a larger one."""

    def count(key: Int32[Array, " S"]) -> Int32[Array, " S"]:
        return _fold_sum(keys.shape[1], lambda columns: jnp.where(keys[:, columns] >= key[:, None], 1, 0))

    return _largest_key(lambda key: count(key) >= top_k, keys.shape[0])


def _top_p_key(
    logits: Float32[Array, "S V"], keys: Int32[Array, "S V"], best: Float32[Array, " S"], top_p: Float32[Array, " S"]
) -> Int32[Array, " S"]:
    """The largest key such that the tokens from it upwards hold top_p of the probability mass."""
    mass = _integer_mass(jnp.exp(logits - best[:, None]))
    total = jnp.sum(mass, axis=1, dtype=jnp.int32)
    wanted = jnp.ceil(top_p * total.astype(jnp.float32)).astype(jnp.int32)
    wanted = jnp.clip(wanted, 1, total)

    def mass_from(key: Int32[Array, " S"]) -> Int32[Array, " S"]:
        return _fold_sum(
            keys.shape[1], lambda columns: jnp.where(keys[:, columns] >= key[:, None], mass[:, columns], 0)
        )

    return _largest_key(lambda key: mass_from(key) >= wanted, keys.shape[0])


def _integer_mass(weights: Float32[Array, "S V"]) -> Int32[Array, "S V"]:
    """Scales weights in [0, 1], the largest of a row 1, to integers that sum to about 2**30 a row.

    The scale comes from the sum of the weights in fixed point, two words each, so few bits that V of them cannot
    overflow. The scale too is then the same in every batch.
    """
    word = 31 - weights.shape[1].bit_length()
    scaled = weights * (2.0**word - 1)
    high = jnp.floor(scaled)
    low = jnp.floor((scaled - high) * 2.0**word)
    high_sum = jnp.sum(high.astype(jnp.int32), axis=1, dtype=jnp.int32).astype(jnp.float32)
    low_sum = jnp.sum(low.astype(jnp.int32), axis=1, dtype=jnp.int32).astype(jnp.float32)
    total = (high_sum + low_sum * 2.0**-word) / (2.0**word - 1)
    return jnp.round(weights * (2.0**_MASS_BITS / total)[:, None]).astype(jnp.int32)

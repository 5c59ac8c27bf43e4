"""`filter_logits`: min_p, top_k and top_p without a sort.

Top-k and top-p each look for a threshold: f32 is mapped to i32 so that the order is kept, and the 32 bits of the
largest threshold that still keeps enough tokens (or enough probability mass) are found a few at a time, each few by one
pass over the row. The result is exact, and equal logits are kept or dropped together. Probability masses are summed as
integers, whose sum does not depend on the order of summation and thus not on the shape of the batch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.sampler_tuning import TUNINGS, SamplerTuning, where_needed
from jpaged.sampling_rows import SamplingRows

_LOWEST_KEY = -(2**31)
_KEY_OF_MINUS_INFINITY = -(2**31) + 0x7FFFFF
_NUM_FOLDS = 16
_MASS_BITS = 30
_PART = 8192  # terms that one block of a GPU sums


def filter_logits(
    logits: Float32[Array, "S V"],
    rows: SamplingRows,
    filters: Bool[Array, " S"],
    tuning: SamplerTuning = TUNINGS["cpu"],
) -> Float32[Array, "S V"]:
    """Sets to -inf what min_p, then top_k, then top_p drop; top_p is of the distribution that the other two leave.

    Args:
      logits: already divided by the temperature.
      rows: of these, min_p, top_k and top_p are read.
      filters: rows to filter; the others keep all.
      tuning: static.

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
    lowest = jnp.full((num_rows,), _LOWEST_KEY, jnp.int32)

    limits_k = filters & (rows.top_k > 0) & (rows.top_k < vocab_size)
    top_k_key = where_needed(tuning, limits_k, lambda: _top_k_key(logits, rows.top_k, tuning.bits), lowest)
    min_p_key = _order_key(best + jnp.log(rows.min_p))
    threshold = jnp.maximum(jnp.where(limits_k, top_k_key, lowest), jnp.where(filters, min_p_key, lowest))

    limits_p = filters & (rows.top_p < 1)
    top_p_key = where_needed(
        tuning, limits_p, lambda: _top_p_key(logits, threshold, best, rows.top_p, tuning.bits), lowest
    )
    threshold = jnp.maximum(threshold, jnp.where(limits_p, top_p_key, lowest))
    threshold = jnp.minimum(threshold, _order_key(best))  # the likeliest token always stays
    return jnp.where(logits >= _value(threshold)[:, None], logits, -jnp.inf)


def _top_k_key(logits: Float32[Array, "S V"], top_k: Int32[Array, " S"], bits: int) -> Int32[Array, " S"]:
    """The largest key such that at least top_k tokens have it or a larger one."""
    return _largest_key(_one, (), logits, top_k, bits)


def _one(logits: Float32[Array, "S V"]) -> Int32[Array, ""]:
    """What a token counts for in top-k."""
    return jnp.int32(1)


def _top_p_key(
    logits: Float32[Array, "S V"],
    lowest: Int32[Array, " S"],
    best: Float32[Array, " S"],
    top_p: Float32[Array, " S"],
    bits: int,
) -> Int32[Array, " S"]:
    """The largest key such that the tokens from it upwards hold top_p of the probability mass.

    Args:
      logits: of all tokens.
      lowest: key of the least likely tokens that have any mass.
      best: the largest logit of each row.
      top_p: by row.
      bits: see `SamplerTuning`.
    """
    scale = _mass_scale(_weights(logits, lowest, best))
    total = jnp.sum(_mass(logits, lowest, best, scale), axis=1, dtype=jnp.int32)
    wanted = jnp.ceil(top_p * total.astype(jnp.float32)).astype(jnp.int32)
    return _largest_key(_mass, (lowest, best, scale), logits, jnp.clip(wanted, 1, total), bits)


def _weights(
    logits: Float32[Array, "S V"], lowest: Int32[Array, " S"], best: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """Probabilities, but for a factor; 0 below the lowest key."""
    return jnp.where(logits >= _value(lowest)[:, None], jnp.exp(logits - best[:, None]), 0.0)


def _mass(
    logits: Float32[Array, "S V"], lowest: Int32[Array, " S"], best: Float32[Array, " S"], scale: Float32[Array, " S"]
) -> Int32[Array, "S V"]:
    """What a token counts for in top-p."""
    return jnp.round(_weights(logits, lowest, best) * scale[:, None]).astype(jnp.int32)


def _mass_scale(weights: Float32[Array, "S V"]) -> Float32[Array, " S"]:
    """What makes weights in [0, 1], the largest of a row 1, integers that sum to about 2**30 a row.

    It comes from the sum of the weights in fixed point, two words each, so few bits that V of them cannot overflow.
    Thus it is the same in every batch, as is the sum of the integers.
    """
    word = 31 - weights.shape[1].bit_length()
    scaled = weights * (2.0**word - 1)
    high = jnp.floor(scaled)
    low = jnp.floor((scaled - high) * 2.0**word)
    high_sum = jnp.sum(high.astype(jnp.int32), axis=1, dtype=jnp.int32).astype(jnp.float32)
    low_sum = jnp.sum(low.astype(jnp.int32), axis=1, dtype=jnp.int32).astype(jnp.float32)
    total = (high_sum + low_sum * 2.0**-word) / (2.0**word - 1)
    return 2.0**_MASS_BITS / total


def _order_key(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Maps f32 to i32 so that the order is kept and -0 equals 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _value(key: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The number of a key: x >= _value(key) where _order_key(x) >= key. NaN, to which nothing compares, above +inf."""
    value = jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)
    return jnp.where(key < _KEY_OF_MINUS_INFINITY, -jnp.inf, value)


def _largest_key(
    measure: Callable[..., Array],
    operands: tuple[Array, ...],
    logits: Float32[Array, "S V"],
    wanted: Int32[Array, " S"],
    bits: int,
) -> Int32[Array, " S"]:
    """The largest threshold from which upwards tokens count for at least `wanted`.

    Args:
      measure: of logits and operands, what each token counts for: one number for all, or i32[S, V].
      operands: arrays.
      logits: of the tokens.
      wanted: by row.
      bits: see `SamplerTuning`.
    """
    num_rows, vocab_size = logits.shape
    threshold = jnp.zeros((num_rows,), jnp.uint32)
    if bits == 1:
        counts = measure(logits, *operands)

        def try_bit(i: Int32[Array, ""], threshold: UInt32[Array, " S"]) -> UInt32[Array, " S"]:
            candidate = threshold | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
            value = _value(_signed(candidate))[:, None]

            def part(columns: slice) -> Int32[Array, "S n"]:
                return jnp.where(logits[:, columns] >= value, counts[:, columns] if counts.ndim else counts, 0)

            return jnp.where(_fold_sum(vocab_size, part) >= wanted, candidate, threshold)

        return _signed(jax.lax.fori_loop(0, 32, try_bit, threshold))
    end = 32
    while end > 0:
        shift = max(end - bits, 0)
        threshold = _find_digit(
            logits, threshold, jnp.uint32(shift), wanted, operands, num_digits=2 ** (end - shift), measure=measure
        )
        end = shift
    return _signed(threshold)


@functools.partial(jax.jit, static_argnames=("num_digits", "measure"))
def _find_digit(logits, threshold, place, wanted, operands, *, num_digits: int, measure: Callable[..., Array]):
    """The threshold u32[S] with its digit at this place, by one pass over the row; jitted, to be traced once for all.

    To make masses anew in each pass costs less than to store and read them; without the barrier the compiler would see
    that they are the same. Nor does it see which place it is, and so all passes are one kernel to it.
    """
    logits, threshold, place = jax.lax.optimization_barrier((logits, threshold, place))
    digits = jnp.arange(1, num_digits, dtype=jnp.uint32) << place
    values = _value(_signed(threshold[:, None] | digits))
    counts = measure(logits, *operands)
    sums = _sums([jnp.where(logits >= values[:, i, None], counts, 0) for i in range(num_digits - 1)])
    digit = jnp.sum((sums >= wanted[:, None]).astype(jnp.uint32), axis=1, dtype=jnp.uint32)
    return threshold | (digit << place)


def _sums(terms: list[Int32[Array, "S V"]]) -> Int32[Array, "S n"]:
    """The sum of each over the vocabulary, by one reduction of all, and so one pass over what they are made of.

    Rows are summed in parts, for few rows would not keep all multiprocessors busy. Larger ones than the compiler's own
    leave each thread more to add up before all those sums are passed among threads.
    """
    num_rows, vocab_size = terms[0].shape
    parts = next((n for n in range(-(-vocab_size // _PART), _PART) if vocab_size % n == 0), 1)
    split = [term.reshape(num_rows, parts, -1) for term in terms]
    zeros = [jnp.zeros((), jnp.int32)] * len(terms)
    sums = jax.lax.reduce(split, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (2,))
    return jnp.sum(jnp.stack(sums, axis=1), axis=2, dtype=jnp.int32)


def _signed(x: UInt32[Array, " S"]) -> Int32[Array, " S"]:
    """Shifts [0, 2**32) to the i32 range, keeping the order."""
    return jax.lax.bitcast_convert_type(x ^ jnp.uint32(2**31), jnp.int32)


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

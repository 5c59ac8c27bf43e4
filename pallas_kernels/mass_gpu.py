"""The probability mass of whole rows for top-p, summed by as many warpgroups as a row has pieces, in two launches.

Masses are integers, so their sum does not depend on who adds up what. The first launch adds up weights, from which
follows what makes them masses that sum to 2**30; the second adds up these masses, each rounded.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .pieces_gpu import PIECE, compiler_params, pieces_of

_MASS_BITS = 30


class Numbers(NamedTuple):
    """What a kernel knows of a row; logits are scaled, that is divided by the temperature.

    Attributes:
      temperature: f32[].
      best: f32[], the largest logit.
      bound: f32[], the candidates hold all logits above it; -inf if they hold all that are above -inf.
      floor: f32[], what min_p asks for at least.
      top_p: f32[], 1 is off.
      filters: bool[], whether the row is of account.
      top_k: i32[], 0 is off.
      key: of the noise, two u32[].
    """

    temperature: jax.Array
    best: jax.Array
    bound: jax.Array
    floor: jax.Array
    top_p: jax.Array
    filters: jax.Array
    top_k: jax.Array
    key: tuple[jax.Array, jax.Array]

    def misses(self, threshold: jax.Array) -> jax.Array:
        """Whether some logits from the threshold upwards may be no candidates."""
        return (threshold <= self.bound) & (self.bound > -jnp.inf)

    @property
    def weighs_all(self) -> jax.Array:
        """Whether top-p is of logits that are not all among the candidates, which is known beforehand."""
        return self.filters & (self.top_k == 0) & (self.top_p < 1) & self.misses(self.floor)


def read_numbers(floats, integers, row: jax.Array) -> Numbers:
    """Of a row of f32[S, 5]: temperature, best, bound, log of min_p, top_p; and of i32[S, 4]: filters, top_k, key."""
    temperature, best, bound, log_min_p, top_p = (floats[row, i] for i in range(5))
    filters, top_k, *key = (integers[row, i] for i in range(4))
    best, bound = best / temperature, bound / temperature
    high, low = (lax.bitcast_convert_type(word, jnp.uint32) for word in key)
    return Numbers(temperature, best, bound, best + log_min_p, top_p, filters != 0, top_k, (high, low))


@dataclass(frozen=True)
class Mass:
    """What a scaled logit weighs, as `jpaged.token_filter` has it.

    Attributes:
      best: f32[], weighs 1.
      lowest: f32[], what is below it weighs nothing.
      word: bits of a word of a weight in fixed point: so few that a vocabulary of them cannot overflow.
    """

    best: jax.Array
    lowest: jax.Array
    word: int

    def weights(self, scaled: jax.Array) -> jax.Array:
        return jnp.where(scaled >= self.lowest, jnp.exp(scaled - self.best), 0.0)

    def words(self, scaled: jax.Array) -> list[jax.Array]:
        """Weights in fixed point, i32, two words each."""
        fixed = self.weights(scaled) * (2.0**self.word - 1)
        upper = fixed.astype(jnp.int32)
        return [upper, ((fixed - upper.astype(jnp.float32)) * 2.0**self.word).astype(jnp.int32)]

    def scale(self, upper: jax.Array, lower: jax.Array) -> jax.Array:
        """What makes weights masses, by the sums of their words."""
        total = upper.astype(jnp.float32) + lower.astype(jnp.float32) * 2.0**-self.word
        return 2.0**_MASS_BITS / (total / (2.0**self.word - 1))

    def of(self, scaled: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.round(self.weights(scaled) * scale).astype(jnp.int32)


def word_bits(vocab_size: int) -> int:
    """See `Mass.word`."""
    return 31 - vocab_size.bit_length()


def weigh_rows_gpu(logits, floats, integers, *, interpret: Any = None) -> jax.Array:
    """i32[S, 3]: sums of the upper and lower words of weights, and of masses, of rows that `Numbers.weighs_all`.

    Args:
      logits: f32[S, V].
      floats, integers: see `read_numbers`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    words = _sums(logits, floats, integers, interpret=interpret)
    masses = _sums(logits, floats, integers, words, interpret=interpret)
    return jnp.concatenate([words, masses], axis=1)


@functools.partial(jax.jit, static_argnames="interpret")
def _sums(logits, floats, integers, words=None, *, interpret: Any):
    """i32[S, 2], of words; or, where their sums are known, i32[S, 1], of masses."""
    num_rows, vocab_size = logits.shape
    moves, in_flight = pieces_of(vocab_size, interpret)
    part_size = in_flight * PIECE
    num_sums = 2 if words is None else 1

    def body(logits_ref, floats_ref, integers_ref, *refs):
        words_ref, outputs = (None, refs) if words is None else (refs[0], refs[1:])
        row, part = lax.axis_index("row"), lax.axis_index("part")
        numbers = read_numbers(floats_ref, integers_ref, row)
        mass = Mass(numbers.best, numbers.floor, word_bits(vocab_size))

        def terms(scaled: jax.Array) -> list[jax.Array]:
            if words_ref is None:
                return mass.words(scaled)
            return [mass.of(scaled, mass.scale(words_ref[row, 0], words_ref[row, 1]))]

        def run() -> list[jax.Array]:
            pieces = [moves.load(logits_ref, row, part * part_size + i * PIECE) for i in range(in_flight)]
            totals = [moves.spread(0, jnp.int32)] * num_sums
            for piece in pieces:
                totals = [a + b for a, b in zip(totals, terms(piece / numbers.temperature), strict=True)]
            return [jnp.sum(total) for total in totals]

        sums = lax.cond(numbers.weighs_all, run, lambda: [jnp.int32(0)] * num_sums)
        for output, total in zip(outputs, sums, strict=True):
            output[row, part] = total

    num_parts = -(-vocab_size // part_size)
    parts = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((num_rows, num_parts), jnp.int32)] * num_sums,
        grid=(num_rows, num_parts),
        grid_names=("row", "part"),
        kernel_name="weigh_rows",
        compiler_params=compiler_params(),
        interpret=interpret,
    )(logits, floats, integers, *([] if words is None else [words]))
    return jnp.stack([jnp.sum(part, axis=1, dtype=jnp.int32) for part in parts], axis=1)

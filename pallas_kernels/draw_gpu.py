"""`draw_filtered` for Hopper in Pallas Mosaic GPU: a warpgroup a row finds its threshold by counting, not sorting.

A pass goes over a row's candidates, or over its whole vocabulary where they do not do, and adds up what is at or above
eight thresholds at once, for numbers that lie between two bounds. Then the bounds move together. A pass also finds the
least and the largest logit between the bounds; once these are one number, that is the threshold. So a search takes a
few passes over the candidates, a sixteenth of a large vocabulary, where bit by bit it would take thirty-two over all.

All decisions are made by numbers of these kernels alone: what is handed over is a logit, to which others can be
compared as they are.
"""

# Mosaic GPU's own modules are barely annotated, and differ between versions of jax.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mass_gpu import Mass, Numbers, read_numbers, word_bits
from .noise import gumbel_in_kernel, threefry
from .pieces_gpu import PIECE, compiler_params, pieces_of

_THRESHOLDS = 8
_MAX_PASSES = 110  # from the largest f32 to the next one of the least, by factors of 8
_NO_MASS = 22.0  # logits that much below the best weigh less than 2**-31 of it: they round to no mass


class _Search(NamedTuple):
    """Between which numbers the threshold lies: enough is at or above `low`, less than that at or above `high`.

    Attributes:
      low, high: f32[]; `high` itself is tried by the first pass.
      found: bool[]; then `low` is the threshold.
      passes: i32[].
    """

    low: jax.Array
    high: jax.Array
    found: jax.Array
    passes: jax.Array


@dataclass(frozen=True)
class _Row:
    """A row: its logits, its candidates, and passes over either.

    Attributes:
      moves: `RegisterPieces` or `PlainPieces`.
      logits: reference [S, V].
      candidates: reference [S, C].
      row: i32[].
      temperature: f32[].
      in_flight: pieces that are loaded together.
    """

    moves: Any
    logits: Any
    candidates: Any
    row: jax.Array
    temperature: jax.Array
    in_flight: int

    def fold(
        self,
        whole: jax.Array,
        start: tuple,
        step: Callable[[tuple, jax.Array, jax.Array], tuple],
    ):
        """A pass over the row or its candidates: `step` of accumulators, logits, and these scaled."""
        chunk_size = self.in_flight * PIECE
        chunks = [-(-ref.shape[1] // chunk_size) for ref in (self.logits, self.candidates)]

        def load(ref, start):
            return tuple(self.moves.load(ref, self.row, start + i * PIECE) for i in range(self.in_flight))

        def chunk_step(chunk, accumulators):
            start = chunk * chunk_size
            pieces = lax.cond(whole, lambda: load(self.logits, start), lambda: load(self.candidates, start))
            for piece in pieces:
                accumulators = step(accumulators, piece, piece / self.temperature)
            return accumulators

        return lax.fori_loop(0, jnp.where(whole, *chunks), chunk_step, start)

    def sums(self, whole: jax.Array, terms: Callable[[jax.Array], list[jax.Array]], count: int) -> list[jax.Array]:
        """The sum of each of `count` i32 terms of the scaled logits."""
        start = tuple(self.moves.spread(0, jnp.int32) for _ in range(count))

        def step(accumulators, _, scaled):
            return tuple(a + term for a, term in zip(accumulators, terms(scaled), strict=True))

        return [jnp.sum(x) for x in self.fold(whole, start, step)]

    def least(self, whole: jax.Array, threshold: jax.Array) -> jax.Array:
        """The least logit that, scaled, reaches the threshold; +inf if there is none."""

        def step(accumulators, logits, scaled):
            return (jnp.minimum(accumulators[0], jnp.where(scaled >= threshold, logits, jnp.inf)),)

        return jnp.min(self.fold(whole, (self.moves.spread(jnp.inf, jnp.float32),), step)[0])

    def finite(self, whole: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """How many scaled logits are above the bound, how many above -inf, and the least of these."""
        start = (
            self.moves.spread(0, jnp.int32),
            self.moves.spread(0, jnp.int32),
            self.moves.spread(jnp.inf, jnp.float32),
        )

        def step(accumulators, _, scaled):
            above, count, least = accumulators
            is_finite = scaled > -jnp.inf
            above, count = above + (scaled > bound).astype(jnp.int32), count + is_finite.astype(jnp.int32)
            return above, count, jnp.minimum(least, jnp.where(is_finite, scaled, jnp.inf))

        above, count, least = self.fold(whole, start, step)
        return jnp.sum(above), jnp.sum(count), jnp.min(least)

    def search(
        self, whole: jax.Array, measure: Callable[[jax.Array], Any], wanted: jax.Array, low: jax.Array, high: jax.Array
    ) -> jax.Array:
        """The largest scaled logit from which upwards all measure at least `wanted`, of those in [low, high].

        Args:
          whole: whether to look at the whole row.
          measure: i32 of scaled logits, at least 0.
          wanted: what all from `low` upwards measure at least; nothing above `high` does.
          low, high: finite.
        """

        def narrow(state: _Search) -> _Search:
            tried = []
            for i in range(1, _THRESHOLDS):
                part = i / _THRESHOLDS
                tried.append(jnp.clip(state.low * (1 - part) + state.high * part, state.low, state.high))
            tried.append(state.high)

            def step(accumulators, _, scaled):
                *totals, least, largest = accumulators
                measured = measure(scaled)
                totals = [a + jnp.where(scaled >= t, measured, 0) for a, t in zip(totals, tried, strict=True)]
                least = jnp.minimum(least, jnp.where(scaled >= state.low, scaled, jnp.inf))
                return *totals, least, jnp.maximum(largest, jnp.where(scaled < state.high, scaled, -jnp.inf))

            start = [self.moves.spread(0, jnp.int32)] * _THRESHOLDS
            start += [self.moves.spread(x, jnp.float32) for x in (jnp.inf, -jnp.inf)]
            *totals, least, largest = self.fold(whole, tuple(start), step)
            least, largest = jnp.min(least), jnp.max(largest)
            low, high = jnp.maximum(state.low, least), state.high
            for total, threshold in zip(totals, tried, strict=True):  # ascending: totals fall
                enough = jnp.sum(total) >= wanted
                low = jnp.where(enough, jnp.maximum(low, threshold), low)
                high = jnp.where(enough, high, jnp.minimum(high, threshold))
            at_high = low >= state.high
            alone = (least == largest) & ~at_high
            return _Search(jnp.where(alone, least, low), high, at_high | alone, state.passes + 1)

        start = _Search(low, high, jnp.bool_(False), jnp.int32(0))
        return lax.while_loop(lambda s: ~s.found & (s.passes < _MAX_PASSES), narrow, start).low


class Filtered(NamedTuple):
    """What is left of a row.

    Attributes:
      threshold: f32[], of scaled logits.
      inside: bool[], whether all that stays is among the candidates.
    """

    threshold: jax.Array
    inside: jax.Array


def _filter(row: _Row, numbers: Numbers, sums: tuple[jax.Array, ...], word: int) -> Filtered:
    """min_p, then top_k, then top_p, as `jpaged.token_filter.filter_logits` has them.

    Args:
      row: of the logits.
      numbers: of the row.
      sums: three i32[] of `weigh_rows_gpu`, for a row that it weighs.
      word: see `Mass`.
    """
    best, bound, top_k = numbers.best, numbers.bound, numbers.top_k
    candidates, nothing = jnp.bool_(False), jnp.float32(-jnp.inf)

    def high(whole: jax.Array) -> jax.Array:
        return jnp.where(whole, bound, best)  # what is above the bound was not enough

    def by_count() -> jax.Array:
        found = row.finite(candidates, bound)
        whole = (found[0] < top_k) & (bound > -jnp.inf)
        _, count, least = lax.cond(whole, lambda: row.finite(whole, bound), lambda: found)
        low = jnp.where(whole, least, jnp.maximum(least, bound))
        return lax.cond(
            count < top_k, lambda: nothing, lambda: row.search(whole, lambda _: jnp.int32(1), top_k, low, high(whole))
        )

    def by_mass() -> jax.Array:
        mass, missing = Mass(best, lowest, word), numbers.misses(lowest)

        def weigh() -> tuple[jax.Array, ...]:
            upper, lower = row.sums(missing, mass.words, 2)
            (total,) = row.sums(missing, lambda scaled: [mass.of(scaled, mass.scale(upper, lower))], 1)
            return upper, lower, total

        upper, lower, total = lax.cond(numbers.weighs_all, lambda: sums, weigh)
        scale = mass.scale(upper, lower)
        share = numbers.top_p * total.astype(jnp.float32)
        wanted = share.astype(jnp.int32)
        wanted = jnp.clip(wanted + (wanted.astype(jnp.float32) < share).astype(jnp.int32), 1, total)
        (above,) = row.sums(candidates, lambda scaled: [jnp.where(scaled > bound, mass.of(scaled, scale), 0)], 1)
        whole = missing & (above < wanted)
        low = jnp.maximum(lowest, best - _NO_MASS)
        low = jnp.where(whole, low, jnp.maximum(low, bound))
        return row.search(whole, lambda scaled: mass.of(scaled, scale), wanted, low, high(whole))

    lowest = jnp.maximum(lax.cond(top_k > 0, by_count, lambda: nothing), numbers.floor)
    threshold = lax.cond(numbers.top_p < 1, by_mass, lambda: lowest)
    threshold = jnp.minimum(jnp.maximum(threshold, lowest), best)  # the likeliest token always stays
    return Filtered(threshold, ~numbers.misses(threshold))


@functools.partial(jax.jit, static_argnames="interpret")
def filter_rows_gpu(logits, candidates, floats, integers, sums, *, interpret: Any = None):
    """What the filters leave of rows.

    Args:
      logits: f32[S, V].
      candidates: f32[S, C], C a multiple of 4: all logits of a row above its bound, and others; -inf for none.
      floats, integers: see `read_numbers`.
      sums: i32[S, 3], of `weigh_rows_gpu`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      f32[S], the least logit that stays; f32[S], the scaled threshold, +inf where all that stays is among the
      candidates.
    """
    num_rows, vocab_size = logits.shape
    moves, in_flight = pieces_of(vocab_size, interpret)

    def body(logits_ref, candidates_ref, floats_ref, integers_ref, sums_ref, least_ref, threshold_ref):
        nth = lax.axis_index("row")
        numbers = read_numbers(floats_ref, integers_ref, nth)
        row = _Row(moves, logits_ref, candidates_ref, nth, numbers.temperature, in_flight)

        def run() -> tuple[jax.Array, jax.Array]:
            known = tuple(sums_ref[nth, i] for i in range(3))
            threshold, inside = _filter(row, numbers, known, word_bits(vocab_size))
            return row.least(~inside, threshold), jnp.where(inside, jnp.inf, threshold)

        off = jnp.float32(-jnp.inf), jnp.float32(jnp.inf)
        least_ref[nth], threshold_ref[nth] = lax.cond(numbers.filters, run, lambda: off)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((num_rows,), jnp.float32)] * 2,
        grid=(num_rows,),
        grid_names=("row",),
        kernel_name="filter_rows",
        compiler_params=compiler_params(),
        interpret=interpret,
    )(logits, candidates, floats, integers, sums)


@functools.partial(jax.jit, static_argnames="interpret")
def draw_wide_gpu(logits, thresholds, floats, integers, *, interpret: Any = None):
    """Draws from whole rows, by as many warpgroups as a row has pieces: the token of largest scaled logit and noise.

    Args:
      logits: f32[S, V].
      thresholds: f32[S], scaled; +inf for rows that are not to be drawn from.
      floats, integers: see `read_numbers`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      i32[S]; anything in [0, V) for rows that were not drawn from.
    """
    num_rows, vocab_size = logits.shape
    moves, in_flight = pieces_of(vocab_size, interpret)
    part_size = in_flight * PIECE

    def body(logits_ref, thresholds_ref, floats_ref, integers_ref, best_ref, token_ref):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        numbers, threshold = read_numbers(floats_ref, integers_ref, row), thresholds_ref[row]

        def run() -> tuple[jax.Array, jax.Array]:
            def step(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                best, token = found
                start = part * part_size + i * PIECE
                scaled = moves.load(logits_ref, row, start) / numbers.temperature
                tokens = moves.places() + start
                noise = gumbel_in_kernel(threefry(*numbers.key, tokens.astype(jnp.uint32)))
                value = jnp.where(scaled >= threshold, scaled + noise, -jnp.inf)
                better = value > best
                return jnp.where(better, value, best), jnp.where(better, tokens, token)

            start = moves.spread(-jnp.inf, jnp.float32), moves.spread(0, jnp.int32)
            best, token = lax.fori_loop(0, in_flight, step, start)
            largest = jnp.max(best)
            return largest, jnp.min(jnp.where(best == largest, token, vocab_size - 1))

        off = jnp.float32(-jnp.inf), jnp.int32(0)
        best_ref[row, part], token_ref[row, part] = lax.cond(threshold < jnp.inf, run, lambda: off)

    num_parts = -(-vocab_size // part_size)
    best, tokens = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((num_rows, num_parts), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_rows, num_parts),
        grid_names=("row", "part"),
        kernel_name="draw_wide",
        compiler_params=compiler_params(),
        interpret=interpret,
    )(logits, thresholds, floats, integers)
    return jnp.take_along_axis(tokens, jnp.argmax(best, axis=1)[:, None], axis=1)[:, 0]

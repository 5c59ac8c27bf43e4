"""`draw_filtered`: a draw from what top-k, top-p and min-p leave of many rows, without a pass a bit.

Nearly always all that stays of a row is in the few tiles with the largest maxima. These tiles, the candidates, are
gathered; a kernel finds the row's threshold among them and says whether that is exact. If it is, the candidates are
drawn from. If not, the kernel has looked at the whole row, and another draws from it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from .compat import current_gpu, jax_version
from .dispatch import current_platform
from .noise import gumbel

TILE = 64
_NUM_TILES = 128
_STEPS = 64
_ROUNDS = 2
_REACH = 25.0  # scaled logits that much below the best are never worth a place among the candidates


class DrawParams(NamedTuple):
    """How rows are drawn from.

    Attributes:
      temperature: above 0.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      keys: of the noise.
    """

    temperature: Float32[Array, " S"]
    top_k: Int32[Array, " S"]
    top_p: Float32[Array, " S"]
    min_p: Float32[Array, " S"]
    keys: UInt32[Array, "S 2"]


class Drawn(NamedTuple):
    """What was drawn.

    Attributes:
      token_ids: a token a row.
      least: the least logit that the filters left.
    """

    token_ids: Int32[Array, " S"]
    least: Float32[Array, " S"]


class Candidates(NamedTuple):
    """Tiles of a row that hold all of its logits above a bound.

    Attributes:
      token_ids: ascending, V and above for none.
      logits: theirs; -inf for none.
      bound: -inf where they hold all that are above -inf.
    """

    token_ids: Int32[Array, "S C"]
    logits: Float32[Array, "S C"]
    bound: Float32[Array, " S"]


def can_draw_filtered(shape: tuple[int, ...]) -> bool:
    """Whether the kernel runs on the devices in use, for logits of this shape."""
    if jax_version() < (0, 11) or current_platform() != "gpu" or shape[0] * shape[1] >= 2**31:
        return False
    gpu = current_gpu()
    return gpu is not None and gpu.is_hopper


def draw_filtered(
    logits: Float32[Array, "S V"],
    maxima: Float32[Array, "S N"],
    filters: Bool[Array, " S"],
    params: DrawParams,
    *,
    interpret: Any = None,
) -> Drawn:
    """A token of each row: the largest sum of scaled logit and noise of those that the filters leave.

    Args:
      logits: finite or -inf in rows that are of account.
      maxima: of tiles of `TILE` logits.
      filters: the rows of account, all of which filter; what others get is of none.
      params: a row each.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    from .draw_gpu import draw_wide_gpu, filter_rows_gpu  # need jax 0.11
    from .mass_gpu import weigh_rows_gpu

    best = jnp.max(maxima, axis=1)
    filters = filters & jnp.isfinite(best / params.temperature)  # searches have ends
    found = find_candidates(logits, maxima, params.temperature)
    limits_k = (params.top_k > 0) & (params.top_k < logits.shape[1])
    keys = jax.lax.bitcast_convert_type(params.keys, jnp.int32)
    # In the order of `mass_gpu.read_numbers`.
    floats = jnp.stack([params.temperature, best, found.bound, jnp.log(params.min_p), params.top_p], axis=1)
    integers = [filters.astype(jnp.int32), jnp.where(limits_k, params.top_k, 0), keys[:, 0], keys[:, 1]]
    integers = jnp.stack(integers, axis=1)
    sums = weigh_rows_gpu(logits, floats, integers, interpret=interpret)
    least, wide = filter_rows_gpu(logits, found.logits, floats, integers, sums, interpret=interpret)
    token_ids = draw_wide_gpu(logits, wide, floats, integers, interpret=interpret)
    stays = found.logits >= least[:, None]
    noisy = found.logits / params.temperature[:, None] + gumbel(params.keys, found.token_ids)
    at = jnp.argmax(jnp.where(stays, noisy, -jnp.inf), axis=1)
    inside = jnp.take_along_axis(found.token_ids, at[:, None], axis=1)[:, 0]
    inside = jnp.minimum(inside, logits.shape[1] - 1)  # no candidate at all: an infinite logit, of no account
    return Drawn(jnp.where(wide < jnp.inf, token_ids, inside), least)


def find_candidates(
    logits: Float32[Array, "S V"], maxima: Float32[Array, "S N"], temperature: Float32[Array, " S"]
) -> Candidates:
    """The tiles of each row whose maxima are above a bound, as many as there is room for, or fewer.

    Args:
      logits: of all tokens.
      maxima: of tiles of `TILE` of them.
      temperature: says how far below the best logits are of interest.
    """
    num_rows, vocab_size = logits.shape
    bound = _bound(maxima, temperature)
    nth = jnp.cumsum(maxima > bound[:, None], axis=1, dtype=jnp.int32)
    places = jnp.arange(_NUM_TILES, dtype=jnp.int32)[:, None]
    tiles = jnp.sum(nth[:, None, :] <= places, axis=2, dtype=jnp.int32)  # past the last tile where there is none
    token_ids = (tiles[:, :, None] * TILE + jnp.arange(TILE, dtype=jnp.int32)).reshape(num_rows, -1)
    taken = jnp.take_along_axis(logits, jnp.minimum(token_ids, vocab_size - 1), axis=1)
    return Candidates(token_ids, jnp.where(token_ids < vocab_size, taken, -jnp.inf), bound)


def _bound(maxima: Float32[Array, "S N"], temperature: Float32[Array, " S"]) -> Float32[Array, " S"]:
    """A number that at most `_NUM_TILES` maxima of a row are above, and not many fewer.

    What is returned has been counted. So it may be larger than it need be, but is never too small.
    """
    high = jnp.max(maxima, axis=1)
    low = jnp.maximum(jnp.min(maxima, axis=1), high - _REACH * temperature)
    for _ in range(_ROUNDS):
        part = jnp.arange(_STEPS, dtype=jnp.float32) / _STEPS
        tried = low[:, None] * (1 - part) + high[:, None] * part
        fits = jnp.sum(maxima[:, None, :] > tried[:, :, None], axis=2, dtype=jnp.int32) <= _NUM_TILES
        low = jnp.maximum(low, jnp.max(jnp.where(fits, -jnp.inf, tried), axis=1))
        high = jnp.minimum(high, jnp.min(jnp.where(fits, tried, jnp.inf), axis=1))
    all_fit = jnp.sum(maxima > -jnp.inf, axis=1, dtype=jnp.int32) <= _NUM_TILES
    return jnp.where(all_fit, -jnp.inf, high)

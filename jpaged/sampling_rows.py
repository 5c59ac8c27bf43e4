"""`SamplingRows`: how each row of a step samples; packed on the host into one i32 array, unpacked on the device."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, no_type_check

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.packed_layout import NUM_SAMPLING_FIELDS, SAMPLING_FIELDS
from jpaged.request import SamplingParams

_MAX_INT32 = 2**31 - 1

_PACKER = struct.Struct("=" + "".join("i" if code == "b" else code for _, code in SAMPLING_FIELDS))
_DTYPES = {"i": np.dtype(np.int32), "f": np.dtype(np.float32), "I": np.dtype(np.uint32), "b": np.dtype(np.bool_)}

_INDEX = {name: index for index, (name, _) in enumerate(SAMPLING_FIELDS)}

MIN_TEMPERATURE: Final = 1e-5  # below it a row is greedy: dividing by less overflows

SamplingKind = Literal["greedy", "draw", "filter", "full"]
SAMPLING_KINDS: Final[tuple[SamplingKind, ...]] = ("greedy", "draw", "filter", "full")


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """How each row of a step samples. Rows that do not sample (padding, unfinished prefill) have `samples` False.

    Attributes:
      state_index: entry of the row in `SamplerState`; the null entry for padding.
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      repetition_penalty: 1 is off.
      presence_penalty: 0 is off.
      frequency_penalty: 0 is off.
      seed_high: upper 32 bits of the request's seed.
      seed_low: lower 32 bits.
      position: position in its sequence of the token that is sampled.
      samples: whether the row samples in this step.
      uses_penalties: whether any penalty is on.
      uses_bias: whether the row has a logit_bias.
      bans_stops: whether the output is still shorter than min_tokens, and no mask sees to that.
      uses_mask: whether the row may sample the tokens of its mask alone.
      num_logprobs: top-logprobs asked for; -1 is no logprobs at all.
    """

    state_index: Int32[Array, " S"]
    temperature: Float32[Array, " S"]
    top_k: Int32[Array, " S"]
    top_p: Float32[Array, " S"]
    min_p: Float32[Array, " S"]
    repetition_penalty: Float32[Array, " S"]
    presence_penalty: Float32[Array, " S"]
    frequency_penalty: Float32[Array, " S"]
    seed_high: UInt32[Array, " S"]
    seed_low: UInt32[Array, " S"]
    position: Int32[Array, " S"]
    samples: Bool[Array, " S"]
    uses_penalties: Bool[Array, " S"]
    uses_bias: Bool[Array, " S"]
    bans_stops: Bool[Array, " S"]
    uses_mask: Bool[Array, " S"]
    num_logprobs: Int32[Array, " S"]


class SamplingRow(NamedTuple):
    """How one row samples, on the host.

    Attributes:
      params: of the request.
      seed: in force, in [0, 2**63).
      state_index: entry of the sequence in `SamplerState`.
      position: position of the token that is sampled.
      samples: False while the prompt is not wholly computed.
      num_output_tokens: output tokens before this one, read or not; decides whether min_tokens still bans.
      num_logprobs: likeliest tokens that are wanted with their log-probabilities; -1: no log-probabilities at all.
    """

    params: SamplingParams
    seed: int
    state_index: int
    position: int
    samples: bool
    num_output_tokens: int
    num_logprobs: int = -1


def sampling_field(name: str) -> int:
    """Where a field of `SamplingRows` is in what `sampling_fields` packs.

    Example:
      >>> sampling_field("temperature")
      1
    """
    return _INDEX[name]


def sampling_fields(rows: Sequence[SamplingRow], num_rows: int, null_entry: int) -> np.ndarray:
    """Packs the rows of a step into i32[NUM_SAMPLING_FIELDS, num_rows]; floats and seeds keep their bits.

    Args:
      rows: the live rows in order.
      num_rows: S, the padded number of rows.
      null_entry: entry that padding points at (`SamplerState.null_entry`, max_num_seqs).

    Raises:
      ValueError: there are more live rows than `num_rows`.

    Example:
      >>> row = SamplingRow(SamplingParams(top_k=5), 7, state_index=0, position=9, samples=True, num_output_tokens=1)
      >>> fields = sampling_fields([row], num_rows=4, null_entry=8)
      >>> fields.shape, fields[0].tolist(), fields[2].tolist()
      ((17, 4), [0, 8, 8, 8], [5, 0, 0, 0])
    """
    if len(rows) > num_rows:
        raise ValueError(f"{len(rows)} live rows, expected at most num_rows ({num_rows})")
    words = bytearray(_PACKER.size * num_rows)
    offset = 0
    for params, seed, state_index, position, samples, num_output_tokens, num_logprobs in rows:
        _PACKER.pack_into(
            words,
            offset,
            state_index,
            params.temperature,
            min(max(params.top_k, 0), _MAX_INT32),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            seed >> 32,
            seed & 0xFFFFFFFF,
            position,
            samples,
            params.uses_penalties,
            bool(params.logit_bias),
            params.bans_stops and num_output_tokens < params.min_tokens,
            params.structured is not None or params.allowed_token_ids is not None,
            num_logprobs,
        )
        offset += _PACKER.size
    padding = _PACKER.pack(null_entry, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, -1)
    words[offset:] = padding * (num_rows - len(rows))
    return np.ascontiguousarray(np.frombuffer(words, np.int32).reshape(num_rows, NUM_SAMPLING_FIELDS).T)


def sampling_kind(fields: np.ndarray, kinds: Sequence[SamplingKind] = SAMPLING_KINDS) -> SamplingKind:
    """The least of some kinds that does for all rows of a step, as the host can tell.

    "greedy": the likeliest token; "draw": a draw from the whole softmax; "filter": one from what top_k, top_p and min_p
    leave; "full": masks, bias, bans or penalties before all that, or draws of both kinds.

    Args:
      fields: i32[NUM_SAMPLING_FIELDS, num_rows], as `sampling_fields` packs them.
      kinds: that there are, as in `SamplerTuning.kinds`; "full" is always one of them.

    Example:
      >>> row = SamplingRow(SamplingParams(top_k=5), 7, state_index=0, position=9, samples=True, num_output_tokens=1)
      >>> fields = sampling_fields([row], num_rows=4, null_entry=8)
      >>> sampling_kind(fields), sampling_kind(fields, ["greedy", "full"]), sampling_kind(fields[:, 1:])
      ('filter', 'full', 'greedy')
    """
    kind = _least_kind(fields)
    return kind if kind in kinds else "full"


def _least_kind(fields: np.ndarray) -> SamplingKind:
    def floats(name: str) -> np.ndarray:
        return fields[_INDEX[name]].view(np.float32)

    flags = fields[_INDEX["uses_penalties"] : _INDEX["uses_mask"] + 1]
    if not np.count_nonzero(flags) and not np.count_nonzero(fields[_INDEX["temperature"]]):
        return "greedy"
    samples = fields[_INDEX["samples"]] != 0
    if (samples & flags.any(axis=0)).any():
        return "full"
    top_k = fields[_INDEX["top_k"]]
    draws = samples & (floats("temperature") >= np.float32(MIN_TEMPERATURE)) & (top_k != 1)
    if not draws.any():
        return "greedy"
    filters = (top_k > 0) | (floats("top_p") < 1) | (floats("min_p") > 0)
    if not (draws & filters).any():
        return "draw"
    return "full" if (draws & ~filters).any() else "filter"  # noise for few tokens a row, or for all


def wants_logprobs(fields: np.ndarray) -> bool:
    """Whether some row asks for log-probabilities of what it samples; `fields` as for `sampling_kind`."""
    asks = fields[_INDEX["num_logprobs"]] >= 0
    return bool(np.count_nonzero(asks) and (asks & (fields[_INDEX["samples"]] != 0)).any())


def unpack_sampling_rows(fields: Int32[Array, "F S"]) -> SamplingRows:
    """Takes `sampling_fields` apart on the device, by bitcasts.

    Raises:
      ValueError: `fields` has another number of fields.

    Example:
      >>> rows = unpack_sampling_rows(jax.numpy.asarray(sampling_fields([], num_rows=2, null_entry=8)))
      >>> rows.state_index.tolist(), rows.top_p.tolist(), rows.samples.tolist()
      ([8, 8], [1.0, 1.0], [False, False])
    """
    if fields.shape[0] != NUM_SAMPLING_FIELDS:
        raise ValueError(f"{fields.shape=}, expected {NUM_SAMPLING_FIELDS} fields, as `sampling_fields` makes them")
    unpacked = {}
    for (name, code), words in zip(SAMPLING_FIELDS, fields, strict=True):
        unpacked[name] = words != 0 if code == "b" else jax.lax.bitcast_convert_type(words, _DTYPES[code])
    return SamplingRows(**unpacked)

"""`SamplerState`: what the sampler remembers of each running sequence, on the device.

One entry a running sequence, and the null entry at the end, to which padding and gated rows point. The engine loads an
entry only when a sequence comes that uses penalties, logit_bias, min_tokens or allowed_token_ids, and the masks of
sequences whose output must have a form before each step that samples for them; all other sequences use `last_token`
alone, which a step writes and the next step reads without the host in between. An entry is loaded with the tokens that
its sequence has by then; those that a step samples for it, the step counts. So the counts are complete when the next
token is sampled, and the tokens that pass through a step as its input need not be counted again.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.config import MAX_BANNED_IDS, MAX_BIAS_IDS
from jpaged.errors import RequestError
from jpaged.request import SamplingParams
from jpaged.token_mask import ALL_TOKENS, num_mask_words, pack_mask


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """One entry a running sequence and the null entry, the last one. Donated to every function that changes it.

    Lists are padded with the vocabulary size V, which scatters drop; -1 would wrap to the last token.

    Attributes:
      last_token: the token sampled last, the input of the next step; 0 where a row failed.
      output_counts: how often each token stands in the output.
      prompt_mask: which tokens stand in the prompt.
      bias_ids: token ids whose logits are biased.
      bias_values: what is added to them.
      banned_ids: token ids that cannot be sampled before min_tokens.
      token_mask: the tokens that can be sampled, one bit each (`token_mask`).
    """

    last_token: Int32[Array, " entries"]
    output_counts: Int32[Array, "entries V"]
    prompt_mask: Bool[Array, "entries V"]
    bias_ids: Int32[Array, "entries 300"]
    bias_values: Float32[Array, "entries 300"]
    banned_ids: Int32[Array, "entries 80"]
    token_mask: UInt32[Array, "entries W"]

    @property
    def null_entry(self) -> int:
        return self.last_token.shape[0] - 1

    @property
    def vocab_size(self) -> int:
        return self.output_counts.shape[1]


class SamplerEntry(NamedTuple):
    """What `load_entry` sets, on the host: the lists of one sequence, padded, and its tokens so far.

    Attributes:
      bias_ids, bias_values, banned_ids, output_counts, prompt_mask, token_mask: as in `SamplerState`, of one entry.
    """

    bias_ids: np.ndarray
    bias_values: np.ndarray
    banned_ids: np.ndarray
    output_counts: np.ndarray
    prompt_mask: np.ndarray
    token_mask: np.ndarray


def make_sampler_state(max_num_seqs: int, vocab_size: int) -> SamplerState:
    """Makes `max_num_seqs` entries and the null entry, all empty.

    Example:
      >>> state = make_sampler_state(4, 100)
      >>> state.output_counts.shape, state.null_entry
      ((5, 100), 4)
    """
    entries = max_num_seqs + 1
    return SamplerState(
        last_token=jnp.zeros((entries,), jnp.int32),
        output_counts=jnp.zeros((entries, vocab_size), jnp.int32),
        prompt_mask=jnp.zeros((entries, vocab_size), jnp.bool_),
        bias_ids=jnp.full((entries, MAX_BIAS_IDS), vocab_size, jnp.int32),
        bias_values=jnp.zeros((entries, MAX_BIAS_IDS), jnp.float32),
        banned_ids=jnp.full((entries, MAX_BANNED_IDS), vocab_size, jnp.int32),
        token_mask=jnp.full((entries, num_mask_words(vocab_size)), ALL_TOKENS, jnp.uint32),
    )


def sampler_state_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes that `make_sampler_state` takes, nearly all of them for counts and mask of each token of the vocabulary.

    Example:
      >>> state = make_sampler_state(4, 100)
      >>> sampler_state_bytes(4, 100) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
      True
    """
    shapes = jax.eval_shape(lambda: make_sampler_state(max_num_seqs, vocab_size))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def needs_entry(params: SamplingParams) -> bool:
    """Whether a sequence must be given a fresh entry by `load_entry` when it is admitted.

    Example:
      >>> needs_entry(SamplingParams()), needs_entry(SamplingParams(min_tokens=3))
      (False, True)
    """
    listed = bool(params.logit_bias) or params.allowed_token_ids is not None
    return listed or params.uses_penalties or params.min_tokens > 0


def entry_for(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> SamplerEntry:
    """Pads the bias and the banned token ids of a request. Stop ids outside the vocabulary can never come: left out.

    Args:
      params: of the request.
      eos_token_ids: the model's end-of-sequence ids.
      vocab_size: V.
      prompt, output: tokens that the sequence has by now.

    Raises:
      RequestError: logit_bias names a token outside the vocabulary, or there are too many ids to ban.

    Example:
      >>> params = SamplingParams(logit_bias={7: 1.5}, stop_token_ids=[3])
      >>> entry = entry_for(params, eos_token_ids=(2,), vocab_size=10, output=[5, 5])
      >>> entry.bias_ids[:2].tolist(), entry.bias_values[:2].tolist(), entry.banned_ids[:3].tolist()
      ([7, 10], [1.5, 0.0], [2, 3, 10])
      >>> entry.output_counts.tolist()
      [0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    """
    for token in params.logit_bias:
        if token >= vocab_size:
            raise RequestError(
                f"logit_bias names token id {token}, expected ids below the vocabulary size {vocab_size}"
            )
    banned = sorted({token for token in (*eos_token_ids, *params.stop_token_ids) if 0 <= token < vocab_size})
    if params.bans_stops and len(banned) > MAX_BANNED_IDS:
        raise RequestError(
            f"min_tokens would ban {len(banned)} end-of-sequence and stop token ids, expected at most "
            f"{MAX_BANNED_IDS}; name fewer stop_token_ids"
        )
    banned = banned[:MAX_BANNED_IDS]  # without min_tokens nothing is banned
    allowed = params.allowed_token_ids
    entry = SamplerEntry(
        bias_ids=np.full(MAX_BIAS_IDS, vocab_size, np.int32),
        bias_values=np.zeros(MAX_BIAS_IDS, np.float32),
        banned_ids=np.full(MAX_BANNED_IDS, vocab_size, np.int32),
        output_counts=np.bincount(np.array(output, np.int64), minlength=vocab_size).astype(np.int32),
        prompt_mask=np.bincount(np.array(prompt, np.int64), minlength=vocab_size) > 0,
        token_mask=(
            np.full(num_mask_words(vocab_size), ALL_TOKENS) if allowed is None else pack_mask(allowed, vocab_size)
        ),
    )
    num_bias = len(params.logit_bias)
    entry.bias_ids[:num_bias] = list(params.logit_bias.keys())
    entry.bias_values[:num_bias] = list(params.logit_bias.values())
    entry.banned_ids[: len(banned)] = banned
    return entry


def load_entry(state: SamplerState, index: int, entry: SamplerEntry) -> SamplerState:
    """Sets entry `index`, in place (`state` is donated). One compiled program for all calls.

    Args:
      state: donated.
      index: entry in [0, max_num_seqs).
      entry: see `entry_for`.

    Raises:
      ValueError: `index` is not an entry of a sequence, or an array has another length.

    Example:
      >>> entry = entry_for(SamplingParams(logit_bias={7: 1.5}), eos_token_ids=(2,), vocab_size=10)
      >>> state = load_entry(make_sampler_state(2, 10), 1, entry)
      >>> int(state.bias_ids[1, 0]), int(state.banned_ids[1, 0])
      (7, 2)
    """
    if not 0 <= index < state.null_entry:
        raise ValueError(f"index is {index}, expected an entry in [0, {state.null_entry})")
    for name, values in entry._asdict().items():
        expected = getattr(state, name).shape[1:]
        if values.shape != expected:
            raise ValueError(f"{name}.shape is {values.shape}, expected {expected}, as `entry_for` makes it")
    return _load_entry(state, np.int32(index), entry)


def warm_up_entry(state: SamplerState) -> SamplerState:
    """Compiles the program of `load_entry`, by emptying the null entry, which is empty anyway (`state` is donated)."""
    return _load_entry(state, np.int32(state.null_entry), entry_for(SamplingParams(), (), state.vocab_size))


@functools.partial(jax.jit, donate_argnums=0)
def _load_entry(state: SamplerState, index: Int32[Array, ""], entry: SamplerEntry) -> SamplerState:
    return SamplerState(
        last_token=state.last_token.at[index].set(0),
        **{name: getattr(state, name).at[index].set(values) for name, values in entry._asdict().items()},
    )


def mask_row_counts(max_num_seqs: int) -> tuple[int, ...]:
    """How many masks `load_masks` takes at once, padded: powers of 8, and as many as there are sequences.

    Example:
      >>> mask_row_counts(4), mask_row_counts(256)
      ((1, 4), (1, 8, 64, 256))
    """
    powers = [8**n for n in range(max_num_seqs.bit_length()) if 8**n < max_num_seqs]
    return (*powers, max_num_seqs)


def warm_up_masks(state: SamplerState) -> SamplerState:
    """Compiles the programs of `load_masks`; nobody's mask changes (`state` is donated)."""
    for count in mask_row_counts(state.null_entry):
        packed = np.full((count, 1 + state.token_mask.shape[1]), ALL_TOKENS)
        packed[:, 0] = state.null_entry
        state = _load_masks(state, packed)
    return state


def load_masks(state: SamplerState, masks: Sequence[tuple[int, np.ndarray]]) -> SamplerState:
    """Sets the masks of entries, in place (`state` is donated). One compiled program for each of `mask_row_counts`.

    They go over in one array whose first column is the entry.

    Args:
      state: donated.
      masks: (entry in [0, max_num_seqs), u32[W]), at least one and at most one for each entry.

    Raises:
      ValueError: there are more masks than entries, or none.

    Example:
      >>> state = load_masks(make_sampler_state(2, 40), [(1, pack_mask([0, 3, 33], vocab_size=40))])
      >>> state.token_mask[1].tolist()
      [9, 2]
    """
    if not 0 < len(masks) <= state.null_entry:
        raise ValueError(f"got {len(masks)} masks, expected 1 to {state.null_entry}, one an entry at the most")
    num_rows = next(count for count in mask_row_counts(state.null_entry) if count >= len(masks))
    packed = np.empty((num_rows, 1 + state.token_mask.shape[1]), np.uint32)
    packed[:, 0] = state.null_entry  # whose mask nobody reads
    for row, (index, mask) in zip(packed, masks, strict=False):
        row[0], row[1:] = index, mask
    packed[len(masks) :, 1:] = ALL_TOKENS
    return _load_masks(state, packed)


@functools.partial(jax.jit, donate_argnums=0)
def _load_masks(state: SamplerState, packed: UInt32[Array, "R X"]) -> SamplerState:
    index = packed[:, 0].astype(jnp.int32)
    return replace(state, token_mask=state.token_mask.at[index].set(packed[:, 1:], mode="drop"))


def remember(
    last_token: Int32[Array, " entries"],
    entry: Int32[Array, " S"],
    samples: Bool[Array, " S"],
    token_ids: Int32[Array, " S"],
) -> Int32[Array, " entries"]:
    """`last_token` with what a step sampled; 0 where that failed.

    Args:
      last_token: donated by the program around.
      entry: of each row.
      samples: the other rows are left out.
      token_ids: sampled, -1 where that failed.

    Example:
      >>> entry, token_ids = jnp.array([2, 0, 1], jnp.int32), jnp.array([7, 8, -1], jnp.int32)
      >>> remember(jnp.full(4, 5, jnp.int32), entry, jnp.array([True, False, True]), token_ids).tolist()
      [5, 0, 7, 5]
    """
    nowhere = last_token.shape[0]  # past the end: dropped
    return last_token.at[jnp.where(samples, entry, nowhere)].set(jnp.maximum(token_ids, 0), mode="drop")


def count_output(
    output_counts: Int32[Array, "entries V"],
    entry: Int32[Array, " S"],
    counts: Bool[Array, " S"],
    token_ids: Int32[Array, " S"],
) -> Int32[Array, "entries V"]:
    """`output_counts` with what a step sampled.

    Args:
      output_counts: donated by the program around.
      entry: of each row.
      counts: rows that sample and have penalties; the others are left out.
      token_ids: sampled, -1 where that failed.

    Example:
      >>> entry, token_ids = jnp.array([2, 0, 1], jnp.int32), jnp.array([1, 1, -1], jnp.int32)
      >>> counts = count_output(jnp.zeros((4, 2), jnp.int32), entry, jnp.array([True, False, True]), token_ids)
      >>> counts.tolist()
      [[0, 0], [0, 0], [0, 1], [0, 0]]
    """
    nowhere = output_counts.shape[0]  # past the end: dropped
    where = jnp.where(counts & (token_ids >= 0), entry, nowhere)
    return output_counts.at[where, token_ids].add(1, mode="drop")

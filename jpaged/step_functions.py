"""`forward_pass`, `decode_steps`: what the large programs of a step compute, to be jitted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.batch import StepInputs, unpack
from jpaged.config import StepShape
from jpaged.errors import ConfigError
from jpaged.sampler import choose_tokens
from jpaged.sampler_state import remember
from jpaged.sampler_tuning import SamplerTuning
from jpaged.step_programs import sampling_part


def forward_pass(
    model: Any, kv_pages: Any, last_token: jax.Array, packed: jax.Array, shape: StepShape, implementation: str
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Any]:
    """One step without its sampling: (logits f32[S, V], hidden [T, E], sampling fields i32[F, S]), pages.

    Args:
      model: a `PagedModel`.
      kv_pages: a `KVPages` a layer.
      last_token: i32[entries], of the sampler's state.
      packed: i32[W], see `jpaged.batch`.
      shape: of the step.
      implementation: attention back end.

    Raises:
      ConfigError: the model's logits are of another shape or dtype.
    """
    inputs = unpack(packed, shape)
    hidden, kv_pages = model(_tokens(inputs, last_token), kv_pages, inputs.meta, implementation=implementation)
    with jax.named_scope("logits"):
        logits = model.logits(hidden[inputs.source])
    _check_logits(logits, shape.num_rows, model.vocab_size)
    return (logits, hidden, sampling_part(packed, shape)), kv_pages


def decode_steps(
    model: Any,
    kv_pages: Any,
    last_token: jax.Array,
    packed: jax.Array,
    shape: StepShape,
    tuning: SamplerTuning,
    implementation: str,
) -> tuple[jax.Array, jax.Array, Any]:
    """Several steps of one token a row, each from the sample before: (token ids i32[k, S], last_token, pages).

    A row that has ended, be it that it has taken its `row_steps` or sampled one of its `stop_ids`, stays where it is:
    it computes its last token again, which writes to the pages what is there already. What it samples then is of no
    account.

    The number of steps is known when the loop is compiled, and what a row does depends on no branch. So nobody asks the
    host which way to go, which launches the same graph again and again.

    Args:
      model, kv_pages, last_token, packed, implementation: as in `forward_pass`. All rows have one token.
      shape: its T equals its S.
      tuning: of the sampler. It is the kind "draw", which does for rows that are greedy too, and makes no noise for
        them: programs of this size are dear to compile.
    """
    num_rows, page_size = shape.num_rows, kv_pages[0].spec.page_size
    inputs = unpack(packed, shape)
    tokens = _tokens(inputs, last_token)
    # A copy, as the loop's graph would have to learn where the step's own array lies this time. It is taken apart in
    # the loop, by the kernels that read it: what is made of it before would be a kernel a field.
    copied = jnp.concatenate([tokens, packed[shape.num_tokens :]])

    def step(_, carry):
        tokens, advance, nth, kv_pages, sampled = carry
        inputs = unpack(copied, shape)
        meta, rows = inputs.meta, inputs.sampling
        positions = meta.positions + advance
        page = jnp.take_along_axis(meta.page_table, (positions // page_size)[:, None], axis=1)[:, 0]
        is_row = jnp.arange(num_rows) < meta.num_seqs
        meta_now = dataclasses.replace(
            meta,
            positions=positions,
            kv_lens=meta.kv_lens + advance,
            slot_mapping=jnp.where(is_row, page * page_size + positions % page_size, 0),
        )
        hidden, kv_pages = model(tokens, kv_pages, meta_now, implementation=implementation)
        with jax.named_scope("logits"):
            logits = model.logits(hidden)
        _check_logits(logits, num_rows, model.vocab_size)
        with jax.named_scope("sample"):
            rows_now = dataclasses.replace(rows, position=rows.position + advance)
            token_ids = choose_tokens(logits, rows_now, "draw", tuning)
        stops = token_ids < 0
        for ids in inputs.stop_ids.T:
            stops |= token_ids == ids
        # A row that has stopped might sample another token now: where its attention is cut, and so how it rounds,
        # depends on the others' lengths. But it is behind by then.
        goes_on = (advance + 1 == nth) & (nth < inputs.row_steps) & ~stops
        tokens = jnp.where(goes_on, token_ids, tokens)
        advance = advance + goes_on.astype(jnp.int32)
        sampled = [jnp.where(nth == n, token_ids, others) for n, others in enumerate(sampled, start=1)]
        return tokens, advance, nth + 1, kv_pages, sampled

    # All that is carried but the pages is of one shape, so that one kernel makes it; with the loop's own counter, or an
    # array of all steps to write to, it would be several. `nothing` is never read, but its arrays differ: equal ones
    # would be one buffer, which the loop would have to copy before it writes to each.
    # `nth`, the number of the step, is one ahead of `advance` for the same reason.
    zeros, nothing = jnp.zeros(num_rows, jnp.int32), [tokens - n for n in range(1, 1 + shape.num_steps)]
    carry = (tokens, zeros, zeros + 1, kv_pages, nothing)
    _, advance, _, kv_pages, sampled = jax.lax.fori_loop(0, shape.num_steps, step, carry)
    sampled = jnp.stack(sampled)
    last = jnp.take_along_axis(sampled, advance[None], axis=0)[0]
    # Another array than that of the loop, whose graph would have to learn where it lies this time.
    rows = inputs.sampling
    sampled = jnp.where(rows.samples, sampled, 0)
    return sampled, remember(last_token, rows.state_index, rows.samples, last), kv_pages


def _tokens(inputs: StepInputs, last_token: jax.Array) -> jax.Array:
    from_device = last_token[jnp.maximum(-1 - inputs.tokens, 0)]
    return jnp.where(inputs.tokens < 0, from_device, inputs.tokens)


def _check_logits(logits: jax.Array, num_rows: int, vocab_size: int) -> None:
    if (logits.shape, logits.dtype) != ((num_rows, vocab_size), jnp.float32):
        raise ConfigError(
            f"the model's logits are {logits.dtype}{list(logits.shape)}, expected float32{[num_rows, vocab_size]}: "
            "a score for each token of its vocab_size"
        )

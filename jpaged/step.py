"""The one jitted step: tokens in, token ids out, pages updated in place.

    packed ── unpack ──► StepInputs ──► model (embed, layers over pages) ──► hidden [T, E]
                                           │ last token of each row             │ only where asked
                                           ▼                                    ▼
                             logits [S, V] ── sample ──► token ids     prompt log-probabilities

Weights are an argument, never captured, so that a training loop can swap them between steps. The pages and the sampler
state are donated: after a step the old arrays are gone and the new ones live in the same memory.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jpaged.batch import num_logprobs, packed_size, unpack
from jpaged.config import StepShape
from jpaged.errors import ConfigError, RecompileError
from jpaged.logprobs import prompt_logprobs, token_logprobs
from jpaged.models import PagedModel
from jpaged.pallas_kernels import KVPages
from jpaged.request import TokenLogprobs
from jpaged.sampler import sample
from jpaged.sampler_state import SamplerState, update_counts
from jpaged.sequence import Sequence
from jpaged.step_plan import StepPlan

logger = logging.getLogger(__name__)


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What a step gives back, on the device; the engine reads what was asked for.

    Attributes:
      token_ids: the token sampled for each row, -1 where the model produced NaN, 0 where a row does not sample.
      logprobs: raw log-probability of that token (0 unless some row asks).
      top_ids, top_logprobs: the likeliest tokens (K = max_logprobs).
      prompt_logprobs: log-probability of the token that follows each input token (0 unless some row asks).
      prompt_top_ids, prompt_top_logprobs: the likeliest tokens there.
    """

    token_ids: Int32[Array, " S"]
    logprobs: Float[Array, " S"]
    top_ids: Int32[Array, "S K"]
    top_logprobs: Float[Array, "S K"]
    prompt_logprobs: Float[Array, " T"]
    prompt_top_ids: Int32[Array, "T K"]
    prompt_top_logprobs: Float[Array, "T K"]


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was handed to the device and whose results were not read yet."""

    plan: StepPlan
    outputs: StepOutputs


@dataclass(frozen=True)
class Compilation:
    """One compiled step shape.

    Attributes:
      shape: what was compiled.
      seconds: tracing, lowering and compiling (or loading from the persistent cache) together.
      after_warmup: it came late, when every shape should have been there.
    """

    shape: StepShape
    seconds: float
    after_warmup: bool


class StepRunner:
    """Compiles the step for each shape and runs it.

    Args:
      model: any `PagedModel`.
      max_logprobs: entries of top-logprobs, K.
      implementation: attention back end.
      recompile: what a compile after `mark_warm` does: "warn" logs the shape, "error" raises.
      on_compile: told each shape just before it is compiled.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        max_logprobs: int,
        implementation: str,
        recompile: str = "warn",
        on_compile: Callable[[StepShape], None] | None = None,
    ):
        self._recompile = recompile
        self._on_compile = on_compile
        self._warm = False
        self._executables: dict[StepShape, Callable] = {}
        self.compilations: list[Compilation] = []

        graph, self.params = nnx.split(model)

        def step(params, kv_pages, state, packed, shape):  # holds no reference to self: no cycle keeps the pages alive
            model = nnx.merge(graph, params)
            return _step(model, kv_pages, state, packed, shape, max_logprobs, implementation)

        self._jitted = jax.jit(step, static_argnames="shape", donate_argnames=("kv_pages", "state"))

    def set_params(self, params: Any) -> None:
        """Replaces the weights; the next step uses them. Those that lie elsewhere (numpy, another device) are moved.

        Raises:
          ConfigError: the tree, a shape or a dtype differs from the present weights (it would recompile every shape).
        """
        old = jax.tree_util.tree_flatten_with_path(self.params)
        new = jax.tree_util.tree_flatten_with_path(params)
        if old[1] != new[1]:
            raise ConfigError("the new weights have another tree structure than the model's")
        for (path, a), (_, b) in zip(old[0], new[0], strict=True):
            name = jax.tree_util.keystr(path)
            if not isinstance(b, jax.Array | np.ndarray):
                raise ConfigError(f"new weights {name}: got {b!r:.80}, expected an array")
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise ConfigError(
                    f"new weights {name}: got {b.dtype}{list(b.shape)}, expected {a.dtype}{list(a.shape)}"
                )
        self.params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, self.params)

    def lower(self, kv_pages: list[KVPages], state: SamplerState, shape: StepShape) -> jax.stages.Lowered:
        """The step of one shape, traced and lowered (for inspection and ahead-of-time compilation)."""
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        return self._jitted.lower(self.params, kv_pages, state, packed, shape=shape)

    def compile(self, kv_pages: list[KVPages], state: SamplerState, shape: StepShape) -> Compilation:
        """Compiles one shape; `run` does it for a shape that is not there yet.

        Raises:
          RecompileError: the shape comes after `mark_warm` and `recompile` is "error".
        """
        if self._warm and self._recompile == "error":
            raise RecompileError(
                f"step shape {shape} was not compiled at start; have {list(map(str, self._executables))}"
            )
        if self._warm:
            logger.warning("step shape %s compiles late: it was not compiled at start", shape)
        if self._on_compile:
            self._on_compile(shape)
        start = time.perf_counter()
        self._executables[shape] = self.lower(kv_pages, state, shape).compile()
        done = Compilation(shape, time.perf_counter() - start, after_warmup=self._warm)
        self.compilations.append(done)
        return done

    def has(self, shape: StepShape) -> bool:
        """Whether the shape is compiled."""
        return shape in self._executables

    def mark_warm(self) -> None:
        """From now on a compile is a fault (see `recompile`)."""
        self._warm = True

    def run(
        self, kv_pages: list[KVPages], state: SamplerState, packed: np.ndarray, shape: StepShape
    ) -> tuple[StepOutputs, list[KVPages], SamplerState]:
        """Dispatches a step; returns before it is done. `kv_pages` and `state` are consumed."""
        if shape not in self._executables:
            self.compile(kv_pages, state, shape)
        return self._executables[shape](self.params, kv_pages, state, packed)


def _step(model, kv_pages, state, packed, shape, max_logprobs, implementation):
    inputs = unpack(packed, shape)
    from_device = state.last_token[jnp.maximum(-1 - inputs.tokens, 0)]
    tokens = jnp.where(inputs.tokens < 0, from_device, inputs.tokens)
    state = update_counts(state, tokens, inputs.count_entry, inputs.is_output)

    hidden, kv_pages = model(tokens, kv_pages, inputs.meta, implementation=implementation)
    with jax.named_scope("logits"):
        logits = model.logits(hidden[inputs.source])
    with jax.named_scope("sample"):
        sampled = sample(logits, inputs.sampling, state)
        wants_logprobs = jnp.any(inputs.sampling.num_logprobs >= 0)
        chosen = token_logprobs(logits, sampled.token_ids, max_logprobs, wants_logprobs)
    with jax.named_scope("prompt_logprobs"):
        prompt = prompt_logprobs(
            hidden, inputs.next_tokens, model.logits, max_logprobs, wanted=inputs.wants_prompt_logprobs
        )
    outputs = StepOutputs(sampled.token_ids, *chosen, *prompt)
    return outputs, kv_pages, sampled.state


def read_logprobs(plan: StepPlan, outputs: StepOutputs) -> Callable[[int], TokenLogprobs | None]:
    """Log-probabilities of the sampled tokens, by row; nothing is read from the device unless some row asks."""
    wanted = [num_logprobs(seq) if samples else -1 for seq, samples in zip(plan.seqs, plan.samples, strict=True)]
    if max(wanted) < 0:
        return lambda row: None
    ids, chosen, top_ids, top = jax.device_get(
        (outputs.token_ids, outputs.logprobs, outputs.top_ids, outputs.top_logprobs)
    )

    def of_row(row: int) -> TokenLogprobs | None:
        n = wanted[row]
        return None if n < 0 else _token_logprobs(ids[row], chosen[row], top_ids[row], top[row], n)

    return of_row


def read_prompt_logprobs(plan: StepPlan, outputs: StepOutputs) -> Iterator[tuple[Sequence, int, TokenLogprobs]]:
    """(sequence, position, log-probabilities) of the prompt tokens that follow this step's, for the rows that ask."""
    at, arrays = 0, None
    for row in plan.rows:
        seq, first = row.seq, at
        at += row.num_tokens
        wanted = seq.request.params.prompt_logprobs
        if wanted is None or seq.is_finished:
            continue
        end = min(row.start + row.num_tokens, seq.num_prompt_tokens - 1)
        if row.start >= end:
            continue
        if arrays is None:
            arrays = jax.device_get((outputs.prompt_logprobs, outputs.prompt_top_ids, outputs.prompt_top_logprobs))
        chosen, top_ids, top = arrays
        for position in range(row.start, end):
            i, token = first + position - row.start, seq.tokens[position + 1]
            yield seq, position + 1, _token_logprobs(token, chosen[i], top_ids[i], top[i], wanted)


def _token_logprobs(token, logprob, top_ids, top_logprobs, n: int) -> TokenLogprobs:
    top = zip(top_ids[:n].tolist(), top_logprobs[:n].tolist(), strict=True)
    top = [entry for entry in top if entry[1] > -math.inf]  # past the end of a vocabulary that has less than n tokens
    return TokenLogprobs(int(token), float(logprob), tuple(top))

"""`StepOutputs`: what a step gives back, and how the host reads it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import no_type_check

import jax
from jaxtyping import Array, Float, Int32

from jpaged.request import TokenLogprobs
from jpaged.sequence import Sequence
from jpaged.step_plan import StepPlan


@no_type_check  # trees are also made of placeholders, which have no shape
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What a step gives back, on the device; the engine reads what was asked for.

    Attributes:
      token_ids: the token sampled for each row, -1 where the model produced NaN, 0 where a row does not sample.
      logprobs: raw log-probability of that token; `None`, as the next two: no row asks.
      top_ids, top_logprobs: the likeliest tokens (K = max_logprobs).
      prompt_logprobs: log-probability of the token that follows each input token; `None`, as the next two: no row asks.
      prompt_top_ids, prompt_top_logprobs: the likeliest tokens there.
    """

    token_ids: Int32[Array, " S"]
    logprobs: Float[Array, " S"] | None = None
    top_ids: Int32[Array, "S K"] | None = None
    top_logprobs: Float[Array, "S K"] | None = None
    prompt_logprobs: Float[Array, " T"] | None = None
    prompt_top_ids: Int32[Array, "T K"] | None = None
    prompt_top_logprobs: Float[Array, "T K"] | None = None

    def copy_to_host_async(self) -> None:
        """Starts to bring over what there is."""
        for array in jax.tree.leaves(self):
            array.copy_to_host_async()


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was handed to the device and whose results were not read yet."""

    plan: StepPlan
    outputs: StepOutputs


def read_logprobs(plan: StepPlan, outputs: StepOutputs) -> Callable[[int, int], TokenLogprobs | None]:
    """Those of each row's tokens, by row and place among them; nothing is read from the device unless some row asks."""
    wanted = [seq.num_logprobs if samples else -1 for seq, samples in zip(plan.seqs, plan.samples, strict=True)]
    if max(wanted) < 0:
        return lambda row, place: None
    ids, chosen, top_ids, top = jax.device_get(
        (outputs.token_ids, outputs.logprobs, outputs.top_ids, outputs.top_logprobs)
    )

    def of_token(row: int, place: int) -> TokenLogprobs | None:
        n, at = wanted[row], row if plan.drafts is None else plan.drafts.sample_of(row, place)
        return None if n < 0 else _token_logprobs(ids[at], chosen[at], top_ids[at], top[at], n)

    return of_token


def read_prompt_logprobs(plan: StepPlan, outputs: StepOutputs) -> Iterator[tuple[Sequence, int, TokenLogprobs]]:
    """(sequence, position, log-probabilities) of the prompt tokens that follow this step's, for the rows that ask."""
    arrays = None
    for seq, first, start, end in plan.prompt_spans():
        if seq.is_finished:
            continue
        arrays = arrays or jax.device_get(
            (outputs.prompt_logprobs, outputs.prompt_top_ids, outputs.prompt_top_logprobs)
        )
        chosen, top_ids, top = arrays
        wanted = seq.request.params.prompt_logprobs or 0
        for i, position in enumerate(range(start, end), first):
            yield seq, position, _token_logprobs(seq.tokens[position], chosen[i], top_ids[i], top[i], wanted)


def _token_logprobs(token, logprob, top_ids, top_logprobs, n: int) -> TokenLogprobs:
    top = zip(top_ids[:n].tolist(), top_logprobs[:n].tolist(), strict=True)
    top = [entry for entry in top if entry[1] > -math.inf]  # past the end of a vocabulary that has less than n tokens
    return TokenLogprobs(int(token), float(logprob), tuple(top))

"""`StepRunner`: one step on the device: tokens in, token ids out, pages updated in place.

The step runs as two programs, sometimes three or four (`jpaged.step_programs`), handed to the device one after the
other without waiting for any. Weights are an argument, never captured, so that a training loop can swap them between
steps. The pages and what changes of the sampler's state are donated: after a step the old arrays are gone and the new
ones live in the same memory.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jpaged.batch import num_logprobs, packed_size, unpack
from jpaged.compilations import compile_side_by_side
from jpaged.config import StepShape
from jpaged.errors import ConfigError, RecompileError
from jpaged.logprobs import prompt_logprobs, token_logprobs
from jpaged.models import PagedModel
from jpaged.models.quantised import quantised_as
from jpaged.pallas_kernels import KVPages
from jpaged.request import TokenLogprobs
from jpaged.sampler import choose_tokens, sample
from jpaged.sampler_state import SamplerState, remember
from jpaged.sampler_tuning import TUNINGS
from jpaged.sampling_rows import NUM_SAMPLING_FIELDS, unpack_sampling_rows
from jpaged.sequence import Sequence
from jpaged.step_plan import StepPlan
from jpaged.step_programs import Program, StepNeeds, all_programs, sampling_part

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Compilation:
    """One compiled program.

    Attributes:
      program: what was compiled.
      seconds: tracing, lowering and compiling (or loading from the persistent cache) together.
      after_warmup: it came late, when every program should have been there.
    """

    program: Program
    seconds: float
    after_warmup: bool


class StepRunner:
    """Compiles the programs of the step and runs them.

    Args:
      model: any `PagedModel`.
      max_logprobs: entries of top-logprobs, K.
      implementation: attention back end.
      platform: of the device, as jax calls it; the sampler is compiled to suit it.
      recompile: what a compile after `mark_warm` does: "warn" logs the program, "error" raises.
      on_compile: told each program just before it is compiled.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        max_logprobs: int,
        implementation: str,
        platform: str = "cpu",
        recompile: str = "warn",
        on_compile: Callable[[Program], None] | None = None,
    ):
        self._recompile = recompile
        self._on_compile = on_compile
        self._warm = False
        self._executables: dict[Program, Callable] = {}
        self._hidden: jax.ShapeDtypeStruct | None = None
        self._takes_spare = platform == "gpu"
        self._spare: dict[tuple, jax.Array] = {}
        self.compilations: list[Compilation] = []

        graph, params = nnx.split(model)
        # A flat list: taking an nnx.State apart at each call would take longer than all else that a call does.
        self._weights, self._tree = jax.tree.flatten(params)
        tree, tuning = self._tree, TUNINGS.get(platform, TUNINGS["cpu"])
        self._kinds = tuning.kinds

        # These hold no reference to self: no cycle keeps the pages alive.
        def forward(weights, kv_pages, spare, last_token, packed, shape):
            model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            return _forward(model, kv_pages, last_token, packed, shape, implementation)

        def choose(logits, fields, last_token, kind):
            rows = unpack_sampling_rows(fields)
            with jax.named_scope("sample"):
                token_ids = choose_tokens(logits, rows, kind, tuning)
            return token_ids, remember(last_token, rows.state_index, rows.samples, token_ids)

        def adjust_and_choose(logits, fields, state):
            with jax.named_scope("sample"):
                return sample(logits, unpack_sampling_rows(fields), state, tuning)

        def logprobs(logits, token_ids):
            return token_logprobs(logits, token_ids, max_logprobs)

        def prompt(weights, hidden, packed, shape):
            model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            return prompt_logprobs(hidden, unpack(packed, shape).next_tokens, model.logits, max_logprobs)

        self._forward = jax.jit(
            forward, static_argnames="shape", donate_argnames=("kv_pages", "spare"), keep_unused=True
        )
        self._choose = jax.jit(choose, static_argnames="kind", donate_argnames="last_token")
        self._adjust_and_choose = jax.jit(adjust_and_choose, donate_argnames="state")
        self._logprobs = jax.jit(logprobs)
        self._prompt_logprobs = jax.jit(prompt, static_argnames="shape")

    @property
    def params(self) -> Any:
        """The weights, as the model has them."""
        return jax.tree.unflatten(self._tree, self._weights)

    @params.setter
    def params(self, params: Any) -> None:
        self._weights = jax.tree.leaves(params)

    def set_params(self, params: Any) -> None:
        """Replaces the weights; the next step uses them. Those that lie elsewhere (numpy, another device) are moved.

        Where the present weights are quantised, the new ones may come as they were trained.

        Raises:
          ConfigError: the tree, a shape or a dtype differs from the present weights (it would recompile every shape).
        """
        present = self.params
        params = quantised_as(present, params)
        old = jax.tree_util.tree_flatten_with_path(present)
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
        pairs = zip(jax.tree.leaves(params), self._weights, strict=True)
        self._weights = [jax.device_put(new, old.sharding) for new, old in pairs]

    def lower(self, kv_pages: list[KVPages], state: SamplerState, program: Program | StepShape) -> jax.stages.Lowered:
        """One program, traced and lowered, to look into it or to compile it; of a shape the forward pass."""
        if isinstance(program, StepShape):
            program = Program("forward", program)
        size, array = program.size, functools.partial(_abstract, state.last_token.sharding)
        if isinstance(size, StepShape):
            packed = jax.ShapeDtypeStruct((packed_size(size),), jnp.int32)
            if program.part == "forward":
                spare = self._outputs(kv_pages, state, size) if self._takes_spare else ()
                return self._forward.lower(self._weights, kv_pages, spare, state.last_token, packed, shape=size)
            _, hidden, _ = self._outputs(kv_pages, state, size)
            return self._prompt_logprobs.lower(self._weights, hidden, packed, shape=size)
        logits, fields = array(jnp.float32, size, state.vocab_size), array(jnp.int32, NUM_SAMPLING_FIELDS, size)
        if program.part == "logprobs":
            return self._logprobs.lower(logits, array(jnp.int32, size))
        if program.kind == "full":
            return self._adjust_and_choose.lower(logits, fields, state)
        return self._choose.lower(logits, fields, state.last_token, kind=program.kind)

    def _outputs(self, kv_pages, state, shape: StepShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the forward pass of a shape gives: logits, hidden states and sampling fields."""
        array = functools.partial(_abstract, state.last_token.sharding)
        hidden = self._hidden
        if hidden is None:
            packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
            forward = functools.partial(self._forward, shape=shape)
            hidden = jax.eval_shape(forward, self._weights, kv_pages, (), state.last_token, packed)[0][1]
            self._hidden = hidden
        return (
            array(jnp.float32, shape.num_rows, state.vocab_size),
            array(hidden.dtype, shape.num_tokens, hidden.shape[1]),
            array(jnp.int32, NUM_SAMPLING_FIELDS, shape.num_rows),
        )

    def compile(self, kv_pages: list[KVPages], state: SamplerState, program: Program) -> Compilation:
        """Compiles one program; `run` does it for those that are not there yet.

        Raises:
          RecompileError: the program comes after `mark_warm` and `recompile` is "error".
        """
        self._compile(kv_pages, state, [program])
        return self.compilations[-1]

    def compile_all(
        self,
        kv_pages: list[KVPages],
        state: SamplerState,
        programs: Iterable[Program],
        on_compiled: Callable[[Program, float], None] | None = None,
    ) -> None:
        """Compiles those of the programs that are not there yet, side by side.

        Args:
          kv_pages, state: as for `run`; they are not touched.
          programs: in the order in which they are begun.
          on_compiled: called after each, in this thread, with the seconds it took; they overlap.

        Raises:
          RecompileError: as `compile` does.
        """
        self._compile(kv_pages, state, [one for one in programs if one not in self._executables], on_compiled)
        for program, executable in self._executables.items():
            if program.part == "forward" and self._takes_spare:  # now, for later there may be no memory left
                self._keep(self._take_spare(executable, state.last_token.sharding))

    def _compile(self, kv_pages, state, programs: list[Program], on_compiled=None) -> None:
        if programs and self._warm and self._recompile == "error":
            raise RecompileError(
                f"{', '.join(map(str, programs))} was not compiled at start; have {list(map(str, self._executables))}"
            )

        def lower(program: Program) -> jax.stages.Lowered:
            if self._warm:
                logger.warning("the program %s compiles late: it was not compiled at start", program)
            if self._on_compile:
                self._on_compile(program)
            return self.lower(kv_pages, state, program)

        for done in compile_side_by_side(programs, lower):
            self._executables[done.key] = done.executable
            self.compilations.append(Compilation(done.key, done.seconds, after_warmup=self._warm))
            if on_compiled:
                on_compiled(done.key, done.seconds)

    def programs(self, shapes: Iterable[StepShape]) -> tuple[Program, ...]:
        """Every program that a step of these shapes may need."""
        return all_programs(shapes, self._kinds)

    def needs(self, packed: np.ndarray, shape: StepShape) -> StepNeeds:
        """What a packed plan asks for."""
        return StepNeeds.read(packed, shape, self._kinds)

    def missing(self, needs: StepNeeds) -> list[Program]:
        """The programs that such a step needs and that are not compiled."""
        return [program for program in needs.programs() if program not in self._executables]

    def mark_warm(self) -> None:
        """From now on a compile is a fault (see `recompile`)."""
        self._warm = True

    def run(
        self, kv_pages: list[KVPages], state: SamplerState, packed: np.ndarray, needs: StepNeeds
    ) -> tuple[StepOutputs, list[KVPages], SamplerState]:
        """Dispatches a step; returns before it is done. `kv_pages` and `state` are consumed."""
        for program in self.missing(needs):
            self.compile(kv_pages, state, program)
        forward, sampling, *others = [self._executables[program] for program in needs.programs()]
        sent = jax.device_put(packed) if needs.prompt_logprobs else packed  # once, though two programs read it
        spare = self._take_spare(forward, state.last_token.sharding)
        (logits, hidden, fields), kv_pages = forward(self._weights, kv_pages, spare, state.last_token, sent)
        if needs.sampling == "full":
            token_ids, state = sampling(logits, fields, state)
        else:
            token_ids, last_token = sampling(logits, fields, state.last_token)
            state = replace(state, last_token=last_token)
        nothing = (None, None, None)
        chosen = others.pop(0)(logits, token_ids) if needs.logprobs else nothing
        prompt = others.pop(0)(self._weights, hidden, sent) if needs.prompt_logprobs else nothing
        if self._takes_spare:
            self._keep((logits, hidden, fields))
        return StepOutputs(token_ids, *chosen, *prompt), kv_pages, state

    def _take_spare(self, forward: Callable, sharding: Any) -> tuple[jax.Array, ...]:
        """Arrays for a forward pass to put its outputs in: those of a step before, which will have been read by then.

        New outputs would lie elsewhere in each step, and push the temporaries about; the graphs that a GPU runs hold
        addresses, and to bring them up to date takes the host longer than all else that it does for a step.
        """
        if not self._takes_spare:
            return ()
        wanted = forward.args_info[0][2]  # type: ignore[attr-defined]
        kept = [self._spare.pop((one.shape, one.dtype), None) for one in wanted]
        return tuple(
            jax.device_put(np.zeros(one.shape, one.dtype), sharding) if array is None else array
            for one, array in zip(wanted, kept, strict=True)
        )

    def _keep(self, outputs: tuple[jax.Array, ...]) -> None:
        self._spare |= {(array.shape, array.dtype): array for array in outputs}

    def forget_outputs(self) -> None:
        """After a step that failed: what it left is of no use to the next."""
        self._spare.clear()


def _abstract(sharding: Any, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _forward(model, kv_pages, last_token, packed, shape, implementation):
    inputs = unpack(packed, shape)
    from_device = last_token[jnp.maximum(-1 - inputs.tokens, 0)]
    tokens = jnp.where(inputs.tokens < 0, from_device, inputs.tokens)
    hidden, kv_pages = model(tokens, kv_pages, inputs.meta, implementation=implementation)
    with jax.named_scope("logits"):
        logits = model.logits(hidden[inputs.source])
    if (logits.shape, logits.dtype) != ((shape.num_rows, model.vocab_size), jnp.float32):
        raise ConfigError(
            f"the model's logits are {logits.dtype}{list(logits.shape)}, expected float32"
            f"{[shape.num_rows, model.vocab_size]}: a score for each token of its vocab_size"
        )
    return (logits, hidden, sampling_part(packed, shape)), kv_pages


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

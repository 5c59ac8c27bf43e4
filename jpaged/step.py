"""`StepRunner`: one step on the device: tokens in, token ids out, pages updated in place.

A step runs as two programs, sometimes three or four (`jpaged.step_programs`), handed to the device one after the other
without waiting for any; or as one, which decodes several tokens for each row. Weights are an argument, never captured,
so that a training loop can swap them between steps. The pages and what changes of the sampler's state are donated:
after a step the old arrays are gone and the new ones live in the same memory.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.batch import unpack
from jpaged.compilations import compile_side_by_side
from jpaged.config import StepShape
from jpaged.errors import ConfigError, RecompileError
from jpaged.logprobs import prompt_logprobs, token_logprobs
from jpaged.models import PagedModel
from jpaged.models.quantised import quantised_as
from jpaged.packed_layout import NUM_SAMPLING_FIELDS, packed_size
from jpaged.pallas_kernels import KVPages
from jpaged.program_store import open_store
from jpaged.sampler import choose_tokens, sample
from jpaged.sampler_state import SamplerState, remember
from jpaged.sampler_tuning import TUNINGS
from jpaged.sampling_rows import unpack_sampling_rows
from jpaged.step_buffers import Buffer, StepBuffers, forward_buffers, token_buffer
from jpaged.step_functions import decode_steps, forward_pass
from jpaged.step_outputs import StepOutputs
from jpaged.step_programs import Program, StepNeeds, all_programs

logger = logging.getLogger(__name__)

# Token ids lie elsewhere in each step, as the host reads them late; and a few kernels are sooner launched one by one
# than in a graph that must be brought up to date.
_NO_GRAPH: Final = {"xla_gpu_graph_min_graph_size": 1000}


@dataclass(frozen=True)
class Compilation:
    """One compiled program.

    Attributes:
      program: what was compiled.
      seconds: tracing, lowering and compiling (or reading from disk) together.
    """

    program: Program
    seconds: float


_Run = tuple[Callable, tuple[Buffer, ...]]  # a program, and what it is lent


class StepRunner:
    """Compiles the programs of the step and runs them.

    Args:
      model: any `PagedModel`.
      max_logprobs: entries of top-logprobs, K.
      implementation: attention back end.
      platform: of the device, as jax calls it; the sampler is compiled to suit it.
      recompile: what a compile after `mark_warm` does: "warn" logs the program, "error" raises.
      on_compile: told each program just before it is compiled, or when it is there because it was kept.
      programs: the folder where compiled programs are kept for later processes; `None`: nowhere.
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
        programs: Path | None = None,
    ):
        self._recompile = recompile
        self._on_compile = on_compile
        self._warm = False
        self._executables: dict[Program, Callable] = {}
        self._hidden: tuple[int, Any] | None = None  # width and dtype
        self._in_place = platform == "gpu"
        self._lent: dict[Program, tuple[Buffer, ...]] = {}
        self._runs: dict[StepNeeds, list[_Run]] = {}
        self._buffers = StepBuffers()
        self.compilations: list[Compilation] = []

        graph, params = nnx.split(model)
        # A flat list: taking an nnx.State apart at each call would take longer than all else that a call does.
        self._weights, self._tree = jax.tree.flatten(params)
        tree, tuning = self._tree, TUNINGS.get(platform, TUNINGS["cpu"])
        self._kinds, self._vocab_size = tuning.kinds, model.vocab_size
        self._folder, self._made_from = programs, (graph, tree, max_logprobs, implementation, platform)

        # These hold no reference to self: no cycle keeps the pages alive.
        def forward(weights, kv_pages, last_token, packed, lent, shape):
            model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            return forward_pass(model, kv_pages, last_token, packed, shape, implementation)

        def decode(weights, kv_pages, last_token, packed, lent, shape):
            model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            token_ids, *state = decode_steps(model, kv_pages, last_token, packed, shape, tuning, implementation)
            return (token_ids,), state

        def choose(logits, fields, last_token, lent, kind):
            rows = unpack_sampling_rows(fields)
            with jax.named_scope("sample"):
                token_ids = choose_tokens(logits, rows, kind, tuning)
            return (token_ids,), remember(last_token, rows.state_index, rows.samples, token_ids)

        def adjust_and_choose(logits, fields, state, lent):
            with jax.named_scope("sample"):
                token_ids, state = sample(logits, unpack_sampling_rows(fields), state, tuning)
            return (token_ids,), state

        def logprobs(logits, token_ids):
            return token_logprobs(logits, token_ids, max_logprobs)

        def prompt(weights, hidden, packed, shape):
            model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            return prompt_logprobs(hidden, unpack(packed, shape).next_tokens, model.logits, max_logprobs)

        # Arrays that are lent are not read, only written over.
        in_place = functools.partial(jax.jit, keep_unused=True)
        self._forward = in_place(forward, static_argnames="shape", donate_argnames=("kv_pages", "lent"))
        self._decode = in_place(decode, static_argnames="shape", donate_argnames=("kv_pages", "last_token", "lent"))
        choose_in_place = functools.partial(
            in_place, choose, static_argnames="kind", donate_argnames=("last_token", "lent")
        )
        self._choose = choose_in_place()
        self._choose_without_graph = choose_in_place(compiler_options=_NO_GRAPH) if self._in_place else self._choose
        self._adjust_and_choose = in_place(adjust_and_choose, donate_argnames=("state", "lent"))
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
        """One program, traced and lowered, to look into it or to compile it; of a shape the one that runs the model."""
        if isinstance(program, StepShape):
            program = Program("decode" if program.num_steps > 1 else "forward", program)
        size, array = program.size, functools.partial(_abstract, state.last_token.sharding)
        gives_hidden = program.part == "prompt logprobs" or (program.part == "forward" and self._in_place)
        if gives_hidden and isinstance(size, StepShape):
            self._hidden = self._hidden or self._hidden_states(kv_pages, state, size)
        spare = tuple(array(one.dtype, *one.shape) for one in self._lent_to(program))
        if isinstance(size, StepShape):
            packed = jax.ShapeDtypeStruct((packed_size(size),), jnp.int32)
            args = self._weights, kv_pages, state.last_token, packed, spare
            if program.part == "decode":
                return self._decode.lower(*args, shape=size)
            if program.part == "forward":
                return self._forward.lower(*args, shape=size)
            width, dtype = self._hidden or (0, None)
            return self._prompt_logprobs.lower(self._weights, array(dtype, size.num_tokens, width), packed, shape=size)
        logits, fields = array(jnp.float32, size, state.vocab_size), array(jnp.int32, NUM_SAMPLING_FIELDS, size)
        if program.part == "logprobs":
            return self._logprobs.lower(logits, array(jnp.int32, size))
        if program.kind == "full":
            return self._adjust_and_choose.lower(logits, fields, state, spare)
        choose = self._choose if program.kind == "filter" else self._choose_without_graph
        return choose.lower(logits, fields, state.last_token, spare, kind=program.kind)

    def _take_up(self, program: Program, executable: Any) -> None:
        """What `lower` would have found out of a program that was kept."""
        if program.part == "forward":
            _, hidden, _ = executable.out_info[0]
            self._hidden = hidden.shape[1], hidden.dtype

    def _hidden_states(self, kv_pages, state, shape: StepShape) -> tuple[int, Any]:
        """Width and dtype of what the model gives."""
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32)
        forward = functools.partial(self._forward, shape=shape)
        hidden = jax.eval_shape(forward, self._weights, kv_pages, state.last_token, packed, ())[0][1]
        return hidden.shape[1], hidden.dtype

    def _lent_to(self, program: Program) -> tuple[Buffer, ...]:
        """What a program is given to write over."""
        size = program.size
        if not self._in_place:
            return ()
        if not isinstance(size, StepShape):
            return (token_buffer(size),) if program.part == "sampling" else ()
        if program.part == "decode":
            return (token_buffer(size.num_rows, size.num_steps),)
        if program.part == "forward" and self._hidden is not None:
            return forward_buffers(size, self._vocab_size, *self._hidden)
        return ()

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
          RecompileError: some come after `mark_warm`, and `recompile` is "error".
        """
        programs = [one for one in programs if one not in self._executables]
        if programs and self._warm and self._recompile == "error":
            raise RecompileError(
                f"not compiled at start: {', '.join(map(str, programs))}; have {list(map(str, self._executables))}"
            )

        def begin(program: Program) -> None:
            if self._warm:
                logger.warning("the program %s compiles late: it was not compiled at start", program)
            if self._on_compile:
                self._on_compile(program)

        def lower(program: Program) -> jax.stages.Lowered:
            begin(program)
            return self.lower(kv_pages, state, program)

        store = None
        if programs and self._folder is not None:
            parts = (*self._made_from, self._weights, kv_pages, state)
            store = open_store(self._folder, parts, state.last_token.sharding)
        for done in compile_side_by_side(programs, lower, store=store):
            if done.kept:
                begin(done.key)
                self._take_up(done.key, done.executable)
            self._executables[done.key] = done.executable
            if lent := self._lent_to(done.key):  # not sooner: nothing is kept for a program that fails to compile
                self._lent[done.key] = lent
            self.compilations.append(Compilation(done.key, done.seconds))
            if on_compiled:
                on_compiled(done.key, done.seconds)
        for lent in self._lent.values():
            self._buffers.prepare(lent, state.last_token.sharding)

    def programs(self, shapes: Iterable[StepShape]) -> tuple[Program, ...]:
        """Every program that a step of these shapes may need."""
        return all_programs(shapes, self._kinds)

    def needs(self, packed: np.ndarray, shape: StepShape) -> StepNeeds:
        """What a packed plan asks for."""
        return StepNeeds.read(packed, shape, self._kinds)

    def prepare(self, kv_pages: list[KVPages], state: SamplerState, needs: StepNeeds) -> None:
        """Compiles what such a step needs and is not there yet, as `compile_all` does; to be called before `run`."""
        if needs not in self._runs:
            programs = list(needs.programs())
            self.compile_all(kv_pages, state, programs)
            self._runs[needs] = [(self._executables[one], self._lent.get(one, ())) for one in programs]

    def mark_warm(self) -> None:
        """From now on a compile is a fault (see `recompile`)."""
        self._warm = True

    def run(
        self, kv_pages: list[KVPages], state: SamplerState, packed: np.ndarray, needs: StepNeeds
    ) -> tuple[StepOutputs, list[KVPages], SamplerState]:
        """Dispatches a step that was prepared; returns before it is done. `kv_pages` and `state` are consumed.

        On a GPU the token ids of a step are written over by the `MAX_IN_FLIGHT`-th step after it.
        """
        first, *others = self._runs[needs]
        last_token = state.last_token
        place = last_token.sharding
        sent = jax.device_put(packed) if needs.prompt_logprobs else packed  # once, though two programs read it
        made, rest = self._call(first, place, self._weights, kv_pages, last_token, sent)
        if needs.shape.num_steps > 1:
            last_token, kv_pages = rest
            return StepOutputs(*made), kv_pages, replace(state, last_token=last_token)
        (logits, hidden, fields), kv_pages, sampling = made, rest, others.pop(0)
        if needs.sampling == "full":
            (token_ids,), state = self._call(sampling, place, logits, fields, state)
        else:
            (token_ids,), last_token = self._call(sampling, place, logits, fields, last_token)
            state = replace(state, last_token=last_token)
        nothing = (None, None, None)
        chosen = others.pop(0)[0](logits, token_ids) if needs.logprobs else nothing
        prompt = others.pop(0)[0](self._weights, hidden, sent) if needs.prompt_logprobs else nothing
        return StepOutputs(token_ids, *chosen, *prompt), kv_pages, state

    def _call(self, run: _Run, place: Any, *args: Any) -> tuple[tuple[jax.Array, ...], Any]:
        """Runs a program, which puts the first part of what it gives where a step before put its own."""
        executable, lent = run
        if not lent:
            return executable(*args, ())
        made, others = executable(*args, self._buffers.take(lent, place))
        self._buffers.keep(lent, made)
        return made, others

    def forget_outputs(self) -> None:
        """After a step that failed: what it left is of no use to the next."""
        self._buffers = StepBuffers()


def _abstract(sharding: Any, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

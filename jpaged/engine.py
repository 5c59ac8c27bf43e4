"""`Engine`: requests in, outputs out. `step()` is the whole system on one page: plan, dispatch, collect."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence

import jax
import numpy as np
from flax import nnx

from jpaged.batch import BatchPacker
from jpaged.collector import Collector, Streaming
from jpaged.compilation_cache import enable_compilation_cache, programs_folder
from jpaged.config import EngineConfig, StepShape
from jpaged.constraints import Constraints
from jpaged.delta import StreamNews
from jpaged.engine_client import PoolPicture
from jpaged.engine_view import describe, page_map, picture, pool_use, read_stats
from jpaged.intake import Intake, checked_name
from jpaged.interrupts import deferred_interrupts
from jpaged.kv_cache import fit_engine
from jpaged.memory_manager import MemoryManager
from jpaged.models import PagedModel
from jpaged.page_mover import PageMover
from jpaged.pallas_kernels import make_pages
from jpaged.preemption import PreemptionCosts
from jpaged.request import Output, SamplingParams
from jpaged.sampler_state import make_sampler_state
from jpaged.scheduler import Scheduler
from jpaged.sequence import SequenceGroup
from jpaged.speculation import Speculation
from jpaged.state_loader import StateLoader
from jpaged.stats import EngineStats, PoolUse, StatsCounter
from jpaged.step import StepRunner
from jpaged.step_outputs import DispatchedStep
from jpaged.step_plan import StepPlan
from jpaged.step_programs import Program
from jpaged.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Serves one model on one device through a page pool. Not thread-safe: one thread adds, steps and aborts.

    Args:
      model: any `PagedModel`; its weights are shared, not copied.
      config: `EngineConfig()` if left out.
      tokenizer: for text prompts, text output and stop strings; `None`: token ids only.
      eos_token_ids: ids that end an output; `None`: the tokenizer's and the model's.
      on_compile: told each program of a step just before it is compiled.

    Attributes:
      info: what does not change.
      metrics: histograms of how requests were served.

    Raises:
      ConfigError: the settings contradict each other or name a bad file, no page fits, or `model` is no `PagedModel`.

    Example:
      >>> from flax import nnx
      >>> from jpaged.config import CacheConfig
      >>> from jpaged.models import Llama, LlamaConfig
      >>> tiny = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
      ...                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
      >>> engine = Engine(Llama(tiny, rngs=nnx.Rngs(0)), EngineConfig(cache=CacheConfig(num_pages=9)))
      >>> engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
      '0'
      >>> outputs = []
      >>> while engine.has_work:
      ...     outputs += engine.step()
      >>> len(outputs[0].token_ids), outputs[0].finish_reason
      (4, 'length')
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        on_compile: Callable[[Program], None] | None = None,
    ):
        fit = fit_engine(model, config or EngineConfig())
        self.config = config = fit.config
        cache = enable_compilation_cache() if config.compilation_cache else None
        self.tokenizer, self.vocab_size = tokenizer, model.vocab_size
        self.device, self.dtype, self.pool_plan = fit.device, fit.dtype, (plan := fit.pool_plan)
        self.implementation, self.implementation_reason = fit.implementation, fit.reason
        if eos_token_ids is None:
            eos_token_ids = {*getattr(model, "eos_token_ids", ()), *(tokenizer.eos_token_ids if tokenizer else ())}
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.step_shapes = config.step_shapes(plan.max_model_len, plan.page_size, self.device.platform)
        self._runner = StepRunner(
            model,
            max_logprobs=config.max_logprobs,
            implementation=self.implementation,
            platform=self.device.platform,
            recompile=config.recompile,
            on_compile=on_compile,
            programs=cache and programs_folder(cache),
        )
        self._intake = Intake(
            vocab_size=self.vocab_size,
            max_logprobs=config.max_logprobs,
            eos_token_ids=self.eos_token_ids,
            tokenizer=tokenizer,
            seed=config.seed,
            priorities=config.scheduler.policy == "priority",
        )
        self._sliding_window, self._page_specs = getattr(model, "sliding_window", None), fit.page_specs
        self._costs = None if (costs := config.scheduler.preemption_costs) is None else PreemptionCosts.load(costs)
        self._begin()
        self.info = describe(self)
        logger.info("attention by %s (%s); pool: %s", self.implementation, self.implementation_reason, self.pool_plan)
        if config.warmup == "eager":
            self.warm_up()

    def _begin(self) -> None:
        """Makes all that knows of requests, takes it over as one, then makes a pool, for which memory may be short."""
        config, plan, max_num_seqs = self.config, self.pool_plan, self.config.scheduler.max_num_seqs
        options = {"prefix_cache": config.cache.prefix_cache, "num_host_pages": config.cache.host_pages}
        memory = MemoryManager.for_pool(plan.num_pages, plan.page_size, sliding_window=self._sliding_window, **options)
        scheduler = Scheduler(
            config.scheduler,
            memory,
            max_model_len=plan.max_model_len,
            eos_token_ids=self.eos_token_ids,
            token_buckets=sorted({shape.num_tokens for shape in self.step_shapes if shape.num_steps == 1}),
            speculation=config.speculation and Speculation(config.speculation, self.step_shapes, self.device.platform),
            decode_steps=config.decode_steps or 1,
            costs=self._costs,
        )
        packer = BatchPacker(self.step_shapes, page_size=plan.page_size, max_num_seqs=max_num_seqs)
        collector = Collector(scheduler, self.tokenizer, memory.allocator.lives)
        constraints = Constraints(self.tokenizer, self.vocab_size, self.eos_token_ids)
        loader = StateLoader(self.eos_token_ids, self.vocab_size, constraints)
        counter, in_flight = StatsCounter(peak=PoolUse(page_size=plan.page_size)), deque[DispatchedStep]()
        self._memory, self._scheduler, self._packer, self._collector = memory, scheduler, packer, collector
        self._constraints, self._loader, self._counter, self._in_flight = constraints, loader, counter, in_flight
        self.metrics = collector.metrics
        with jax.default_device(self.device):
            made = [make_pages(spec) for spec in self._page_specs], make_sampler_state(max_num_seqs, self.vocab_size)
        self._kv_pages, self._state = jax.device_put(made, self.device)  # bound to it, as steps give them back
        self._mover = PageMover(self._kv_pages, num_host_pages=config.cache.host_pages)
        self._failure: BaseException | None = None

    def restart(self) -> None:
        """Begins anew after a failed step: an empty pool, no requests, counters at 0. Weights and programs stay.

        Requests that live end without an `Output`. What it raises, the device does; try again, or in a new process.
        """
        self._drop_pool("a restart did not end")
        self._runner.forget_outputs()
        try:
            self._begin()
        except BaseException as error:
            self._drop_pool(f"a restart failed: {error!r:.200}")
            self._collector.drop_all()  # it is the old one, if no new one was taken over
            raise

    def _drop_pool(self, why: str) -> None:
        """Fails, in words: a traceback would hold what is to go, and there is no room for two pools."""
        self._failure = RuntimeError(why)
        for name in ("_kv_pages", "_state", "_mover"):
            self.__dict__.pop(name, None)

    def add(
        self,
        prompt: str | AbstractSequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: Streaming = False,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_s: float | None = None,
    ) -> str:
        """Takes a request; it runs with the steps that follow.

        Args:
          prompt: text (needs a tokenizer) or token ids.
          params: how to sample; `SamplingParams()` if left out.
          request_id: unique among live requests; made up if left out.
          stream: `step` gives an `Output` each time the request advances, not only at its end; "deltas": `take_news`
            gives what each step added to it instead.
          priority: lower is served first, if the scheduler's policy is "priority"; must be 0 else.
          cache_salt: KV is shared with requests of the same salt only.
          arrival_s: when it came, by `time.monotonic()`; now, if left out.

        Returns:
          The request's id.

        Raises:
          RequestError: the request is refused, and why; nothing else changes.
        """
        options = {"priority": priority, "cache_salt": cache_salt, "arrival_s": arrival_s}
        return self._add(prompt, params, request_id, stream=stream, **options)

    def pin_prefix(self, prompt: str | AbstractSequence[int], *, cache_salt: str | None = None) -> str:
        """Computes the KV of a prompt with the steps that follow, and keeps it until `unpin_prefix`.

        Requests that begin with the same tokens then find it, whatever else needs pages. The request's empty `Output`
        ends with "length", or with "abort" if the pin was dropped meanwhile, as `update_weights` drops all.

        Args:
          prompt: text (needs a tokenizer) or token ids.
          cache_salt: requests with the same salt alone find it.

        Returns:
          The name to unpin it by, which is its request id too.

        Raises:
          RequestError: the prompt is refused, there is no prefix cache, or a live request could no longer be served.
        """
        return self._add(prompt, SamplingParams(max_tokens=0), None, pin=True, cache_salt=cache_salt)

    def unpin_prefix(self, name: str) -> bool:
        """Lets a pinned prefix go; it stays cached until its pages are needed. False if there is none of that name."""
        return self._scheduler.unpin(checked_name("name", name))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes and drops all pins; what runs keeps its pages, which nobody else will find."""
        with deferred_interrupts():
            self._scheduler.reset_prefix_cache()

    def _add(self, prompt, params, request_id, *, stream: Streaming = False, **options) -> str:
        self._check_alive()
        request = self._intake.request(prompt, params, request_id, self._collector, stream=stream, **options)
        group = SequenceGroup(request)
        with deferred_interrupts():
            self._scheduler.add(group)
            self._collector.open(group, prompt if isinstance(prompt, str) else None, stream=stream)
            self._constraints.open(group)
            self._counter.num_requests += 1
        return request.request_id

    def take_news(self) -> StreamNews:
        """What steps brought to the requests added with stream="deltas", since the last call."""
        return self._collector.take_news()

    def abort(self, request_id: str) -> Output | None:
        """Ends a request, frees its pages; gives what it had produced ("abort"), `None` if no such request lives."""
        with deferred_interrupts():
            return self._collector.abort(checked_name("request_id", request_id))

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return len(self._collector) > 0

    def step(self) -> list[Output]:
        """Plans and dispatches one step, and reads the results of the one before it (`run_ahead`).

        Returns:
          Outputs of requests that ended, and of streaming requests that advanced.

        Raises:
          RecompileError: the step's shape was not compiled at start, and `recompile` is "error".
          KeyboardInterrupt: all requests have ended, without an `Output`; prefixes and pins are forgotten; go on.
          RuntimeError: a step or a restart failed before; after any other error the engine needs a `restart`.
        """
        self._check_alive()
        outputs: list[Output] = []
        try:
            if self._constraints.is_working:
                with deferred_interrupts():
                    outputs += [self._collector.refuse(group, why) for group, why in self._constraints.poll()]
            plan = self._plan()
            if plan is not None:
                self._dispatch(plan)
            elif not self._in_flight:  # nothing to do before a grammar is compiled, or a mask is made
                self._constraints.wait()
            ahead = 1 if self.config.run_ahead and plan is not None and plan.seqs and plan.drafts is None else 0
            while len(self._in_flight) > ahead:
                outputs += self._collect()
            return outputs
        except KeyboardInterrupt as interrupt:
            self._end_all(interrupt)
            raise
        except BaseException as error:
            self._failure = error  # the scheduler counts on a step that did not run, or pages were donated to it
            raise

    def _plan(self) -> StepPlan | None:
        start = time.perf_counter()
        with deferred_interrupts():
            plan = self._scheduler.plan()
        self._counter.plan_s += time.perf_counter() - start
        return plan

    def _dispatch(self, plan: StepPlan) -> None:
        start = time.perf_counter()
        if any(plan.transfers):
            with deferred_interrupts():  # pages are donated: what goes in must come back
                self._kv_pages = self._mover.move(self._kv_pages, plan.transfers)
        moved_at = time.perf_counter()
        self._counter.move_s += moved_at - start
        if loads := self._loader.due(plan):
            with deferred_interrupts():
                self._state = self._loader.load(self._state, loads)
        if not plan.seqs:
            return
        self._collector.begin(plan)
        packed, shape = self._packer.pack(plan)
        needs = self._runner.needs(packed, shape)
        self._counter.pack_s += time.perf_counter() - moved_at
        self._runner.prepare(self._kv_pages, self._state, needs)  # not in the block below: compiling takes long
        ready_at = time.perf_counter()
        with deferred_interrupts():
            outputs, self._kv_pages, self._state = self._runner.run(self._kv_pages, self._state, packed, needs)
            self._in_flight.append(DispatchedStep(plan, outputs))
        outputs.copy_to_host_async()
        self._counter.dispatch_s += time.perf_counter() - ready_at
        more = 0 if plan.num_more is None else int(plan.num_more.sum())
        counts = {"num_rows": plan.num_seqs + more, "num_tokens": plan.num_tokens + more, "times": plan.num_steps}
        padded, use = shape.num_tokens * plan.num_steps - counts["num_tokens"], pool_use(self._memory, self._scheduler)
        self._counter.count_step(use, num_padded=padded, **counts)

    def _end_all(self, interrupt: KeyboardInterrupt) -> None:
        """After Ctrl-C, which may come between any two lines of a step: ends all requests, then looks what is whole."""
        steps, self._failure = tuple(self._in_flight), interrupt  # which holds if another one comes
        try:
            self._collector.drop_all()
            self._in_flight.clear()
            self._loader.clear()
            self._scheduler.abandon_plan()
            self._scheduler.check_invariants()
            whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves((self._kv_pages, self._state)))
            jax.block_until_ready([step.outputs.token_ids for step in steps])  # which read the packer's buffers
        except Exception:
            whole = False
        self._failure = None if whole else interrupt  # torn: pages were donated and not received, or taken and lost

    def _collect(self) -> list[Output]:
        start = time.perf_counter()
        done = self._in_flight[0]
        token_ids = np.asarray(done.outputs.token_ids)
        waited = time.perf_counter()
        self._in_flight.popleft()
        with deferred_interrupts():
            outputs = self._collector.collect(done, token_ids)
            self._constraints.advance(done.plan)
        if self.config.check_invariants:
            self._scheduler.check_invariants()
        self._counter.wait_s += waited - start
        self._counter.update_s += time.perf_counter() - waited
        return outputs

    def _check_alive(self) -> None:
        if (failure := self._failure) is not None:
            raise RuntimeError(f"the engine stopped ({failure!r:.200}); restart it, or make a new Engine") from failure

    def warm_up(self, on_compiled: Callable[[Program, float], None] | None = None) -> float:
        """Compiles every program that is not there yet, side by side; after it a compile is a fault (`recompile`).

        Args:
          on_compiled: called after each program with the seconds it took; they overlap.

        Returns:
          Seconds in all.
        """
        self._check_alive()
        start = time.perf_counter()
        self._runner.compile_all(self._kv_pages, self._state, self._runner.programs(self.step_shapes), on_compiled)
        with deferred_interrupts():  # both are donated
            self._state = self._loader.warm_up(self._state, masks=self.tokenizer is not None)
            self._kv_pages = self._mover.warm_up(self._kv_pages)
        self._runner.mark_warm()
        return time.perf_counter() - start

    def update_weights(self, weights: PagedModel | nnx.State) -> None:
        """Swaps the weights between two steps, without a recompile; running requests go on with the new ones.

        Raises:
          ConfigError: tree, shapes or dtypes differ from the present weights.
        """
        with deferred_interrupts():  # what the old weights computed is of no use to the new ones
            self._runner.set_params(nnx.state(weights) if isinstance(weights, nnx.Module) else weights)
            self._scheduler.weights_changed()

    def lower_step(self, program: Program | StepShape) -> jax.stages.Lowered:
        """A program of the step, of a shape the one that runs the model, lowered: to look into it and its memory."""
        self._check_alive()
        return self._runner.lower(self._kv_pages, self._state, program)

    def stats(self) -> EngineStats:
        """Counters and the page pool at this moment."""
        return read_stats(self._counter, self._memory, self._scheduler, self._collector, self._runner)

    def picture(self) -> PoolPicture:
        """The pool page by page, and who holds it: for people."""
        return picture(self._memory, self._scheduler)

    def page_map(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The pages of each sequence of each running request, by request id: what the page table says, for people."""
        return page_map(self._scheduler)

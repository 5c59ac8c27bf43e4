"""`STEP_CASES`: programs of the engine at serving sizes, compiled from shapes alone."""

import os
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.config import StepShape
from jpaged.model_shapes import model_shape
from jpaged.models import Llama
from jpaged.pallas_kernels import make_pages
from jpaged.sampler_state import make_sampler_state
from jpaged.step import StepRunner
from jpaged.step_programs import Program
from tests.kernels.hlo import pool_copies
from tests.kernels.test_decode_gpu import abstract_hopper

from . import target
from .programs import kernel_counts

PAGE_SIZE: Final = 16
NUM_PAGES: Final = 8192
MAX_NUM_SEQS: Final = 256
MAX_MODEL_LEN: Final = {"smollm2-135m": 2048, "llama-3.1-8b": 8192}


@dataclass(frozen=True)
class StepCase:
    """A program of a model."""

    model: str
    program: Program

    @property
    def name(self) -> str:
        return f"{self.model} {self.program}"


def step(model: str, tokens: int, rows: int, num_steps: int = 1) -> StepCase:
    """The program that runs the model."""
    shape = StepShape(tokens, rows, MAX_MODEL_LEN[model] // PAGE_SIZE, num_steps)
    return StepCase(model, Program("decode" if num_steps > 1 else "forward", shape))


STEP_CASES: Final = {
    case.name: case
    for case in (
        step("llama-3.1-8b", 4096, 64),
        step("llama-3.1-8b", 2048, 256),
        step("llama-3.1-8b", 256, 256),
        step("llama-3.1-8b", 32, 32),
        step("llama-3.1-8b", 1, 1),
        StepCase("llama-3.1-8b", Program("sampling", 256, "draw")),
        StepCase("llama-3.1-8b", Program("sampling", 256, "filter")),
        step("smollm2-135m", 64, 64, num_steps=4),
        step("smollm2-135m", 64, 64),
        step("smollm2-135m", 1, 1, num_steps=4),
        step("smollm2-135m", 1, 1),
        StepCase("smollm2-135m", Program("sampling", 64, "greedy")),
        StepCase("smollm2-135m", Program("sampling", 64, "full")),
    )
}


class _TraceEnd:
    """CPU seconds at the end of the longest trace: the rest of `lower` is lowering."""

    def __init__(self) -> None:
        self.longest_s, self.at_s = 0.0, cpu_seconds()

    def __call__(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration" and duration_secs > self.longest_s:
            self.longest_s, self.at_s = duration_secs, cpu_seconds()


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for, ptxas among them."""
    return sum(os.times()[:4])


def compile_step(case: StepCase, gpu: Any) -> dict[str, Any]:
    """Compiles a program; its figures.

    Raises:
      Exception: whatever the model, the kernels or the compiler refuse with.
    """
    config = model_shape(case.model)
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        specs = model.page_specs(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.dtype(jnp.bfloat16), implementation="mosaic_gpu"
        )
        kv_pages = target.placed([jax.eval_shape(lambda spec=spec: make_pages(spec)) for spec in specs], gpu)
        state = target.placed(jax.eval_shape(lambda: make_sampler_state(MAX_NUM_SEQS, config.vocab_size)), gpu)
        runner = StepRunner(model, max_logprobs=20, implementation="mosaic_gpu", platform="gpu")
        runner.params = target.placed(runner.params, gpu)
        start, trace_end = cpu_seconds(), _TraceEnd()
        jax.monitoring.register_event_duration_secs_listener(trace_end)
        try:
            lowered = runner.lower(kv_pages, state, case.program)
        finally:
            jax.monitoring.unregister_event_duration_listener(trace_end)
        lowered_at = cpu_seconds()
        compiled = lowered.compile()
    end, memory = cpu_seconds(), compiled.memory_analysis()
    runs_model = isinstance(case.program.size, StepShape)
    pool = NUM_PAGES * sum(spec.bytes_per_page for spec in specs) if runs_model else 0
    assert memory is not None
    return {
        "launches": kernel_counts(compiled.as_text() or ""),
        "argument_bytes": memory.argument_size_in_bytes - pool,
        "output_bytes": memory.output_size_in_bytes - pool,
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_bytes": pool,
        "aliased_bytes": memory.alias_size_in_bytes,
        "pool_copies": len(pool_copies(compiled, specs[0])) if runs_model else 0,
        "trace_s": round(trace_end.at_s - start, 1),
        "lower_s": round(lowered_at - trace_end.at_s, 1),
        "compile_s": round(end - lowered_at, 1),
    }

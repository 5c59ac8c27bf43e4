"""Compiles a model's whole step for a TPU that is not there, from shapes alone, and reports what it takes."""

import dataclasses
import re
import time
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.config import StepShape
from jpaged.model_bytes import weight_bytes
from jpaged.model_shapes import model_shape
from jpaged.models import Llama
from jpaged.models.config import LlamaConfig
from jpaged.pallas_kernels import PageSpec, supported_implementations
from jpaged.sampler_state import make_sampler_state
from jpaged.step import StepRunner

from .chips import Chip
from .kernels import abstract_pages, pool_copies

MODELS: Final = ("SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B")
PAGE_SIZE: Final = 64
MAX_NUM_SEQS: Final = 32
MAX_MODEL_LEN: Final = 8192
_ROOM: Final = 0.97  # of HBM; the rest is the runtime's
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclass(frozen=True)
class StepCase:
    """A step of a model: "decode" is one token of each of 32 sequences, "prefill" 2,048 tokens.

    `num_steps`: decode steps in one program (`EngineConfig.decode_steps`), sampling included.
    """

    model: str
    phase: str
    page_dtype: str = "bfloat16"
    layers: int | None = None  # None: all of the model's
    num_steps: int = 1

    @property
    def shape(self) -> StepShape:
        tokens = MAX_NUM_SEQS if self.phase == "decode" else 2048
        return StepShape(tokens, MAX_NUM_SEQS, MAX_MODEL_LEN // PAGE_SIZE, self.num_steps)


def compile_step(case: StepCase, chip: Chip, mesh: Mesh, implementation: str | None = None) -> dict[str, Any]:
    """Compiles one step; `implementation` None takes the first that can run. Figures of one device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    config = model_shape(case.model)
    if case.layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=case.layers)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        spec = PageSpec(2, PAGE_SIZE, config.num_key_value_heads, config.head_dim, case.page_dtype)
        name = implementation or _first_choice(spec)
        num_pages = _pool_pages(spec, config, chip)
        specs = model.page_specs(
            num_pages=num_pages, page_size=PAGE_SIZE, dtype=jnp.dtype(case.page_dtype), implementation=name
        )
        runner = StepRunner(model, max_logprobs=20, implementation=name, platform="tpu")
        runner.params = placed(runner.params)
        pages = [abstract_pages(spec, sharding) for spec in specs]
        state = placed(jax.eval_shape(lambda: make_sampler_state(MAX_NUM_SEQS, config.vocab_size)))
        lowered = runner.lower(pages, state, case.shape)
        traced = time.perf_counter()
        compiled = lowered.compile()
    hlo = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    page_bytes = sum(spec.bytes_per_page for spec in specs)
    pool = page_bytes * num_pages
    arguments, code = memory.argument_size_in_bytes, memory.generated_code_size_in_bytes
    free = chip.hbm_bytes * _ROOM - (arguments - pool) - memory.temp_size_in_bytes - code
    return {
        "model": case.model,
        "phase": case.phase,
        "pages": case.page_dtype,
        "implementation": name,
        "shape": str(case.shape),
        "layers": config.num_hidden_layers,
        "argument_bytes": arguments - pool,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": code,
        "page_bytes": page_bytes,
        "pages_that_fit": max(int(free // page_bytes), 0),
        "fits": free // page_bytes > MAX_MODEL_LEN // PAGE_SIZE,
        "pool_copies": pool_copies(hlo, specs),
        "collectives": len(_COLLECTIVE.findall(hlo)),
        "tpu_custom_calls": hlo.count('custom_call_target="tpu_custom_call"'),
        "trace_s": round(traced - start, 1),
        "compile_s": round(time.perf_counter() - traced, 1),
    }


def _pool_pages(spec: PageSpec, config: LlamaConfig, chip: Chip) -> int:
    """Pages to compile for: a layer twice as large as VMEM, or XLA would keep it there; few where HBM is short."""
    pages = -(-2 * chip.vmem_bytes // spec.bytes_per_page)
    weights, pool = weight_bytes(config, "bfloat16"), pages * spec.bytes_per_page * config.num_hidden_layers
    return pages if weights + pool < 0.8 * chip.hbm_bytes else 8


def _first_choice(spec: PageSpec) -> str:
    """What the engine would choose on this mesh."""
    stored = dataclasses.replace(spec, implementation="mosaic_tpu")
    return "mosaic_tpu" if "mosaic_tpu" in supported_implementations(spec=stored) else "xla"

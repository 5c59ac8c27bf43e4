"""`make_model`, `make_config`, `start_engine`: one engine for all workloads that were asked for."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged import CacheConfig, EngineConfig, SchedulerConfig
from jpaged.accelerators import Accelerator
from jpaged.engine import Engine
from jpaged.errors import ConfigError
from jpaged.fetch import fetch
from jpaged.model_shapes import MODEL_SHAPES
from jpaged.models import Llama, LlamaConfig, load_model, quantise
from jpaged.serving_sizes import token_budgets
from jpaged.wheel_models import KNOWN_MODELS
from scripts.engine.roofline import ModelCost
from scripts.engine.workloads import Load

# vLLM's figures were taken with as many.
_MAX_SEQS: Final = 512
# Beside the well-known shapes; for tests, and to try the script on a CPU.
TINY: Final = LlamaConfig(
    vocab_size=96,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=8192,
)


@dataclass(frozen=True)
class Needs:
    """What the workloads need of an engine.

    Attributes:
      rows: that a step has, at the most.
      longest: tokens of the longest sequence.
    """

    rows: int
    longest: int

    @classmethod
    def of(
        cls, loads: Iterable[Load], cells: Collection[tuple[int, int]], *, steps: int, together: tuple[int, int] | None
    ) -> "Needs":
        """Args:
        loads: already scaled.
        cells: (rows, context) of decode cells.
        steps: of each cell.
        together: requests of the workload "together", and the tokens of each; `None`: it is not measured.
        """
        sizes = [(1 if load.in_turn else min(len(load.prompts), _MAX_SEQS), load.longest) for load in loads]
        sizes += [(rows, context + steps + 1) for rows, context in cells]
        sizes += [together] if together else []
        rows, longest = zip(*sizes, strict=True)
        return cls(max(rows), max(longest))


def make_model(name: str, dtype: str, *, random_weights: bool, weights: str | None = None) -> tuple[Any, str]:
    """A model and what to call it: a well-known shape with random weights, or one that is loaded.

    Args:
      name: of `MODEL_SHAPES`, or "tiny"; a known name, a path, or a Hugging Face id.
      dtype: of the weights.
      random_weights: even if there is a known model of that name.
      weights: "int8" or "fp8": the layers' products are quantised.

    Raises:
      JpagedError: no such model.
    """
    shapes = {**MODEL_SHAPES, "tiny": TINY}
    config = shapes.get(name.lower())
    if random_weights and config is None:
        raise ConfigError(f"the model is {name!r}, expected one of {', '.join(shapes)} for random weights")
    if config is not None and (random_weights or name not in KNOWN_MODELS):
        model, name = Llama(config, rngs=nnx.Rngs(0), dtype=dtype), name.lower()
    else:
        path = fetch(name)
        model, name = load_model(path, dtype=dtype), name if name in KNOWN_MODELS else path.stem
    model = model if weights is None else quantise(model, weights)
    jax.block_until_ready(nnx.state(model))
    return model, name


def make_config(
    needs: Needs,
    *,
    accelerator: Accelerator,
    budget: int | None = None,
    prefill: int | None = None,
    buckets: list[int] | None = None,
    cache: CacheConfig | None = None,
    implementation: str | None = None,
    max_num_seqs: int | None = None,
) -> EngineConfig:
    """The settings of the engine: those of a server on such a chip.

    Args:
      needs: of the workloads.
      accelerator: the chip.
      budget, buckets, max_num_seqs: tokens of a step, its padded sizes and its rows; `None` chooses.
      prefill: tokens of a step in which no row waits for its next token. `None`: by the chip if neither `budget` nor
        `buckets` is given, else as many as of any step.
      cache, implementation: see `EngineConfig`.

    Raises:
      ConfigError: settings contradict each other.
    """
    rows = max_num_seqs or needs.rows
    budget, prefill = token_budgets(rows, accelerator, budget=budget, prefill=prefill, buckets=buckets)
    if buckets and buckets[-1] < budget:
        raise ConfigError(f"the largest token bucket is {buckets[-1]}, expected at least the budget, {budget}")
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_num_prefill_tokens=prefill,
            max_model_len=needs.longest,
        ),
        cache=cache or CacheConfig(),
        token_buckets=buckets,
        implementation=implementation,  # type: ignore[arg-type]
        recompile="error",
    )


def start_engine(
    model: Any, config: EngineConfig, on_compiled: Callable[[Any, float], None]
) -> tuple[Engine, dict[str, float]]:
    """An engine with all steps compiled, and the seconds that took."""
    begin = time.perf_counter()
    engine = Engine(model, config)
    made = time.perf_counter()
    engine.warm_up(on_compiled)
    return engine, {"engine": made - begin, "compile": time.perf_counter() - made}


def model_cost(engine: Engine, model: Any) -> ModelCost:
    """What a step of a Llama reads and computes; weights count as they are stored."""
    config = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    matrices = config.hidden_size * ((2 * heads + 2 * kv_heads) * dim + 3 * config.intermediate_size)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)) if isinstance(leaf, jax.Array))
    if model.lm_head is not None:
        read -= model.embed[...].nbytes  # of which a gather is read; otherwise it is the output projection too
    return ModelCost(
        weight_bytes=read,
        token_flops=2 * config.num_hidden_layers * matrices,
        row_flops=2 * config.hidden_size * config.vocab_size,
        kv_token_bytes=engine.pool_plan.bytes_per_page / engine.pool_plan.page_size,
        pair_flops=4 * config.num_hidden_layers * heads * dim,
    )


def default_dtype(platform: str) -> str:
    """bfloat16, which a CPU computes slowly.

    Example:
      >>> default_dtype("cpu"), default_dtype("gpu")
      ('float32', 'bfloat16')
    """
    return "float32" if platform == "cpu" else str(jnp.dtype(jnp.bfloat16))

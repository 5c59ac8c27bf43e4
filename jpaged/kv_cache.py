"""What an engine settles before it allocates anything: the attention back end, and how many pages fit."""

import os
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from jpaged.accelerators import GIB
from jpaged.config import (
    DEFAULT_PAGE_SIZE,
    MAX_DEFAULT_CPU_POOL_BYTES,
    MAX_SLOTS,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
)
from jpaged.errors import ConfigError
from jpaged.models import PagedModel
from jpaged.page_allocator import pages_at_most
from jpaged.pallas_kernels import PageSpec, resolve_implementation
from jpaged.pallas_kernels.tpu_tuning import shape_objection
from jpaged.sampler_state import sampler_state_bytes
from jpaged.serving_sizes import TPU_PAGE_BYTES, TPU_PAGE_SIZES, decode_steps
from jpaged.step_bytes import lent_bytes


class Device(Protocol):
    """What is asked of a `jax.Device`: how much memory it has, if it says so."""

    def memory_stats(self) -> dict[str, int] | None: ...


@dataclass(frozen=True)
class PoolPlan:
    """How the page pool was sized. `str()` explains it in one line.

    Attributes:
      num_pages: pages in the pool, the null page included.
      page_size: token slots a page.
      bytes_per_page: K, V and scales of one page over all layers.
      max_model_len: tokens of a sequence at the most.
      reason: what fixed `num_pages`.
    """

    num_pages: int
    page_size: int
    bytes_per_page: int
    max_model_len: int
    reason: str

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.bytes_per_page

    @property
    def token_capacity(self) -> int:
        """Tokens that the pool holds; the null page holds none."""
        return (self.num_pages - 1) * self.page_size

    def __str__(self) -> str:
        return (
            f"{self.num_pages} pages x {self.page_size} tokens = {self.token_capacity} tokens, "
            f"{self.pool_bytes / GIB:.2f} GiB ({self.bytes_per_page / 1024:.0f} KiB a page; {self.reason}); "
            f"sequences up to {self.max_model_len} tokens"
        )


def model_weights(model: PagedModel) -> list[jax.Array]:
    """The model's floating-point parameters; the first one stands for the device and the dtype of them all.

    Raises:
      ConfigError: `model` is no `PagedModel`, or has no such parameters.
    """
    if isinstance(model, type):
        raise ConfigError(f"the model is the class {model.__name__}, expected an object of it")
    if not isinstance(model, PagedModel):
        members = ("vocab_size", "max_position", "page_specs", "logits", "__call__")
        lacking = [name for name in members if not hasattr(model, name)]
        raise ConfigError(f"{model!r:.80} is no PagedModel: it lacks {', '.join(lacking)}")
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    weights = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not weights:
        raise ConfigError(f"{type(model).__name__} has no nnx.Param of a floating-point dtype; expected its weights")
    return weights


def default_page_size(model: PagedModel, *, dtype: str, implementation: str) -> int:
    """Token slots a page where `CacheConfig.page_size` is `None`.

    16, as small pages waste least; but for the Mosaic TPU kernel 64, if a page of each layer then has at least 128 KiB
    and the kernel takes it, else 128.

    Example:
      >>> from jpaged.models import Llama, LlamaConfig
      >>> tiny = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
      ...                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
      >>> model = Llama(tiny, rngs=nnx.Rngs(0))
      >>> [default_page_size(model, dtype="bfloat16", implementation=name) for name in ("xla", "mosaic_tpu")]
      [16, 128]
    """
    if implementation != "mosaic_tpu":
        return DEFAULT_PAGE_SIZE
    small, large = TPU_PAGE_SIZES
    suits = all(
        spec.bytes_per_page >= TPU_PAGE_BYTES and shape_objection(spec) is None
        for spec in _layers(model, small, dtype=dtype, implementation=implementation)
    )
    return small if suits else large


def _layers(
    model: PagedModel, page_size: int, *, dtype: str, implementation: str, num_pages: int = 2
) -> list[PageSpec]:
    return model.page_specs(
        num_pages=num_pages, page_size=page_size, dtype=jnp.dtype(dtype), implementation=implementation
    )


def choose_implementation(
    model: PagedModel, config: EngineConfig, *, dtype: str, activations: DTypeLike
) -> tuple[str, str]:
    """The attention back end for all layers of a model, and why.

    Args:
      model: gives the pages' shapes.
      config: `implementation` is what was asked for; `None`: the first choice of the devices in use.
      dtype: stored dtype of K and V.
      activations: dtype of the queries.

    Raises:
      NotImplementedError: the one that was asked for cannot run here.
    """
    # The kernel that is particular about its pages is asked about its own; to the others those are as good as 16.
    size = config.cache.page_size or default_page_size(model, dtype=dtype, implementation="mosaic_tpu")
    choices = [
        resolve_implementation(
            config.implementation,
            spec=spec,
            q=jax.ShapeDtypeStruct((1, spec.num_kv_heads, spec.head_dim), activations),
            stored=False,
        )
        for spec in dict.fromkeys(_layers(model, size, dtype=dtype, implementation="xla"))
    ]
    return next((choice for choice in choices if choice[0] == "xla"), choices[0])  # which runs whatever comes


def device_bytes(device: Device) -> int:
    """All memory of the device; for a CPU that of the host."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_device_bytes(device: Device, fraction: float) -> tuple[int, str]:
    """Bytes that the pool may take on `device`, and how that was found.

    Args:
      device: where the weights already are.
      fraction: part of the memory that may be in use in the end.
    """
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        used = stats.get("bytes_in_use", 0)
        return int(limit * fraction) - used, f"{fraction:.0%} of {limit / GIB:.1f} GiB less {used / GIB:.2f} in use"
    # macOS does not say how much is free.
    count = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    host = os.sysconf(count) * os.sysconf("SC_PAGE_SIZE")
    return min(int(host * fraction), MAX_DEFAULT_CPU_POOL_BYTES), "default for host memory: at most 1 GiB"


def plan_pool(
    model: PagedModel,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: str,
    implementation: str,
    device: Device,
    reserved_bytes: int = 0,
) -> PoolPlan:
    """Sizes the pool before anything is allocated.

    Args:
      model: gives the pages' shapes.
      cache: `num_pages` is taken as it is; `None` fills the memory that `memory_fraction` leaves. `page_size`: `None`
        stands for `default_page_size`.
      scheduler: `max_model_len` is checked against the pool; `None` takes what model and pool allow.
      dtype: stored dtype of K and V.
      implementation: attention back end.
      device: where the pages will live.
      reserved_bytes: memory to leave for what is not there yet, such as the sampler's state.

    Raises:
      ConfigError: not even one page fits, or `max_model_len` is more than the model or the pool can hold.
    """
    size = cache.page_size or default_page_size(model, dtype=dtype, implementation=implementation)
    one = _layers(model, size, dtype=dtype, implementation=implementation)
    per_page = sum(spec.bytes_per_page for spec in one)
    if cache.num_pages is not None:
        num_pages, reason = cache.num_pages, "num_pages was given"
    else:
        free, reason = free_device_bytes(device, cache.memory_fraction)
        num_pages = (free - reserved_bytes) // per_page
    most = MAX_SLOTS // size
    if cache.num_pages is not None and num_pages > most:
        raise ConfigError(f"num_pages is {num_pages}, expected at most {most}: slots are counted in 32 bits")
    memory = device_bytes(device)
    if cache.num_pages is not None and num_pages * per_page > memory:
        raise ConfigError(
            f"num_pages is {num_pages}, which takes {num_pages * per_page / GIB:.1f} GiB ({per_page / 1024:.0f} KiB a "
            f"page); the device has {memory / GIB:.1f} GiB; lower num_pages to less than {memory // per_page}"
        )
    num_pages = min(num_pages, most)
    if num_pages < 2:
        raise ConfigError(
            f"no page fits: a page takes {per_page / 1024:.0f} KiB over {len(one)} layers, there is room for "
            f"{max(num_pages, 0)} ({reason}), and page 0 is reserved; raise memory_fraction or num_pages"
        )
    wanted, window = scheduler.max_model_len, getattr(model, "sliding_window", None)
    if wanted is not None and wanted > model.max_position:
        raise ConfigError(f"max_model_len is {wanted}, but the model knows positions up to {model.max_position}")
    chunk = scheduler.max_step_tokens
    pages_needed = pages_at_most(wanted or model.max_position, size, sliding_window=window, chunk=chunk)
    capacity = (num_pages - 1) * size
    if wanted is not None and pages_needed > num_pages - 1:
        raise ConfigError(
            f"max_model_len is {wanted}, but the pool holds {capacity} tokens "
            f"({num_pages} pages x {size}, one reserved; {reason}); raise num_pages or lower max_model_len"
        )
    # A sequence longer than the pool fits if its pages are given back as they leave the window.
    fits = pages_needed <= num_pages - 1
    longest = wanted or (model.max_position if fits else min(model.max_position, capacity))
    return PoolPlan(num_pages, size, per_page, longest, reason)


@dataclass(frozen=True, kw_only=True)
class EngineFit:
    """What is settled before an engine allocates anything.

    Attributes:
      device: the `jax.Device` where the weights are and the pages will be.
      dtype: stored dtype of K and V.
      implementation, reason: of attention, and why this one.
      pool_plan: how many pages.
      page_specs: those of each layer.
      config: what was asked for, with `decode_steps` chosen.
    """

    device: Any
    dtype: str
    implementation: str
    reason: str
    pool_plan: PoolPlan
    page_specs: list[PageSpec]
    config: EngineConfig


def fit_engine(model: PagedModel, config: EngineConfig) -> EngineFit:
    """Chooses the attention back end and sizes the pool for a model whose weights are on their device.

    Args:
      model: any `PagedModel`.
      config: what was asked for.

    Raises:
      ConfigError: no page fits, the settings contradict the model, or `model` is no `PagedModel`.
      NotImplementedError: the back end that was asked for cannot run here.
    """
    first = model_weights(model)[0]
    device = next(iter(first.devices()))
    dtype = config.cache.dtype or str(np.dtype(first.dtype))
    name, reason = choose_implementation(model, config, dtype=dtype, activations=first.dtype)
    if config.decode_steps is None:
        config = replace(config, decode_steps=choose_decode_steps(model, device.platform))
    reserved = sampler_state_bytes(config.scheduler.max_num_seqs, model.vocab_size)
    if device.platform == "gpu":
        size = config.cache.page_size or default_page_size(model, dtype=dtype, implementation=name)
        reserved += _bytes_lent(model, config, size)
    plan = plan_pool(
        model,
        config.cache,
        config.scheduler,
        dtype=dtype,
        implementation=name,
        device=device,
        reserved_bytes=reserved,
    )
    return EngineFit(
        device=device,
        dtype=dtype,
        implementation=name,
        reason=reason,
        pool_plan=plan,
        page_specs=_layers(model, plan.page_size, dtype=dtype, implementation=name, num_pages=plan.num_pages),
        config=config,
    )


def choose_decode_steps(model: PagedModel, platform: str) -> int:
    """`EngineConfig.decode_steps` where it is `None`: that of `jpaged.serving_sizes.decode_steps`, as it is planned.

    Args:
      model: whose weights count, 8-bit codes and their scales too.
      platform: of the device.
    """
    weights = jax.tree.leaves(nnx.state(model))
    return decode_steps(sum(leaf.size * leaf.dtype.itemsize for leaf in weights), platform)


def _bytes_lent(model: PagedModel, config: EngineConfig, page_size: int) -> int:
    """What a GPU's steps keep to write over, if hidden states are as wide as the tables of the model's vocabulary."""
    weights, vocab_size = model_weights(model), model.vocab_size
    width = max((leaf.size // vocab_size for leaf in weights if vocab_size in leaf.shape), default=0)
    longest = config.scheduler.max_model_len or model.max_position
    if config.page_buckets:
        longest = min(longest, config.page_buckets[-1] * page_size)
    shapes = config.step_shapes(longest, page_size, "gpu")
    return lent_bytes(shapes, vocab_size=vocab_size, hidden_size=width, itemsize=weights[0].dtype.itemsize)

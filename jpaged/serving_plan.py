"""`plan_serving`: what a server would take of each device, and what then fits, before anything is loaded. No jax.

    device_bytes      |######################### what programs may use of a device #########################|
    memory_fraction   |######## weights, sampler's state, pages ########|    (and on a GPU a step's outputs)
                                                                        | inputs | temporaries | programs | reserve |

Several devices share a model by tensor parallelism: each holds its part of the query heads, of the KV heads, of the
MLP and of the vocabulary's tables, and of every page the part of its KV heads. That is planned here; this version runs
on one device.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from jpaged.accelerators import Accelerator, Topology
from jpaged.config import (
    MAX_DEFAULT_CPU_POOL_BYTES,
    MAX_SLOTS,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
)
from jpaged.division import Division
from jpaged.errors import ConfigError
from jpaged.model_bytes import WEIGHT_ITEMSIZES, kv_bytes_per_page, weight_bytes
from jpaged.models.config import LlamaConfig
from jpaged.serving_sizes import attention_of, decode_steps, default_page_size, page_buckets, token_budgets
from jpaged.step_bytes import (
    can_divide,
    divided,
    input_bytes,
    lent_bytes,
    program_bytes,
    state_bytes,
    stored_page_bytes,
    stored_weight_bytes,
    temporary_bytes,
)
from jpaged.token_buckets import default_token_buckets

_RESERVE: Final = {
    "tpu": 0.01,
    "gpu": 0.05,
    "cpu": 0.1,
}  # gaps between arrays; on a GPU also the trials of its compiler
_ROWS: Final = (256, 128, 64, 32, 16, 8)
_TYPICAL_TOKENS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What was asked for; `None` leaves it to the plan.

    Attributes:
      dtype: of the weights. `None`: float32 on CPU, bfloat16 elsewhere.
      weights: the form of the layers' kernels, if another: "int8" or "fp8".
      kv_dtype: of the pages. `None`: that of the weights.
      page_size, num_pages, memory_fraction: see `CacheConfig`.
      max_model_len, max_num_seqs, max_num_batched_tokens: see `SchedulerConfig`.
      max_num_prefill_tokens: likewise. `None`: by the chip if neither `max_num_batched_tokens` nor `token_buckets` were
        asked for, else none.
      token_buckets: see `EngineConfig`.
    """

    dtype: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_prefill_tokens: int | None = None
    token_buckets: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What a server would take, and hold.

    Attributes:
      model, config: its name and its shape.
      topology: where.
      dtype, kv_dtype: of weights and pages.
      weights: the form of the layers' kernels, if another.
      divisions: ways to spread the model over the devices, by how many share it.
      chosen: the one that is planned for.
    """

    model: str
    config: LlamaConfig = field(repr=False)
    topology: Topology
    dtype: str
    kv_dtype: str
    weights: str | None
    divisions: tuple[Division, ...]
    chosen: Division

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        chip = self.topology.accelerator
        return {
            "model": self.model,
            "num_parameters": self.config.num_parameters,
            "topology": f"{self.topology}",
            "num_chips": self.topology.num_chips,
            "num_devices": self.topology.num_devices,
            "num_hosts": self.topology.num_hosts,
            "device": chip.kind,
            "devices_per_chip": chip.devices_per_chip,
            "bytes_per_chip": self.chosen.bytes_used * chip.devices_per_chip,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "weights": self.weights,
            "fits": self.chosen.objection is None,
            "this_version_runs_it": self.chosen.objection is None and self.chosen.degree == 1,
            "chosen": self.chosen.as_dict(),
            "divisions": [one.as_dict() for one in self.divisions],
        }


def plan_serving(
    model: str, config: LlamaConfig, topology: Topology, wishes: Wishes | None = None, *, degree: int | None = None
) -> ServingPlan:
    """Plans; nothing is allocated, and nothing asked of a device.

    Args:
      model: its name, for people.
      config: its shape.
      topology: where it would run.
      wishes: what was asked for.
      degree: devices that share the model. `None`: as many of them as its heads can be divided by.

    Raises:
      ConfigError: a wish is out of range, or the model cannot be shared so. That it does not fit is no error here: see
        `Division.objection`.

    Example:
      >>> from jpaged.accelerators import parse_topology
      >>> from jpaged.model_shapes import model_shape
      >>> plan = plan_serving("Llama-3.1-8B", model_shape("llama-3.1-8b"), parse_topology("v6e-1"))
      >>> plan.chosen.page_size, plan.chosen.attention, plan.chosen.objection
      (64, 'mosaic_tpu', None)
    """
    wishes = wishes or Wishes()
    dtype = wishes.dtype or ("float32" if topology.accelerator.platform == "cpu" else "bfloat16")
    kv_dtype = wishes.kv_dtype or dtype
    _check(wishes, dtype, kv_dtype, config)
    count = topology.num_devices
    degrees = [n for n in range(1, count + 1) if count % n == 0 and can_divide(config, n) is None]
    if degree is not None and degree not in degrees:
        even = degree >= 1 and count % degree == 0
        why = can_divide(config, degree) if even else f"{topology} has {count} devices"
        raise ConfigError(
            f"{model} cannot be shared by {degree} devices: {why}; expected one of {', '.join(map(str, degrees))}"
        )
    planner = _Planner(config, topology, wishes, dtype, kv_dtype)
    divisions = tuple(planner.divide(n) for n in degrees)
    chosen = divisions[-1] if degree is None else divisions[degrees.index(degree)]
    return ServingPlan(
        model=model,
        config=config,
        topology=topology,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=wishes.weights,
        divisions=divisions,
        chosen=chosen,
    )


def smallest_topology(plan: ServingPlan, accelerator: Accelerator, wishes: Wishes | None = None) -> Topology | None:
    """The fewest chips of a kind that hold the plan's model; `None` if none of its sizes do, or if what was asked for
    does not go with what is chosen for such chips, such as a larger budget of tokens."""
    for num_chips in accelerator.sizes:
        topology = Topology(accelerator=accelerator, num_chips=num_chips)
        with contextlib.suppress(ConfigError):
            if plan_serving(plan.model, plan.config, topology, wishes).chosen.objection is None:
                return topology
    return None


def _check(wishes: Wishes, dtype: str, kv_dtype: str, config: LlamaConfig) -> None:
    weight_bytes(config, dtype, wishes.weights)  # these two refuse what is no dtype
    kv_bytes_per_page(config, 1, kv_dtype)
    fraction = CacheConfig.memory_fraction if wishes.memory_fraction is None else wishes.memory_fraction
    CacheConfig(page_size=wishes.page_size, num_pages=wishes.num_pages, memory_fraction=fraction)
    rows, budget = wishes.max_num_seqs, wishes.max_num_batched_tokens
    rows = min(_ROWS) if rows is None else rows
    if budget is None:
        budget = max(rows, SchedulerConfig.max_num_batched_tokens) if isinstance(rows, int) else rows
    elif wishes.max_num_seqs is None and isinstance(budget, int):
        rows = max(min(rows, budget), 1)
    SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_num_prefill_tokens=wishes.max_num_prefill_tokens,
        max_model_len=wishes.max_model_len,
    )
    known = config.max_position_embeddings
    if wishes.max_model_len is not None and wishes.max_model_len > known:
        raise ConfigError(f"max_model_len is {wishes.max_model_len}, but the model knows positions up to {known}")


@dataclass(frozen=True)
class _Planner:
    config: LlamaConfig
    topology: Topology
    wishes: Wishes
    dtype: str
    kv_dtype: str

    def divide(self, degree: int) -> Division:
        """With as many rows as sequences of 1,024 tokens fit, if their number was not given."""
        if self.wishes.max_num_seqs is not None:
            return self._divide(degree, self.wishes.max_num_seqs)
        if self.topology.accelerator.platform == "cpu":
            most = self.wishes.max_num_batched_tokens or SchedulerConfig.max_num_seqs
            return self._divide(degree, min(SchedulerConfig.max_num_seqs, most))
        budget = self.wishes.max_num_batched_tokens or _ROWS[0]
        tried = [rows for rows in _ROWS if rows <= budget] or [budget]
        for rows in tried[:-1]:
            one = self._divide(degree, rows)
            if one.objection is None and one.token_capacity >= rows * _TYPICAL_TOKENS:
                return one
        return self._divide(degree, tried[-1])

    def _divide(self, degree: int, rows: int) -> Division:
        config, wishes, chip = self.config, self.wishes, self.topology.accelerator
        tpu, part = chip.platform == "tpu", divided(config, degree)
        page_size = wishes.page_size or default_page_size(part, self.kv_dtype, chip)
        budget, prefill = token_budgets(
            rows,
            chip,
            budget=wishes.max_num_batched_tokens,
            prefill=wishes.max_num_prefill_tokens,
            buckets=wishes.token_buckets,
        )
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget, max_num_prefill_tokens=prefill)
        tokens = wishes.token_buckets or default_token_buckets(rows, budget, chip.platform, prefill)
        asked = wishes.max_model_len or config.max_position_embeddings
        pages = page_buckets(rows, asked, page_size)
        weights = stored_weight_bytes(part, self.dtype, tiled=tpu, weights=wishes.weights)
        steps = decode_steps(weights, chip.platform)
        # Refuses sizes that no engine would take.
        engine = EngineConfig(scheduler=scheduler, token_buckets=tokens, page_buckets=pages, decode_steps=steps)
        per_page = stored_page_bytes(part, page_size, self.kv_dtype, tiled=tpu)
        memory = chip.device_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

        shapes = engine.step_shapes(asked, page_size, chip.platform)
        itemsize = WEIGHT_ITEMSIZES[self.dtype]
        parts = {
            "weights": weights,
            "sampler's state": state_bytes(rows, config.vocab_size, tiled=tpu),
            "step's inputs": max(map(input_bytes, shapes)),
            "temporaries": max(temporary_bytes(config, part, shape, chip, itemsize=itemsize) for shape in shapes),
            "programs": sum(program_bytes(shape, chip) for shape in shapes),
        }
        if chip.platform == "gpu":
            sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "itemsize": itemsize}
            parts["step's outputs"] = lent_bytes(shapes, **sizes)
        with_pages = ("weights", "sampler's state", "step's outputs")
        beside = sum(size for name, size in parts.items() if name not in with_pages)
        if wishes.memory_fraction is not None or chip.platform == "cpu":
            fraction = wishes.memory_fraction or CacheConfig.memory_fraction
        else:
            fraction = math.floor(1e4 * (1 - beside / memory - _RESERVE[chip.platform])) / 1e4
        parts["reserve"] = memory - int(memory * fraction) - beside
        pool = int(memory * fraction) - sum(parts.get(name, 0) for name in with_pages)
        if chip.platform == "cpu":
            pool = min(pool, MAX_DEFAULT_CPU_POOL_BYTES) if wishes.num_pages is None else pool
        num_pages = min(pool // per_page, MAX_SLOTS // page_size)
        objection = None
        if num_pages < 2 or parts["reserve"] < 0:
            objection = _lacking(memory, parts, {"the null page and another": 2 * per_page})
        elif wishes.num_pages is not None and wishes.num_pages > num_pages:
            objection = _lacking(memory, parts, {f"{wishes.num_pages:,} pages": wishes.num_pages * per_page})
        num_pages = 0 if objection else wishes.num_pages or num_pages
        longest = min(asked, self._longest(num_pages, page_size, scheduler.max_step_tokens))
        if objection is None and wishes.max_model_len is not None and longest < wishes.max_model_len:
            objection = (
                f"max_model_len is {wishes.max_model_len:,}, but the pages hold {longest:,} tokens; lower it, or take "
                "narrower pages (kv_dtype), fewer sequences (max_num_seqs), or more memory"
            )
        pages = page_buckets(rows, longest or asked, page_size)
        return Division(
            degree=degree,
            num_replicas=self.topology.num_devices // degree,
            device_bytes=memory,
            parts=parts,
            page_size=page_size,
            bytes_per_page=per_page,
            num_pages=num_pages,
            max_model_len=longest,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_num_prefill_tokens=prefill,
            token_buckets=tokens,
            page_buckets=pages,
            decode_steps=steps,
            step_shapes=replace(engine, page_buckets=pages).step_shapes(longest or asked, page_size, chip.platform),
            attention=attention_of(part, page_size, self.kv_dtype, chip),
            memory_fraction=max(fraction, 0.0),
            repeated=_repeated(config, degree),
            objection=objection,
        )

    def _longest(self, num_pages: int, page_size: int, chunk: int) -> int:
        """Tokens of the longest sequence: 5 % less than the pages hold, if these are not as many in the end.

        Any number, where pages are given back as they leave a window.
        """
        free = int(0.95 * max(num_pages - 1, 0)) if self.wishes.num_pages is None else max(num_pages - 1, 0)
        window = self.config.sliding_window
        if window is not None and -(-(window + chunk) // page_size) + 1 <= free:
            return self.config.max_position_embeddings
        return free * page_size


def _repeated(config: LlamaConfig, degree: int) -> tuple[str, ...]:
    if degree == 1:
        return ()
    copies = degree // config.num_key_value_heads
    heads = (f"each KV head and its pages, on {copies} devices",) if copies > 1 else ()
    return ("norms", "sampler's state", "step's inputs", "logits that are sampled", *heads)


def _lacking(memory: int, parts: Mapping[str, int], pages: Mapping[str, int]) -> str:
    taken = {name: size for name, size in parts.items() if size > 0} | dict(pages)
    total = sum(taken.values())
    words = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in taken.items())
    return f"{words}: {total / 1e9:.2f} GB of {memory / 1e9:.2f} GB; {(total - memory) / 1e9:.2f} GB are lacking"

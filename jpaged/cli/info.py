"""`jpaged info`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jpaged.cli import options

if TYPE_CHECKING:
    from jpaged.models import LlamaConfig


@options.flattened
def info(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Known name, folder, .gguf file or Hugging Face id.")
    ] = options.DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: options.EngineOptions = options.ENGINE_DEFAULTS,
) -> None:
    """Show a model's config, what its weights and pages take, and how many pages fit here.

    Only the config is read; a model that is not in the cache is downloaded first.
    """
    engine.config()  # refuses wrong options before anything is downloaded
    from jpaged.fetch import fetch
    from jpaged.models import load_config

    path = fetch(model)
    report = _report(path, load_config(path), engine)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_report(report)


def _report(path: Path, model_config: "LlamaConfig", engine: options.EngineOptions) -> dict[str, Any]:
    import jax
    import numpy as np

    from jpaged.kv_cache import choose_implementation, plan_pool
    from jpaged.model_bytes import weight_bytes
    from jpaged.models.parameter_map import WEIGHT_FORMS
    from jpaged.models.weights import abstract_llama, float_dtype, num_bytes
    from jpaged.pallas_kernels import PageSpec
    from jpaged.pallas_kernels.pages import PAGE_DTYPES

    config = engine.config()
    device = jax.devices()[0]
    weight_dtype = float_dtype(engine.dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
    llama = abstract_llama(model_config, weight_dtype, engine.weights)
    name, reason = choose_implementation(llama, config, dtype=weight_dtype.name, activations=weight_dtype)
    # Where the device counts its memory, the weights will take their part of it; the default for host memory leaves
    # room for them.
    reserved = num_bytes(llama) if device.memory_stats() else 0
    plan = plan_pool(
        llama,
        config.cache,
        config.scheduler,
        dtype=weight_dtype.name,
        implementation=name,
        device=device,
        reserved_bytes=reserved,
    )

    def page_bytes(dtype: str) -> int:
        spec = PageSpec(
            2, plan.page_size, model_config.num_key_value_heads, model_config.head_dim, np.dtype(dtype), name
        )
        return spec.bytes_per_page * model_config.num_hidden_layers

    return {
        "path": str(path),
        "config": model_config.to_hf(),
        "num_parameters": model_config.num_parameters,
        "weight_bytes": {dtype: weight_bytes(model_config, dtype) for dtype in options.WEIGHT_DTYPES}
        | {form: weight_bytes(model_config, weight_dtype.name, form) for form in WEIGHT_FORMS},
        "kv_bytes_per_token": {dtype: page_bytes(dtype) / plan.page_size for dtype in PAGE_DTYPES},
        "kv_bytes_per_page": {dtype: page_bytes(dtype) for dtype in PAGE_DTYPES},
        "here": {
            "device": device.platform
            if device.device_kind == device.platform
            else f"{device.platform}, {device.device_kind}",
            "dtype": weight_dtype.name,
            "page_size": plan.page_size,
            "num_pages": plan.num_pages,
            "num_tokens": plan.token_capacity,
            "pool_bytes": plan.pool_bytes,
            "max_model_len": plan.max_model_len,
            "why": plan.reason,
            "attention": name,
            "attention_why": reason,
        },
    }


def _size(num_bytes: float) -> str:
    """Example:
    >>> _size(46080), _size(3 * 2**30)
    ('45.0 KiB', '3.0 GiB')
    """
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    here = report["here"]

    def section(title: str, rows: dict[str, str]) -> None:
        console.print(title, style="bold")
        for name, value in rows.items():
            console.print(f"  {name:<24} {value}")

    section(report["path"], {key: f"{value}" for key, value in report["config"].items() if value is not None})
    section(
        f"{report['num_parameters']:,} parameters",
        {dtype: _size(size) for dtype, size in report["weight_bytes"].items()},
    )
    section(
        f"K and V over all layers, of a token and of a page of {here['page_size']} tokens",
        {
            dtype: f"{_size(report['kv_bytes_per_token'][dtype])}, {_size(size)}"
            for dtype, size in report["kv_bytes_per_page"].items()
        },
    )
    section(
        f"here: {here['device']}, {here['dtype']}",
        {
            "page size": f"{here['page_size']} tokens",
            "pages that fit": f"{here['num_pages'] - 1:,} and the null page ({here['why']})",
            "bytes of the pages": _size(here["pool_bytes"]),
            "tokens that fit": f"{here['num_tokens']:,}",
            "longest sequence": f"{here['max_model_len']:,} tokens",
            "attention": f"{here['attention']} ({here['attention_why']})",
        },
    )

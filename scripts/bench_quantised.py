"""Times decode attention over int8 and fp8 pages on a GPU, beside bfloat16 pages in the same run.

    python scripts/bench_quantised.py [--page-size 16]
    python scripts/bench_quantised.py --render docs/benchmarks/h200-quantised.json     that record as Markdown

Times are taken as in `bench_kernels`: device time of one call, calls chained in one program, another page table each,
over a pool far larger than the L2 cache. The pages hold normal values, quantised as `write_kv` does it. The error is
the largest difference of an output to the dense reference on the same pages, over a step of uneven rows. Prints a table
and a last line of JSON.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages, PageSpec, paged_attention
from jpaged.pallas_kernels.cost import attention_cost
from jpaged.pallas_kernels.reference import paged_attention_reference
from scripts.bench_kernels import READ_ROOF, make_metadata, make_pool, make_tables, prepare_cell
from scripts.markdown import measured, table
from scripts.measuring import Failure, arguments_on_gpu, measure_all
from scripts.report import print_json, print_table

CELLS = ((8, 8192), (32, 4096), (128, 1024), (128, 4096), (256, 1024))
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def largest_error(kv_pages: KVPages) -> float:
    """Largest difference to the reference, of outputs that are some 4 at most."""
    spec = dataclasses.replace(kv_pages.spec, num_pages=1024)
    pages = KVPages(kv_pages.data[:1024], None if kv_pages.scales is None else kv_pages.scales[:1024], spec)
    meta = make_metadata(make_tables(spec, 6, 160 * spec.page_size, 1)[0], 1)
    lengths = jnp.array([1, 63, 64, 65, 700, 160 * spec.page_size], jnp.int32)
    meta = dataclasses.replace(meta, kv_lens=lengths, positions=lengths - 1)
    q = jax.random.normal(jax.random.key(1), (6, HEADS, HEAD_DIM), jnp.bfloat16)
    out = jax.jit(partial(paged_attention, implementation="mosaic_gpu"))(q, pages, meta)
    expected, _ = paged_attention_reference(q, pages, meta)
    return float(np.abs(np.asarray(out, np.float32) - np.asarray(expected, np.float32)).max())


def prepare(kind: str, pool: tuple[str, int, int, int], *arguments: Any) -> Callable[[], float]:
    """A job of `measure_all`: "error", or "time" as in `prepare_cell`."""
    return partial(largest_error, make_pool(*pool)) if kind == "error" else prepare_cell(pool, *arguments)


COLUMNS = ["rows x KV tokens, pages", "us", "TB/s", "of read roof", "times bfloat16"]


def _lines(results: list[dict]) -> list[list]:
    return [
        [f"{r['rows']} x {r['kv_len']}, {r['pages']}", r["us"], r["tb_per_s"], r["roofline"], r["times_bfloat16"]]
        for r in results
    ]


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    lines = [[str(x) for x in line] for line in _lines(record["results"]["decode"])]
    columns = ["Rows x KV tokens, pages", *COLUMNS[1:]]
    return f"{table(columns, lines)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode attention over int8 and fp8 pages.")
    parser.add_argument("--page-size", type=int, default=16)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU's memory
    arguments = arguments_on_gpu(parser, render)
    if arguments is None:
        return
    pools = {dtype: (dtype, arguments.page_size, KV_HEADS, HEAD_DIM) for dtype in DTYPES}
    jobs: list[tuple] = []
    for pool in pools.values():
        jobs += [("error", pool), *(("time", pool, HEADS, *cell, "mosaic_gpu", 16, 10) for cell in CELLS)]
    times, errors = {}, {}
    for nth, figure in measure_all(prepare, jobs):
        kind, (dtype, *_), *what = jobs[nth]
        if isinstance(figure, Failure):
            sys.exit(f"{jobs[nth]}: {figure.error}")
        if kind == "error":
            errors[dtype] = figure
            print(f"{dtype}: largest error {figure:.2e}", flush=True)
        else:
            times[dtype, *what[1:3]] = figure
            print(f"{dtype} {what[1]} x {what[2]}: {figure:.2f} us", flush=True)
    results = []
    for (dtype, rows, length), us in sorted(times.items(), key=lambda item: DTYPES.index(item[0][0])):
        spec = PageSpec(2, arguments.page_size, KV_HEADS, HEAD_DIM, dtype)
        cost = attention_cost(spec, num_heads=HEADS, q_lens=[1] * rows, kv_lens=[length] * rows, q_itemsize=2)
        results.append(
            {
                "pages": dtype,
                "page_size": arguments.page_size,
                "rows": rows,
                "kv_len": length,
                "us": round(us, 2),
                "tb_per_s": round(cost.bytes_accessed / us / 1e6, 2),
                "roofline": round(cost.bytes_accessed / READ_ROOF / (us * 1e-6), 3),
                "times_bfloat16": round(times["bfloat16", rows, length] / us, 2),
            }
        )
    print_table(
        f"Decode, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, pages of {arguments.page_size}",
        COLUMNS,
        _lines(results),
    )
    print_json("bench_quantised", {"decode": results, "largest_error": errors})


if __name__ == "__main__":
    main()

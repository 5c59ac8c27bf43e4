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
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages, PageSpec, paged_attention
from jpaged.pallas_kernels.cost import attention_cost
from jpaged.pallas_kernels.quantization import quantize
from jpaged.pallas_kernels.reference import paged_attention_reference
from scripts.bench_kernels import POOL_BYTES, READ_ROOF, make_metadata, make_tables, prepare_all, prepare_cell
from scripts.markdown import measured, table
from scripts.report import print_json, print_table

CELLS = ((8, 8192), (32, 4096), (128, 1024), (128, 4096), (256, 1024))
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def make_pool(dtype: str, page_size: int) -> KVPages:
    """A pool of `POOL_BYTES` of normal values."""
    page_values = page_size * KV_HEADS * 2 * HEAD_DIM
    num_pages = POOL_BYTES // (page_values * jnp.dtype(dtype).itemsize) // 64 * 64
    spec = PageSpec(num_pages, page_size, KV_HEADS, HEAD_DIM, dtype, "mosaic_gpu")

    def fill(keys):  # a 64th of the pool at a time: what is quantised is float32 on the way
        def part(key):
            x = jax.random.normal(key, (num_pages // 64, page_size, KV_HEADS, 2, HEAD_DIM), jnp.float32)
            return spec.to_stored(*quantize(x, spec.dtype)) if spec.quantized else spec.to_stored(x.astype(spec.dtype))

        data, scales = jax.lax.map(part, keys)
        return data.reshape(spec.data_shape), None if scales is None else scales.reshape(spec.scales_shape)

    data, scales = jax.jit(fill)(jax.random.split(jax.random.key(0), 64))
    return KVPages(data, scales, spec)


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
    parser.add_argument("--render", metavar="FILE", type=Path, help="print a record as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text(encoding="utf-8"))), end="")
        return
    if jax.default_backend() != "gpu":
        sys.exit("needs a GPU; jax found none")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    times, errors, results = {}, {}, []
    for dtype in DTYPES:
        kv_pages = make_pool(dtype, arguments.page_size)
        errors[dtype] = largest_error(kv_pages)
        print(f"{dtype}: largest error {errors[dtype]:.2e}", flush=True)
        timers = prepare_all(prepare_cell, [(kv_pages, HEADS, *cell, "mosaic_gpu", 16, 10) for cell in CELLS])
        for (rows, length), timer in zip(CELLS, timers, strict=True):
            us = timer()
            times[dtype, rows, length] = us
            cost = attention_cost(
                kv_pages.spec, num_heads=HEADS, q_lens=[1] * rows, kv_lens=[length] * rows, q_itemsize=2
            )
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
            print(f"{dtype} {rows} x {length}: {us:.2f} us", flush=True)
        del kv_pages
    print_table(
        f"Decode, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, pages of {arguments.page_size}",
        COLUMNS,
        _lines(results),
    )
    print_json("bench_quantised", {"decode": results, "largest_error": errors})


if __name__ == "__main__":
    main()

"""Times paged decode attention on a GPU, beside other libraries in the same run or on the same kind of card.

    python scripts/bench_kernels.py [--page-sizes 16,64] [--quick] [--xla]
    python scripts/bench_kernels.py --render docs/benchmarks/h200-kernels.json     that record as tables in Markdown

Each time is that of one call of the attention op, device time: calls are chained in one program, each on the output of
the last, with another page table each, over a pool far larger than the L2 cache, filled with random values; the program
is replayed and the median of several batches of replays is taken. Of short calls a program has more, for between two
programs the device does nothing. The work list, which all layers of a step share, is made before and timed apart.
cuDNN's paged attention runs in the same run, and so do FlashAttention-3 and FlashInfer where they can be imported
(`peers`); the record says which cannot, and for those the table of another day stands.
Prints tables and a last line of JSON.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, paged_attention, plan_attention
from jpaged.pallas_kernels.cost import attention_cost
from jpaged.pallas_kernels.quantization import quantize
from jpaged.pallas_kernels.xla import AttentionOptions
from scripts import peers
from scripts.markdown import measured, table
from scripts.measuring import Failure, arguments_on_gpu, measure_all
from scripts.report import print_json, print_table

READ_ROOF = 4.41e12  # bytes a second: a sum over 2 GiB, the fastest read seen on an H200
CELLS = (
    (1, 1024),
    (1, 8192),
    (8, 1024),
    (8, 8192),
    (32, 1024),
    (32, 4096),
    (64, 4096),
    (128, 1024),
    (128, 4096),
    (256, 1024),
    (256, 2048),
)
QUICK = ((1, 1024), (8, 1024), (32, 1024), (32, 4096), (256, 1024))
# Microseconds on an H200 (2026-11-29): FA3 as in vLLM 0.25, FlashInfer 0.6.13 with tensor cores, pages of 16 and of 64;
# 8 to 16 calls in a CUDA graph, page table and pool as here. FlashInfer was not measured with 9 query heads.
PEERS = {
    (32, 8, 128): {
        "FA3 p16": (11.5, 18.1, 17.8, 71.8, 42.5, 133.8, 258.2, 151.0, 507.6, 289.7, 534.9),
        "FA3 p64": (11.5, 17.3, 17.0, 71.8, 42.4, 133.0, 255.7, 150.9, 500.8, 279.4, 529.4),
        "FlashInfer p16": (8.0, 18.8, 18.9, 72.7, 39.2, 130.0, 254.2, 140.2, 498.8, 262.3, 502.9),
        "FlashInfer p64": (8.0, 18.1, 18.2, 71.0, 38.0, 127.7, 253.6, 138.5, 496.2, 261.3, 500.1),
    },
    (32, 8, 64): {
        "FA3 p16": (9.2, 13.7, 13.1, 43.3, 28.6, 77.0, 147.4, 92.6, 290.6, 176.2, 306.9),
        "FA3 p64": (9.5, 13.8, 13.1, 41.6, 27.5, 74.2, 141.7, 88.5, 278.9, 169.1, 294.2),
        "FlashInfer p16": (8.2, 13.8, 13.9, 44.0, 24.9, 73.8, 140.7, 82.3, 272.8, 149.1, 277.4),
        "FlashInfer p64": (8.6, 13.7, 13.8, 41.9, 23.0, 70.3, 137.6, 80.0, 270.6, 145.9, 274.7),
    },
    (9, 3, 64): {
        "FA3 p16": (10.2, 14.7, 12.3, 26.1, 19.6, 43.8, 72.8, 41.5, 114.2, 75.6, 122.6),
        "FA3 p64": (9.3, 14.4, 12.2, 24.6, 19.1, 43.0, 73.1, 40.2, 112.4, 73.9, 120.0),
    },
}
OTHERS_CELLS = ((1, 1024), (32, 1024), (32, 4096))  # those of XLA and cuDNN
_MODULES = {"FA3": "flash_attn_interface", "FlashInfer": "flashinfer"}
POOL_BYTES = 3 * 2**30
CALLS = 16  # of a program
LONG_CALLS, SHORT = 64, 2**15  # of one whose calls read so many KV tokens at most


def make_tables(spec: PageSpec, rows: int, length: int, calls: int) -> list[jax.Array]:
    rng, pages = np.random.default_rng(0), -(-length // spec.page_size)
    ids = [rng.permutation(spec.num_pages - 1)[: rows * pages] + 1 for _ in range(calls)]
    return [jnp.asarray(x.reshape(rows, pages), jnp.int32) for x in ids]


def make_metadata(table: jax.Array, length: int) -> PagedMetadata:
    rows = table.shape[0]
    return PagedMetadata(
        page_table=table,
        kv_lens=jnp.full(rows, length, jnp.int32),
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        positions=jnp.full(rows, length - 1, jnp.int32),
        slot_mapping=jnp.zeros(rows, jnp.int32),
        num_decode=jnp.int32(rows),
        num_seqs=jnp.int32(rows),
    )


def replay(step, state, arguments, calls: int, replays: int, batches: int = 5) -> tuple[float, Any]:
    """Microseconds a call, and the state; it is donated and comes back, so that no buffer moves between replays."""
    for _ in range(4):
        state = step(state, *arguments)
    jax.block_until_ready(state)
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(replays):
            state = step(state, *arguments)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / replays / calls * 1e6)
    return statistics.median(times), state


def median_us(step, state, arguments, calls: int, replays: int) -> float:
    """Microseconds a call, where nobody needs the state any more."""
    return replay(step, state, arguments, calls, replays)[0]


@functools.lru_cache(maxsize=1)
def make_pool(dtype: str, page_size: int, kv_heads: int, head_dim: int) -> KVPages:
    """A pool of `POOL_BYTES` of normal values, quantised where the dtype is of 8 bits."""
    page_values = page_size * kv_heads * 2 * head_dim
    num_pages = POOL_BYTES // (page_values * jnp.dtype(dtype).itemsize) // 64 * 64
    spec = PageSpec(num_pages, page_size, kv_heads, head_dim, dtype, "mosaic_gpu")

    def fill(keys):  # a 64th of the pool at a time: what is quantised is float32 on the way
        def part(key):
            x = jax.random.normal(key, (num_pages // 64, page_size, kv_heads, 2, head_dim), jnp.float32)
            return spec.to_stored(*quantize(x, spec.dtype)) if spec.quantized else spec.to_stored(x.astype(spec.dtype))

        data, scales = jax.lax.map(part, keys)
        return data.reshape(spec.data_shape), None if scales is None else scales.reshape(spec.scales_shape)

    data, scales = jax.jit(fill)(jax.random.split(jax.random.key(0), 64))
    return KVPages(data, scales, spec)


def prepare_cell(
    pool: tuple[str, int, int, int], heads: int, rows: int, length: int, by: str, calls: int, replays: int
) -> Callable[[], float]:
    """Compiles a cell's program, and gives the function that times it: microseconds a call.

    Args:
      pool: dtype, page size, KV heads and head_dim (`make_pool`).
      by: "mosaic_gpu", "xla", or a name of `peers.PEERS`.
    """
    kv_pages = make_pool(*pool)
    spec = kv_pages.spec
    tables = make_tables(spec, rows, length, calls)
    queries = jax.random.normal(jax.random.key(1), (rows, heads, spec.head_dim), jnp.bfloat16)
    if by in peers.PEERS:
        return peers.PEERS[by](queries, kv_pages, tables, length, replays)
    from jpaged.pallas_kernels import attention_gpu as attention

    planned = jax.jit(partial(plan_attention, spec=spec))(make_metadata(tables[0], length))
    shape = queries.shape
    records = jax.jit(lambda planned: attention.make_records(shape, spec, planned, None))(planned)
    options = AttentionOptions(scale=spec.head_dim**-0.5, sliding_window=None, soft_cap=None)

    def with_table(planned, page_table):
        """The kernel reads the plan's table. Were it the same for all calls, XLA would leave all but one out."""
        return dataclasses.replace(planned, work=dataclasses.replace(planned.work, page_table=page_table))

    first_pages = [attention.find_first_pages(records, spec, with_table(planned, table)) for table in tables]

    def kernels(queries, kv_pages, tables, planned, records, first_pages):
        for page_table, pages in zip(tables, first_pages, strict=True):
            listed = queries, kv_pages, with_table(planned, page_table), records, None, None, options, False
            queries, _ = attention.attend_listed(*listed, first_pages=pages)
        return queries

    def xla(queries, kv_pages, tables, planned, *_):
        kv_pages = dataclasses.replace(kv_pages, spec=dataclasses.replace(spec, implementation="xla"))
        for page_table in tables:
            meta = dataclasses.replace(planned, page_table=page_table)
            queries = paged_attention(queries, kv_pages, meta, implementation="xla")
        return queries

    step = jax.jit(xla if by == "xla" else kernels, donate_argnums=0)
    arguments = kv_pages, tables, planned, records, first_pages
    queries = jax.block_until_ready(step(queries, *arguments))
    return lambda: median_us(step, queries, arguments, calls, replays)


def prepare_all(prepare: Callable[..., Any], cells: Iterable[tuple]) -> list[Any]:
    """`prepare(*cell)` of all cells, side by side in threads, for cells that share a pool."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda cell: prepare(*cell), cells))


def cell_result(pool: tuple[str, int, int, int], heads: int, rows: int, length: int, us: float) -> dict:
    """A time with what it is to be read against: of what was measured on another day."""
    dtype, page_size, kv_heads, head_dim = pool
    spec = PageSpec(2, page_size, kv_heads, head_dim, dtype)
    cost = attention_cost(spec, num_heads=heads, q_lens=[1] * rows, kv_lens=[length] * rows)
    peers = {
        name: times[CELLS.index((rows, length))]
        for name, times in PEERS[heads, spec.num_kv_heads, spec.head_dim].items()
    }
    best = min(peers, key=lambda name: peers[name])
    return {
        "heads": heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "page_size": spec.page_size,
        "rows": rows,
        "kv_len": length,
        "us": round(us, 2),
        "tb_per_s": round(cost.bytes_accessed / us / 1e6, 2),
        "roofline": round(cost.bytes_accessed / READ_ROOF / (us * 1e-6), 3),
        "best_peer": best,
        "best_peer_us": peers[best],
        "times_best_peer": round(peers[best] / us, 2),
    }


def render(record: dict) -> str:
    """A record of this script as Markdown: a table for each kind of heads, geometric means below."""
    parts, results = [], record["results"]["decode"]
    for heads, kv_heads, head_dim in dict.fromkeys((r["heads"], r["kv_heads"], r["head_dim"]) for r in results):
        mine = [r for r in results if (r["heads"], r["kv_heads"], r["head_dim"]) == (heads, kv_heads, head_dim)]
        rows = [
            [
                f"{r['rows']} x {r['kv_len']:,}",
                str(r["page_size"]),
                f"{r['us']:.2f}",
                f"{r['tb_per_s']:.2f}",
                f"{r['roofline']:.0%}",
                f"{r['best_peer_us']:.1f} ({r['best_peer']})",
                f"{r['times_best_peer']:.2f}",
            ]
            for r in mine
        ]
        columns = ["Rows x KV tokens", "Page", "us", "TB/s", "Of the read roof", "Best peer, us", "Times as fast"]
        first = [r["times_best_peer"] for r in mine if r["page_size"] == mine[0]["page_size"]]
        parts.append(f"### {heads} query heads over {kv_heads}, head_dim {head_dim}\n\n{table(columns, rows)}")
        parts.append(f"Geometric mean at page size {mine[0]['page_size']}: {statistics.geometric_mean(first):.2f}.\n")
    ours = {(r["heads"], r["head_dim"], r["rows"], r["kv_len"], r["page_size"]): r["us"] for r in reversed(results)}
    rows = []
    for r in record["results"].get("others", []):
        same = [us for key, us in ours.items() if key[:4] == (r["heads"], r["head_dim"], r["rows"], r["kv_len"])]
        cell = f"{r['rows']} x {r['kv_len']:,}", r["by"], str(r["page_size"])
        rows.append([*cell, f"{r['us']:.1f}", f"{min(same):.2f}", f"{r['us'] / min(same):.1f}"])
    if rows:
        columns = ["Rows x KV tokens", "By", "Page", "us", "This kernel, best page, us", "Times as fast"]
        parts.append(f"### Others in the same run\n\n{table(columns, rows)}")
    absent = record["results"].get("not_importable", [])
    if absent:
        parts.append(f"Not importable there, so measured on another day: {', '.join(absent)}.\n")
    return "\n".join([*parts, measured(record)])


def prepare_plan(rows: int, length: int) -> Callable[[], float]:
    """The plan of a step, made once for all layers: chained, each on lengths from the last. Microseconds a plan."""
    from jpaged.pallas_kernels.attention_gpu import make_records

    spec, calls = PageSpec(64, 16, 8, 128, jnp.dtype("bfloat16"), "mosaic_gpu"), 16

    def chain(kv_lens, meta):
        for _ in range(calls):
            planned = plan_attention(dataclasses.replace(meta, kv_lens=kv_lens), spec)
            records = make_records((rows, 32, 128), spec, planned, None)
            kv_lens = kv_lens + jnp.minimum(records[:rows, 0], 0)  # 0, but known only once the list is made
        return kv_lens

    meta = make_metadata(jnp.zeros((rows, 1), jnp.int32), length)
    step = jax.jit(chain, donate_argnums=0)
    lengths = jax.block_until_ready(step(meta.kv_lens + 0, meta))
    return lambda: median_us(step, lengths, (meta,), calls, replays=10)


def prepare(kind: str, *arguments: Any) -> Callable[[], float]:
    """A job of `measure_all`: "cell", as in `prepare_cell`, or "plan"."""
    return {"cell": prepare_cell, "plan": prepare_plan}[kind](*arguments)


def make_jobs(models: Iterable[tuple[int, int, int]], page_sizes: list[int], *, quick: bool, xla: bool) -> list[tuple]:
    """Arguments of `prepare`; neighbours share a pool."""
    jobs: list[tuple] = [("plan", rows, 1024) for rows in (1, 256)]
    for nth, (heads, kv_heads, head_dim) in enumerate(models):
        for page_size in page_sizes if nth == 0 else page_sizes[:1]:
            pool = ("bfloat16", page_size, kv_heads, head_dim)
            for rows, length in QUICK if quick or page_size != page_sizes[0] else CELLS:
                calls = LONG_CALLS if rows * length <= SHORT else CALLS
                replays = 20 if rows * length < 2**17 else 8
                jobs.append(("cell", pool, heads, rows, length, "mosaic_gpu", calls, replays))
        if nth == 0:
            first = ("bfloat16", page_sizes[0], kv_heads, head_dim)
            jobs += [("cell", first, heads, *cell, "xla", 2, 4) for cell in OTHERS_CELLS if xla]
            large = ("bfloat16", 128, kv_heads, head_dim)
            jobs += [("cell", large, heads, *cell, "cuDNN", 8, 8) for cell in OTHERS_CELLS]
            jobs += [
                ("cell", ("bfloat16", size, kv_heads, head_dim), heads, *cell, name, 16, 8)
                for name in ("FA3", "FlashInfer")
                for size in (16, 64)
                for cell in CELLS
                if importlib.util.find_spec(_MODULES[name])
            ]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description="Time paged decode attention.")
    parser.add_argument(
        "--page-sizes", default="16", help="comma-separated; those after the first on five cells of the first table"
    )
    parser.add_argument("--quick", action="store_true", help="five cells of the first table only")
    parser.add_argument("--xla", action="store_true", help="also time the XLA implementation, on three cells")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU's memory
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    arguments = arguments_on_gpu(parser, render)
    if arguments is None:
        return
    page_sizes = [int(size) for size in arguments.page_sizes.split(",")]
    models = [(32, 8, 128)] if arguments.quick else list(PEERS)
    jobs = make_jobs(models, page_sizes, quick=arguments.quick, xla=arguments.xla)
    ours: dict[int, dict] = {}
    plans, others, failed = {}, [], []
    for nth, us in measure_all(prepare, jobs):
        kind, *what = jobs[nth]
        print(f"{kind} {what}: {us if isinstance(us, Failure) else f'{us:.2f} us'}", flush=True)
        if isinstance(us, Failure):
            failed.append({"job": str(what), "error": us.error.strip().splitlines()[-1]})
        elif kind == "plan":
            plans[f"{what[0]} x {what[1]}"] = round(us, 1)
        else:
            pool, heads, rows, length, by = what[:5]
            if by == "mosaic_gpu":
                ours[nth] = cell_result(pool, heads, rows, length, us)
            else:
                shape = {"heads": heads, "kv_heads": pool[2], "head_dim": pool[3], "page_size": pool[1]}
                others.append({"by": by, **shape, "rows": rows, "kv_len": length, "us": round(us, 1)})
    results = [ours[nth] for nth in sorted(ours)]
    titles = dict.fromkeys((r["heads"], r["kv_heads"], r["head_dim"], r["page_size"]) for r in results)
    for heads, kv_heads, head_dim, page_size in titles:
        lines = [
            [
                f"{r['rows']} x {r['kv_len']}",
                r["us"],
                r["tb_per_s"],
                f"{r['roofline']:.0%}",
                r["best_peer"],
                r["best_peer_us"],
                r["times_best_peer"],
            ]
            for r in results
            if (r["heads"], r["kv_heads"], r["head_dim"], r["page_size"]) == (heads, kv_heads, head_dim, page_size)
        ]
        columns = ["rows x KV tokens", "us", "TB/s", "of read roof", "best peer", "us", "times as fast"]
        print_table(f"Decode, {heads}/{kv_heads} heads of {head_dim}, pages of {page_size}", columns, lines)
    absent = [name for name, module in _MODULES.items() if not importlib.util.find_spec(module)]
    print_json(
        "bench_kernels",
        {"decode": results, "others": others, "plan_us": plans, "not_importable": absent, "failed": failed},
    )


if __name__ == "__main__":
    main()

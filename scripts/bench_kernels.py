"""Times paged decode attention on a GPU, beside what other libraries were measured to take on the same kind of card.

    python scripts/bench_kernels.py [--page-sizes 16,64] [--quick] [--xla]
    python scripts/bench_kernels.py --render docs/benchmarks/h200-kernels.json     that record as tables in Markdown

Each time is that of one call of `paged_attention`, device time: calls are chained in one program, each on the output of
the last, with another page table each, over a pool far larger than the L2 cache, filled with random values; the program
is replayed and the median of several batches of replays is taken. The work list, which all layers of a step share, is
made before and timed apart. Prints tables and a last line of JSON.
"""

import argparse
import dataclasses
import json
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
from jpaged.pallas_kernels.xla import AttentionOptions
from scripts.markdown import measured, table
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
XLA_CELLS = ((1, 1024), (32, 1024), (32, 4096))
POOL_BYTES = 3 * 2**30


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


def prepare_cell(
    kv_pages: KVPages, heads: int, rows: int, length: int, implementation: str, calls: int, replays: int
) -> Callable[[], float]:
    """Compiles a cell's program, and gives the function that times it: microseconds a call."""
    from jpaged.pallas_kernels.attention_gpu import choose_tile, make_records
    from jpaged.pallas_kernels.decode_gpu import attend

    spec = kv_pages.spec
    tables = make_tables(spec, rows, length, calls)
    planned = jax.jit(partial(plan_attention, spec=spec))(make_metadata(tables[0], length))
    queries = jax.random.normal(jax.random.key(1), (rows, heads, spec.head_dim), jnp.bfloat16)
    shape = queries.shape
    records = jax.jit(lambda planned: make_records(shape, spec, planned, None))(planned)
    tokens, narrow = choose_tile(rows, rows, heads // spec.num_kv_heads, spec.head_dim)
    options = AttentionOptions(scale=spec.head_dim**-0.5, sliding_window=None, soft_cap=None)

    def kernels(queries, kv_pages, tables, planned, records):
        work = planned.work
        for page_table in tables:
            queries, _ = attend(
                queries,
                kv_pages.data,
                records,
                page_table,
                work.counters,
                None,
                tokens=tokens,
                narrow=narrow,
                page_size=spec.page_size,
                blocks=work.blocks,
                options=options,
                with_lse=False,
                scales=kv_pages.scales,
            )
        return queries

    def xla(queries, kv_pages, tables, planned, _):
        for page_table in tables:
            meta = dataclasses.replace(planned, page_table=page_table)
            queries = paged_attention(queries, kv_pages, meta, implementation="xla")
        return queries

    step = jax.jit(xla if implementation == "xla" else kernels, donate_argnums=0)
    arguments = kv_pages, tables, planned, records
    queries = jax.block_until_ready(step(queries, *arguments))
    return lambda: median_us(step, queries, arguments, calls, replays)


def prepare_all(prepare: Callable[..., Any], cells: Iterable[tuple]) -> list[Any]:
    """`prepare(*cell)` of all cells, side by side: nearly all of a bench's time is the compiler's."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda cell: prepare(*cell), cells))


def cell_result(spec: PageSpec, heads: int, rows: int, length: int, us: float) -> dict:
    """A time with what it is to be read against."""
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
    return "\n".join([*parts, measured(record)])


def bench_decode(heads: int, kv_heads: int, head_dim: int, page_size: int, cells, *, xla: bool) -> list[dict]:
    page_bytes = page_size * kv_heads * 2 * head_dim * 2
    spec = PageSpec(POOL_BYTES // page_bytes, page_size, kv_heads, head_dim, jnp.dtype("bfloat16"), "mosaic_gpu")
    fill = jax.jit(lambda: jax.random.normal(jax.random.key(0), spec.data_shape, jnp.bfloat16))
    kv_pages = KVPages(data=fill(), scales=None, spec=spec)
    xla_pages = dataclasses.replace(kv_pages, spec=dataclasses.replace(spec, implementation="xla"))
    jobs = [
        (kv_pages, heads, rows, length, "mosaic_gpu", 16, 20 if rows * length < 2**17 else 8) for rows, length in cells
    ]
    others = [cell for cell in cells if xla and cell in XLA_CELLS]
    jobs += [(xla_pages, heads, *cell, "xla", 2, 4) for cell in others]
    timers = prepare_all(prepare_cell, jobs)
    xla_timers = dict(zip(others, timers[len(cells) :], strict=True))
    results = []
    for (rows, length), timer in zip(cells, timers, strict=False):
        us = timer()
        result = cell_result(spec, heads, rows, length, us)
        if (rows, length) in xla_timers:
            result["xla_us"] = round(xla_timers[rows, length](), 1)
            print(f"XLA, the same: {result['xla_us']} us", flush=True)
        results.append(result)
        print(f"{heads}/{kv_heads} x {head_dim} p{page_size} {rows:>4} x {length:<6}{us:>8.2f} us", flush=True)
    return results


def bench_plan(rows: int, length: int) -> float:
    """Microseconds of the plan of a step, made once for all layers: chained, each on lengths from the last."""
    from jpaged.pallas_kernels.attention_gpu import make_records

    spec, calls = PageSpec(64, 16, 8, 128, jnp.dtype("bfloat16"), "mosaic_gpu"), 16

    def chain(kv_lens, meta):
        for _ in range(calls):
            planned = plan_attention(dataclasses.replace(meta, kv_lens=kv_lens), spec)
            records = make_records((rows, 32, 128), spec, planned, None)
            kv_lens = kv_lens + jnp.minimum(records[:rows, 0], 0)  # 0, but known only once the list is made
        return kv_lens

    meta = make_metadata(jnp.zeros((rows, 1), jnp.int32), length)
    return round(median_us(jax.jit(chain, donate_argnums=0), meta.kv_lens + 0, (meta,), calls, replays=10), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time paged decode attention.")
    parser.add_argument(
        "--page-sizes", default="16", help="comma-separated; those after the first on five cells of the first table"
    )
    parser.add_argument("--quick", action="store_true", help="five cells of the first table only")
    parser.add_argument("--xla", action="store_true", help="also time the XLA implementation, on three cells")
    parser.add_argument("--render", metavar="FILE", type=Path, help="print a record as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text(encoding="utf-8"))), end="")
        return
    if jax.default_backend() != "gpu":
        sys.exit("needs a GPU; jax found none")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    page_sizes = [int(size) for size in arguments.page_sizes.split(",")]
    models = [(32, 8, 128)] if arguments.quick else list(PEERS)
    results = []
    for model in models:
        for page_size in page_sizes if model == models[0] else page_sizes[:1]:
            cells = QUICK if arguments.quick or page_size != page_sizes[0] else CELLS
            cells_of_table = bench_decode(
                *model, page_size, cells, xla=arguments.xla and model == models[0] and page_size == page_sizes[0]
            )
            results += cells_of_table
            columns = ["rows x KV tokens", "us", "TB/s", "of read roof", "best peer", "us", "times as fast"]
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
                for r in cells_of_table
            ]
            print_table(f"Decode, {model[0]}/{model[1]} heads of {model[2]}, pages of {page_size}", columns, lines)
    plans = {f"{rows} x {length}": bench_plan(rows, length) for rows, length in ((1, 1024), (256, 1024))}
    print_json("bench_kernels", {"decode": results, "plan_us": plans})


if __name__ == "__main__":
    main()

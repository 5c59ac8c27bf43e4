"""Times decode attention of rows that share a prefix of pages, beside the same rows without it and read one by one.

    python scripts/bench_shared_prefix.py [--page-size 16]
    python scripts/bench_shared_prefix.py --render docs/benchmarks/h200-shared-prefixes.json     that record as Markdown

Times are taken as in `bench_kernels`: device time of one call, calls chained in one program, another page table each,
over a pool far larger than the L2 cache. Each cell is timed three times: as the plan's rule has it; its rows' own
tokens alone, without the prefix; and the same page tables with a work list that reads the prefix for each row ("one by
one": from the L2 cache mostly, for all read the same pages at about the same time). The rule should choose no way that
is slower than one by one. Plain cells have no prefix: they show what a step pays in which nobody shares. The difference
is the largest one between the outputs of the two lists after the chain. Prints tables and a last line of JSON.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels import PagedMetadata, PageSpec, plan_attention
from jpaged.pallas_kernels.xla import AttentionOptions
from scripts.bench_kernels import make_metadata, make_pool, median_us
from scripts.markdown import measured, table
from scripts.measuring import Failure, arguments_on_gpu, measure_all
from scripts.report import print_json, print_table

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CALLS = 16
# Rows, tokens of the prefix, and of each row.
CELLS = (
    (64, 2048, 512),
    (256, 2048, 64),
    (16, 8192, 256),
    (32, 1024, 512),
    (64, 512, 512),
    (16, 1024, 512),
    (8, 2048, 512),
    (8, 8192, 512),
)
PLAIN = ((8, 1024), (32, 4096), (256, 1024))
PLANS = ((8, 128), (64, 256), (256, 256))  # rows and columns of the page table
COLUMNS = ["rows x (prefix + own) tokens", "rows that share", "us", "own alone, us", "ratio", "one by one, us", "times"]


def make_shared_tables(spec: PageSpec, rows: int, prefix: int, own: int, calls: int) -> list[jax.Array]:
    """Page tables whose rows begin with the same pages, the ids random."""
    rng, tables = np.random.default_rng(0), []
    shared, pages = -(-prefix // spec.page_size), -(-own // spec.page_size)
    for _ in range(calls):
        ids = rng.permutation(spec.num_pages - 1)[: shared + rows * pages] + 1
        columns = np.tile(ids[:shared], (rows, 1)), ids[shared:].reshape(rows, pages)
        tables.append(jnp.asarray(np.concatenate(columns, axis=1), jnp.int32))
    return tables


def without_sharing(meta: PagedMetadata) -> PagedMetadata:
    """The step with a table of which no two rows have a page in common; for its plan, not for its pages."""
    ids = jnp.arange(1, 1 + meta.page_table.size, dtype=jnp.int32)
    return dataclasses.replace(meta, page_table=ids.reshape(meta.page_table.shape))


def prepare_cell(page_size: int, rows: int, prefix: int, own: int) -> Callable[[], dict[str, float]]:
    """Compiles a cell's program, compares its outputs by both work lists, and gives the function that times them."""
    from jpaged.pallas_kernels.attention_gpu import attend_listed, find_first_pages, make_records
    from jpaged.pallas_kernels.gpu_plan import members_of_a_tile
    from jpaged.pallas_kernels.prefix_plan_gpu import pays

    kv_pages = make_pool("bfloat16", page_size, KV_HEADS, HEAD_DIM)
    spec, shape = kv_pages.spec, (rows, HEADS, HEAD_DIM)
    tables = make_shared_tables(spec, rows, prefix, own, CALLS)
    meta = make_metadata(tables[0], prefix + own)
    queries = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    options = AttentionOptions(scale=HEAD_DIM**-0.5, sliding_window=None, soft_cap=None)

    def with_table(planned, page_table):
        return dataclasses.replace(planned, work=dataclasses.replace(planned.work, page_table=page_table))

    @partial(jax.jit, donate_argnums=0)
    def step(queries, kv_pages, tables, planned, records, first_pages):
        for page_table, pages in zip(tables, first_pages, strict=True):
            listed = queries, kv_pages, with_table(planned, page_table), records, None, None, options, False
            queries, _ = attend_listed(*listed, first_pages=pages)
        return queries

    @jax.jit
    def plan(meta, tables):
        planned = plan_attention(meta, spec)
        records = make_records(shape, spec, planned, None)
        shares = 0
        if (prefixes := planned.work.prefixes) is not None:
            members, workers = members_of_a_tile(HEADS // KV_HEADS), planned.work.blocks.num_workers
            shares = jnp.sum(pays(prefixes, members, KV_HEADS, workers))
        first_pages = [find_first_pages(records, spec, with_table(planned, page_table)) for page_table in tables]
        return (planned, records, first_pages), shares

    figures, steps = {}, {}
    steps["us"], shares = plan(meta, tables)
    figures["shares"] = int(shares)
    if prefix:
        steps["one_by_one_us"], _ = plan(without_sharing(meta), tables)
    outs = [jax.block_until_ready(step(queries + 0, kv_pages, tables, *planned)) for planned in steps.values()]
    figures["difference"] = float(jnp.abs(outs[0].astype(jnp.float32) - outs[-1].astype(jnp.float32)).max())
    replays = 20 if rows * (prefix + own) < 2**17 else 8

    def timer() -> dict[str, float]:
        for name, planned in steps.items():
            figures[name] = median_us(step, queries + 0, (kv_pages, tables, *planned), CALLS, replays)
        return figures

    return timer


def prepare_plan(rows: int, columns: int) -> Callable[[], dict[str, float]]:
    """The plan of a step whose rows share all but their last block; chained, each on lengths from the last."""
    from jpaged.pallas_kernels.attention_gpu import make_records

    spec = PageSpec(2**16, 16, KV_HEADS, HEAD_DIM, jnp.dtype("bfloat16"), "mosaic_gpu")
    meta = make_metadata(make_shared_tables(spec, rows, 16 * columns - 64, 64, 1)[0], 16 * columns)

    def chain(kv_lens, meta):
        for _ in range(CALLS):
            planned = plan_attention(dataclasses.replace(meta, kv_lens=kv_lens), spec)
            records = make_records((rows, HEADS, HEAD_DIM), spec, planned, None)
            kv_lens = kv_lens + jnp.minimum(records[:rows, 0], 0)  # 0, but known only once the list is made
        return kv_lens

    step = jax.jit(chain, donate_argnums=0)
    jax.block_until_ready(step(meta.kv_lens + 0, meta))
    return lambda: {"us": median_us(step, meta.kv_lens + 0, (meta,), CALLS, replays=20)}


def prepare(kind: str, *arguments: int) -> Callable[[], dict[str, float]]:
    """A job of `measure_all`: "cell", as in `prepare_cell`, or "plan"."""
    return {"cell": prepare_cell, "plan": prepare_plan}[kind](*arguments)


def bench(page_size: int) -> dict[str, list[dict]]:
    """Measures all cells and plans.

    Raises:
      RuntimeError: one of them cannot be measured.
    """
    alone = [(rows, 0, own) for rows, _, own in CELLS]
    cells = list(dict.fromkeys([*CELLS, *((rows, 0, own) for rows, own in PLAIN), *alone]))
    jobs = [*(("cell", page_size, *cell) for cell in cells), *(("plan", *shape) for shape in PLANS)]
    found: dict[tuple, dict[str, float]] = {}
    for nth, figures in measure_all(prepare, jobs):
        if isinstance(figures, Failure):
            raise RuntimeError(f"{jobs[nth]}: {figures.error}")
        found[jobs[nth]] = figures
        print(jobs[nth], {name: round(x, 4) for name, x in figures.items()}, flush=True)
    results = []
    for rows, prefix, own in cells:
        figures = found["cell", page_size, rows, prefix, own]
        result = {"rows": rows, "prefix": prefix, "own": own, "page_size": page_size, "us": round(figures["us"], 2)}
        if prefix:
            result["shares"] = figures["shares"]
            result["difference"] = round(figures["difference"], 5)
            own_us = found["cell", page_size, rows, 0, own]["us"]
            result["own_alone_us"] = round(own_us, 2)
            result["times_own_alone"] = round(figures["us"] / own_us, 3)
            result["one_by_one_us"] = round(figures["one_by_one_us"], 2)
            result["times_one_by_one"] = round(figures["one_by_one_us"] / figures["us"], 2)
        results.append(result)
    plans = [
        {"rows": rows, "columns": columns, "us": round(found["plan", rows, columns]["us"], 1)}
        for rows, columns in PLANS
    ]
    return {"decode": results, "plan": plans}


def lines(results: list[dict]) -> list[list]:
    """A table's lines, in the order of `COLUMNS`."""
    return [
        [
            f"{r['rows']} x ({r['prefix']:,} + {r['own']:,})",
            str(r["shares"]),
            f"{r['us']:.2f}",
            f"{r['own_alone_us']:.2f}",
            f"{r['times_own_alone']:.2f}",
            f"{r['one_by_one_us']:.2f}",
            f"{r['times_one_by_one']:.2f}",
        ]
        for r in results
        if r["prefix"]
    ]


def plain_lines(results: list[dict]) -> list[list]:
    return [[f"{r['rows']} x {r['own']:,}", f"{r['us']:.2f}"] for r in results if not r["prefix"]]


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    results = record["results"]["decode"]
    largest = max(r["difference"] for r in results if r["prefix"])
    return "\n".join(
        [
            table(COLUMNS, lines(results)),
            table(["rows x tokens, nothing shared", "us"], plain_lines(results)),
            table(
                ["Plan of a step, rows x columns of the page table", "us"],
                [[f"{r['rows']} x {r['columns']:,}", f"{r['us']:.1f}"] for r in record["results"]["plan"]],
            ),
            f"Largest difference between the outputs of the two lists: {largest:.4f}.\n",
            measured(record),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode attention of rows that share a prefix.")
    parser.add_argument("--page-size", type=int, default=16, help="token slots of a page (default 16)")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU's memory
    arguments = arguments_on_gpu(parser, render)
    if arguments is None:
        return
    results = bench(arguments.page_size)
    print_table("Decode, rows that share a prefix", COLUMNS, lines(results["decode"]))
    print_table("Decode, nothing shared", ["rows x tokens", "us"], plain_lines(results["decode"]))
    print_json("bench_shared_prefix", results)


if __name__ == "__main__":
    main()

"""Times paged prefill attention on a GPU, beside what FlashAttention-3 was measured to reach on the same kind of card.

    python scripts/bench_prefill.py [--page-sizes 16,64,128] [--quick]
    python scripts/bench_prefill.py --render docs/benchmarks/h200-prefill.json     that record as tables in Markdown

Each time is that of one call of the attention op, the launch for a step's decode rows (there are none) included: calls
follow each other in one program, each with another page table, over a pool far larger than the L2 cache, filled with
random values. Work lists, which all layers of a step share, are made before and timed apart. FLOPs are those of the
scores that the causal mask leaves. Prints tables and a last line of JSON.
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

from jpaged.pallas_kernels import PagedMetadata, PageSpec, plan_attention
from jpaged.pallas_kernels.cost import attention_cost
from jpaged.pallas_kernels.pages import QUANTIZED_DTYPES
from jpaged.pallas_kernels.xla import AttentionOptions
from scripts.bench_kernels import make_pool, make_tables, median_us
from scripts.markdown import measured, table
from scripts.measuring import Failure, arguments_on_gpu, measure_all
from scripts.report import print_json, print_table

CELLS = ((1, 4096, 4096), (8, 1024, 1024), (4, 1024, 8192), (16, 512, 2048))  # rows, new tokens and all tokens of each
# TFLOP/s on an H200 (2026-11-29): FA3 as in vLLM 0.25, by page size; 8 calls in a CUDA graph, tables and pool as here.
PEERS = {
    (32, 8, 128): {16: (523, 371, 556, 505), 64: (522, 371, 553, 503), 128: (557, 382, 589, 531)},
    (64, 8, 128): {16: (519, 378, 566, 503), 64: (516, 382, 565, 503), 128: (554, 394, 606, 538)},
    (32, 8, 64): {16: (396, 267, 420, 354), 64: (415, 268, 416, 352), 128: (440, 274, 442, 366)},
}
CALLS = 8


def make_metadata(page_table: jax.Array, new: int, length: int) -> PagedMetadata:
    rows = page_table.shape[0]
    positions = jnp.tile(jnp.arange(length - new, length, dtype=jnp.int32), rows)
    return PagedMetadata(
        page_table=page_table,
        kv_lens=jnp.full(rows, length, jnp.int32),
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32) * new,
        positions=positions,
        slot_mapping=jnp.zeros_like(positions),
        num_decode=jnp.int32(0),
        num_seqs=jnp.int32(rows),
    )


def prepare_cell(
    pool: tuple[str, int, int, int], heads: int, rows: int, new: int, length: int
) -> Callable[[], tuple[float, float]]:
    """Compiles a cell's programs, and gives the function that times a call and a step's work lists: microseconds.

    Args:
      pool: dtype, page size, KV heads and head_dim (`make_pool`).
    """
    from jpaged.pallas_kernels import attention_gpu as attention

    kv_pages = make_pool(*pool)
    spec = kv_pages.spec
    shape, options = (
        (rows * new, heads, spec.head_dim),
        AttentionOptions(spec.head_dim**-0.5, sliding_window=None, soft_cap=None),
    )
    tables = make_tables(spec, rows, length, CALLS)
    meta = make_metadata(tables[0], new, length)
    planned = jax.jit(partial(plan_attention, spec=spec))(meta)
    blocks = attention.prefill_blocks(shape, spec, planned)
    if blocks is None:
        raise ValueError(f"{rows} x {new} tokens are too few for the prefill kernel")

    def lists(planned):
        records = attention.make_records(shape, spec, planned, None)
        return records, attention.make_prefill_records(shape, spec, planned, None, blocks)

    def kernels(state, kv_pages, tables, planned, records, prefill_records):
        queries, outputs = state[0], []  # each call's output is one of the program's: else XLA leaves the call out
        for page_table in tables:
            # The kernels read the plan's table. Were it the same for all calls, XLA would leave all but one out.
            step = dataclasses.replace(planned, work=dataclasses.replace(planned.work, page_table=page_table))
            out, _ = attention.attend_listed(
                queries, kv_pages, step, records, prefill_records, None, options, with_lse=False
            )
            outputs.append(out)
        return queries, outputs

    def plans(kv_lens, meta):
        for _ in range(CALLS):
            planned = plan_attention(dataclasses.replace(meta, kv_lens=kv_lens), spec)
            records, prefill_records = lists(planned)
            # 0, but known only once the lists are made
            kv_lens = kv_lens + jnp.minimum(records[:rows, 0] + prefill_records[:rows, 0], 0)
        return kv_lens

    queries = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    state = queries, [queries + 0 for _ in tables]
    arguments = kv_pages, tables, planned, *jax.jit(lists)(planned)
    step, plan = jax.jit(kernels, donate_argnums=0), jax.jit(plans, donate_argnums=0)
    state = jax.block_until_ready(step(state, *arguments))
    lengths = jax.block_until_ready(plan(meta.kv_lens + 0, meta))
    return lambda: (
        median_us(step, state, arguments, CALLS, replays=12),
        median_us(plan, lengths, (meta,), CALLS, replays=5),
    )


def cell_result(pool: tuple[str, int, int, int], heads: int, cell: tuple[int, int, int], us: float, plan_us: float):
    """Times with what they are to be read against."""
    dtype, page_size, kv_heads, head_dim = pool
    rows, new, length = cell
    spec = PageSpec(2, page_size, kv_heads, head_dim, dtype)
    cost = attention_cost(spec, num_heads=heads, q_lens=[new] * rows, kv_lens=[length] * rows, q_itemsize=2)
    peers = PEERS[heads, kv_heads, head_dim].get(page_size, (None,) * len(CELLS)) if dtype == "bfloat16" else None
    peer = None if peers is None else peers[CELLS.index(cell)]
    speed = cost.flops / us / 1e6
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "pages": dtype,
        "page_size": page_size,
        "rows": rows,
        "new_tokens": new,
        "kv_len": length,
        "us": round(us, 1),
        "plan_us": round(plan_us, 1),
        "tflop_per_s": round(speed, 1),
        "fa3_tflop_per_s": peer,
        "times_fa3": None if peer is None else round(speed / peer, 3),
    }


def make_jobs(page_sizes: list[int], *, quick: bool) -> list[tuple]:
    """Arguments of `prepare_cell`; neighbours share a pool."""
    jobs: list[tuple] = []
    for nth, (heads, kv_heads, head_dim) in enumerate(PEERS):
        for page_size in page_sizes if nth == 0 else page_sizes[:1]:
            if not (quick and nth):
                cells = CELLS[:3:2] if quick else CELLS
                jobs += [(("bfloat16", page_size, kv_heads, head_dim), heads, *cell) for cell in cells]
        if nth == 0:
            for dtype in QUANTIZED_DTYPES:
                cells = CELLS[2:3] if quick else CELLS
                jobs += [((dtype, page_sizes[0], kv_heads, head_dim), heads, *cell) for cell in cells]
    return jobs


def _lines(results: list[dict[str, Any]]) -> list[list[Any]]:
    return [
        [
            f"{r['heads']}/{r['kv_heads']} x {r['head_dim']}, {r['pages']}",
            f"{r['rows']} x {r['new_tokens']:,} @ {r['kv_len']:,}",
            str(r["page_size"]),
            f"{r['us']:.0f}",
            f"{r['tflop_per_s']:.0f}",
            "–" if r["fa3_tflop_per_s"] is None else str(r["fa3_tflop_per_s"]),
            "–" if r["times_fa3"] is None else f"{r['times_fa3']:.2f}",
            f"{r['plan_us']:.0f}",
        ]
        for r in results
    ]


_COLUMNS = [
    "Heads x dim, pages",
    "Rows x new @ KV tokens",
    "Page",
    "us",
    "TFLOP/s",
    "FA3",
    "Times as fast",
    "Lists, us a step",
]


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    return f"{table(_COLUMNS, _lines(record['results']['prefill']), num_text=2)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time paged prefill attention.")
    parser.add_argument("--page-sizes", default="16", help="comma-separated; those after the first on the first heads")
    parser.add_argument("--quick", action="store_true", help="two cells of the first heads only")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU's memory
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    arguments = arguments_on_gpu(parser, render)
    if arguments is None:
        return
    jobs = make_jobs([int(size) for size in arguments.page_sizes.split(",")], quick=arguments.quick)
    found: dict[int, dict[str, Any]] = {}
    for nth, times in measure_all(prepare_cell, jobs):
        if isinstance(times, Failure):
            sys.exit(f"{jobs[nth]}: {times.error}")
        pool, heads, *cell = jobs[nth]
        found[nth] = cell_result(pool, heads, tuple(cell), *times)
        print(found[nth], flush=True)
    results = [found[nth] for nth in sorted(found)]
    print_table("Prefill over pages, causal", _COLUMNS, _lines(results))
    print_json("bench_prefill", {"prefill": results})


if __name__ == "__main__":
    main()

"""Measures block sizes of the Hopper kernels and makes the table of those that beat the rules, for this kind of GPU.

    python scripts/tune.py [--kernels decode,prefill] [--head-dims 64,128] [--dtypes bfloat16,int8] [--write]

Decode is measured over consumers of a block of threads and `full_share`, on rows and contexts of several models, each
with as many stages as fit; prefill over tile sizes, stages, and how much of K and V tiles share in the L2 cache. A
choice serves all contexts, for lengths are data: it is taken where it is 3 % faster than the rules' in the geometric
mean of its cells, and slower than 1 % in none. Times are device times, taken as in `bench_kernels` and `bench_prefill`.
Prints tables and a last line of JSON, which --write then puts where `jpaged.pallas_kernels` looks for it.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import KVPages
from jpaged.pallas_kernels.prefill_tuning_gpu import fit_prefill_stages, rule_prefill_blocks
from jpaged.pallas_kernels.tuned_blocks import FIELDS, FOLDER, parse_table, table_name
from jpaged.pallas_kernels.tuning import fit_stages, rule_gpu_blocks, tile_rows
from jpaged.pallas_kernels.xla import AttentionOptions
from scripts.bench_kernels import make_metadata, make_pool, make_tables, replay
from scripts.bench_prefill import make_metadata as make_prefill_metadata
from scripts.measuring import Failure, measure_all
from scripts.report import environment, print_table

MIN_GAIN, MAX_LOSS = 1.03, 0.99
CALLS = 8
FEW_ROWS, LONG_CALLS = 8, 32  # of short calls a program has more, or the host would be what is measured
ROUNDS = 5
PAGE_SIZE = 16
SHARES = (1, 4, 8, 16, 32)
UNIT_EDGES = (0, 16, 64, 256, 1024, 1 << 30)
DECODE_STEPS = {1: (1024, 8192), 8: (1024, 8192), 32: (1024, 4096), 128: (1024, 2048)}  # contexts by rows
PREFILL_CELLS = ((8, 1024, 1024), (4, 1024, 8192), (16, 512, 2048))  # rows, new tokens and all tokens of each


@dataclasses.dataclass(frozen=True)
class Model:
    """Heads and pages that are measured."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}, {self.dtype}"


_OF_BOTH = (
    Model(32, 8, 128, "bfloat16"),
    Model(32, 8, 64, "bfloat16"),
    Model(16, 8, 256, "bfloat16"),
    Model(32, 8, 128, "int8"),
)
DECODE_MODELS = (*_OF_BOTH, Model(9, 3, 64, "bfloat16"))
PREFILL_MODELS = (*_OF_BOTH, Model(32, 8, 64, "int8"))


def decode_consumers(model: Model) -> list[int]:
    """Consumers of a block of threads that a decode step of the model can have."""
    return [n for n in ((1, 2, 3, 4) if model.itemsize == 1 else (1, 2, 3)) if _stages(model, n) >= 2]


def _stages(model: Model, consumers: int) -> int:
    rows = tile_rows(model.head_dim, model.itemsize, model.heads // model.kv_heads, narrow=True)
    return fit_stages(model.head_dim, model.itemsize, PAGE_SIZE, consumers, rows, swapped=model.itemsize == 1)


def prefill_sizes(model: Model) -> list[dict[str, int]]:
    """What is tried instead of the rules' sizes, `{}` for those themselves."""
    rule = rule_prefill_blocks(model.head_dim, 132, model.itemsize)
    tried: list[dict[str, int]] = [{}]
    tried += [{"section_tokens": rule.section_tokens * n // 4} for n in (1, 2, 8)]
    if model.itemsize == 1:
        tried += [{"stages": 2, "raw_stages": 4}, {"stages": 2}, {"raw_stages": 2}, {"consumers": 3}]
        return [*tried, {"query_buffers": 1, "stages": 4}]
    if rule.block_kv == 128:
        tried.append({"block_kv": 64, "stages": 4})
    if model.head_dim == 64:
        tried.append({"consumers": 5 - rule.consumers})
    return tried


@functools.lru_cache(maxsize=1)
def _pool(model: Model) -> KVPages:
    return make_pool(model.dtype, PAGE_SIZE, model.kv_heads, model.head_dim)


def prepare(kernel: str, model: Model, *arguments: Any) -> Callable[[], Any]:
    """Compiles a program and gives what times it."""
    return {"decode": _prepare_decode, "prefill": _prepare_prefill}[kernel](model, *arguments)


def _options(model: Model) -> AttentionOptions:
    return AttentionOptions(scale=model.head_dim**-0.5, sliding_window=None, soft_cap=None)


def _replays(us: float, calls: int = CALLS) -> int:
    """Programs of a batch: some 8 ms, beside which the host's time for the first of them is little."""
    return max(3, min(40, int(8000 / (us * calls))))


def _prepare_decode(model: Model, rows: int) -> Callable[[], list[tuple[int, int, int, float]]]:
    """Its timer gives (context, consumers, full_share, microseconds a call) of all that a step can be cut into.

    They take turns, a batch each: what comes next to each other in time has the same clocks, and is compared.
    """
    from jpaged.pallas_kernels import attention_gpu as attention
    from jpaged.pallas_kernels.compat import current_gpu
    from jpaged.pallas_kernels.gpu_plan import plan_gpu
    from jpaged.pallas_kernels.xla_plan import plan_xla

    gpu, kv_pages, contexts = current_gpu(), _pool(model), DECODE_STEPS[rows]
    if gpu is None:
        raise RuntimeError("needs a GPU; jax found none")
    spec, shape = kv_pages.spec, (rows, model.heads, model.head_dim)
    units = rows * model.kv_heads
    rule = rule_gpu_blocks(model.head_dim, gpu.multiprocessors, model.itemsize, PAGE_SIZE, units=units)
    calls = LONG_CALLS if rows <= FEW_ROWS else CALLS
    tables = make_tables(spec, rows, max(contexts), calls)

    @functools.partial(jax.jit, static_argnames=("consumers", "share"))
    def plan(meta, consumers, share):
        blocks = dataclasses.replace(rule, consumers=consumers, stages=_stages(model, consumers))
        shared = dataclasses.replace(blocks, full_share=share)
        work = plan_gpu(meta, plan_xla(meta, spec.page_size, "gpu"), spec, shared)
        planned = dataclasses.replace(meta, work=work)
        records = attention.make_records(shape, spec, planned, None)
        return dataclasses.replace(planned, work=dataclasses.replace(work, blocks=blocks)), records

    def with_table(planned, page_table):
        return dataclasses.replace(planned, work=dataclasses.replace(planned.work, page_table=page_table))

    @jax.jit
    def first_pages(planned, records):
        return [attention.find_first_pages(records, spec, with_table(planned, page_table)) for page_table in tables]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(queries, kv_pages, tables, planned, records, first_pages):
        for page_table, pages in zip(tables, first_pages, strict=True):
            listed = queries, kv_pages, with_table(planned, page_table), records, None, None, _options(model), False
            queries, _ = attention.attend_listed(*listed, first_pages=pages)
        return queries

    shares = sorted({*SHARES, rule.full_share})
    cases = list(itertools.product(contexts, decode_consumers(model), shares))
    queries = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    plans = []
    for length, consumers, share in cases:
        planned = plan(make_metadata(tables[0], length), consumers=consumers, share=share)
        plans.append((*planned, first_pages(*planned)))
        queries = step(queries, kv_pages, tables, *plans[-1])
    jax.block_until_ready(queries)

    def timer() -> list[tuple[int, int, int, float]]:
        state, times = queries, [[] for _ in cases]
        for nth in range(1 + ROUNDS):
            for case, planned in enumerate(plans):
                replays = _replays(statistics.median(times[case]), calls) if times[case] else 1
                us, state = replay(step, state, (kv_pages, tables, *planned), calls, replays, batches=1)
                if nth == 1:
                    times[case].clear()  # the first round only says how often the others replay
                times[case].append(us)
        return [(*case, statistics.median(us)) for case, us in zip(cases, times, strict=True)]

    return timer


def _prepare_prefill(model: Model, cell: tuple[int, int, int], sizes: dict[str, int]) -> Callable[[], float]:
    """Its timer gives microseconds a call."""
    from jpaged.pallas_kernels import attention_gpu as attention
    from jpaged.pallas_kernels.compat import current_gpu
    from jpaged.pallas_kernels.gpu_plan import plan_gpu
    from jpaged.pallas_kernels.prefill_gpu import prefill
    from jpaged.pallas_kernels.xla_plan import plan_xla

    gpu, kv_pages, (rows, new, length) = current_gpu(), _pool(model), cell
    if gpu is None:
        raise RuntimeError("needs a GPU; jax found none")
    spec, shape = kv_pages.spec, (rows * new, model.heads, model.head_dim)
    blocks = _prefill_blocks(model, gpu.multiprocessors, sizes)
    tables = make_tables(spec, rows, length, CALLS)
    decode_blocks = rule_gpu_blocks(model.head_dim, gpu.multiprocessors, model.itemsize, PAGE_SIZE, narrow=False)

    @jax.jit
    def plan(meta):
        work = plan_gpu(meta, plan_xla(meta, spec.page_size, "gpu"), spec, decode_blocks)
        planned = dataclasses.replace(meta, work=work)
        return work.counters, attention.make_prefill_records(shape, spec, planned, None, blocks)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, kv_pages, tables, counters, records):
        queries, outputs = state
        for nth, page_table in enumerate(tables):
            outputs[nth], _ = prefill(
                queries,
                kv_pages.data,
                records,
                page_table,
                counters,
                None,
                outputs[nth],
                None,
                page_size=spec.page_size,
                blocks=blocks,
                options=_options(model),
                scales=kv_pages.scales,
            )
        return queries, outputs

    queries = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    arguments = kv_pages, tables, *plan(make_prefill_metadata(tables[0], new, length))
    state = jax.block_until_ready(step((queries, [queries + 0 for _ in tables]), *arguments))

    def timer() -> float:
        us, again = replay(step, state, arguments, CALLS, 1, batches=3)
        return replay(step, again, arguments, CALLS, _replays(us), batches=3)[0]

    return timer


def _prefill_blocks(model: Model, multiprocessors: int, sizes: dict[str, int]):
    rule = rule_prefill_blocks(model.head_dim, multiprocessors, model.itemsize)
    blocks = fit_prefill_stages(dataclasses.replace(rule, **sizes), model.head_dim)
    if blocks.stages < 1:
        raise ValueError(f"{sizes} do not fit shared memory")
    return blocks


def choose(cells: Iterable[tuple[str, float, float]]) -> tuple[str, float] | None:
    """The sizes to take instead of the rules', and their mean gain, or `None`.

    Args:
      cells: of each measurement the sizes as JSON, and the times of the rules and of these sizes.

    Example:
      >>> choose([("a", 10.0, 9.0), ("a", 20.0, 19.9), ("b", 10.0, 8.0), ("b", 20.0, 21.0)])
      ('a', 1.057)
    """
    gains: dict[str, list[float]] = {}
    for sizes, rule_us, us in cells:
        gains.setdefault(sizes, []).append(rule_us / us)
    whole = max(map(len, gains.values()), default=0)  # sizes that did not run everywhere are none for everywhere
    means = {
        sizes: statistics.geometric_mean(ratios)
        for sizes, ratios in gains.items()
        if len(ratios) == whole and min(ratios) >= MAX_LOSS
    }
    best = max(means, key=lambda sizes: means[sizes], default=None)
    return None if best is None or means[best] < MIN_GAIN else (best, round(means[best], 3))


def _range_of(units: int) -> tuple[int, int]:
    return next((a, b) for a, b in itertools.pairwise(UNIT_EDGES) if a <= units < b)


def _decode_cells(model: Model, rows: int, measured: list, multiprocessors: int) -> list[dict[str, Any]]:
    """All figures of a step, as `_prepare_decode` gives them, each beside that of the rules."""
    units = rows * model.kv_heads
    rule = rule_gpu_blocks(model.head_dim, multiprocessors, model.itemsize, PAGE_SIZE, units=units)
    times = {(length, consumers, share): us for length, consumers, share, us in measured}
    found = []
    for (length, consumers, share), us in times.items():
        own = (length, rule.consumers, rule.full_share)
        if own in times:
            sizes = {"consumers": consumers, "stages": _stages(model, consumers), "full_share": share}
            found.append({"units": units, "kv_len": length, "sizes": sizes, "us": us, "rule_us": times[own]})
    return found


def choices(kernel: str, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the table says of a kernel: for each shape of pages, and each range of units, the sizes that win."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for cell in cells:
        edges = _range_of(cell["units"]) if kernel == "decode" else (0, 1)
        groups.setdefault((cell["head_dim"], cell["itemsize"], *edges), []).append(cell)
    found = []
    for (head_dim, itemsize, min_units, end_units), group in sorted(groups.items()):
        best = choose((json.dumps(c["sizes"]), c["rule_us"], c["us"]) for c in group if c["sizes"])
        if best is not None:
            shape = {"head_dim": head_dim, "itemsize": itemsize, "min_units": min_units, "end_units": end_units}
            found.append({**shape, "sizes": json.loads(best[0]), "gain": best[1]})
    return found


def write_table(record: dict[str, Any], kind: str, folder: Path) -> Path:
    """Makes a record the table of its kind of GPU.

    Raises:
      ValueError: `read_table` would refuse it; nothing is written.
    """
    parse_table(record, kind)
    (path := folder / table_name(kind)).parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return path


def hand_over(record: dict[str, Any], kind: str, folder: Path | None) -> None:
    """Prints a record, so that nothing is lost, then makes it the table of its kind of GPU, if there is a folder.

    Exits with a message where `read_table` would refuse the record, or where it cannot be written.
    """
    print(json.dumps(record), flush=True)
    try:
        if folder is None:
            parse_table(record, kind)
        else:
            print(f"wrote {write_table(record, kind, folder)}", file=sys.stderr)
    except (OSError, ValueError) as error:
        sys.exit(f"error: no table was made of the record above: {error}")


def make_jobs(kernels: list[str], head_dims: list[int], dtypes: list[str]) -> list[tuple]:
    """What is to be measured: arguments of `prepare`."""
    wanted = lambda model: model.head_dim in head_dims and model.dtype in dtypes  # noqa: E731
    jobs: list[tuple] = []
    if "decode" in kernels:
        for model in filter(wanted, DECODE_MODELS):
            jobs += [("decode", model, rows) for rows in DECODE_STEPS]
    if "prefill" in kernels:
        for model in filter(wanted, PREFILL_MODELS):
            jobs += [("prefill", model, cell, sizes) for sizes in prefill_sizes(model) for cell in PREFILL_CELLS]
    return jobs


def collect(jobs: list[tuple], multiprocessors: int) -> dict[str, list[dict[str, Any]]]:
    """Runs the jobs; figures by kernel."""
    found: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}
    prefill: dict[tuple, list[tuple[dict, float]]] = {}
    for nth, result in measure_all(prepare, jobs):
        kernel, model, step, *sizes = jobs[nth]
        if isinstance(result, Failure):
            print(f"{kernel} {model} {step} {sizes}: {result.error}", flush=True)
        elif kernel == "decode":
            cells = _decode_cells(model, step, result, multiprocessors)
            found["decode"] += [{**_shape(model), "rows": step, **cell} for cell in cells]
            lines = ", ".join(f"{length}/{consumers}/{share}: {us:.2f}" for length, consumers, share, us in result)
            print(f"decode {model}, {step} rows, context/consumers/share: {lines} us", flush=True)
        else:
            prefill.setdefault((model, step), []).append((*sizes, result))
            print(f"prefill {model}, {step}, {sizes}: {result:.1f} us", flush=True)
    for (model, (rows, new, length)), measured in prefill.items():
        rule_us = next((us for sizes, us in measured if not sizes), None)
        for sizes, us in measured if rule_us is not None else []:
            cell = {"rows": rows, "new_tokens": new, "kv_len": length, "sizes": sizes, "us": us, "rule_us": rule_us}
            found["prefill"].append({**_shape(model), **cell})
    for cell in [*found["decode"], *found["prefill"]]:
        cell["us"], cell["rule_us"] = round(cell["us"], 2), round(cell["rule_us"], 2)
    return found


def _shape(model: Model) -> dict[str, Any]:
    return {**dataclasses.asdict(model), "itemsize": model.itemsize}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure block sizes and make this GPU's table of them.")
    parser.add_argument("--kernels", default=",".join(FIELDS), help="comma-separated: decode, prefill")
    parser.add_argument("--head-dims", default="64,128,256", help="comma-separated")
    parser.add_argument("--dtypes", default="bfloat16,int8", help="comma-separated dtypes of pages")
    parser.add_argument("--write", action="store_true", help=f"put the table into {FOLDER.name}/")
    arguments = parser.parse_args()
    kernels, dtypes = arguments.kernels.split(","), arguments.dtypes.split(",")
    jobs = make_jobs(kernels, [int(n) for n in arguments.head_dims.split(",")], dtypes)
    if not jobs or not set(kernels) <= set(FIELDS):
        parser.error("nothing to measure; see --help for what there is")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU's memory
    from jpaged.pallas_kernels.compat import current_gpu

    gpu = current_gpu()
    if gpu is None or not gpu.is_hopper:
        sys.exit("needs a Hopper GPU; jax found none")
    cells = collect(jobs, gpu.multiprocessors)
    chosen = {kernel: choices(kernel, cells[kernel]) for kernel in FIELDS}
    for kernel, found in chosen.items():
        lines: list[list[object]] = [
            [f"{c['head_dim']}, {c['itemsize']}", f"{c['min_units']}-{c['end_units']}", c["sizes"], c["gain"]]
            for c in found
        ]
        print_table(f"{kernel}: better than the rules", ["head_dim, bytes", "units", "sizes", "gain"], lines)
    # `environment` names the first GPU, which need not be the one that was measured.
    record = {"script": "tune", **environment(), "device": gpu.kind, "results": {"chosen": chosen, **cells}}
    hand_over(record, gpu.kind, FOLDER if arguments.write else None)


if __name__ == "__main__":
    main()

"""Times the sampler by what a step's rows ask for, their number and the vocabulary, on the first device.

    python scripts/bench_sampling.py [--quick] [--kernels] [--render FILE]

Each time is that of one of several calls in one program, each of which waits for the one before. Logits are normal,
three of them raised, as a model's are; "wide" asks for a share of the probability that takes thousands of tokens.
*Read* is one pass over the logits at the device's read roof, which is measured first, and the fraction is that of the
time. Prints a table and a last line of JSON. On a CPU the shapes are tiny, to see that it runs.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.filtered_draw import can_draw_filtered
from jpaged.request import SamplingParams
from jpaged.sampler import choose_tokens, sample
from jpaged.sampler_state import make_sampler_state
from jpaged.sampler_tuning import TUNINGS, SamplerTuning
from jpaged.sampling_rows import SamplingKind, SamplingRow, sampling_fields, sampling_kind, unpack_sampling_rows
from scripts.bench_kernels import median_us
from scripts.engine.roofs import measure_roofs
from scripts.markdown import measured, table
from scripts.report import print_json, print_table

ASKS = {
    "greedy": SamplingParams(temperature=0.0),
    "draw": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p .95": SamplingParams(top_p=0.95),
    "min-p .05": SamplingParams(min_p=0.05),
    "top-k 50, top-p .95": SamplingParams(top_k=50, top_p=0.95),
    "wide": SamplingParams(top_p=0.95, temperature=2.0),
    "penalties, top-p .95": SamplingParams(top_p=0.95, repetition_penalty=1.1),
}
ROWS, VOCABULARIES = (1, 8, 64, 256), (49_152, 128_256)
QUICK_ROWS, CPU_ROWS, CPU_VOCABULARIES = (1, 256), (1, 4), (1_024,)
CALLS, REPLAYS = 8, 10


def make_step(kind: SamplingKind, state: Any, tuning: Any):
    """`CALLS` samplings in one program: position, logits, fields -> position."""

    def step(position, logits, fields):
        for _ in range(CALLS):
            # Neither the same as the call before, nor begun before that has ended.
            position, here, packed = jax.lax.optimization_barrier((position, logits, fields))
            rows = unpack_sampling_rows(packed.at[0].set(position))
            if kind == "full":
                token_ids = sample(here, rows, state, tuning).token_ids
            else:
                token_ids = choose_tokens(here, rows, kind, tuning)
            position = jnp.minimum(token_ids, 0)  # 0: the entry of the sampler's state that they all have
        return position

    return jax.jit(step)


def measure(num_rows: int, vocab_size: int, tuning: SamplerTuning) -> dict[str, float]:
    """Microseconds a sampling, by what is asked for."""
    logits = 2.5 * jax.random.normal(jax.random.key(0), (num_rows, vocab_size))
    logits = logits.at[:, 7:300:100].add(jnp.array([12.0, 11.0, 10.0]))
    state = make_sampler_state(1, vocab_size)
    steps: dict[str, Any] = {}
    found = {}
    for name, params in ASKS.items():
        rows = [SamplingRow(params, 7 + i, 0, position=9, samples=True, num_output_tokens=1) for i in range(num_rows)]
        fields = sampling_fields(rows, num_rows, 1)
        kind = sampling_kind(fields)
        kind = kind if kind in tuning.kinds else "full"
        step = steps.setdefault(kind, make_step(kind, state, tuning))
        position = jnp.zeros(num_rows, jnp.int32)
        found[name] = median_us(step, position, (logits, jnp.asarray(fields)), CALLS, REPLAYS)
    return found


_COLUMNS = ["Rows ask for", "Vocabulary", "Rows", "us", "Read, us", "Fraction"]


def _lines(results: list[dict[str, Any]]) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for r in results:
        figures = f"{r['us']:.0f}", f"{r['read_us']:.1f}", f"{r['fraction']:.2f}"
        lines.append([r["asks"], str(r["vocab_size"]), str(r["rows"]), *figures])
    return lines


def render(record: dict) -> str:
    """A record of this script as Markdown."""
    return f"{table(_COLUMNS, _lines(record['results']['sampling']), num_text=1)}\n{measured(record)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the sampler.")
    parser.add_argument("--quick", action="store_true", help="1 and 256 rows only")
    parser.add_argument("--kernels", action="store_true", help="filter by the kernels for Hopper, used in steps or not")
    parser.add_argument("--render", metavar="FILE", type=Path, help="print a record as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text(encoding="utf-8"))), end="")
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    on_cpu = jax.default_backend() == "cpu"
    rows = CPU_ROWS if on_cpu else QUICK_ROWS if arguments.quick else ROWS
    roof = measure_roofs("float32", scale=0.05 if on_cpu else 1.0).read
    tuning = TUNINGS.get(jax.default_backend(), TUNINGS["cpu"])
    if arguments.kernels:
        if not can_draw_filtered((1, VOCABULARIES[0])):
            sys.exit("--kernels needs a Hopper GPU and jax 0.11")
        tuning = replace(tuning, kernels=True)
    results = []
    for vocab_size in CPU_VOCABULARIES if on_cpu else VOCABULARIES:
        for num_rows in rows:
            read_us = 4 * num_rows * vocab_size / roof * 1e6
            for asks, us in measure(num_rows, vocab_size, tuning).items():
                result = {"asks": asks, "vocab_size": vocab_size, "rows": num_rows, "us": round(us, 1)}
                results.append(result | {"read_us": round(read_us, 2), "fraction": round(read_us / us, 3)})
    print_table("Sampling", _COLUMNS, _lines(results))
    print_json("bench_sampling", {"read_bytes_per_s": round(roof), "kernels": tuning.kernels, "sampling": results})


if __name__ == "__main__":
    main()

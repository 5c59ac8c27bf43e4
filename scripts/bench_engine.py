"""The engine under load: decode steps, prefill and whole workloads, beside the roofline and vLLM; one engine for all.

    python scripts/bench_engine.py                                 requests together against one by one, default model
    python scripts/bench_engine.py --model llama-3.1-8b --workloads all --trace FILE --profile --output record.json
    python scripts/bench_engine.py --model smollm2-135m --workloads decode,uniform --scale 0.02     a small try

`--model` is a well-known shape, which gets random weights made on the device, or a model as `fetch` finds it. The
workloads are those of `scripts/engine/workloads.py`; the steps that all of them need are compiled before the first one
is measured, and nothing is compiled after. Results are printed as they come, and kept in `--output` after each
workload. The last line is JSON. Runs on whatever device jax finds.
"""

import argparse
import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jpaged.errors import ConfigError, JpagedError
from jpaged.launch_settings import launch_settings
from scripts.engine import workloads
from scripts.engine.results import Results
from scripts.engine.start import READY, compare_start, measure_cold_start

# When this process was started; that the interpreter starts is work of the processor, hardly of anything else.
_BEGAN: Final = time.time() - time.process_time()
_PROFILED: Final = "1@1024,32@1024,256@1024"
_KV_DTYPES: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model = result.add_argument_group("model and engine")
    model.add_argument("--model", default="smollm2-135m-instruct")
    model.add_argument("--random-weights", action="store_true", help="for a known model too, which is not loaded then")
    model.add_argument("--dtype", help="of weights and activations (default: float32 on a CPU, else bfloat16)")
    model.add_argument("--weights", choices=["int8", "fp8"], help="quantise the products of the layers")
    model.add_argument("--kv-dtype", choices=_KV_DTYPES, help="of the pages (default: that of the activations)")
    model.add_argument("--page-size", type=int)
    model.add_argument("--pages", type=int, help="pages of the pool (default: what memory allows)")
    model.add_argument("--implementation", choices=["xla", "mosaic_gpu", "mosaic_tpu"])
    model.add_argument("--max-num-seqs", type=int, help="rows of a step (default: by the workloads, 512 at most)")
    model.add_argument("--token-budget", type=int, help="tokens of a step (default: by the chip)")
    model.add_argument(
        "--prefill-budget",
        type=int,
        metavar="TOKENS",
        help="of a step in which no row waits for its next token (default: by the chip; with a --token-budget or "
        "--token-buckets: those of any step)",
    )
    model.add_argument("--token-buckets", metavar="T,...", help="padded sizes of a step (default: chosen)")
    load = result.add_argument_group("what is measured")
    load.add_argument("--workloads", default="together", metavar="NAME,...", help=f"all, {', '.join(workloads.NAMES)}")
    load.add_argument("--cells", metavar="ROWS@CONTEXT,...", help="of the workload decode")
    load.add_argument("--trace", metavar="FILE", help="of the workload azure")
    load.add_argument("--scale", type=float, default=1.0, help="below 1: fewer and shorter requests")
    load.add_argument("--repeats", type=int, default=3, help="of each measurement (azure and uniform: 1)")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--profile", nargs="?", const=_PROFILED, metavar="ROWS@CONTEXT,...", help="steps to break down")
    load.add_argument("--time-limit", type=float, metavar="S", help="begin nothing more after so many seconds")
    together = result.add_argument_group("the workload together")
    together.add_argument("--requests", type=int, default=32)
    together.add_argument("--tokens", type=int, default=128, help="prompt and output of a request together")
    together.add_argument("--alone", type=int, default=8, help="requests served one by one (default: %(default)s)")
    together.add_argument("--seed", type=int, default=0)
    output = result.add_argument_group("output")
    output.add_argument("--output", metavar="FILE", type=Path, help="the JSON so far, after each workload")
    output.add_argument("--json", action="store_true", help="print only the JSON line")
    output.add_argument("--until-ready", action="store_true", help=argparse.SUPPRESS)
    return result


def prepare_jax(*, profile: bool) -> None:
    """Settings of the process that jax reads when it starts: those of a server, and CUDA graphs under the profiler."""
    for setting in launch_settings("gpu", os.environ):
        if setting.name != "JAX_PLATFORMS":
            os.environ[setting.name] = setting.value
    if profile:
        flag = "--xla_enable_command_buffers_during_profiling=true"
        flags = [other for other in os.environ.get("XLA_FLAGS", "").split() if other != flag]
        os.environ["XLA_FLAGS"] = " ".join([*flags, flag])  # once: the compilation cache's keys depend on the text


def check(args: argparse.Namespace) -> list[str]:
    """The workloads that were asked for.

    Raises:
      ConfigError: something that was asked for makes no sense.
    """
    names = workloads.parse_names(args.workloads)
    for name in ("repeats", "requests", "alone"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}, expected at least 1")
    if not 0 < args.scale <= 1:
        raise ConfigError(f"--scale is {args.scale}, expected a number above 0 and at most 1")
    if args.tokens < 8:
        raise ConfigError(f"--tokens is {args.tokens}, expected at least 8")
    if args.temperature < 0:
        raise ConfigError(f"--temperature is {args.temperature}, expected at least 0")
    if args.profile and "decode" not in names:
        raise ConfigError("--profile breaks down steps of the workload 'decode', which is not among --workloads")
    if args.token_buckets and not all(word.strip().isdecimal() for word in args.token_buckets.split(",")):
        raise ConfigError(f"--token-buckets is {args.token_buckets!r}, expected ascending integers, such as 1,8,32")
    if names == ["start"]:
        raise ConfigError("--workloads is 'start' alone, expected another one too: what it compiles depends on them")
    return names


def run(args: argparse.Namespace, results: Results) -> None:
    """Measures what was asked for; see the module.

    Raises:
      JpagedError: it cannot be measured.
    """
    begin = time.perf_counter()
    names = check(args)
    cells, profiled = _cells(args, names)
    whole = (name for name in names if name not in ("start", "decode", "together"))
    loads = {name: workloads.make_load(name, trace=args.trace) for name in whole}
    cold_s = _start_cold(args) if "start" in names and not args.until_ready else None
    elsewhere_s = time.perf_counter() - begin

    # Only now may jax take the device.
    from scripts.engine import bench
    from scripts.engine.roofs import measure_roofs
    from scripts.engine.setup import Needs

    needs = Needs.of(
        [load.scaled(args.scale) for load in loads.values()],
        cells,
        steps=workloads.decode_steps(args.scale),
        together=(args.requests, args.tokens) if "together" in names else None,
    )
    if args.until_ready:
        bench.start(args, results, needs)
        print(f"{READY}{time.time()}", flush=True)
        return
    before = time.perf_counter()
    roofs = measure_roofs(bench.dtype_of(args), scale=args.scale)  # before the pool takes the memory
    elsewhere_s += time.perf_counter() - before
    started = bench.start(args, results, needs)
    warm_s = time.time() - _BEGAN - elsewhere_s
    made = bench.make_bench(args, results, started, roofs)
    if cold_s is not None:
        results.say(f"ready {cold_s:.1f} s after a cold start, {warm_s:.1f} s with a warm cache")
        starts = {"cold_s": round(cold_s, 2), "warm_s": round(warm_s, 2)}
        results.add({"start": compare_start(starts, made.yardstick)})

    def late() -> bool:
        return args.time_limit is not None and time.perf_counter() - begin > args.time_limit

    skipped = []
    for name in names:
        if name == "start":
            continue
        if late():
            skipped.append(name)
        elif name == "decode":
            bench.run_decode(made, results, cells, profiled, late)
        elif name == "together":
            bench.run_together(made, results, args)
        else:
            bench.run_load(made, results, loads[name])
        results.add({"skipped": skipped, "compiled_at_end": made.engine.stats().num_compilations})


def _cells(args: argparse.Namespace, names: Sequence[str]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cells of the workload decode, and those of them that are broken down; scaled."""
    cells = workloads.parse_cells(args.cells) if args.cells else list(workloads.CELLS)
    cells = workloads.scaled_cells(cells, args.scale) if "decode" in names else []
    profiled = workloads.scaled_cells(workloads.parse_cells(args.profile), args.scale) if args.profile else []
    if args.profile == _PROFILED:
        profiled = [cell for cell in profiled if cell in cells]
    if unknown := [f"{rows}@{context}" for rows, context in profiled if (rows, context) not in cells]:
        raise ConfigError(f"--profile names {', '.join(unknown)}, expected cells that are measured: see --cells")
    return cells, profiled


def _start_cold(args: argparse.Namespace) -> float:
    """Seconds of another process's start, which leaves its compiled programs for this one to find."""
    cache = tempfile.mkdtemp(prefix="jpaged-bench-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    seconds = measure_cold_start(args.words, cache, timeout_s=600.0)
    import jax

    settings: Any = jax.config
    settings.update("jax_compilation_cache_dir", cache)
    return seconds


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else list(words)
    args = parser().parse_args(words, argparse.Namespace(words=words))
    prepare_jax(profile=args.profile is not None)
    results = Results(args.output, quiet=args.json or args.until_ready)
    code = 0
    try:
        run(args, results)
    except (JpagedError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured so far follows", file=sys.stderr)
        code = 130
    if not args.until_ready:
        print(results.line())
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Lowers paged attention and the KV write for CUDA, on a machine without a GPU: every shape of the shared lists.

    python scripts/lower_cuda.py [--only NAME]

Shows what lowering alone can show: that each back end builds its program for a GPU, and how large it is. Prints a table
and a last line of JSON; exits with 1 if a shape does not lower.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jpaged.pallas_kernels import attend_and_write
from jpaged.pallas_kernels.compat import jax_version
from tests.arg_specs import ARG_SPECS, ArgSpec, make_inputs
from tests.kernels.test_decode_gpu import GPU_SPECS, LOWERED, abstract_hopper
from tests.kernels.test_prefill_gpu import PREFILL_SPECS

# Those whose tiles differ.
PREFILL_LOWERED = ("everything", "head_dim_64", "head_dim_96", "head_dim_256", "group_of_64", "page_of_24")


def lower(spec: ArgSpec, implementation: str) -> str:
    """The StableHLO of one call, lowered as on a machine with a GPU."""
    inputs = make_inputs(spec)
    op = partial(attend_and_write, implementation=implementation, return_lse=True, **inputs.options(spec))
    # The mesh in use says "H200", so implementations and tiles are chosen as they are there.
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        traced = jax.jit(op).trace(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def main() -> int:
    parser = argparse.ArgumentParser(description="Lower every shape of the shared list for CUDA.")
    parser.add_argument("--only", help="lower the shapes whose name contains this")
    only = parser.parse_args().only
    # The shared list is for all back ends, so XLA lowers it; the kernel has its own, of the shapes that it takes.
    cases = [(spec.name, spec, "xla") for spec in ARG_SPECS if not spec.slow]
    if jax_version() >= (0, 11):
        cases += [(spec.name, spec, "mosaic_gpu") for spec in GPU_SPECS if spec.name in LOWERED]
        cases += [
            (f"prefill_{spec.name}", spec, "mosaic_gpu") for spec in PREFILL_SPECS if spec.name in PREFILL_LOWERED
        ]
    names = [name for name, *_ in cases]
    cases = [case for case in cases if only is None or only in case[0]]
    if not cases:
        sys.exit(f"no shape has {only!r} in its name; have {', '.join(names)}")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    failures: dict[str, str] = {}
    begin = time.perf_counter()
    print(f"{'shape':<24} {'implementation':<14} {'seconds':>7} {'lines':>7}")
    for name, spec, implementation in cases:
        start = time.perf_counter()
        try:
            lines = str(len(lower(spec, implementation).splitlines()))
        except Exception as error:  # one failing shape must not hide the others
            failures[f"{name}/{implementation}"] = f"{type(error).__name__}: {error}"
            lines = "FAILED"
        print(f"{name:<24} {implementation:<14} {time.perf_counter() - start:>7.2f} {lines:>7}", flush=True)
    for name, error in failures.items():
        print(f"{name}: {error}", file=sys.stderr)
    report = {
        "script": "lower_cuda",
        "jax": jax.__version__,
        "implementations": sorted({implementation for *_, implementation in cases}),
        "lowered": len(cases) - len(failures),
        "failed": sorted(failures),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

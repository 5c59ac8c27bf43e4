"""Compiles paged attention and the KV write for TPUs, on a machine without one (needs libtpu: `pip install jax[tpu]`).

    python scripts/tpu_aot.py [--topology v5e:2x2 v6e:2x2]

Runs XLA's real TPU compiler on a donated step of one layer at serving shapes and reports what it made of it: bytes of
temporaries, and the bytes that are copied at the size of the pool (a layout that the compiler did not like; a figure,
not a failure). Prints a table and a last line of JSON; exits with 1 if a step does not compile, or would not fit.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu looks for the machine's metadata server

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, attend_and_write, plan_attention

NUM_LAYERS = 1
_COPY = re.compile(r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(")


@dataclass(frozen=True)
class Case:
    """A step: T tokens of S rows with P pages each."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    num_rows: int
    pages_per_row: int
    page_dtype: str = "bfloat16"
    page_size: int = 64
    num_pages: int = 512

    @property
    def spec(self) -> PageSpec:
        return PageSpec(self.num_pages, self.page_size, self.num_kv_heads, self.head_dim, jnp.dtype(self.page_dtype))


CASES = (
    Case("smollm2", 9, 3, 64, 32, 32, 32),
    Case("llama-8b", 32, 8, 128, 512, 32, 32),
    Case("llama-8b int8", 32, 8, 128, 512, 32, 32, page_dtype="int8"),
)


def step(q, k, v, layers, meta):
    """What a model does with its pages in a step."""
    meta = plan_attention(meta, layers[0].spec)
    written = []
    for kv_pages in layers:
        q, kv_pages = attend_and_write(q, k, v, kv_pages, meta)
        written.append(kv_pages)
    return q, written


def shapes(case: Case, sharding: NamedSharding) -> tuple:
    """Arguments of `step`, as shapes."""

    def array(*shape: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    t, s = case.num_tokens, case.num_rows
    meta = PagedMetadata(
        page_table=array(s, case.pages_per_row),
        kv_lens=array(s),
        cu_q_lens=array(s + 1),
        positions=array(t),
        slot_mapping=array(t),
        num_decode=array(),
        num_seqs=array(),
    )
    spec = case.spec
    scales = None if spec.scales_shape is None else array(*spec.scales_shape, dtype="float32")
    pages = KVPages(data=array(*spec.data_shape, dtype=spec.dtype.name), scales=scales, spec=spec)
    q = array(t, case.num_heads, case.head_dim, dtype="bfloat16")
    kv = array(t, case.num_kv_heads, case.head_dim, dtype="bfloat16")
    return q, kv, kv, [pages] * NUM_LAYERS, meta


def pool_copies(hlo: str, spec: PageSpec) -> int:
    """How many instructions copy or relayout an array as large as the pool, whatever its shape."""
    size, found = math.prod(spec.data_shape), 0
    for line in hlo.splitlines():
        match = _COPY.search(line)
        found += bool(match) and math.prod(int(n) for n in match[1].split(",")) == size
    return found


def compile_case(case: Case, topology: str) -> dict:
    """Compiles one case and returns its figures."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(step, donate_argnums=3).lower(*shapes(case, NamedSharding(mesh, PartitionSpec())))
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    pool_bytes = NUM_LAYERS * case.spec.bytes_per_page * case.num_pages
    return {
        "case": case.name,
        "topology": topology,
        "seconds": round(time.perf_counter() - start, 1),
        "pool_mib": round(pool_bytes / 2**20, 1),
        "argument_mib": round(memory.argument_size_in_bytes / 2**20, 1),
        "temp_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "pool_copies": pool_copies(compiled.as_text() or "", case.spec),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile paged attention for TPUs without one.")
    parser.add_argument("--topology", nargs="+", default=["v5e:2x2", "v6e:2x2"], help="such as v5e:2x2, tpu7x:2x2x1")
    arguments = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    rows, failures = [], {}
    columns = ("case", "topology", "seconds", "pool_mib", "argument_mib", "temp_mib", "pool_copies")
    print(f"{'case':<22}" + "".join(f"{column:>14}" for column in columns[1:]))
    for topology in arguments.topology:
        for case in CASES:
            try:
                row = compile_case(case, topology)
            except Exception as error:  # one failing case must not hide the others
                failures[f"{case.name} on {topology}"] = f"{type(error).__name__}: {error}"
                print(f"{case.name:<22}{topology:>14}{'FAILED':>14}", flush=True)
                continue
            rows.append(row)
            print(f"{row['case']:<22}" + "".join(f"{row[column]!s:>14}" for column in columns[1:]), flush=True)
    for name, error in failures.items():
        print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps({"script": "tpu_aot", "jax": jax.__version__, "rows": rows, "failed": sorted(failures)}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

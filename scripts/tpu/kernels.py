"""`KERNEL_CASES`: configurations of the attention and of the KV write, compiled as a donated step of one layer."""

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec, attend_and_write, plan_attention

from .chips import Chip
from .llo_dump import KernelDump, compile_kernels
from .static_cost import product_loops

_COPY = re.compile(r"= \(?\w+\[([\d,]+)\]([^=\n]*?) (?:copy|copy-start|transpose)\(")
_ON_CHIP = re.compile(r"S\([13]\)")  # VMEM, or CMEM of v4: only a pool as small as these ones would XLA move there


@dataclass(frozen=True)
class KernelCase:
    """A step of one layer: T tokens of S rows with P pages each."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_dtype: str = "bfloat16"
    page_size: int = 64
    num_tokens: int = 512
    num_rows: int = 32
    pages_per_row: int = 64
    num_pages: int = 512
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False

    def spec(self, implementation: str) -> PageSpec:
        return PageSpec(
            *(self.num_pages, self.page_size, self.num_kv_heads, self.head_dim, self.page_dtype), implementation
        )


KERNEL_CASES: Final = {
    case.name: case
    for case in (
        KernelCase("smollm2", 9, 3, 64, num_tokens=32, pages_per_row=32),
        KernelCase("llama-8b", 32, 8, 128),
        KernelCase("llama-8b int8", 32, 8, 128, "int8"),
        KernelCase("llama-8b fp8", 32, 8, 128, "float8_e4m3fn"),
        KernelCase("llama-8b f32", 32, 8, 128, "float32"),
        KernelCase("llama-8b decode", 32, 8, 128, num_tokens=32),
        KernelCase("llama-70b / 8", 8, 1, 128),
        KernelCase("llama-70b / 8 int8", 8, 1, 128, "int8", page_size=128),
        KernelCase("D64", 32, 8, 64),
        KernelCase("D64 int8", 32, 8, 64, "int8"),
        KernelCase("D256", 16, 4, 256),
        KernelCase("page 16", 32, 8, 128, page_size=16, pages_per_row=256),
        KernelCase("page 256", 32, 8, 128, page_size=256, pages_per_row=32, num_pages=256),
        KernelCase("window, cap", 32, 8, 128, options=(("sliding_window", 4096), ("soft_cap", 50.0))),
        KernelCase("sinks, LSE", 32, 8, 128, options=(("return_lse", True),), sinks=True),
        KernelCase("256 x 32k", 32, 8, 128, num_tokens=256, num_rows=256, pages_per_row=512),
    )
}


def pool_copies(hlo: str, specs: list[PageSpec]) -> int:
    """How many instructions copy or transpose, in HBM, an array as large as a layer's K and V, or as its scales."""
    shapes = {shape for spec in specs for shape in (spec.data_shape, spec.scales_shape) if shape is not None}
    sizes = {math.prod(shape) for shape in shapes}
    copied = [match[1].split(",") for match in _COPY.finditer(hlo) if not _ON_CHIP.search(match[2])]
    return sum(math.prod(map(int, dims)) in sizes for dims in copied)


def abstract_pages(spec: PageSpec, sharding: NamedSharding) -> KVPages:
    """Pages of one layer, as shapes."""
    data = jax.ShapeDtypeStruct(spec.data_shape, spec.dtype, sharding=sharding)
    scales = None
    if spec.scales_shape is not None:
        scales = jax.ShapeDtypeStruct(spec.scales_shape, jnp.float32, sharding=sharding)
    return KVPages(data=data, scales=scales, spec=spec)  # pyright: ignore[reportArgumentType]


def _arguments(case: KernelCase, spec: PageSpec, sharding: NamedSharding) -> tuple[Any, ...]:
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
    q = array(t, case.num_heads, case.head_dim, dtype="bfloat16")
    kv = array(t, case.num_kv_heads, case.head_dim, dtype="bfloat16")
    return q, kv, kv, abstract_pages(spec, sharding), meta


def _inner_spills(dump: KernelDump) -> int:
    """Vector registers spilled or filled in the loops with matrix products, every branch included."""
    program = dump.program
    bodies = [program.slots(program.within(loop)) for loop in product_loops(program)]
    return sum(body["VLOAD:FILL"] + body["VSTORE:SPILL"] for body in bodies)


def compile_case(
    case: KernelCase, chip: Chip, mesh: Mesh, folder: Path, implementation: str = "mosaic_tpu"
) -> dict[str, Any]:
    """Compiles the step of one layer, pages donated; its figures.

    Raises:
      Exception: whatever the kernels or the compiler refuse with.
    """
    spec, sharding = case.spec(implementation), NamedSharding(mesh, PartitionSpec())

    def step(q, k, v, kv_pages, meta, sinks):
        meta = plan_attention(meta, spec)
        options = {**dict(case.options), **({} if sinks is None else {"sinks": sinks})}
        return attend_and_write(q, k, v, kv_pages, meta, implementation=implementation, **options)

    sinks = jax.ShapeDtypeStruct((case.num_heads,), jnp.float32, sharding=sharding) if case.sinks else None
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(step, donate_argnums=3).lower(*_arguments(case, spec, sharding), sinks)
        compiled, dumps = compile_kernels(lowered, folder, delay_slots=chip.delay_slots)
    memory: Any = compiled.memory_analysis()
    hlo = compiled.as_text() or ""
    return {
        "implementation": implementation,
        "kernels": {dump.name: {"vmem": dump.vmem_bytes, "smem": dump.smem_bytes} for dump in dumps},
        "vmem_bytes": max((dump.vmem_bytes for dump in dumps), default=0),
        "vmem_share": round(max((dump.vmem_bytes for dump in dumps), default=0) / chip.vmem_bytes, 3),
        "smem_bytes": max((dump.smem_bytes for dump in dumps), default=0),
        "inner_spills": sum(map(_inner_spills, dumps)),
        "code_cycles": sum(dump.program.cycles for dump in dumps),
        "tpu_custom_calls": hlo.count('custom_call_target="tpu_custom_call"'),
        "pool_bytes": spec.bytes_per_page * case.num_pages,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_copies": pool_copies(hlo, [spec]),
        "compile_s": round(time.perf_counter() - start, 1),
    }

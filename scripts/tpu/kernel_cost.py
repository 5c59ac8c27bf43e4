"""Compiles an attention kernel for a load, follows it, and models its time."""

import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .cases import Kernel, Load, Shape, cost_of
from .chips import Chip
from .llo_dump import compile_kernels
from .operands import kernel_operands
from .scalar_run import run_program
from .static_cost import static_cost


def kernel_cost(
    kernel: Kernel, shape: Shape, load: Load, dtype: str, chip: Chip, mesh: Mesh, folder: Path
) -> dict[str, Any]:
    """Figures of one kernel on one load, of one call (a layer) on one core.

    Raises:
      Exception: whatever the kernel or the compiler refuses with.
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        built = kernel.build(shape, load, dtype, chip)
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), built.args)
        lowered = jax.jit(built.function).lower(*placed)
        calls = kernel_operands(built.function, *built.args)
        compiled, dumps = compile_kernels(lowered, folder, delay_slots=chip.delay_slots)
    seconds = time.perf_counter() - start
    if len(calls) != 1 or len(dumps) != 1:
        raise ValueError(f"{len(calls)} kernels were traced and {len(dumps)} dumped; expected one")
    work, dump = cost_of(shape, load, dtype), dumps[0]
    run = run_program(dump.program, calls[0].operands, granule=chip.dma_granule)
    if run.bytes_read < work.kv_bytes:
        raise ValueError(f"the kernel was seen to read {run.bytes_read} bytes; there are {work.kv_bytes} of K and V")
    cost = static_cost(run, chip, flops=work.flops, kv_bytes=work.kv_bytes, other_bytes=work.other_bytes)
    memory: Any = compiled.memory_analysis()
    return {
        "cycles": cost.cycles,
        "code_bundles": dump.code_bundles,
        "code_cycles": dump.program.cycles,
        "loop_iterations": cost.loop_iterations,
        "loop_cycles": round(cost.loop_cycles, 1),
        "loop_kv_bytes": round(cost.kv_bytes_per_iteration),
        "loop_spills": round(cost.loop_spills, 1),
        "loop_matrix": round(cost.loop_matrix, 4),
        "kv_bytes": cost.kv_bytes,
        "fetched_bytes": cost.fetched_bytes,
        "cycles_per_kv_kib": round(cost.cycles_per_kv_kib, 3),
        "issue_us": round(cost.issue_s * 1e6, 1),
        "memory_us": round(cost.memory_s * 1e6, 1),
        "bound": cost.bound,
        "bandwidth_share": round(cost.bandwidth_share, 4),
        "matrix_share": round(cost.matrix_share, 4),
        "vmem_bytes": dump.vmem_bytes,
        "smem_bytes": dump.smem_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "compile_s": round(seconds, 1),
    }

"""The static model of TPU kernels: parser, interpreter and arithmetic; jax's kernel too, where libtpu is there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import PageSpec
from scripts.tpu import runs
from scripts.tpu.chips import CHIPS, chip_of
from scripts.tpu.kernels import pool_copies
from scripts.tpu.llo import UNITS, Program, parse_program
from scripts.tpu.operands import kernel_operands
from scripts.tpu.scalar_run import run_program
from scripts.tpu.static_cost import static_cost

ROOT = Path(__file__).resolve().parents[1]
HEADER = "== CAPACITY:\n" + ", ".join(UNITS) + "\n4 3 4 2 1 3 3 1 1 2\n== UTILIZATION:\n"

# Row by row, a loop over the blocks of a row; a DMA for each block that is not the last; one delay slot after a branch.
TOY = """\
     0   :  { %s10_s0 = inlined_call_operand.vmem [shape: s32[3], index: 0, kind: input, shape index: {}] \
 ;;  %s11_s1 = inlined_call_operand.<no memory space> [shape: s32[1], index: 1, kind: input, shape index: {}] }
   0x1   :  { %s12_s2 = sshll.u32 %s10_s0, 4  ;;  %s13_s3 = smov [#allocation4] /* materialized constant */ }
   0x2   :  { %14 = dma.vmem_to_smem /*vmem=*/%s12_s2, /*size_in_granules=*/16, /*smem=*/%s13_s3 }
   0x3   :  { %s15_s4 = smov 0 /* copy for cssa */ } /* Start region 1 */
   0x4 LB: > { %s16_s4 = sphi %s15_s4, %s17_s4 /* phi */  ;;  %s18_s5 = sld [smem:[#allocation4 + %s16_s4]] }
   0x5   : > { %p19_p0 = scmp.le.s32.totalorder %s18_s5, 0  ;;  %s20_s6 = smov 0 }
   0x6   : > { %21 = sbr.rel (%p19_p0) target bundleno = 14 (0xe), region = 2 }
   0x7   :  {}
   0x8 LB: >> { %s22_s6 = sphi %s20_s6, %s23_s6  ;;  %s23_s6 = sadd.s32 1, %s22_s6 }
   0x9   : >> { %p25_p1 = scmp.lt.s32.totalorder %s23_s6, %s18_s5  ;;  %26 = sdivrem.u32 %s23_s6, 3 /* kDivAndRem */ }
   0xa   : >> { %s27_s7 = spop.drf %26  ;;  %31 = sst [smem:[#allocation6_spill]] %s23_s6 }
   0xb   : >> { %28 = dma.hbm_to_vmem [thread:$0]  (%p25_p1), /*hbm=*/%s10_s0, /*size=*/64, /*vmem=*/%s13_s3 }
   0xc   : >> { %29 = sbr.rel (%p25_p1) target bundleno = 8 (0x8), region = 3 }
   0xd   : >> { %s30_s8 = sld [smem:[#allocation6_spill]] }
   0xe PF: > { %s17_s4 = sadd.s32 1, %s16_s4 }
   0xf   : > { %p33_p2 = scmp.ne.s32.totalorder %s17_s4, %s11_s1 }
  0x10   : > { %34 = sbr.rel (%p33_p2) target bundleno = 4 (0x4), region = 1 }
  0x11   :  {}
  0x12   :  { %35 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/%s13_s3, /*size_in_granules=*/8, /*hbm=*/%s10_s0 }
"""
_SLOTS = {0x8: (16, 0, 2, 0, 0, 3, 1, 0, 0, 2), 0xA: (0, 0, 0, 0, 0, 0, 0, 1, 1, 1)}


def _toy() -> Program:
    rows = [" ".join(map(str, _SLOTS.get(i, (0,) * len(UNITS)))) for i in range(0x13)]
    return parse_program(TOY, HEADER + "\n".join(rows) + "\n", delay_slots=1)


def test_parser_finds_blocks_and_nested_loops() -> None:
    program = _toy()
    assert program.cycles == 0x13
    assert [(loop.start, loop.end) for loop in program.loops] == [(0x4, 0x12)]
    assert [(loop.start, loop.end) for loop in program.loops[0].loops] == [(0x8, 0xE)]
    assert [(b.start, b.end) for b in program.blocks] == [(0, 4), (4, 8), (8, 0xE), (0xE, 0x12), (0x12, 0x13)]
    assert program.blocks[1].successors == (0xE, 0x8)
    assert program.slots(program.within(program.loops[0].loops[0]))["VLOAD:FILL"] == 1
    assert [b.start for b in program.own(program.loops[0])] == [4, 0xE]


def test_parser_refuses_another_format() -> None:
    with pytest.raises(ValueError, match="not a dump of packed bundles"):
        parse_program(TOY.replace("   0x1   :", "   0x5   :"), HEADER, delay_slots=1)
    with pytest.raises(ValueError, match="expected as many"):
        parse_program(TOY, HEADER + "0 0 0 0 0 0 0 0 0 0\n", delay_slots=1)
    with pytest.raises(ValueError, match="utilization dump"):
        parse_program(TOY, "== CAPACITY:\nMXU, XLU\n4 3\n== UTILIZATION:\n", delay_slots=1)


def test_run_counts_what_the_operands_make_it_do() -> None:
    run = run_program(_toy(), {0: np.array([3, 0, 2]), 1: np.array([3])})
    inner = run.program.loops[0].loops[0]
    assert run.iterations(run.program.loops[0]) == 3
    assert run.iterations(inner) == 5
    # Rows 3 and 2 have a DMA before each block but the last one's.
    assert (run.bytes_read, run.bytes_written) == (3 * 64 * 32, 8 * 32)
    assert run.cycles() == 4 + 3 * 4 + 5 * 6 + 3 * 4 + 1
    assert run.slots("MXU") == 5 * 16


def test_run_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="operand 0"):
        run_program(_toy(), {1: np.array([3])})
    with pytest.raises(ValueError, match="depends on an unknown value"):
        run_program(_toy(), {0: np.array([3, 0, 2])})
    with pytest.raises(ValueError, match="still ran"):
        run_program(_toy(), {0: np.array([3, 0, 2]), 1: np.array([3])}, max_blocks=4)


def test_model_is_the_larger_of_bytes_and_cycles() -> None:
    run, chip = run_program(_toy(), {0: np.array([3, 0, 2]), 1: np.array([3])}), CHIPS["v5e"]
    cost = static_cost(run, chip, flops=10**6, kv_bytes=6000, other_bytes=0)
    assert cost.issue_s == pytest.approx(59 / chip.clock)
    assert cost.memory_s == pytest.approx(3 * 64 * 32 / chip.hbm_rate)  # fetched, which is more than has to be
    assert cost.bound == "issue"
    assert cost.matrix_share == pytest.approx(10**6 / chip.matrix_flops / cost.issue_s)
    assert (cost.loop_iterations, cost.loop_cycles, cost.loop_spills) == (5, 6.0, 2.0)
    assert cost.loop_matrix == pytest.approx(16 / (4 * 6))
    memory_bound = static_cost(run, chip, flops=1, kv_bytes=10**6, other_bytes=0)
    assert (memory_bound.bound, memory_bound.bandwidth_share) == ("memory", 1.0)


def test_clocks_follow_from_peak_and_matrix_units() -> None:
    clocks = {name: round(chip.clock / 1e9, 2) for name, chip in CHIPS.items()}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
    with pytest.raises(ValueError, match="expected one of v4:2x2x1"):
        chip_of("v9:2x2")


def test_pool_copies_are_of_data_or_scales() -> None:
    spec = PageSpec(64, 16, 2, 64, "int8")
    hlo = "\n".join(
        [
            "  %a = s8[64,32,128]{2,1,0} copy(%x)",  # the pool, in another shape
            "  %b = (s8[64,16,4,64]{3,2,1,0}, u32[]) copy-start(%x)",
            "  %c = f32[64,64]{0,1} transpose(%scales)",
            "  %d = s8[64,16,4,32]{3,2,1,0} copy(%x)",
            "  %e = s8[64,16,4,64]{3,2,1,0} fusion(%x)",
            "  %f = (s8[64,16,4,64]{3,2,1,0}, s8[64,16,4,64]{3,2,1,0:S(1)}, u32[]) copy-start(%x)",  # into VMEM
        ]
    )
    assert pool_copies(hlo, [spec]) == 3
    assert pool_copies(hlo, [spec, spec]) == 3  # a layer more of the same shape does not count twice


def test_operands_are_those_that_do_not_depend_on_tensors() -> None:
    from jax.experimental import pallas as pl

    def kernel(ids_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + ids_ref[0].astype(jnp.float32)

    @jax.jit
    def inner(ids, x):
        call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="add")
        return call(jnp.cumsum(ids) * 2, x)

    calls = kernel_operands(inner, np.array([1, 2, 3], np.int32), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert [(call.name, list(call.operands)) for call in calls] == [("add", [0])]
    assert calls[0].operands[0].tolist() == [2, 6, 12]


def test_a_case_that_ends_its_process_is_refused_and_the_next_ones_run(tmp_path, monkeypatch, capsys) -> None:
    worker = tmp_path / "worker"
    worker.write_text(
        """#!/bin/sh
while read -r line; do
    case $line in *"bad"*) echo "Check failed: no such layout" >&2; exit 3;; esac
    echo '{"compile_s": 1}'
done
"""
    )
    worker.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(worker))
    job = runs.Job("kernels", "v5e:2x2", tuple({"name": name} for name in ("a", "bad", "c")))
    rows = runs.run_jobs([job], processes=1)
    assert [row["case"] for row in rows] == ["a", "bad", "c"]
    assert "(3): Check failed" in rows[1]["refused"]
    assert [runs.failure(row) is not None for row in rows] == [False, True, False]
    assert "[2/3] v5e:2x2 kernels bad: refused" in capsys.readouterr().err


def test_ci_compiles_a_step_and_several_in_one_program() -> None:
    steps, _ = runs.ci_jobs(["v5e:2x2"])
    assert [runs.name_of("steps", case) for case in steps.cases] == ["SmolLM2-135M decode", "SmolLM2-135M decode x4"]


def test_findings_are_no_failures() -> None:
    too_small = {"part": "steps", "refused": "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16G"}
    assert runs.failure(too_small) is None
    assert runs.failure({**too_small, "refused": "Ran out of memory in memory space vmem"}) is not None
    assert runs.failure({"part": "cost", "kernel": runs.JAX_RPA, "refused": "ValueError: head_dim"}) is None


def test_a_program_that_copies_the_pool_or_lacks_our_kernels_fails() -> None:
    good = {"part": "steps", "implementation": "mosaic_tpu", "tpu_custom_calls": 60, "pool_copies": 0, "collectives": 0}
    assert runs.failure(good) is None
    assert "1 pool-sized" in (runs.failure({**good, "pool_copies": 1}) or "")
    assert "2 collectives" in (runs.failure({**good, "collectives": 2}) or "")
    assert "tpu_custom_call" in (runs.failure({**good, "tpu_custom_calls": 0}) or "")
    assert runs.failure({**good, "tpu_custom_calls": 0, "implementation": "xla"}) is None


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install jax[tpu]")
def test_counter_on_the_kernel_of_jax() -> None:
    """128 tokens, 32 and 8 heads of 128, pages of 16, 64 rows, 8 pages and 32 queries a block: about 2,944 bundles."""
    script = """
import json, sys, tempfile
from pathlib import Path
from scripts.tpu.llo_dump import compile_kernels, start_dumps
folder = Path(tempfile.mkdtemp()); start_dumps(folder)
from scripts.tpu.worker import topology_mesh
import jax, jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as rpa
from jax.sharding import NamedSharding, PartitionSpec
mesh = topology_mesh("v5e:2x2")
def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
arrays = (array(128, 32, 128, dtype=jnp.bfloat16), array(1024, 16, 16, 128, dtype=jnp.bfloat16))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    attend = jax.jit(lambda *x: rpa(*x, num_kv_pages_per_block=8, num_queries_per_block=32))
    lowered = attend.lower(*arrays, array(64), array(64, 64), array(65), array(1))
    _, (dump,) = compile_kernels(lowered, folder, delay_slots=4)
depths = [depth for top in dump.program.loops for depth, _ in top.walk()]
print(json.dumps([dump.code_bundles, dump.program.cycles, depths]))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    bundles, cycles, depths = json.loads(done.stdout.splitlines()[-1])
    assert bundles == pytest.approx(2944, rel=0.01)  # another libtpu schedules a few more or less
    assert 1.02 * bundles < cycles < 1.2 * bundles  # the delays
    assert depths == [1, 2, 3]

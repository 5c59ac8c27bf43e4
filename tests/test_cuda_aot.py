"""Compiling for a described H200: what is read of ptxas and of programs, and what counts as wrong."""

import os
from typing import Any

import pytest

from scripts import cuda_aot
from scripts.cuda import programs, ptxas, runs, tables, target

SAID = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 9 by compiler in function 'a_mosaic_gpu_kernel'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 12 by compiler in function 'a_mosaic_gpu_kernel'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call
ptxas warning : Registers are spilled to local memory in function 'a_mosaic_gpu_kernel', 72 bytes spill stores, 76 bytes
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for a_mosaic_gpu_kernel
    56 bytes stack frame, 72 bytes spill stores, 76 bytes spill loads
ptxas info    : Used 240 registers, used 16 barriers, 56 bytes cumulative stack size, 1 bytes smem
define i32 @a_mosaic_gpu(ptr %0, ptr %1, ptr %2) {
  %9 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 66, i32 2, i32 1, i32 0, i32 0, i32 0, i32 128, i32 3, i32 1, \
i32 220576, i32 0, ptr %1, ptr %8)
ptxas info    : Compiling entry function 'b_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers
"""
# A step that unpacks, then runs a layer three times, and samples.
PROGRAM = """\
HloModule jit_forward, is_scheduled=true

%fused (p: s32[4]) -> s32[4] {
  ROOT %copy.9 = s32[4]{0} copy(%p)
}

%body (arg: (s32[], bf16[2])) -> (s32[], bf16[2]) {
  %arg = (s32[], bf16[2]{0}) parameter(0)
  %x = bf16[2]{0} get-tuple-element(%arg), index=1
  %mpmd_map.1 = (bf16[2]{0}, /*index=1*/f32[3]{0}) custom-call(%x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/while/body/layer_0/attention/paged_attention/paged_attention_decode/mpmd_map"}
  %mpmd_map.2 = bf16[2]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/while/body/layer_0/after_attention/layer_matmuls/mpmd_map"}
  %copy.1 = s32[]{} copy(%i)
  ROOT %tuple = (s32[], bf16[2]{0}) tuple(%copy.1, %mpmd_map.2)
}

%called (y: bf16[2]) -> bf16[2] {
  ROOT %fusion.3 = bf16[2]{0} fusion(%y), calls=%fused, metadata={op_name="jit(f)/norm/mul"}
}

%cond (arg.1: (s32[], bf16[2])) -> pred[] {
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (a: s32[4], b: bf16[2]) -> s32[1] {
  %a = s32[4]{0} parameter(0)
  %loop_add_fusion = s32[4]{0} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/add"}
  %gather = (s32[4]{0}, f32[2]{0}) fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/cos"}
  %while = (s32[], bf16[2]{0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %call.1 = bf16[2]{0} call(%x), to_apply=%called
  %gemm_fusion_dot.2 = f32[1,9]{1,0} fusion(%x), kind=kCustom, calls=%fused, metadata={op_name="jit(f)/logits/dot"}
  ROOT %reduce = s32[1]{0} fusion(%gemm_fusion_dot.2), calls=%fused, metadata={op_name="jit(f)/sample/argmax"}
}
"""


def test_reads_what_ptxas_says_of_each_kernel() -> None:
    first, second = ptxas.parse_kernels(SAID)
    assert (first.name, first.registers, first.spill_bytes) == ("a", 240, 148)
    assert (first.blocks, first.threads, first.shared_bytes) == (132, 384, 220576)
    assert first.said == {"C7519": 2, "C7510": 1}
    assert [loss.partition(":")[0] for loss in first.losses] == ["C7510"]
    assert (second.name, second.registers, second.spill_bytes, second.said) == ("b", 26, 0, {})
    assert second.shared_bytes == 0


def test_counts_launches_by_what_they_do() -> None:
    assert programs.kernel_counts(PROGRAM) == {
        "layer": 3,
        "plan": 1,
        "GEMM": 1,
        "attention": 3,
        "norm": 1,
        "sampling": 1,
        "copy": 3,
        "other": 1,
    }
    with pytest.raises(ValueError, match="no ENTRY"):
        programs.kernel_counts("module @jit_f {")


def row(**changes: Any) -> dict[str, Any]:
    kernel = {"name": "a", "spill_bytes": 0, "losses": []}
    return {"case": "one", "kernels": [kernel | changes.pop("kernel", {})], **changes}


def test_what_is_wrong_with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = {"pool_bytes": 100, "aliased_bytes": 104, "pool_copies": 0}
    assert runs.failures(row()) == runs.failures(row(**pool)) == []
    assert runs.failures({"case": "one", "refused": "ValueError: no"}) == ["ValueError: no"]
    assert runs.failures(row(**pool | {"pool_copies": 2})) == ["2 copies of the pool"]
    assert "99 bytes are written in place" in runs.failures(row(**pool | {"aliased_bytes": 99}))[0]
    slow = row(kernel={"losses": ["C7510: slow", "C7512: slow"]})
    assert runs.failures(slow) == ["a: C7510: slow", "a: C7512: slow"]
    monkeypatch.setattr(runs, "KNOWN_LOSSES", {("a", "one", "C7512"), ("a", "other", "C7510")})
    assert runs.failures(slow) == ["a: C7510: slow"]
    spilling = row(kernel={"spill_bytes": 148})
    assert runs.failures(spilling) == ["a spills 148 bytes, expected at most 0"]
    monkeypatch.setattr(runs, "KNOWN_SPILLS", {("a", "one"): 147})
    assert runs.failures(spilling) == ["a spills 148 bytes, expected at most 147"]
    monkeypatch.setattr(runs, "KNOWN_SPILLS", {("a", "one"): 148})
    assert runs.failures(spilling) == []


def end_at_two(name: str, compiles: bool) -> runs.Row:
    assert compiles
    if name == "two":
        os._exit(7)
    return {"case": name, "pid": os.getpid()}


def test_a_case_that_ends_its_process_is_refused_alone() -> None:
    told: list[runs.Row] = []
    jobs = [runs.Job(name, True) for name in ("one", "two", "three")]
    rows = runs.run_jobs(jobs, end_at_two, processes=1, report=told.append)
    assert rows == told
    assert [found["case"] for found in rows] == ["one", "two", "three"]
    assert ["refused" in found for found in rows] == [False, True, False]
    assert len({os.getpid(), rows[0]["pid"], rows[2]["pid"]}) == 3


def test_the_cases_of_ci_are_cases_and_the_programs_are_those_of_the_engine() -> None:
    from jpaged.config import EngineConfig, SchedulerConfig, StepShape
    from jpaged.pallas_kernels.compat import jax_version
    from scripts.cuda import cases, steps

    names = (*cases.kernel_cases(), *steps.STEP_CASES)
    assert len(set(names)) == len(names)
    if jax_version() >= (0, 11):  # older ones have none of our kernels
        assert set(cuda_aot.CI) <= set(names)
        known = {case for _, case in runs.KNOWN_SPILLS} | {case for _, case, _ in runs.KNOWN_LOSSES}
        assert known <= set(names)
    for model, longest in steps.MAX_MODEL_LEN.items():
        programs_of = [case.program for case in steps.STEP_CASES.values() if case.model == model]
        shapes = [program.size for program in programs_of if isinstance(program.size, StepShape)]
        scheduler = SchedulerConfig(
            max_num_seqs=max(shape.num_rows for shape in shapes),
            max_num_batched_tokens=2048,
            max_num_prefill_tokens=4096,
            max_model_len=longest,
        )
        config = EngineConfig(scheduler=scheduler, decode_steps=max(shape.num_steps for shape in shapes))
        assert set(shapes) <= set(config.step_shapes(longest, steps.PAGE_SIZE, "gpu"))


def test_cases_are_chosen_by_words_and_by_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, engine = ("decode mixed", "prefill mixed", "norm 576"), ("m forward", "m sampling")
    monkeypatch.setattr(cuda_aot, "CI", ("prefill mixed", "m sampling"))

    def names(only: list[str] | None, *, ci: bool) -> list[tuple[str, bool]]:
        return [(job.name, job.compiles) for job in cuda_aot.chosen(kernels, engine, only, ci=ci)]

    monkeypatch.setattr(target, "can_compile", lambda: True)
    assert names(["mixed"], ci=False) == [("decode mixed", True), ("prefill mixed", True)]
    assert names(["mixed", "m s"], ci=True) == [("m sampling", True), ("decode mixed", False), ("prefill mixed", True)]
    assert len(names(None, ci=False)) == 5
    monkeypatch.setattr(target, "can_compile", lambda: False)
    assert names(None, ci=False) == [(name, False) for name in kernels]
    with pytest.raises(ValueError, match="no case has forward in its name; have decode mixed"):
        names(["forward"], ci=False)


def test_tables_show_kernels_and_programs() -> None:
    kernels = [vars(kernel) for kernel in ptxas.parse_kernels(SAID)]
    program = {"case": "m forward", "launches": {"plan": 5, "attention": 2}, "kernels": kernels}
    program |= {"argument_bytes": 1 << 20, "temp_bytes": 3 << 19, "pool_bytes": 100, "aliased_bytes": 99}
    program |= {"pool_copies": 0, "trace_s": 1.0, "lower_s": 2.0, "compile_s": 3.0}
    rows = [{"case": "one", "kernels": kernels * 2}, program, {"case": "none", "refused": "no"}]
    assert list(tables.kernel_lines(rows[:1])) == [
        ["one", "a", "132", "384", "240", "148", "215.4", "2"],
        ["one", "b", "0", "0", "26", "0", "0.0", "0"],
    ]
    assert [line[:2] for line in tables.kernel_lines(rows[1:])] == [["m forward", "a"], ["m forward", "b"]]
    assert list(tables.step_lines(rows)) == [["m forward", "7", "5 plan, 2 attention", "1", "1.5", "copied"]]
    assert list(tables.time_lines(rows)) == [["m forward", "1.0", "2.0", "3.0"]]


def test_the_environment_is_set_before_jax_reads_it() -> None:
    with pytest.raises(RuntimeError, match="jax is imported already"):
        target.prepare()

"""The engine benchmark: its arithmetic against figures computed by hand, what it refuses, and a run on a tiny model."""

import doctest
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from jpaged.accelerators import ACCELERATORS
from jpaged.errors import ConfigError
from scripts import bench_engine
from scripts.engine import bench, breakdown, figures, measures, serve, setup, start, tables, workloads
from scripts.engine.breakdown import Kernel, Profile
from scripts.engine.kernel_classes import kernel_class
from scripts.engine.peers import REACH, VLLM, Yardstick
from scripts.engine.results import Results
from scripts.engine.roofline import ModelCost, Roofs
from scripts.engine.setup import Needs
from scripts.engine.workloads import Load
from scripts.render_benchmarks import Record
from tests.engine_driver import give_gpu_shapes, make_engine, shapes_taken
from tests.fakes import tiny_llama

UNIT = Roofs(read=1.0, matmul=1.0)
READS = ModelCost(weight_bytes=100, token_flops=0, row_flops=0, kv_token_bytes=1.0, pair_flops=0)
COMPUTES = ModelCost(weight_bytes=0, token_flops=10, row_flops=3, kv_token_bytes=0.0, pair_flops=1)


@pytest.mark.parametrize("module", ["kernel_classes", "peers", "roofline", "breakdown", "setup", "workloads"])
def test_examples_of_the_parts_run(module: str) -> None:
    failed, tried = doctest.testmod(
        importlib.import_module(f"scripts.engine.{module}"), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert (failed, tried > 0) == (0, True)


# --- roofline ---------------------------------------------------------------------------------------------------------
def test_a_load_at_the_roof_reads_the_weights_once_a_step_and_the_live_kv() -> None:
    load = Load("uniform", prompts=(4, 2), outputs=(2, 1))
    # One step for both prompts, one for the second token of the first request, which sees 5 tokens.
    assert READS.load_s(UNIT, load, max_num_seqs=2, budget=8) == (100 + 4 + 2) + (100 + 5)
    # By a budget of 3 the first prompt is cut in two, and the second one joins the second part.
    assert READS.load_s(UNIT, load, max_num_seqs=2, budget=3) == (100 + 3) + (100 + 4 + 2) + (100 + 5)
    # A row at a time: three steps, as the second request begins when the first has ended.
    assert READS.load_s(UNIT, load, max_num_seqs=1, budget=8) == (100 + 4) + (100 + 5) + (100 + 2)


def test_a_load_at_the_roof_computes_each_token_once_and_the_pairs_that_are_seen() -> None:
    load = Load("uniform", prompts=(4, 2), outputs=(2, 1))
    pairs = (1 + 2 + 3 + 4) + 5 + (1 + 2)
    assert COMPUTES.load_s(UNIT, load, max_num_seqs=2, budget=8) == 7 * 10 + 3 * 3 + pairs


def test_what_prompts_share_is_computed_and_read_once() -> None:
    load = Load("shared-prefix", prompts=(10, 10, 10), outputs=(1, 1, 1), shared=8)
    assert READS.load_s(UNIT, load, max_num_seqs=3, budget=64) == 100 + 8 + 3 * 2
    assert COMPUTES.load_s(UNIT, load, max_num_seqs=3, budget=64) == (10 + 2 + 2) * 10 + 3 * 3 + 55 + 2 * (9 + 10)


def test_a_load_at_the_roof_has_larger_steps_while_nobody_decodes() -> None:
    load = Load("two", prompts=(24, 6), outputs=(1, 2))
    small = READS.load_s(UNIT, load, max_num_seqs=8, budget=8)
    large = READS.load_s(UNIT, load, max_num_seqs=8, budget=8, prefill_budget=24)
    assert READS.load_s(UNIT, load, max_num_seqs=8, budget=8, prefill_budget=8) == small
    # In three steps the first prompt's tokens are read again by each part that follows; in one they are not.
    assert small == (100 + 8) + (100 + 16) + (100 + 24) + (100 + 6) + (100 + 7)
    assert large == (100 + 24) + (100 + 6) + (100 + 7)


def test_requests_in_turn_share_no_step() -> None:
    load = Load("alone", prompts=(4, 4), outputs=(2, 2), in_turn=True)
    assert READS.load_s(UNIT, load, max_num_seqs=8, budget=8) == 2 * ((100 + 4) + (100 + 5))


# --- workloads --------------------------------------------------------------------------------------------------------
def test_the_azure_workload_is_the_first_rows_that_are_short_enough(tmp_path: Path) -> None:
    rows = [(7990, 11), (5, 0), *((10 + n, 2) for n in range(1200))]
    lines = (f"2023-11-16 18:{n // 60:02}:{n % 60:02}.5,{p},{o}" for n, (p, o) in enumerate(rows))
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    load = workloads.make_load("azure", trace=str(path))
    assert (len(load.prompts), load.prompts[0], load.prompts[-1], set(load.outputs)) == (1000, 10, 1009, {2})


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    load = Load("shared-prefix", prompts=(12, 14), outputs=(1, 1), shared=8)
    one, other = load.token_ids(1000, seed=0)
    assert (len(one), len(other), one[:8] == other[:8], one[8:] == other[8:12]) == (12, 14, True, False)
    assert load.token_ids(1000, seed=1)[0][:8] != one[:8]


def test_the_engine_fits_every_workload() -> None:
    loads = [workloads.make_load(name) for name in ("uniform", "prefill", "alone")]
    needs = Needs.of(loads, [(16, 4096)], steps=128, together=(300, 64))
    assert needs == Needs(rows=300, longest=4096 + 129)
    config = setup.make_config(needs, accelerator=ACCELERATORS["h200"])
    assert (config.scheduler.max_num_batched_tokens, config.token_buckets, config.recompile) == (2048, None, "error")
    assert config.scheduler.max_num_prefill_tokens == 4096
    with pytest.raises(ConfigError, match="largest token bucket is 64, expected at least the budget, 512"):
        setup.make_config(needs, accelerator=ACCELERATORS["cpu"], buckets=[64])


@pytest.mark.parametrize(
    ("options", "budgets"),
    [
        ({}, (2048, 4096)),
        ({"budget": 1024}, (1024, None)),  # as asked for, in every step
        ({"budget": 1024, "prefill": 3072}, (1024, 3072)),
        ({"prefill": 8192}, (2048, 8192)),
        ({"buckets": [64, 2048]}, (2048, None)),
        ({"buckets": [64, 2048, 4096], "prefill": 4096}, (2048, 4096)),
    ],
)
def test_the_budget_of_prompts_is_chosen_unless_sizes_are_given(options: dict, budgets: tuple) -> None:
    needs = Needs(rows=64, longest=128)
    scheduler = setup.make_config(needs, accelerator=ACCELERATORS["h200"], **options).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_prefill_tokens) == budgets
    if not options:
        scheduler = setup.make_config(needs, accelerator=ACCELERATORS["v6e"]).scheduler
        assert scheduler.max_num_prefill_tokens is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workloads foo", "a workload is 'foo', expected all, or some of"),
        ("--workloads azure", "needs --trace FILE"),
        ("--workloads azure --trace /nowhere", "does not exist"),
        ("--workloads start", "'start' alone"),
        ("--workloads decode --cells 1x2", "a cell is '1x2', expected ROWS@CONTEXT"),
        ("--workloads decode --cells 1@64 --profile 2@64", "--profile names 2@64"),
        ("--workloads uniform --profile", "--profile breaks down steps of the workload 'decode'"),
        ("--workloads uniform --scale 2", "--scale is 2.0"),
        ("--repeats 0", "--repeats is 0, expected at least 1"),
        ("--token-buckets 1,x", "--token-buckets is '1,x'"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_engine, "prepare_jax", lambda profile: None)
    assert bench_engine.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


# --- breakdown --------------------------------------------------------------------------------------------------------
def test_a_step_is_kernels_short_gaps_and_idle_time() -> None:
    kernels, now = [], 0.0
    for _ in range(2):  # steps of two layers
        for name, ns, gap in [
            ("nvjet_sm90_tst", 40_000, 1_000),
            ("paged_attention_decode_mosaic_gpu_kernel", 20_000, 1_000),
            ("nvjet_sm90_tst", 40_000, 1_000),
            ("paged_attention_decode_mosaic_gpu_kernel", 20_000, 1_000),
            ("loop_add_fusion_3", 5_000, 1_000),
            ("MemcpyD2H", 2_000, 50_000),
        ]:
            kernels.append(Kernel(name, now, now + ns, in_graph="fusion" not in name and "Memcpy" not in name))
            now += ns + gap
    found = breakdown.summarise(
        Profile(kernels, {"cuGraphLaunch": 2}),
        num_layers=2,
        steps=99,
        scopes={"loop_add_fusion_3": "jit(forward)/layer_0/norm/mul"},
    )
    assert found["profiled_steps"] == 2
    assert found["busy_ms"] == pytest.approx(0.125)
    assert found["between_kernels_ms"] == pytest.approx(0.004)
    assert found["longer_gaps_ms"] == pytest.approx(0.0265)  # none behind the last
    assert found["classes_ms"] == {"GEMM": 0.08, "attention": 0.04, "norm": 0.005, "copy": 0.002}
    assert found["kernels_per_step"] == 5
    assert found["kernels_outside_graphs_per_step"] == 1
    assert found["calls_per_step"] == {"cuGraphLaunch": 1}
    assert found["kernels"][0] == {
        "name": "nvjet_sm90_tst",
        "class": "GEMM",
        "us": 40.0,
        "per_step": 2.0,
        "outside_graphs_per_step": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemm_fusion_dot_134", "GEMM"),
        ("rope_and_write_kv_mosaic_gpu_kernel", "KV write"),
        ("add_rms_norm_mosaic_gpu_kernel", "norm"),
        ("silu_mul_mosaic_gpu_kernel", "activation"),
        ("MemcpyH2D", "copy"),
        ("input_reduce_fusion_84", "GEMM"),
        ("loop_fusion_9", "sampling"),
    ],
)
def test_kernels_are_told_by_name_and_by_scope(name: str, expected: str) -> None:
    scopes = {"input_reduce_fusion_84": "jit(forward)/layer_0/mlp/dot_general"}
    assert kernel_class(name, scopes) == expected


# --- start ------------------------------------------------------------------------------------------------------------
def test_a_cold_start_is_timed_and_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import sys, time; print('ready', time.time()) if '--until-ready' in sys.argv else sys.exit('no')"
    )
    monkeypatch.setattr(start, "_SCRIPT", script)
    assert 0 < start.measure_cold_start([], str(tmp_path), timeout_s=60) < 60
    yardstick = Yardstick.of("llama-3.1-8b", "NVIDIA H200", "bfloat16", 1.0)
    assert start.compare_start({"cold_s": 71.0, "warm_s": 12.5}, yardstick)["warm"] == {
        "vllm": 25.0,
        "times_vllm": 2.0,
        "reach": 20.0,
        "reached": True,
    }
    script.write_text("import sys; sys.exit('it burns')")
    with pytest.raises(ConfigError, match=r"did not start:\n.*it burns"):
        start.measure_cold_start([], str(tmp_path), timeout_s=60)


def test_what_is_to_be_reached_is_faster_than_vllm() -> None:
    for model, reach in REACH.items():
        for cell, ms in reach.decode_ms.items():
            assert ms < VLLM[model].decode_ms[cell]


# --- a run ------------------------------------------------------------------------------------------------------------
WORDS = "--model tiny --scale 0.004 --pages 64 --repeats 1 --max-num-seqs 2 --token-budget 16 --token-buckets 16 --json"


@pytest.fixture(scope="module")
def started() -> bench.Started:
    args = bench_engine.parser().parse_args([*WORDS.split(), "--workloads", "together"])
    needs = Needs(rows=2, longest=32)
    return bench.start(args, Results(None, quiet=True), needs)


def run_main(
    words: str, started: bench.Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    monkeypatch.setattr(bench_engine, "prepare_jax", lambda profile: None)
    monkeypatch.setattr(bench, "start", lambda args, results, needs: started)
    assert bench_engine.main([*WORDS.split(), *words.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    return json.loads(line)


def test_a_run_measures_every_workload_and_compiles_nothing_more(
    started: bench.Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "so-far.json"
    words = f"--workloads start,decode,prefill,shared-prefix,uniform,alone,together --profile 1@1024 --output {saved} "
    monkeypatch.setattr(bench_engine, "_start_cold", lambda args: 71.0)
    record = run_main(f"{words} --requests 2 --tokens 8 --alone 1", started, monkeypatch, capsys)
    assert json.loads(saved.read_text()) == record
    results = record["results"]
    assert results["compiled_at_end"] == results["compiled_at_start"] > 0
    assert results["skipped"] == []
    assert [(cell["rows"], cell["context"]) for cell in results["decode"]["cells"]] == [(1, 8), (1, 16)]
    for cell in results["decode"]["cells"]:
        assert cell["prompt_cached"] > 0.8
        assert cell["roofline_ms"] > 0
        assert "vllm" not in cell, "no peer runs a tiny model"
    assert results["uniform"]["output_tokens"] == sum(workloads.uniform().scaled(0.004).outputs)
    assert results["breakdown"][0]["step_ms"] > 0
    assert results["start"]["cold_s"] == 71.0
    assert results["start"]["warm_s"] > 0
    assert results["together"]["speedup"] > 0

    read = Record.from_line("tiny", json.dumps(record))
    for name, part in tables.PARTS.items():
        rows = part([read]).splitlines()
        assert len({row.count(" | ") for row in rows}) == 1, name
        # No device is profiled on a CPU, and no peer ran a tiny model.
        expects_none = name in ("engine-breakdown", "engine-kernels", "engine-summary")
        assert ("not measured yet" in rows[-1]) == expects_none, name


def test_what_would_begin_too_late_is_skipped(
    started: bench.Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_main("--workloads decode,alone --time-limit 0", started, monkeypatch, capsys)
    assert record["results"]["skipped"] == ["decode", "alone"]
    args = bench_engine.parser().parse_args(WORDS.split())
    made = bench.make_bench(args, Results(None, quiet=True), started, UNIT)
    assert list(measures.measure_decode(made, [(1, 8)], lambda: True)) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"budget": 60}, {"length": 32}, {"decode_steps": 4}, {"decode_steps": 16, "length": 32}],
    ids=str,
)
def test_every_step_shape_is_exercised_those_of_few_rows_and_of_several_steps_too(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu_shapes(monkeypatch, 2, 4)
    engine = make_engine(tiny_llama(), seqs=8, **{"budget": 64, "token_buckets": (2, 4, 8, 48, 64), **options})
    assert [str(shape).split(" P")[0] for shape in engine.step_shapes[3:7]] == ["T48 S8", "T64 S2", "T64 S4", "T64 S8"]
    several = [(shape.num_rows, shape.num_steps) for shape in engine.step_shapes[7:]]
    assert several == ([(rows, options["decode_steps"]) for rows in (2, 4, 8)] if "decode_steps" in options else [])
    shapes = shapes_taken(monkeypatch)
    serve.exercise(engine)
    assert [shape for shape in engine.step_shapes if shapes.count(shape) < 3] == []


def test_steps_above_the_ordinary_budget_are_exercised_too(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu_shapes(monkeypatch, 2, 4)
    sizes = {"budget": 32, "token_buckets": (2, 4, 8, 32, 64), "scheduler": {"max_num_prefill_tokens": 64}}
    engine = make_engine(tiny_llama(), seqs=8, **sizes)
    assert {shape.num_rows for shape in engine.step_shapes if shape.num_tokens == 64} == {2, 8}
    shapes = shapes_taken(monkeypatch)
    serve.exercise(engine)
    assert [shape for shape in engine.step_shapes if shapes.count(shape) < 3] == []


def test_several_steps_are_exercised_where_no_token_bucket_is_that_small_and_not_where_no_sequence_is_that_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes, model = shapes_taken(monkeypatch), tiny_llama()
    wide = make_engine(model, seqs=4, budget=16, token_buckets=(16,), decode_steps=4)
    serve.exercise(wide)
    assert [str(shape).split(" P")[0] for shape in wide.step_shapes if shapes.count(shape) >= 3] == [
        "T16 S4",
        "T4 S4",
    ]
    shapes.clear()
    serve.exercise(make_engine(model, length=9, decode_steps=8))
    assert {shape.num_steps for shape in shapes} == {1}


@pytest.mark.parametrize(("scale", "warm"), [(1.0, [13]), (0.08, [11, 11]), (0.04, [6, 6, 6])], ids=str)
def test_a_cell_is_measured_after_three_programs_of_its_kind(
    scale: float, warm: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_llama(), length=256, page_buckets=(4, 32), decode_steps=4)
    made = measures.Bench(
        engine=engine,
        num_layers=2,
        cost=READS,
        roofs=UNIT,
        yardstick=Yardstick.of("tiny", "cpu", "float32", 1.0),
        repeats=1,
        scale=scale,
    )
    shapes, runs, plain = shapes_taken(monkeypatch), [], measures.serve

    def serve_and_tell(engine, requests, **options):
        runs.append((requests[0][1].max_tokens, shapes.copy()))
        return plain(engine, requests, **options)

    monkeypatch.setattr(measures, "serve", serve_and_tell)
    list(measures.measure_decode(made, [(2, 64)]))
    assert [tokens for tokens, _ in runs] == [1, *warm, made.steps + 1]
    (several,) = {shape for shape in shapes if shape.num_steps == 4}
    assert sum(shape == several for shape in runs[-1][1]) >= 3


# --- pictures ---------------------------------------------------------------------------------------------------------
def cell(rows: int, **more: Any) -> dict[str, Any]:
    return {"rows": rows, "context": 1024, "ms": 4.0 + rows, "roofline_ms": 4.0, "vllm": 5.0 + rows, **more}


def test_pictures_and_tables_show_what_a_gpu_was_measured_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = {
        "roofline_fraction": 0.8,
        "tokens_per_s": 9.0,
        "times_vllm": 1.25,
        "reach": 4.3,
        "host_ms": {"plan_s": 0.1},
    }
    step = {"step_ms": 5.0, "classes_ms": {"GEMM": 3.0, "norm": 0.5}, "between_kernels_ms": 0.2, "idle_fraction": 0.1}
    step |= {"kernels_per_step": 300.0, "kernels_outside_graphs_per_step": 1.0, "host_ms": {}}
    step |= {"calls_per_step": {"cuGraphLaunch": 2.0}}
    step |= {"kernels": [{"name": "nvjet", "class": "GEMM", "us": 40.0, "per_step": 4.0}]}
    results = {
        "model": "m",
        "dtype": "bfloat16",
        "decode": {"steps": 128, "cells": [cell(n, **beside) for n in (1, 8)]},
    }
    results |= {"breakdown": [cell(1, **step)], "start": {"cold_s": 70.0, "warm_s": 15.0, "warm": {}}}
    record = {"script": "bench_engine", "commit": "c", "date": "d", "device": "D", "python": "3", "versions": {}}
    read = Record.from_line("made", json.dumps({**record, "results": results}))
    uniform = {"figure": "output_tokens_per_s", "output_tokens_per_s": 11000.4, "vllm": 9899.0, "times_vllm": 1.111}
    all_of_it = Record.from_line("made", json.dumps({**record, "results": {**results, "uniform": uniform}}))
    assert not figures.panels_of([read])  # it came to no whole workload
    times, rates, bars = figures.panels_of([read, all_of_it])
    assert times.series["jpaged, 1,024 tokens"] == ([1, 8], [5.0, 12.0])  # type: ignore[union-attr]
    assert rates.series["vLLM, 1,024 tokens"][1][0] == pytest.approx(1000 / 6)  # type: ignore[union-attr]
    parts = {part: ms for part, ms in bars.bars["1 x 1,024"].items() if ms}  # type: ignore[union-attr]
    assert parts == {"GEMM": 3.0, "small": 0.5, "between": 0.2, "idle": 0.5}
    assert (
        "| 1 x 1,024 | 5.00 | 3.000 | 0.500 | 0.200 | 10.0% | 300 | 1.0 | 2.0 | 0.0 | d, `c` |"
        in tables.breakdown_table([read])
    )
    assert (
        "| m, bfloat16 | D | 1 x 1,024 | 5.00 | 4.00 | 80% | 9 | 6.00 | 1.25 | 4.30 | – | d, `c` |"
        in tables.decode_table([read])
    )
    summary = tables.summary_table([read, all_of_it])
    assert summary.count("1 row of 1,024 tokens") == 1
    assert "| D | m, bfloat16 | decode step, 1 row of 1,024 tokens, ms | 5.00 | 6.00 | 1.25 | d, `c` |" in summary
    assert "output tokens/s | 11,000 | 9,899 | 1.11 | d, `c` |" in summary
    assert "8 rows" not in summary
    assert "| 70.0 | – | 15.0 | – | – | – | d, `c` |" in tables.start_table([read])
    assert "| `nvjet` | GEMM | 40.00 | 4.0 | 160.0 |" in tables.kernel_table([read])

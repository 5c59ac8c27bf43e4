"""The launcher: its plans in words and JSON, what it refuses, and what it hands to the server."""

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from jpaged.accelerators import ACCELERATORS, GIB
from jpaged.cli import serve as serve_command
from jpaged.device_probe import FoundDevices
from jpaged.launch_settings import launch_settings
from scripts import serve_tpu
from scripts.plan_text import SEVERAL_CHIPS
from tests.fakes import tiny_config

PAGE = (Path(__file__).parent.parent / "docs" / "serving-on-tpu.md").read_text(encoding="utf-8")
ASKED = [
    (topology, model)
    for topology in ("v5e-1", "v5e-8", "v6e-1", "v6e-8", "v5p-8", "tpu7x-4")
    for model in ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B")
]
REFUSED = {("v5e-1", "Llama-3.1-70B"), ("v5e-8", "Llama-3.1-70B"), ("v6e-1", "Llama-3.1-70B")}


@pytest.fixture
def run(monkeypatch):
    """Runs the launcher with nothing set in the environment that it would keep."""
    for name in ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_CLIENT_MEM_FRACTION", "JPAGED_API_KEYS"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(serve_tpu.app, list(arguments))


@pytest.fixture
def here(monkeypatch):
    """Makes the launcher find a device."""

    def find(name: str, num_devices: int = 1, **other: int) -> None:
        found = FoundDevices(replace(ACCELERATORS[name], **other), num_devices)
        monkeypatch.setattr(serve_tpu, "probe_devices", lambda environ, chip: found)

    return find


@pytest.fixture
def served(monkeypatch):
    """What the server was started with, in place of starting it; the environment is as before when the test ends."""
    calls = []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(serve_command, "listener_of", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(serve_command, "start", lambda *given, **more: calls.append((*given, more)))
    return calls


@pytest.fixture
def folder(tmp_path):
    """A model's folder, without weights worth the name."""
    config = tiny_config(head_dim=64, num_attention_heads=8, num_key_value_heads=8)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return f"{tmp_path}"


@pytest.mark.parametrize(("topology", "model"), ASKED)
def test_a_plan_for_chips_that_are_not_here(run, topology, model):
    done = run(model, "--dry-run", "--topology", topology)
    assert f"{model} on {topology}" in done.stdout
    assert "bytes of a device" in done.stdout
    assert "weights" in done.stdout
    if (topology, model) in REFUSED:
        assert done.exit_code == 2
        assert f"does not fit on {topology}: weights" in done.stderr
        assert "GB are lacking; it would fit on" in done.stderr
        assert "lacking" in done.stdout
    else:
        assert done.exit_code == 0
        assert "(--max-model-len)" in done.stdout
    assert (SEVERAL_CHIPS in done.stdout) == (done.exit_code == 0 and not topology.endswith("-1"))


def test_what_is_lacking_is_summed_line_by_line(run):
    lines = run("Llama-3.1-70B", "--dry-run", "--topology", "v5e-8").stdout.splitlines()
    figures = {
        line.split("  ")[2].strip(): float(line.split()[-2]) for line in lines if line.strip().startswith("lacking")
    }
    body = lines[lines.index("  bytes of a device") + 1 :]
    sizes = [float(line.split(" GB")[0].split()[-1]) for line in body[: next(i for i, x in enumerate(body) if not x)]]
    *parts, total, lacking = sizes
    assert sum(parts) == pytest.approx(total, abs=0.005)
    assert total - 16.911 == pytest.approx(lacking, abs=0.002)
    assert list(figures.values()) == [lacking]


def test_few_pages_are_called_few(run):
    assert "  tight  " in run("Llama-3.1-8B", "--dry-run", "--topology", "v5e-1").stdout
    assert "  tight  " not in run("Llama-3.1-8B", "--dry-run", "--topology", "v6e-1").stdout
    assert "  tight  " not in run("Llama-3.2-1B", "--dry-run", "--topology", "cpu").stdout


def test_a_plan_as_json(run):
    done = run("Llama-3.1-8B", "--dry-run", "--topology", "v6e-8", "--json", "--tensor-parallel", "1")
    report = json.loads(done.stdout)
    assert (report["topology"], report["fits"], report["this_version_runs_it"]) == ("v6e-8", True, True)
    assert report["refused"] is None
    names = [one["name"] for one in report["environment"]]
    assert names == [
        "JAX_PLATFORMS",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "TPU_VISIBLE_CHIPS",
        "TPU_CHIPS_PER_PROCESS_BOUNDS",
        "TPU_PROCESS_BOUNDS",
    ]
    refused = run("Llama-3.1-70B", "--dry-run", "--topology", "v5e-8", "--json")
    assert refused.exit_code == 2
    would_fit = "it would fit on v5e-16, v4-8, v5p-4, v6e-8, tpu7x-4, h200-2"
    assert json.loads(refused.stdout)["refused"].endswith(f"{would_fit} ({SEVERAL_CHIPS})")


def test_chips_that_take_larger_steps_than_were_asked_for_are_not_named(run):
    refused = run("Llama-3.1-70B", "--dry-run", "--topology", "v5e-8", "--max-num-prefill-tokens", "1024")
    assert refused.exit_code == 2
    assert "does not fit on v5e-8: weights" in refused.stderr
    assert f"it would fit on v5e-16, v4-8, v5p-4, tpu7x-4 ({SEVERAL_CHIPS})" in " ".join(refused.stderr.split())
    sizes = ("--token-buckets", "64,512")  # of a v6e or an H200 the last must hold more
    refused = run("Llama-3.1-70B", "--dry-run", "--topology", "v5e-8", *sizes)
    assert "does not fit on v5e-8: weights" in refused.stderr


def test_a_plan_for_what_is_here(run, here):
    here("v5e", 4)
    done = run("Llama-3.2-1B", "--dry-run")
    assert done.stdout.startswith("Llama-3.2-1B on v5e-4: 4 x TPU v5 lite\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--tensor-parallel", "2"), f"expected 1: {SEVERAL_CHIPS}"),
        (("--topology", "v5e-8"), "--topology goes with --dry-run"),
        (("--json",), "--json goes with --dry-run"),
        (("--warmup", "often"), "warmup is 'often'"),
        (("--policy", "lifo"), "policy is 'lifo'"),
        (("--dry-run", "--topology", "v9"), "the topology is 'v9'"),
        (("--dry-run", "--topology", "v5e-8", "--page-size", "12"), "--page-size is 12"),
    ],
)
def test_what_is_refused_is_one_line(run, served, arguments, why):
    done = run("Llama-3.1-8B", *arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("serve_tpu: error: ")
    assert why in done.stderr
    assert not served


def test_a_model_that_is_not_there(run):
    done = run("org/name", "--dry-run", "--topology", "v5e-8")
    assert (done.exit_code, "there is no model 'org/name'" in done.stderr) == (1, True)


def test_what_does_not_fit_is_refused_before_it_is_loaded(run, here, served, folder):
    here("v5e", device_bytes=GIB // 8)
    done = run(folder)
    assert done.exit_code == 2
    assert "does not fit on v5e-1: weights" in done.stderr
    assert not served


def test_the_server_is_told_what_was_planned(run, here, served, folder):
    here("v5e", 8)
    asked = ("--served-model-name", "tiny", "--port", "0", "--kv-dtype", "int8", "--weights", "fp8")
    done = run(folder, *asked, "--no-prefix-cache")
    assert done.exit_code == 0, done.stderr
    [(config, recipe, _, more)] = served
    engine = recipe["config"]
    assert (config.models, config.port, more) == (
        ("tiny",),
        0,
        {"load_format": "auto", "own_process": True},
    )
    assert (recipe["model"], recipe["dtype"], recipe["weights"]) == (folder, "bfloat16", "fp8")
    assert "in bfloat16, the layers' in fp8 (--weights)" in done.stderr
    assert (engine.cache.dtype, engine.cache.prefix_cache, engine.warmup) == ("int8", False, "eager")
    assert engine.cache.num_pages is None
    assert engine.cache.page_size == 128
    assert engine.token_buckets[0] == 8
    assert "with --chip 0, --chip 1" in done.stderr
    assert {name: os.environ[name] for name in ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS")} == {
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def test_on_a_cpu_nothing_is_set_and_the_pool_is_as_planned(run, here, served, folder):
    here("cpu")
    before = dict(os.environ)
    done = run(folder, "--engine-thread", "--warmup", "lazy")
    assert done.exit_code == 0, done.stderr
    [(_, recipe, _, more)] = served
    assert dict(os.environ) == before
    assert (recipe["dtype"], recipe["config"].warmup, more["own_process"]) == ("float32", "lazy", False)
    assert recipe["config"].cache.num_pages >= 2
    assert "nothing is set for a CPU" in done.stderr


def test_a_missing_extra_is_named_first(run, monkeypatch):
    def missing() -> None:
        from jpaged.errors import ConfigError

        raise ConfigError("starlette is not installed")

    monkeypatch.setattr(serve_command, "require_extra", missing)
    done = run()
    assert (done.exit_code, "starlette is not installed" in done.stderr) == (2, True)


def test_the_page_shows_what_is_printed(run):
    shown = re.findall(r"^<!-- plan: (\S+) (\S+) -->\n```text\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for model, topology, text in shown:
        printed = run(model, "--dry-run", "--topology", topology).stdout
        assert printed.partition("\n\n  environment, set")[0] == text, f"print the plan of {model} on {topology} again"


def test_the_page_names_every_setting_and_only_options_that_exist():
    settings = [*launch_settings("tpu", {}, chip=0), *launch_settings("gpu", {})]
    assert {one.name for one in settings} <= set(re.findall(r"`(\w+)`", PAGE))
    known = {name for one in get_command(serve_tpu.app).params for name in (*one.opts, *one.secondary_opts)}
    shown = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE)) - {"--build-arg", "--privileged", "--network"}
    assert shown <= known


def test_the_budget_of_prompts_is_an_option(run, here, served):
    here("cpu")
    assert run("SmolLM2-135M", "--load-format", "dummy", "--max-num-prefill-tokens", "1024").exit_code == 0
    [(_, recipe, _, _)] = served
    scheduler = recipe["config"].scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_prefill_tokens) == (512, 1024)
    for options, prefill in (((), 4096), (("--max-num-batched-tokens", "2048"), None)):
        planned = run("SmolLM2-135M", "--dry-run", "--json", "--topology", "h200", *options)
        assert json.loads(planned.stdout)["chosen"]["max_num_prefill_tokens"] == prefill


def test_a_shape_is_served_without_weights(run, here, served):
    here("cpu")
    done = run("SmolLM2-135M", "--load-format", "dummy", "--token-buckets", "32,512")
    assert done.exit_code == 0, done.stderr
    [(config, recipe, _, more)] = served
    assert (config.models, recipe["model"], more["load_format"]) == (("SmolLM2-135M",), "SmolLM2-135M", "dummy")
    assert recipe["config"].token_buckets == (32, 512)
    assert "compiled steps  2: tokens 32 512;" in done.stderr
    planned = run("SmolLM2-135M", "--dry-run", "--topology", "v5e-1", "--token-buckets", "64,512")
    assert "compiled steps  2: tokens 64 512;" in planned.stdout
    for wrong, words in (
        (("--load-format", "magic"), "--load-format is 'magic', expected one of auto, dummy"),
        (("--load-format", "dummy", "--token-buckets", "8,x"), "--token-buckets is '8,x', expected integers"),
        (("--load-format", "dummy", "--token-buckets", "8"), "--token-buckets is (8,)"),
    ):
        refused = run("smollm2-135m", *wrong)
        assert (refused.exit_code, words in refused.stderr) == (2, True)

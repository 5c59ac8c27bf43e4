"""`jpaged info` against the engine that it foretells, and `jpaged fetch`."""

import json
import shutil
from pathlib import Path


def test_the_engine_is_as_foretold(jpaged, tiny_folder: Path) -> None:
    from jpaged import LLM

    small = ("--num-pages", "65", "--max-model-len", "256", "--page-size", "8")
    report = json.loads(jpaged("info", tiny_folder, "--json", *small).stdout)
    engine = LLM(tiny_folder, num_pages=65, max_model_len=256, page_size=8).engine
    plan, here = engine.pool_plan, report["here"]
    assert (here["num_pages"], here["page_size"]) == (plan.num_pages, plan.page_size) == (65, 8)
    assert (here["pool_bytes"], here["num_tokens"]) == (plan.pool_bytes, plan.token_capacity)
    assert here["max_model_len"] == plan.max_model_len == 256
    assert here["attention"] == engine.implementation
    assert report["kv_bytes_per_page"][here["dtype"]] == plan.bytes_per_page


def test_bytes_of_weights_and_pages(jpaged, tiny_folder: Path) -> None:
    from jpaged.models import load_config, load_model
    from jpaged.models.weights import num_bytes

    report = json.loads(jpaged("info", tiny_folder, "--json").stdout)
    assert report["here"]["page_size"] == 16  # which was not asked for
    count = load_config(tiny_folder).num_parameters
    assert report["num_parameters"] == count
    quantised = {form: num_bytes(load_model(tiny_folder, weights=form)) for form in ("int8", "fp8")}
    floats = {"float32": 4 * count, "bfloat16": 2 * count, "float16": 2 * count}
    assert report["weight_bytes"] == floats | quantised
    values = 2 * 2 * 2 * 8  # K and V, layers, heads, width
    assert report["kv_bytes_per_token"]["float32"] == 4 * values
    assert report["kv_bytes_per_token"]["int8"] == values + 2 * 2 * 2 * 4  # and a scale for each head of K and V
    assert report["kv_bytes_per_page"]["bfloat16"] == 16 * 2 * values


def test_weights_are_not_read(jpaged, tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    result = jpaged("info", tmp_path, "--num-pages", "65")
    assert result.exit_code == 0
    assert "64 and the null page" in result.stdout
    assert "vocab_size" in result.stdout
    assert "xla" in result.stdout
    assert "page size                16 tokens" in result.stdout


def test_what_no_pool_can_hold_is_refused(jpaged, tiny_folder: Path) -> None:
    result = jpaged("info", tiny_folder, "--num-pages", "9", "--max-model-len", "256")
    assert result.exit_code == 2
    assert "128 tokens" in result.stderr


def test_fetch_prints_a_path(jpaged, tiny_folder: Path) -> None:
    result = jpaged("fetch", tiny_folder)
    assert (result.exit_code, result.stdout) == (0, f"{tiny_folder}\n")

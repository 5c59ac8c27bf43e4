"""`jpaged plan`: without jax and without a download, for shapes, configs and files; tables and refusals."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import PATIENCE_S, ROOT
from tests.fakes import tiny_config

WITHOUT_JAX = """
import sys
for name in ("jax", "jaxlib", "flax", "optax", "orbax", "matplotlib"):
    sys.modules[name] = None
from jpaged.cli import main
sys.argv[1:] = {args!r}
main()
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config().to_hf()))
    return path


def planned(jpaged, *args: str | Path) -> dict:
    result = jpaged("plan", *args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_is_the_plan(jpaged) -> None:
    from jpaged.capacity import plan_capacity
    from jpaged.lengths import fixed_lengths
    from jpaged.model_shapes import model_shape

    report = planned(jpaged, "Llama-3-8B", "--memory", "141GB")
    plan = plan_capacity(model_shape("llama-3-8b"), fixed_lengths(1000, 200), device_bytes=141 * 10**9)
    assert report == {"model": "Llama-3-8B", **json.loads(json.dumps(plan.as_dict()))}
    assert report["paged"]["sequences"] > 1.8 * report["contiguous"][1]["sequences"]


def test_every_option_counts(jpaged) -> None:
    options = {
        "--memory": "80GiB",
        "--memory-fraction": "0.5",
        "--page-size": "64",
        "--dtype": "float16",
        "--weights": "fp8",
        "--kv-dtype": "int8",
        "--max-num-seqs": "17",
        "--max-model-len": "2000",
        "--lengths": "hist:1000,200,1;1900,200,2",
    }
    from jpaged.model_bytes import weight_bytes
    from jpaged.model_shapes import model_shape

    report = planned(jpaged, "llama-3-8b", *(word for option in options.items() for word in option))
    assert (report["device_bytes"], report["memory_fraction"], report["page_size"]) == (80 * 2**30, 0.5, 64)
    assert (report["dtype"], report["kv_dtype"], report["max_num_seqs"]) == ("float16", "int8", 17)
    assert report["weights"] == "fp8"
    assert report["weight_bytes"] == weight_bytes(model_shape("llama-3-8b"), "float16", "fp8")
    assert (report["max_model_len"], report["num_requests"], report["num_refused"]) == (2000, 2, 1)
    assert report["bytes_per_page"] == 32 * 64 * 8 * 2 * (128 + 4)


def test_configs_and_files_are_read(jpaged, config_file: Path) -> None:
    from gguf import GGUFWriter

    gguf, config = config_file.parent / "tiny.gguf", tiny_config()
    writer = GGUFWriter(gguf, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    kv = [
        planned(jpaged, path, "--memory", "4MB", "--lengths", "20+30")["bytes_per_token"]
        for path in (config_file, config_file.parent, gguf)
    ]
    assert kv == [2 * 2 * 2 * 8 * 2] * 3


def test_people_get_tables(jpaged, config_file: Path) -> None:
    result = jpaged("plan", config_file, "--memory", "4MB", "--lengths", "hist:20,30,1;300,1,1")
    assert result.exit_code == 0
    for words in ("4.00 MB (3.81 MiB)", "and the null page", "1 are longer", "oracle buddy", "256 ", "waste %"):
        assert words in " ".join(result.stdout.split()) + " ", words


def test_a_picture_is_drawn(jpaged, config_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    result = jpaged("plan", config_file, "--memory", "4MB", "--lengths", "20+30", "--json", "--plot", picture)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["page_size"] == 16
    assert result.stderr == f"wrote {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_neither_jax_nor_matplotlib_is_needed(config_file: Path) -> None:
    args = ["plan", str(config_file), "--memory", "4MB", "--lengths", "20+30"]
    code = WITHOUT_JAX.format(args=args)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "and the null page" in done.stdout


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        (["llama-3-70b", "--memory", "141GB"], 2, "weights in bfloat16 141.11 GB"),
        (["llama-3-8b", "--memory", "141"], 2, "the memory is too small"),
        (["llama-3-8b", "--memory", "141 G"], 2, "the memory is '141 G'"),
        (["llama-3-8b", "--memory", "141GB", "--page-size", "12"], 2, "--page-size is 12"),
        (["llama-3-8b", "--memory", "141GB", "--dtype", "int8"], 2, "dtype is 'int8'"),
        (["llama-3-8b", "--memory", "141GB", "--lengths", "many"], 2, "lengths are 'many'"),
        (["llama-3-8b", "--memory", "141GB", "--lengths", "trace:nowhere"], 2, "nowhere does not exist"),
        (["llama-3-8b", "--memory", "141GB", "--lengths", "trace:pyproject.toml"], 2, "pyproject.toml, line 1"),
        (
            ["llama-3-8b", "--memory", "141GB", "--lengths", "9000+1"],
            2,
            "the shortest request of fixed 9000+1 has 9001 tokens",
        ),
        (["llama-3-8b", "--memory", "141GB", "--plot", "a.jpg"], 2, "'a.jpg'"),
        (["llama-9-8b", "--memory", "141GB"], 1, "there is no model 'llama-9-8b': expected one of llama-2-7b"),
        (["org/name", "--memory", "141GB"], 1, "downloads nothing"),
        (["pyproject.toml", "--memory", "141GB"], 1, "pyproject.toml"),
        (["jpaged", "--memory", "141GB"], 1, "config.json does not exist"),
    ],
)
def test_refusals_are_one_line(jpaged, monkeypatch, args: list[str], exit_code: int, words: str) -> None:
    monkeypatch.chdir(ROOT)
    result = jpaged("plan", *args)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("jpaged: error: ")
    assert words in line


def test_the_document_shows_what_the_command_prints(jpaged) -> None:
    text = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\njpaged (plan [^\n]*)\n```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(shown) >= 2
    for line, expected in shown:
        result = jpaged(*shlex.split(line))
        assert result.exit_code == 0, result.stderr
        lines = [line.rstrip() for line in result.stdout.splitlines()]
        assert "\n".join(lines).strip() == expected.strip(), f"`jpaged {line}` prints something else now"

"""A key that is equal in the next process, and changes with whatever a program depends on."""

import functools
import os
import subprocess
import sys
from unittest.mock import MagicMock

import jax
import pytest

import jpaged
from jpaged import program_key as keys
from jpaged.fingerprint import UnseenError
from jpaged.models.layers import rotary_angles
from jpaged.program_key import program_key
from tests.fakes import tiny_llama

TEXT_OF_PARTS = """
import sys, jax
from flax import nnx
from jpaged import program_key as keys
from tests.fakes import tiny_llama

def parts():
    graph, params = nnx.split(nnx.eval_shape(lambda: tiny_llama(num_hidden_layers=1)))
    return graph, jax.tree.structure(params), {"b", "a"}, jax.numpy.zeros(2)

text = keys.sources() + keys.versions() + keys.place(jax.devices()[0]) + keys.describe(parts())
"""


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Whatever happens to the sources while the tests run."""
    monkeypatch.setattr(keys, "_BEGAN", float("inf"))


def key(parts="parts", device=None) -> str:
    return program_key(parts, device or jax.devices()[0])


def test_processes_agree():
    here: dict = {}
    exec(TEXT_OF_PARTS, here)
    command = [sys.executable, "-c", f"{TEXT_OF_PARTS}sys.stdout.write(text)"]
    environ = os.environ | {"PYTHONHASHSEED": "1"}
    there = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert there == here["text"]


def test_settings_of_jax_count_in_this_thread_too():
    plain = key()
    with jax.default_matmul_precision("highest"):
        assert key() != plain
    with jax.numpy_dtype_promotion("standard"):
        assert key() != plain
    with jax.default_device(jax.devices()[0]):
        assert key() != plain
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert key() != plain
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    try:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)  # which changes no program
        assert key() == plain
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    assert key() == plain


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *(
            (name, True)
            for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUDA_MPS_PIPE_DIRECTORY")
        ),
        *((name, False) for name in ("TF_CPP_MIN_LOG_LEVEL", "XLA_PYTHON_CLIENT_MEM_FRACTION", "HOME")),
    ],
)
def test_variables_that_compilers_read_count(monkeypatch, name, counts):
    plain = key()
    monkeypatch.setenv(name, "another")
    assert (key() != plain) == counts


def test_the_device_and_the_parts_count():
    class Other:
        """Like the first device, but for one thing."""

        def __init__(self, **changes):
            self.__dict__.update({"client": jax.devices()[0].client, "device_kind": "cpu", "id": 0, **changes})

    devices = [Other(), Other(device_kind="NVIDIA H200"), Other(id=1), Other(core_count=78)]
    assert len({key(device=device) for device in devices}) == len(devices)
    assert key(("a", 1)) != key(("a", 2))


def test_the_sources_of_all_that_programs_are_made_from_count(monkeypatch):
    read = keys._read_sources()
    names = {f"{path.parent.name}/{path.name}" for path in read.paths}
    for path in ("step", "step_functions", "sampler", "token_filter", "batch", "models/layers", "pallas_kernels/xla"):
        assert f"jpaged/{path}.py" in names or f"{path}.py" in names
    assert read.modules.isdisjoint({"engine", "scheduler", "server", "cli", "llm"})  # which only use them
    plain = key()
    monkeypatch.setattr(keys, "_read_sources", functools.partial(read._replace, digest="another"))
    assert key() != plain


def test_every_byte_of_them_counts(monkeypatch, tmp_path):
    for folder in ("models", "pallas_kernels"):
        (tmp_path / folder / "tuned").mkdir(parents=True)
    monkeypatch.setattr(jpaged, "__path__", [str(tmp_path)])
    monkeypatch.setattr(keys, "_paths", lambda name: [str(tmp_path / name.removeprefix("jpaged."))])
    (tmp_path / "step.py").write_text("from jpaged.sampler import sample\n")
    seen = []
    for name, text, counts in (
        ("sampler.py", "    from jpaged.batch import unpack\nimport numpy as np", True),
        ("batch.py", "1", True),
        ("batch.py", "2", True),
        ("engine.py", "3", False),
        ("models/llama.py", "4", True),
        ("pallas_kernels/tuned/h200.json", "{}", True),
        ("pallas_kernels/tuned/h100.json", "{}", True),
    ):
        (tmp_path / name).write_text(text)
        digest = keys._read_sources.__wrapped__().digest
        assert (digest not in seen) == counts
        seen.append(digest)
    read = keys._read_sources.__wrapped__()
    assert (read.modules, read.imports) == ({"step", "sampler", "batch"}, {"jpaged", "numpy"})


def test_a_file_that_was_changed_since_is_not_what_this_process_runs(monkeypatch):
    monkeypatch.setattr(keys, "_BEGAN", 0.0)
    with pytest.raises(UnseenError, match="was changed after this process began"):
        key()


def own(*args):
    return args


@functools.wraps(rotary_angles)
def lent(*args):
    return args


@pytest.mark.parametrize(
    "target", ["jpaged.models.layers.rotary_angles", "jpaged.models.layers.MLP.__call__", "jpaged.sampler.sample"]
)
@pytest.mark.parametrize(
    "patch",
    [own, functools.partial(own, 1), jax.jit(own), lambda *args: args, lent],
    ids=["function", "partial", "jitted", "lambda", "with-another-name"],
)
def test_code_that_was_replaced_is_not_that_of_the_sources(monkeypatch, target, patch):
    import jpaged.sampler  # noqa: F401

    tiny_llama(num_hidden_layers=1)
    key()
    with monkeypatch.context() as patched:
        patched.setattr(target, patch)
        with pytest.raises(UnseenError, match=r"tests\.test_program_key\..*, which jpaged\."):
            key()
    with monkeypatch.context() as patched:
        patched.setattr(target, MagicMock())
        with pytest.raises(UnseenError, match=r"unittest\.mock\..*, which jpaged\."):
            key()
    key()

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jpaged.errors import ModelLoadError
from jpaged.models import load_model, save_orbax

from .paged import random_llama, tiny_config

# Orbax leaves sockets of its event loop open and uses names of jax that are on their way out.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_restore(tmp_path, dtype):
    model = random_llama(attention_bias=True, tie_word_embeddings=False)
    save_orbax(random_llama(seed=1), tmp_path / "m")  # replaced by the next line
    save_orbax(model, tmp_path / "m")
    steps = []
    again = load_model(tmp_path / "m", dtype=dtype, progress=lambda *step: steps.append(step))
    assert again.config == model.config
    size = model.config.num_parameters * np.dtype(again.dtype).itemsize
    assert steps == [(size, size)]
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        assert b.dtype.name == dtype
        np.testing.assert_array_equal(a.astype(dtype), b)


def test_refuses_what_does_not_fit_or_is_damaged(tmp_path):
    save_orbax(random_llama(), tmp_path)
    for changes, message in [
        ({"num_hidden_layers": 3}, "layers/2/mlp/down/kernel is missing"),
        ({"num_hidden_layers": 1}, "layers/1/mlp/down/kernel is unexpected"),
        ({"vocab_size": 50}, r"embed has shape \[48, 32\], expected \[50, 32\]"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(**changes).to_hf()))
        with pytest.raises(ModelLoadError, match=message):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_hf()))
    (tmp_path / "params" / "_METADATA").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read; it is damaged"):
        load_model(tmp_path)


# Cuts each file of a checkpoint in turn, and prints what `load_model` says: null where it does without that file.
CUT_EACH_FILE = """
import json, pathlib, sys
from jpaged.errors import ModelLoadError
from jpaged.models import load_model

folder, messages = pathlib.Path(sys.argv[1]), {}
for file in sorted(path for path in folder.rglob("*") if path.is_file()):
    whole = file.read_bytes()
    for keep in (0, len(whole) // 2):
        file.write_bytes(whole[:keep])
        try:
            load_model(folder)
            messages[f"{file.name} {keep}"] = None
        except ModelLoadError as error:
            messages[f"{file.name} {keep}"] = str(error)
    file.write_bytes(whole)
load_model(folder)
print(json.dumps(messages))
"""


def test_each_file_cut_short_is_one_line(tmp_path):
    save_orbax(random_llama(), tmp_path)
    # In a process of its own: Orbax drops reads that it has begun, and Python complains of them whenever it finds them.
    done = subprocess.run(
        [sys.executable, "-c", CUT_EACH_FILE, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout.splitlines()[-1])
    refused = [message for message in messages.values() if message is not None]
    assert len(refused) >= 6  # config.json, metadata and data, twice each
    assert [message for message in refused if "it is damaged or not whole" in message]
    for message in refused:
        assert "\n" not in message
        assert "NoneType" not in message
        assert " object at " not in message

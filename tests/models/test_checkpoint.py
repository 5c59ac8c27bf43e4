import json

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
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(tmp_path)

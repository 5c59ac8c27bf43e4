import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jpaged.errors import ModelLoadError
from jpaged.models import load_model

from .checkpoints import EMBED, HEAD, tensors_of, write
from .paged import tiny_config


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_converts_to_the_wanted_dtype(tmp_path, stored, wanted):
    config = tiny_config()
    tensors = tensors_of(config, stored)
    model = load_model(write(tmp_path / "m", config, tensors), dtype=wanted)
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model))} == {wanted}
    np.testing.assert_array_equal(model.embed[...], tensors[EMBED].astype(wanted))
    down = tensors["model.layers.0.mlp.down_proj.weight"].T.astype(wanted)
    np.testing.assert_array_equal(model.layers[0].mlp.down.kernel[...], down)


def test_holds_one_copy_and_one_parameter_on_the_host(tmp_path, monkeypatch):
    """The host holds the largest parameter and its largest tensor at most; the device never more than the model.

    numpy reports its memory to tracemalloc, half of the rest is for Python's own objects. On the CPU a device array may
    share the host's buffer, so it is copied here.
    """
    config = tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=12, vocab_size=1024)
    folder = write(tmp_path / "m", config, tensors_of(config), shards=2)
    total, largest = config.num_parameters * 4, max(256 * 2 * 512, 1024 * 256) * 4
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x: put(jnp.array(x, copy=True)))
    load_model(folder)  # imports and compiles what it needs
    before = sum(x.nbytes for x in jax.live_arrays())
    steps, device = [], []

    def progress(done, of):
        steps.append((done, of))
        device.append(sum(x.nbytes for x in jax.live_arrays()) - before)

    tracemalloc.start()
    try:
        model = load_model(folder, progress=progress)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * largest < total / 4
    assert all(held <= done for held, (done, _) in zip(device, steps, strict=True))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (total, total)
    assert sum(x.nbytes for x in jax.tree.leaves(nnx.state(model))) == total


def test_tied_models_may_bring_the_table_twice(tmp_path):
    config = tiny_config()
    tensors = tensors_of(config)
    model = load_model(write(tmp_path / "same", config, tensors | {HEAD: tensors[EMBED]}))
    assert model.lm_head is None
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(write(tmp_path / "other", config, tensors | {HEAD: tensors[EMBED] + 1}))


def test_names_every_tensor_that_does_not_fit(tmp_path):
    config = tiny_config()
    tensors = tensors_of(config)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["extra"] = np.zeros(3, np.float32)
    tensors[EMBED] = tensors[EMBED][:-1].copy()
    with pytest.raises(ModelLoadError) as caught:
        load_model(write(tmp_path / "m", config, tensors))
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in text
    assert "unexpected: " in text
    assert "model.layers.2.mlp.up_proj.weight" in text
    assert "extra" in text
    assert "model.embed_tokens.weight (got [47, 32], expected [48, 32])" in text


def test_refuses_numbers_that_are_not_floats(tmp_path):
    config = tiny_config()
    tensors = tensors_of(config)
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight for norm/scale is int8\[32\]"):
        load_model(write(tmp_path / "m", config, tensors))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float64", "bf16"])
def test_refuses_other_dtypes(tmp_path, dtype):
    with pytest.raises(ModelLoadError, match="expected one of float32, bfloat16, float16"):
        load_model(tmp_path, dtype=dtype)

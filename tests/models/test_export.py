import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.errors import ConfigError
from jpaged.models import RopeScaling, export_safetensors, load_config, load_model

from .paged import random_llama


@pytest.mark.parametrize("max_shard_bytes", [10**9, 8000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_and_load_again(tmp_path, max_shard_bytes, dtype):
    scaling = RopeScaling(kind="llama3", factor=8.0)
    model = random_llama(tie_word_embeddings=False, attention_bias=True, rope_scaling=scaling, dtype=jnp.dtype(dtype))
    # What is left of an earlier export goes away; other files stay.
    (tmp_path / "model-00001-of-00099.safetensors").write_bytes(b"old")
    (tmp_path / "tokenizer.json").write_text("{}")
    export_safetensors(model, tmp_path, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if max_shard_bytes == 8000:
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert len(files) > 3
        assert all(path.stat().st_size < 8000 + 4000 for path in tmp_path.glob("*.safetensors"))  # 4 kB of header
    else:
        assert files == ["model.safetensors"]
    assert (tmp_path / "tokenizer.json").exists()
    again = load_model(tmp_path, dtype=dtype)
    assert again.config == model.config == load_config(tmp_path)
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_export_refuses_a_size_of_zero(tmp_path):
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        export_safetensors(random_llama(), tmp_path, max_shard_bytes=0)

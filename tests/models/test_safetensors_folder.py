import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.errors import ModelLoadError
from jpaged.models import Llama, load_model

from .checkpoints import EMBED, HEAD, tensors_of, write
from .paged import tiny_config


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 16}])
def test_every_tensor_lands_in_its_place(tmp_path, shards, changes):
    config = tiny_config(**changes)
    tensors = tensors_of(config)
    model = load_model(write(tmp_path / "m", config, tensors, shards=shards))
    assert model.config == config
    layer, t = model.layers[1], {k.removeprefix("model.layers.1."): v for k, v in tensors.items()}
    qkv = np.concatenate([t[f"self_attn.{x}_proj.weight"] for x in "qkv"]).T
    np.testing.assert_array_equal(layer.attention.qkv.kernel[...], qkv)
    np.testing.assert_array_equal(layer.attention.o.kernel[...], t["self_attn.o_proj.weight"].T)
    gate_up = np.concatenate([t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]]).T
    np.testing.assert_array_equal(layer.mlp.gate_up.kernel[...], gate_up)
    np.testing.assert_array_equal(layer.mlp.down.kernel[...], t["mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(layer.attention_norm.scale[...], t["input_layernorm.weight"])
    np.testing.assert_array_equal(layer.mlp_norm.scale[...], t["post_attention_layernorm.weight"])
    np.testing.assert_array_equal(model.embed[...], tensors[EMBED])
    np.testing.assert_array_equal(model.norm.scale[...], tensors["model.norm.weight"])
    if changes:
        np.testing.assert_array_equal(model.lm_head.kernel[...], tensors[HEAD].T)
        biases = np.concatenate([t[f"self_attn.{x}_proj.bias"] for x in "qkv"])
        np.testing.assert_array_equal(layer.attention.qkv.bias[...], biases)
        np.testing.assert_array_equal(layer.attention.o.bias[...], t["self_attn.o_proj.bias"])


def test_derived_buffers_of_old_checkpoints_are_passed_over(tmp_path):
    config = tiny_config()
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    load_model(write(tmp_path / "m", config, tensors_of(config) | extra))


def test_refuses_a_tensor_in_two_shards(tmp_path):
    config = tiny_config()
    folder = write(tmp_path / "m", config, tensors_of(config), shards=2)
    save_file({EMBED: np.zeros((48, 32), np.float32)}, folder / "more.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.norm.weight": "more.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight is both in model-0\.safetensors and in more"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ghost": "model-0.safetensors"}, "names tensors that its files do not hold: ghost"),
        ({EMBED: "model-1.safetensors"}, f"names tensors that its files do not hold: {EMBED}"),
        ({EMBED: "model-9.safetensors"}, "does not exist, but model.safetensors.index.json names it"),
        ({EMBED: "../model-0.safetensors"}, "names files outside its folder"),
        ({EMBED: 3}, "lacks the object weight_map"),
    ],
)
def test_refuses_an_index_that_does_not_fit(tmp_path, change, message):
    config = tiny_config()
    folder = write(tmp_path / "m", config, tensors_of(config), shards=2, **change)
    with pytest.raises(ModelLoadError) as caught:
        load_model(folder)
    assert message in str(caught.value)


def test_refuses_tensors_that_the_index_does_not_list(tmp_path):
    config = tiny_config()
    folder = write(tmp_path / "m", config, tensors_of(config), shards=2)
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=r"does not list tensors that its files hold: model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_refuses_truncated_files(tmp_path, keep):
    config = tiny_config()
    folder = write(tmp_path / "m", config, tensors_of(config))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="is not a whole safetensors file"):
        load_model(folder)


def test_refuses_foreign_files_and_empty_folders(tmp_path):
    config = tiny_config()
    folder = write(tmp_path / "m", config, {"a": np.zeros(1, np.float32)})
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ModelLoadError, match="is not a whole safetensors file"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no safetensors file, expected model\.safetensors"):
        load_model(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="holds a list, expected a JSON object"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        load_model(folder)


def test_a_single_file_may_have_any_name_but_two_need_an_index(tmp_path):
    config = tiny_config()
    folder = write(tmp_path / "m", config, tensors_of(config))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert isinstance(load_model(folder), Llama)
    save_file({"a": np.zeros(1, np.float32)}, folder / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"has other\.safetensors, weights\.safetensors, expected"):
        load_model(folder)

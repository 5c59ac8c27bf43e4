import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jpaged.errors import ConfigError, ModelLoadError
from jpaged.models import Llama, LlamaConfig, RopeScaling, export_safetensors, load_config, load_model
from jpaged.models.parameter_map import parameter_map

from .paged import random_llama, tiny_config

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def tensors_of(config: LlamaConfig, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    pieces = [piece for group in parameter_map(config).values() for piece in group]
    return {piece.name: rng.standard_normal(piece.shape).astype(dtype) for piece in pieces}


def write(folder, config, tensors, *, shards: int = 1, **index_changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])  # q, k and v of a layer lie in different shards
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | index_changes}))
    return folder


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


def test_derived_buffers_of_old_checkpoints_are_passed_over(tmp_path):
    config = tiny_config()
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    load_model(write(tmp_path / "m", config, tensors_of(config) | extra))


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


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float64", "bf16"])
def test_refuses_other_dtypes(tmp_path, dtype):
    with pytest.raises(ModelLoadError, match="expected one of float32, bfloat16, float16"):
        load_model(tmp_path, dtype=dtype)


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

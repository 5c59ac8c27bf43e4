import contextlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from jpaged.errors import ModelLoadError
from jpaged.gguf_file import GGUFFile
from jpaged.models import LlamaConfig, RopeScaling, iter_gguf_tensors, load_config, load_model
from jpaged.models.gguf import hf_name, unpermute
from jpaged.models.parameter_map import parameter_map

from .paged import tiny_config

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """What converters to GGUF do to q and k, written out: row r of a half becomes row 2 r or 2 r + 1 of the head."""
    dim = len(tensor) // num_heads
    result = np.empty_like(tensor)
    for head in range(num_heads):
        for r in range(dim):
            half, place = divmod(r, dim // 2)
            result[head * dim + 2 * place + half] = tensor[head * dim + r]
    return result


def write_gguf(path, config: LlamaConfig, tensors, types=None, *, extra=(), metadata=()) -> None:
    """Writes tensors with Hugging Face names as a GGUF file; `types` gives quantised block types."""
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(["<s>", "</s>", "é"])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for key, value in metadata:
        writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name, GGMLQuantizationType.F32)
        data = quantize(tensor, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, tensor in extra:
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(config: LlamaConfig) -> tuple[dict, dict]:
    """Tensors as Hugging Face has them, and as a GGUF file has them."""
    rng = np.random.default_rng(0)
    pieces = [piece for group in parameter_map(config).values() for piece in group]
    tensors = {piece.name: rng.standard_normal(piece.shape).astype(np.float32) for piece in pieces}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {name: permute(t, heads[p]) if (p := name.split(".")[-2]) in heads else t for name, t in tensors.items()}
    return tensors, stored


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_config(rms_norm_eps=0.5), make(tiny_config())[1])
    return path


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 16}])
def test_every_tensor_lands_in_its_place(tmp_path, changes):
    config = tiny_config(rms_norm_eps=0.5, **changes)
    tensors, stored = make(config)
    write_gguf(tmp_path / "m.gguf", config, stored)
    got = dict(iter_gguf_tensors(tmp_path / "m.gguf"))
    assert got.keys() == tensors.keys() | {"lm_head.weight"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)
    if not changes:
        np.testing.assert_array_equal(got["lm_head.weight"], tensors["model.embed_tokens.weight"])
    model = load_model(tmp_path / "m.gguf")
    assert model.config == config
    q_and_k = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qk"]
    qkv = np.concatenate([*q_and_k, tensors["model.layers.1.self_attn.v_proj.weight"]]).T
    np.testing.assert_array_equal(model.layers[1].attention.qkv.kernel[...], qkv)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_dequantises_blocks(tmp_path, kind):
    """Joining rows before the library sees them must not change a number; 3 joined rows do not divide 40 rows."""
    block_type = GGMLQuantizationType[kind]
    config = tiny_config(vocab_size=160)
    tensors, stored = make(config)
    types = {name: block_type for name, t in tensors.items() if t.ndim == 2 and t.shape[-1] % 32 == 0}
    assert len(types) == 13  # all but ffn_down, whose rows are 40 long
    write_gguf(tmp_path / "m.gguf", config, stored, types)
    got = dict(iter_gguf_tensors(tmp_path / "m.gguf"))
    for name in types:
        expected = dequantize(quantize(tensors[name], block_type), block_type)
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
        assert 0 < np.abs(got[name] - tensors[name]).max() < 0.6
    model = load_model(tmp_path / "m.gguf", dtype="bfloat16")
    assert model.embed[...].dtype.name == "bfloat16"


def test_rope_factors_become_part_of_the_config(tmp_path):
    config = tiny_config()
    _, stored = make(config)
    factors = np.array([1, 1.5, 4, 8], np.float32)
    write_gguf(tmp_path / "m.gguf", config, stored, extra=[("rope_freqs.weight", factors)])
    scaling = load_model(tmp_path / "m.gguf").config.rope_scaling
    assert scaling == RopeScaling(kind="factors", factors=(1.0, 1.5, 4.0, 8.0))


def test_the_config_follows_from_the_header(tiny_path):
    assert load_config(tiny_path) == tiny_config(rms_norm_eps=0.5)


def test_names_tensors_that_do_not_fit(tmp_path):
    config = tiny_config()
    _, stored = make(config)
    del stored["model.norm.weight"]
    write_gguf(tmp_path / "m.gguf", config, stored, extra=[("blk.0.ffn_gate.bias", np.zeros(40, np.float32))])
    with pytest.raises(ModelLoadError, match=r"missing: model\.norm\.weight; unexpected: blk\.0\.ffn_gate\.bias"):
        load_model(tmp_path / "m.gguf")


def test_refuses_one_part_of_several(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny_config(), {}, metadata=[("split.count", 3)])
    with pytest.raises(ModelLoadError, match="is one of 3 parts"):
        load_model(tmp_path / "m.gguf")


def test_refuses_every_truncation(tiny_path, tmp_path):
    """Cut anywhere, in the header or in the data, it is an error that names the file."""
    data = tiny_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    for keep in [0, 3, 4, 8, 20, 24, 30, *rng.integers(0, len(data), 100).tolist(), len(data) - 64]:
        cut.write_bytes(data[:keep])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            load_model(cut)


def test_a_foreign_file_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(ModelLoadError, match=r"x\.gguf is no GGUF file"):
        load_model(tmp_path / "x.gguf")


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_a_damaged_header_is_an_error_or_harmless(tiny_path, tmp_path, mask):
    data = tiny_path.read_bytes()
    end = min(tensor.offset for tensor in GGUFFile(tiny_path).tensors.values())
    kept = 0
    for at in range(0, end, 3):
        damaged = bytearray(data)
        damaged[at] ^= mask
        (tmp_path / "x.gguf").write_bytes(damaged)
        with contextlib.suppress(ModelLoadError):
            load_config(tmp_path / "x.gguf")
            kept += 1
    assert 0 < kept < end // 3


def test_unpermute_undoes_permute():
    rows = np.arange(24).reshape(12, 2)
    np.testing.assert_array_equal(unpermute(permute(rows, 3), 3), rows)


def test_names_without_a_translation_stay():
    assert hf_name("blk.0.attn_rot_embd.weight") == "blk.0.attn_rot_embd.weight"
    assert hf_name("output.weight") == "lm_head.weight"


def test_the_default_model(smollm2_path):
    assert load_config(smollm2_path).num_parameters == 134_515_008

import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from jpaged.errors import ModelLoadError
from jpaged.models import LlamaConfig, RopeScaling, iter_gguf_tensors, load_config, load_model
from jpaged.models.gguf import hf_name, unpermute
from jpaged.models.gguf_file import GGUFFile
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


def test_every_block_type_of_the_library_is_read(tmp_path):
    """Zero bytes are valid blocks of every type; the answer is that of the library, row by row."""
    from gguf.constants import GGML_QUANT_SIZES

    count = 0
    for kind in GGMLQuantizationType:
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = np.zeros((6, 2 * block_bytes), np.uint8)
        blocks[3] = 1
        try:
            expected = dequantize(blocks, kind)
        except NotImplementedError:
            continue
        count += 1
        path = tmp_path / f"{kind.name}.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_tensor("t", blocks, raw_shape=blocks.shape, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        got = GGUFFile(path).read("t")
        assert got.shape == (6, 2 * block_size)
        np.testing.assert_array_equal(got, expected, err_msg=kind.name)
    assert count > 20


def test_rope_factors_become_part_of_the_config(tmp_path):
    config = tiny_config()
    _, stored = make(config)
    factors = np.array([1, 1.5, 4, 8], np.float32)
    write_gguf(tmp_path / "m.gguf", config, stored, extra=[("rope_freqs.weight", factors)])
    scaling = load_model(tmp_path / "m.gguf").config.rope_scaling
    assert scaling == RopeScaling(kind="factors", factors=(1.0, 1.5, 4.0, 8.0))


def test_metadata_are_read_as_they_were_written(tiny_path):
    metadata = GGUFFile(tiny_path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "</s>", "é"]
    assert metadata["tokenizer.ggml.scores"] == [0.0, -1.0, -2.5]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 0.5
    assert load_config(tiny_path).eos_token_ids == (2,)


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


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"PK\x03\x04", "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "version 1, expected 2 or 3"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 0, 1, 1, b"k", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"t", 1, 32, 99, 0), "block type 99"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "not whole blocks of 32"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"t", 1, 2**50, 0, 0), "is truncated: t ends at byte"),
        (b"GGUF" + struct.pack("<IQQ" + 2 * "QsIQIQ", 3, 2, 0, *2 * (1, b"t", 1, 4, 0, 0)), "the tensor t twice"),
    ],
)
def test_refuses_foreign_and_damaged_headers(tmp_path, head, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(head + bytes(64))
    with pytest.raises(ModelLoadError) as caught:
        load_model(path)
    assert message in str(caught.value)


def test_unpermute_undoes_permute():
    rows = np.arange(24).reshape(12, 2)
    np.testing.assert_array_equal(unpermute(permute(rows, 3), 3), rows)


def test_names_without_a_translation_stay():
    assert hf_name("blk.0.attn_rot_embd.weight") == "blk.0.attn_rot_embd.weight"
    assert hf_name("output.weight") == "lm_head.weight"


def test_the_default_model(smollm2_path):
    assert len(dict.fromkeys(name for name in GGUFFile(smollm2_path).tensors)) == 272
    assert load_config(smollm2_path).num_parameters == 134_515_008

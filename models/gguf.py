"""A GGUF file of a Llama as a source of tensors with Hugging Face names and shapes. Imports no jax."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.gguf_file import GGUFFile
from jpaged.models.config import LlamaConfig
from jpaged.models.parameter_map import EMBED, LM_HEAD

ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# The projections that may have a bias.
_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output")
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that has none is returned as it is.

    Example:
      >>> hf_name("blk.3.attn_q.weight")
      'model.layers.3.self_attn.q_proj.weight'
    """
    match name.split("."):
        case ["blk", index, layer, "weight" | "bias" as kind] if layer in (_LAYER if kind == "weight" else _BIASED):
            return f"model.layers.{index}.{_LAYER[layer]}.{kind}"
        case [top, "weight"] if top in _TOP:
            return f"{_TOP[top]}.weight"
    return name


def unpermute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection in the order of Hugging Face.

    GGUF files keep the two numbers that are rotated together in adjacent rows; here they are half a head apart.

    Example:
      >>> unpermute(np.arange(8), num_heads=2).tolist()
      [0, 2, 1, 3, 4, 6, 5, 7]
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


class GGUFSource:
    """The tensors of a GGUF file; a tensor is dequantised when it is asked for.

    Args:
      path: the file.

    Attributes:
      config: the model's shape.
      shapes: shape of each tensor by its Hugging Face name. The tensor of rope factors is in `config` instead.

    Raises:
      ModelLoadError: see `GGUFFile` and `LlamaConfig.from_gguf`; or one of several parts of a split file.
    """

    def __init__(self, path: Path | str):
        self._file = GGUFFile(path)
        if (parts := self._file.metadata.get("split.count", 1)) not in (0, 1):
            raise ModelLoadError(f"{path} is one of {parts!r:.80} parts; merge them into one file first")
        tensors = self._file.tensors
        factors = tuple(self._file.read(ROPE_FACTORS).tolist()) if ROPE_FACTORS in tensors else None
        self.config = LlamaConfig.from_gguf(self._file.metadata, tensor_names=tensors, rope_factors=factors)
        self._names = {hf_name(name): name for name in tensors if name != ROPE_FACTORS}
        self.shapes = {name: tensors[original].shape for name, original in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor, f32, rows of q and k in the order of Hugging Face."""
        tensor = self._file.read(self._names[name])
        if ".q_proj." in name:
            return unpermute(tensor, self.config.num_attention_heads)
        if ".k_proj." in name:
            return unpermute(tensor, self.config.num_key_value_heads)
        return tensor


def iter_gguf_tensors(path: Path | str) -> Iterator[tuple[str, np.ndarray]]:
    """The dequantised tensors of a GGUF file, one at a time, as a Hugging Face Llama would hold them.

    A tied model gets its output projection too, under the name that Hugging Face gives it.

    Args:
      path: the file.

    Yields:
      (Hugging Face name, f32 array).

    Raises:
      ModelLoadError: the file cannot be read, or is no Llama.
    """
    source = GGUFSource(path)
    for name in source.shapes:
        yield name, source.read(name)
    if source.config.tie_word_embeddings:
        yield LM_HEAD, source.read(EMBED)

"""Checkpoints of tiny models, written as others would write them."""

import json

import numpy as np
from safetensors.numpy import save_file

from jpaged.models import LlamaConfig
from jpaged.models.parameter_map import parameter_map

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

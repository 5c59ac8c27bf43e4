import math

import pytest
from flax import nnx

from jpaged.models.parameter_map import parameter_map, path_name
from jpaged.models.weights import abstract_llama

from .paged import tiny_config


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 16}])
def test_pieces_tile_exactly_the_parameters_of_the_model(changes):
    config = tiny_config(**changes)
    mapping = parameter_map(config)
    shapes = {
        path: variable.shape for path, variable in nnx.to_flat_state(nnx.state(abstract_llama(config, "float32")))
    }
    assert mapping.keys() == shapes.keys()
    for path, pieces in mapping.items():
        assert sum(math.prod(piece.shape) for piece in pieces) == math.prod(shapes[path])
        edges = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == edges[:-1]
        assert edges[-1] == shapes[path][-1]
    names = [piece.name for pieces in mapping.values() for piece in pieces]
    assert len(names) == len(set(names))


def test_path_names():
    assert path_name(("layers", 0, "mlp", "down", "kernel")) == "layers/0/mlp/down/kernel"

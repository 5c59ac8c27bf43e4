"""Texts of values: equal values have equal texts, others have not, and unknown code has none."""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.config import CacheConfig, StepShape
from jpaged.fingerprint import UnseenError, describe
from tests.fakes import tiny_llama


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Mine:
    size: int = 1


def own(x):
    return x


def graph(**changes):
    return nnx.graphdef(tiny_llama(num_hidden_layers=1, **changes))


VALUES = [
    *(None, False, 0, 0.0, "0", b"0", "", (), [], {}, frozenset(), (0,), [0], (0, 1), (1, 0), ((0,), 1), (0, (1,))),
    *({"a": 1}, {"a": 2}, {"b": 1}, {1, 2}, {1, 3}, float("nan"), float("inf"), -0.0, 1j),
    *(np.float32(0), np.float64(0), np.zeros(2), np.zeros((2, 1)), np.ones(2), np.dtype("int8"), np.dtype("uint8")),
    *(jnp.zeros(2), jnp.zeros(3), jnp.zeros(2, jnp.int32), jnp.float32, jnp.int32),
    *(StepShape(1, 1, 1), StepShape(1, 1, 2), CacheConfig(), CacheConfig(page_size=8)),
    *(jax.nn.silu, jax.nn.relu, int, float, functools.partial(jax.nn.silu, 1), functools.partial(jax.nn.silu, x=1)),
    *(jax.tree.structure(tree) for tree in (0, None, [0], [0, 0], [[0], 0], {"a": 0}, {"b": 0}, nnx.State({"a": 0}))),
]


def test_values_that_differ_have_texts_that_differ():
    texts = [describe(value) for value in VALUES]
    assert len(set(texts)) == len(VALUES)
    assert texts == [describe(value) for value in VALUES]


def test_a_model_is_told_by_its_classes_and_settings_and_not_by_its_weights():
    assert describe(graph(seed=0)) == describe(graph(seed=1))
    others = [{"rms_norm_eps": 0.25}, {"tie_word_embeddings": True}, {"sliding_window": 4}, {"attention_bias": True}]
    assert len({describe(graph(**changes)) for changes in [{}, *others]}) == 1 + len(others)


def test_a_place_is_part_of_an_array():
    array = jnp.zeros(2)
    assert describe(array) != describe(jax.device_put(array, jax.devices()[0]))  # which must stay there
    assert describe(array) == describe(array + 1)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (own, "tests.test_fingerprint.own"),
        (lambda x: x, "<lambda>"),
        (jax.jit(own), "tests.test_fingerprint.own"),
        (functools.partial(own, 1), "tests.test_fingerprint.own"),
        (Mine, "tests.test_fingerprint.Mine"),
        ({"a": [Mine()]}, "tests.test_fingerprint.Mine"),
        (Colour.RED, "tests.test_fingerprint.Colour"),
        (object(), "builtins.object"),
        (nnx.Dropout(0.5, rngs=nnx.Rngs(0)).__call__, "Dropout.__call__"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct"),
    ],
    ids=range(10),
)
def test_code_that_nobody_has_seen_has_no_text(value, named):
    with pytest.raises(UnseenError, match=named):
        describe(value)


def test_a_model_of_others_has_no_text():
    class Own(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros(2))

    with pytest.raises(UnseenError, match="Own"):
        describe(nnx.graphdef(Own()))
    model = tiny_llama(num_hidden_layers=1)
    vars(model.layers[0].mlp)["activation"] = own
    with pytest.raises(UnseenError, match="own"):
        describe(nnx.graphdef(model))

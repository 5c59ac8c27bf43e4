"""Codes and scales against sums by hand; quantised models against those that they came from."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jpaged.errors import ConfigError
from jpaged.models import export_safetensors, load_model, quantise, save_orbax
from jpaged.models.linear import Linear
from jpaged.models.quantised import (
    FEW_TOKENS_IN_PIECES,
    FEW_TOKENS_WIDENED,
    Frozen,
    QuantisedLinear,
    form_of,
    in_pieces,
    quantise_kernel,
    quantised_as,
)
from jpaged.models.weights import num_bytes

from .checkpoints import tensors_of, write
from .paged import DenseRunner, PagedRunner, dequantise, random_llama, tiny_config
from .test_gguf import write_gguf

FORMS = ("int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}


def leaves(model) -> dict:
    return {path: variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}


def assert_same(a, b) -> None:
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for path, array in a.items():
        assert array.dtype == b[path].dtype, path
        np.testing.assert_array_equal(array, b[path], err_msg=str(path))


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_no_weight_is_further_off_than_half_a_step_of_its_code(weights, dtype):
    rng = np.random.default_rng(0)
    kernel = (rng.standard_normal((64, 24)) * 10.0 ** rng.uniform(-6, 3, 24)).astype(dtype)
    kernel[:, 3] = 0  # a column of zeros
    kernel[5, 7] = 1e4  # one weight that makes all others of its column small
    codes, scale = quantise_kernel(jnp.asarray(kernel), weights)
    wide = kernel.astype(np.float32)
    assert (codes.shape, codes.dtype.itemsize, scale.shape, scale.dtype) == ((24, 64), 1, (24,), jnp.float32)
    back = np.asarray(codes).astype(np.float32).T
    tops = np.abs(wide).max(0)
    assert np.abs(back).max(0)[tops > 0].tolist() == [LARGEST[weights]] * 23  # no code is wasted
    np.testing.assert_allclose(np.asarray(scale)[tops > 0] * LARGEST[weights], tops[tops > 0], rtol=1e-6)
    error = np.abs(back * np.asarray(scale) - wide)
    # int8: half a scale; e4m3: half of the last of 3 bits, or half of the smallest step, 2^-9.
    half = 0.5 * np.ones_like(wide) if weights == "int8" else np.maximum(np.abs(wide / scale) * 2.0**-4, 2.0**-10)
    assert (error <= half * np.asarray(scale) * 1.0001).all()
    assert not back[:, 3].any()


@pytest.mark.parametrize("weights", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_with_the_kernel_that_the_codes_stand_for(weights, dtype):
    linear = Linear(48, 40, bias=True, rngs=nnx.Rngs(0), dtype=dtype)
    linear.bias[...] = jnp.arange(40, dtype=dtype)
    small = QuantisedLinear(linear, weights)
    x = jax.random.normal(jax.random.key(1), (5, 48), dtype)
    expected = np.asarray(x, np.float32) @ dequantise(small) + np.arange(40)
    got = small(x)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=1e-5 if dtype == "float32" else 1e-2)
    many = small(jnp.tile(x, (FEW_TOKENS_IN_PIECES // 5 + 1, 1)))[-5:]
    np.testing.assert_allclose(np.asarray(many, np.float32), expected, rtol=1e-5 if dtype == "float32" else 2e-2)
    alone = small(x[2:3])
    np.testing.assert_allclose(np.asarray(got[2:3], np.float32), np.asarray(alone, np.float32), rtol=1e-6)


def test_pieces_are_closer_than_bfloat16_in_any_company():
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (24, 512), np.int8)
    scale = rng.uniform(0.5, 2.0, 24).astype(np.float32)
    x = rng.standard_normal((9, 512)).astype(np.float32)
    x[3] = 0
    x[4, 7] = 300  # an activation that makes all others of its token small
    x[5] *= 1e-20
    got = np.asarray(jax.jit(in_pieces)(x, codes, scale))
    expected = x.astype(np.float64) @ codes.T * scale
    # Each activation is off by half a step of the low piece at most, and the float32 around the sums by a little.
    off = np.abs(x).max(1, keepdims=True) / 127 / 254 / 2 * np.abs(codes.astype(np.int64)).sum(1) * scale
    assert (np.abs(got - expected) <= 1.01 * off + 1e-5 * np.abs(expected)).all()
    assert not got[3].any()
    rounded = x.astype(ml_dtypes.bfloat16)
    ordinary = [0, 1, 2, 6, 7, 8]
    rms = [
        np.square(value[ordinary] - expected[ordinary]).mean()
        for value in (got, rounded.astype(float) @ codes.T * scale)
    ]
    assert rms[0] < rms[1] / 100
    for company in (slice(5, 6), slice(4, 9), [8, 5, 3, 1]):
        np.testing.assert_array_equal(np.asarray(jax.jit(in_pieces)(x[company], codes, scale)), got[company])


@pytest.mark.parametrize(
    ("weights", "dtype", "tokens", "in_integers"),
    [
        ("int8", "bfloat16", FEW_TOKENS_IN_PIECES, True),
        ("int8", "float16", 1, True),
        ("int8", "bfloat16", FEW_TOKENS_IN_PIECES + 1, False),
        ("int8", "float32", 1, False),
        ("fp8", "bfloat16", FEW_TOKENS_WIDENED, False),
    ],
)
def test_few_16_bit_tokens_meet_int8_codes_in_pieces(weights, dtype, tokens, in_integers):
    graph, state = nnx.split(QuantisedLinear(Linear(32, 16, rngs=nnx.Rngs(0), dtype=dtype), weights))
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    x = jax.ShapeDtypeStruct((tokens, 32), dtype)
    (product,) = [line for line in run.lower(state, x).as_text().splitlines() if "dot_general" in line]
    assert (f"tensor<{2 * tokens}x32xi8>" in product) == in_integers


@pytest.mark.parametrize("weights", FORMS)
def test_a_model_is_quantised_beside_the_first_one(weights):
    model = random_llama(num_hidden_layers=1, attention_bias=True, tie_word_embeddings=False)
    before = leaves(model)
    small = quantise(model, weights)
    assert (form_of(small), form_of(model)) == (weights, None)
    assert leaves(model).keys() == before.keys()
    after = leaves(small)
    codes = {path for path, array in after.items() if array.dtype.itemsize == 1}
    assert codes == {path for path in before if path[0] == "layers" and path[-1] == "kernel"}
    shared = [path for path in before if path not in codes]
    assert all(after[path] is before[path] for path in shared)
    assert {path[-1] for path in after.keys() - before.keys()} == {"scale"}
    assert small.dtype == model.dtype
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    expected, got = DenseRunner(model)(tokens), DenseRunner(small)(tokens)
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert 0 < error < {"int8": 0.05, "fp8": 0.3}[weights]
    paged = PagedRunner(small, num_sequences=1).step({0: tokens})[0]
    np.testing.assert_allclose(paged, got, atol=1e-3)


@pytest.mark.parametrize("weights", FORMS)
def test_every_format_loads_into_the_same_codes(tmp_path, weights):
    config = tiny_config(tie_word_embeddings=False)
    tensors = tensors_of(config)
    write(tmp_path / "folder", config, tensors)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    plain = load_model(tmp_path / "folder", dtype="bfloat16")
    steps = []
    small = load_model(
        tmp_path / "folder", dtype="bfloat16", weights=weights, progress=lambda *step: steps.append(step)
    )
    assert steps[-1] == (num_bytes(small), num_bytes(small))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert_same(small, quantise(plain, weights))
    from_gguf = load_model(tmp_path / "model.gguf", dtype="bfloat16", weights=weights)
    assert_same(from_gguf, quantise(load_model(tmp_path / "model.gguf", dtype="bfloat16"), weights))
    assert from_gguf.layers[0].mlp.down.kernel[...].dtype == small.layers[0].mlp.down.kernel[...].dtype


def test_the_device_never_holds_the_model_beside_its_codes(tmp_path, monkeypatch):
    config = tiny_config(hidden_size=128, intermediate_size=256, num_hidden_layers=8, vocab_size=64)
    folder = write(tmp_path / "m", config, tensors_of(config), shards=2)
    put = jax.device_put
    held: list[int] = []

    def count(x):
        array = put(jnp.array(x, copy=True))
        held.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return array

    monkeypatch.setattr(jax, "device_put", count)
    before = sum(x.nbytes for x in jax.live_arrays())
    model = load_model(folder, dtype="bfloat16", weights="int8")
    largest = 128 * 2 * 256 * 2
    # The copies of embed, norms and scales, the codes, one parameter that is not quantised yet, and what sent it.
    assert max(held) <= num_bytes(model) + 2 * largest + 4096 < 2 * num_bytes(model)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # of Orbax
def test_an_orbax_checkpoint_is_quantised_as_it_is_read(tmp_path):
    model = random_llama()
    save_orbax(model, tmp_path)
    steps = []
    small = load_model(tmp_path, weights="fp8", progress=lambda *step: steps.append(step))
    assert_same(small, quantise(model, "fp8"))
    assert len(steps) == 2 * 4 + 1  # each kernel by itself
    assert steps[-1] == (num_bytes(small), num_bytes(small))


@pytest.mark.parametrize("weights", FORMS)
def test_new_weights_are_quantised_as_the_present_ones(weights):
    present = nnx.state(quantise(random_llama(), weights))
    model = random_llama(seed=1)
    new = quantised_as(present, nnx.state(model))
    assert jax.tree.structure(new) == jax.tree.structure(present)
    expected = nnx.state(quantise(model, weights))
    jax.tree.map(np.testing.assert_array_equal, new, expected)
    jax.tree.map(np.testing.assert_array_equal, quantised_as(present, expected), expected)
    on_host = jax.tree.map(np.asarray, nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, quantised_as(present, on_host), expected)
    plain = nnx.state(model)
    assert quantised_as(plain, plain) is plain


def test_codes_of_another_form_are_no_new_weights():
    model = random_llama(num_hidden_layers=1)
    present, other = nnx.state(quantise(model, "int8")), nnx.state(quantise(model, "fp8"))
    with pytest.raises(ConfigError, match="quantised to float8_e4m3fn, the present ones to 'int8'"):
        quantised_as(present, other)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_finite_stays_so(broken, dtype):
    linear = QuantisedLinear(Linear(16, 8, rngs=nnx.Rngs(0), dtype=dtype), "int8")
    x = jnp.ones((3, 16), dtype).at[1, 4].set(broken)
    finite = jnp.isfinite(linear(x)).all(axis=1)
    assert finite.tolist() == [True, False, True]
    kernel = jnp.ones((16, 3), dtype).at[4, 1].set(broken)
    codes, scale = quantise_kernel(kernel, "int8")
    assert jnp.isfinite(codes.astype(jnp.float32) @ jnp.ones(16) * scale).tolist() == [True, False, True]


def test_what_codes_cannot_do_is_refused_by_name(tmp_path):
    model = random_llama(num_hidden_layers=1)
    small = quantise(model, "int8")
    with pytest.raises(ConfigError, match="weights is 'int4', expected one of int8, fp8, or None"):
        quantise(model, "int4")
    with pytest.raises(ConfigError, match="weights is 'int4'"):
        load_model(tmp_path, weights="int4")
    with pytest.raises(ConfigError, match="int8 already, and cannot be quantised again"):
        quantise(small, "fp8")
    with pytest.raises(ConfigError, match="int8 already, and cannot be saved"):
        save_orbax(small, tmp_path)
    with pytest.raises(ConfigError, match="int8 already, and cannot be exported"):
        export_safetensors(small, tmp_path)
    assert not list(tmp_path.iterdir())
    tokens = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ConfigError, match="a model with int8 weights cannot be trained"):
        nnx.grad(lambda model: model.causal_logits(tokens).sum())(small)
    assert not [path for path, variable in nnx.to_flat_state(nnx.state(small, nnx.Param)) if variable.dtype == jnp.int8]
    assert len(jax.tree.leaves(nnx.state(small, Frozen))) == 2 * 4

"""The Mosaic GPU kernel that rotates and writes: lowered and interpreted anywhere, run where a Hopper GPU is."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import KVPages, attend_and_write, attend_and_write_qkv, plan_attention, write_kv
from jpaged.pallas_kernels.compat import jax_version
from jpaged.pallas_kernels.kv_write import write_kv_xla
from jpaged.pallas_kernels.rope import Rope, apply_rope
from tests.arg_specs import ArgSpec, Inputs, make_inputs
from tests.kernels.gpu_interpret import interpret_params, no_races
from tests.kernels.hlo import pool_copies
from tests.kernels.test_decode_gpu import abstract_hopper

if jax_version() < (0, 11):
    pytest.skip("the kernel needs jax 0.11", allow_module_level=True)

from jpaged.pallas_kernels import write_gpu
from jpaged.pallas_kernels.write_rows_gpu import RegisterRows, Tile


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its inputs' spec, and the pairs of a head that the rope turns (`None`: there is no rope)."""

    spec: ArgSpec
    half: int | None

    @property
    def rope(self) -> Rope | None:
        """Of powers of two: their products are exact, so that it does not matter whether they are rounded."""
        if self.half is None:
            return None
        shape = (2, self.spec.num_tokens, self.half)
        turns = np.random.default_rng(1).choice(np.array([-1, -0.5, 0, 0.25, 1, 2], np.float32), shape)
        return Rope(*map(jax.device_put, turns))


def case(name: str, half: int | None = None, **changes) -> Case:
    mixed = {"q_lens": (1, 1, 3), "kv_lens": (1, 16, 18), "pad_rows": 1, "pad_tokens": 2, "head_dim": 128}
    return Case(ArgSpec(name, **{**mixed, "page_size": 16, **changes}), half)


_BF16 = {"dtype": "bfloat16", "page_dtype": "bfloat16"}
CASES = (
    case("plain", 64, **_BF16),
    case("write_only", **_BF16),
    case("float16_head_dim_96", 48, head_dim=96, dtype="float16", page_dtype="float16"),
    case("smollm2_heads", 32, head_dim=64, num_heads=9, num_kv_heads=3),
    case("partly_rotated", 20, head_dim=64, page_dtype="int8"),  # pieces of four values
    case("int8_head_dim_256", 128, head_dim=256, dtype="bfloat16", page_dtype="int8"),
    case("float8", 64, dtype="bfloat16", page_dtype="float8_e4m3fn"),
    case("float8_write_only", head_dim=80, num_heads=5, num_kv_heads=5, page_dtype="float8_e4m3fn"),
    case("odd_half", 3, head_dim=64),
    case("page_of_128", 64, page_size=128, dtype="float16", page_dtype="int8"),
)
params = partial(pytest.mark.parametrize, "case", ids=lambda case: case.spec.name)
# Large enough for several tiles and blocks.
DEVICE_CASES = tuple(
    Case(dataclasses.replace(c.spec, q_lens=(1, 1, 1, 90, 300), kv_lens=(1, 16, 100, 90, 333)), c.half) for c in CASES
)


def rotate_and_write(inputs: Inputs, rope: Rope | None, interpret=None) -> tuple[jax.Array, KVPages]:
    op = partial(write_gpu.rotate_and_write_gpu, interpret=interpret)
    return jax.jit(op)(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta, rope)


@jax.jit
def by_xla(q, k, v, kv_pages: KVPages, meta, rope: Rope | None) -> tuple[jax.Array, KVPages]:
    if rope is not None:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    return q, write_kv_xla(k, v, kv_pages, meta)


def expected(inputs: Inputs, rope: Rope | None) -> tuple[jax.Array, KVPages]:
    return by_xla(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta, rope)


def assert_equal_bits(got: jax.Array, expected: jax.Array, pages: slice = slice(None)) -> None:
    np.testing.assert_array_equal(np.asarray(got)[pages].view(np.uint8), np.asarray(expected)[pages].view(np.uint8))


@params(argvalues=CASES)
def test_interpreted_it_equals_xla_bit_by_bit(case: Case) -> None:
    inputs = make_inputs(case.spec)
    with no_races():
        q, kv_pages = jax.block_until_ready(rotate_and_write(inputs, case.rope, interpret_params()))
    expected_q, expected_pages = expected(inputs, case.rope)
    assert_equal_bits(q, expected_q)
    for got, want, before in zip(*map(jax.tree.leaves, (kv_pages, expected_pages, inputs.pages_before)), strict=True):
        assert_equal_bits(got, want, slice(1, None))
        assert_equal_bits(got, before, slice(1))  # padding is dropped


def test_slots_outside_the_pool_are_dropped() -> None:
    inputs = make_inputs(CASES[0].spec)
    spec = inputs.kv_pages.spec
    slots = np.array(inputs.meta.slot_mapping)
    slots[:2] = spec.num_pages * spec.page_size, -1
    meta = dataclasses.replace(inputs.meta, slot_mapping=jax.device_put(slots))
    inputs = dataclasses.replace(inputs, meta=meta)
    with no_races():
        _, kv_pages = jax.block_until_ready(rotate_and_write(inputs, None, interpret_params()))
    slots[1] = 0  # XLA takes -1 for the last slot
    meta = dataclasses.replace(meta, slot_mapping=jax.device_put(slots.copy()))
    expected = jax.jit(write_kv_xla)(inputs.k, inputs.v, inputs.pages_before, meta)
    assert_equal_bits(kv_pages.data, expected.data, slice(1, None))


def test_the_interpreter_refuses_the_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there is `PlainRows`: once this fails, it can go."""
    monkeypatch.setattr(write_gpu, "PlainRows", RegisterRows)
    inputs = make_inputs(case("refused", 64, **_BF16, q_lens=(1,), kv_lens=(3,)).spec)
    with pytest.raises(ValueError, match="GPU interpret mode does not support `inline_mgpu`"):
        rotate_and_write(inputs, None, interpret_params())


def fused(inputs: Inputs) -> jax.Array:
    return jnp.concatenate([inputs.q, inputs.k, inputs.v], axis=1)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("q_lens", [(1, 1, 3), (1,)], ids=["mixed", "a_token_alone"])
def test_heads_are_read_at_offsets_of_a_fused_projection(q_lens: tuple[int, ...], parts: int) -> None:
    """A projection of q, k and v in one needs no slices: its columns are named; and parts of one are added up."""
    spec = dataclasses.replace(CASES[3].spec, q_lens=q_lens, kv_lens=(1, 16, 18)[: len(q_lens)], pad_tokens=0)
    one = Case(spec, CASES[3].half)
    inputs = make_inputs(spec)
    qkv, dtype = (fused(inputs), None) if parts == 1 else (jnp.stack([fused(inputs) / 2] * 2), jnp.float32)
    with no_races():
        q, kv_pages = jax.block_until_ready(
            write_gpu.rotate_and_write_qkv_gpu(
                qkv, inputs.pages_before, inputs.meta, one.rope, dtype=dtype, interpret=interpret_params()
            )
        )
    expected_q, expected_pages = expected(inputs, one.rope)
    assert_equal_bits(q, expected_q)
    assert_equal_bits(kv_pages.data, expected_pages.data, slice(1, None))


def test_one_part_is_rounded_before_anything_else() -> None:
    """A product that is not cut is one part in f32: q, K and V are to be of the model's dtype all the same."""
    inputs, rope = make_inputs(CASES[0].spec), CASES[0].rope
    exact = fused(inputs).astype(jnp.float32)
    between = exact * (1 + 2.0**-10)  # rounds to what `exact` is, but its turned values would not
    assert_equal_bits(between.astype(jnp.bfloat16), fused(inputs))
    with no_races():
        q, kv_pages = jax.block_until_ready(
            write_gpu.rotate_and_write_qkv_gpu(
                between[None], inputs.pages_before, inputs.meta, rope, dtype=jnp.bfloat16, interpret=interpret_params()
            )
        )
    expected_q, expected_pages = expected(inputs, rope)
    assert q.dtype == jnp.bfloat16
    assert_equal_bits(q, expected_q)
    assert_equal_bits(kv_pages.data, expected_pages.data, slice(1, None))


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_fused_projection_goes_into_the_kernel_as_it_is(tokens: int) -> None:
    """Nothing is cut off before the kernel, for a token alone neither; and parts are not added up before it."""
    spec = dataclasses.replace(CASES[0].spec, q_lens=(1,) * tokens, kv_lens=(9,) * tokens, pad_rows=0, pad_tokens=0)
    inputs, rope = make_inputs(spec), Case(spec, CASES[0].half).rope

    def layer(qkv, kv_pages, meta):
        meta = plan_attention(meta, kv_pages.spec)
        dtype = jnp.bfloat16 if qkv.ndim == 4 else None
        return attend_and_write_qkv(qkv, kv_pages, meta, rope=rope, dtype=dtype)

    for qkv in (fused(inputs), jnp.stack([fused(inputs).astype(jnp.float32)] * 4)):
        text = lowered(layer, qkv, inputs.pages_before, inputs.meta)
        writer = text[text.index("func.func private @write") :]
        call = next(line for line in writer.splitlines() if "custom_call @mosaic_gpu" in line)
        columns = f"{8 * 128}xbf16" if qkv.ndim == 3 else f"{8 * 128}xf32"
        assert call.count(f"tensor<{qkv.size // 1024}x{columns}>") == 3
        assert "stablehlo.scatter" not in text


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (96, 48), (128, 64), (256, 128), (64, 16), (80, 40), (12, 2)])
def test_a_tile_holds_each_column_once(head_dim: int, half: int) -> None:
    tile = Tile(head_dim, half)
    assert tile.rows * tile.lanes == 128
    assert head_dim // 2 <= tile.shape[1] < head_dim // 2 + tile.lanes * tile.piece
    assert half % tile.piece == 0
    assert (head_dim - 2 * half) % (2 * tile.piece) == 0


def lowered(op, *arguments, donate: tuple[int, ...] = ()) -> str:
    with jax.sharding.use_abstract_mesh(abstract_hopper()):
        return jax.jit(op, donate_argnums=donate).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@params(argvalues=[c for c in CASES if c.spec.name != "odd_half"])  # the same as write_only
def test_lowers_for_cuda_with_the_pool_aliased(case: Case) -> None:
    inputs = make_inputs(case.spec)
    text = lowered(
        write_gpu.rotate_and_write_gpu,
        *(inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta, case.rope),
        donate=(3,),
    )
    call = next(line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    arrays = 1 if inputs.kv_pages.scales is None else 2
    assert call.count("output_operand_alias<") == arrays
    assert text.count("tf.aliasing_output") == arrays


def test_it_is_the_choice_on_hopper_and_layers_share_it() -> None:
    inputs, rope = make_inputs(CASES[0].spec), CASES[0].rope

    def layers(q, k, v, kv_pages, meta):
        meta = plan_attention(meta, kv_pages.spec)
        for _ in range(2):
            q, kv_pages = attend_and_write(q, k, v, kv_pages, meta, rope=rope)
        return q, kv_pages

    text = lowered(layers, inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
    assert "rope_and_write_kv" in text
    assert text.count("call @write") == 2
    assert text.count("custom_call @mosaic_gpu") == 2  # one writes, one attends


@pytest.mark.parametrize(("stored", "by_kernel"), [("mosaic_gpu", True), ("xla", False)])
def test_write_kv_goes_by_how_the_pages_are_stored(stored: str, by_kernel: bool) -> None:
    inputs = make_inputs(dataclasses.replace(CASES[0].spec, implementation=stored))
    text = lowered(write_kv, inputs.k, inputs.v, inputs.pages_before, inputs.meta)
    assert ("custom_call @mosaic_gpu" in text) is by_kernel


def ulps(got: jax.Array, expected: jax.Array) -> np.ndarray:
    """How many numbers of the dtype stand between."""
    signed = {1: np.int8, 2: np.int16, 4: np.int32}[got.dtype.itemsize]
    bits = [np.asarray(x).view(signed).astype(np.int64) for x in (got, expected)]
    return np.abs(bits[0] - bits[1])


@pytest.mark.gpu
@params(argvalues=DEVICE_CASES)
def test_equals_xla(case: Case) -> None:
    inputs = make_inputs(case.spec)
    q, kv_pages = rotate_and_write(inputs, case.rope)
    expected_q, expected_pages = expected(inputs, case.rope)
    live = sum(case.spec.q_lens)
    assert_equal_bits(q[:live], expected_q[:live])
    for got, want in zip(*map(jax.tree.leaves, (kv_pages, expected_pages)), strict=True):
        assert_equal_bits(got[1:], want[1:])


@pytest.mark.gpu
def test_real_angles_differ_by_a_rounding_at_most() -> None:
    """The two compilers contract products and sums to other fused ones."""
    case = DEVICE_CASES[0]
    inputs = make_inputs(case.spec)
    angles = np.random.default_rng(1).uniform(0, 6, (case.spec.num_tokens, 64)).astype(np.float32)
    rope = Rope(cos=jnp.cos(angles), sin=jnp.sin(angles))
    q, kv_pages = rotate_and_write(inputs, rope)
    expected_q, expected_pages = expected(inputs, rope)
    live = sum(case.spec.q_lens)
    for got, want in ((q[:live], expected_q[:live]), (kv_pages.data[1:], expected_pages.data[1:])):
        assert ulps(got, want).max() <= 1
        assert (ulps(got, want) > 0).mean() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.spec.name)
def test_the_pool_is_not_copied(case: Case) -> None:
    inputs = make_inputs(case.spec)

    def layers(q, k, v, kv_pages, meta, rope):
        for _ in range(3):
            q, kv_pages = write_gpu.rotate_and_write_gpu(q, k, v, kv_pages, meta, rope)
        return q, kv_pages

    arguments = inputs.q, inputs.k, inputs.v, inputs.pages_before, inputs.meta, case.rope
    compiled = jax.jit(layers, donate_argnums=3).lower(*arguments).compile()
    assert pool_copies(compiled, inputs.kv_pages.spec) == []
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 3


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [None, 1, 4])
@params(argvalues=[c for c in DEVICE_CASES if c.half not in (None, 3)])
def test_a_fused_projection_equals_xla(case: Case, parts: int | None) -> None:
    inputs = make_inputs(case.spec)
    qkv, dtype = fused(inputs), None
    if parts is not None:  # quarters are exact
        qkv, dtype = jnp.stack([qkv.astype(jnp.float32) / parts] * parts), qkv.dtype
    op = jax.jit(write_gpu.rotate_and_write_qkv_gpu, static_argnames="dtype")
    q, kv_pages = op(qkv, inputs.pages_before, inputs.meta, case.rope, dtype=dtype)
    expected_q, expected_pages = expected(inputs, case.rope)
    live = sum(case.spec.q_lens)
    assert_equal_bits(q[:live], expected_q[:live])
    for got, want in zip(*map(jax.tree.leaves, (kv_pages, expected_pages)), strict=True):
        assert_equal_bits(got[1:], want[1:])

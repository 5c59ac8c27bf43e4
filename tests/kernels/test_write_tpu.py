"""The TPU kernel that writes K and V, in jax's TPU interpreter, against the XLA implementation: bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.pallas_kernels import KVPages, PagedMetadata, PageSpec
from jpaged.pallas_kernels import write_plan_tpu as plan
from jpaged.pallas_kernels.kv_write import write_kv_xla
from jpaged.pallas_kernels.write_plan_tpu import choose_write_blocks, plan_write
from jpaged.pallas_kernels.write_tpu import write_kv_tpu
from tests.arg_specs import ArgSpec, Inputs, make_inputs, make_metadata
from tests.kernels.hlo import pool_copies
from tests.kernels.tpu_interpret import interpret_params, no_races

# Rows that begin and end within a group of rows, cross a page, fill whole pages, and stand side by side; padding.
MIXED = ArgSpec(
    "mixed",
    q_lens=(1, 1, 7, 20),
    kv_lens=(9, 1, 12, 29),
    head_dim=64,
    page_size=16,
    pad_rows=1,
    pad_tokens=3,
    implementation="mosaic_tpu",
)


def write(inputs: Inputs, meta: PagedMetadata | None = None) -> KVPages:
    def interpreted(k, v, kv_pages, meta):
        return write_kv_tpu(k, v, kv_pages, meta, interpret=interpret_params())

    with no_races():
        written = jax.jit(interpreted)(inputs.k, inputs.v, inputs.pages_before, meta or inputs.meta)
        return jax.block_until_ready(written)


# As one program: a plan that is made step by step compiles one for each operation.
plan_once = functools.partial(jax.jit, static_argnums=1)(plan_write)


def without_slots(meta: PagedMetadata) -> PagedMetadata:
    """The same step, of padding alone."""
    return dataclasses.replace(meta, slot_mapping=jax.device_put(np.zeros(meta.slot_mapping.shape, np.int32)))


def with_slots(meta: PagedMetadata, slots: dict[int, int]) -> PagedMetadata:
    """The same step with other slots for some tokens."""
    mapping = np.array(meta.slot_mapping)
    mapping[[*slots]] = [*slots.values()]
    return dataclasses.replace(meta, slot_mapping=jax.device_put(mapping))


def assert_equal_bits(got: KVPages, expected: KVPages, pages: slice = slice(1, None)) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[pages].view(np.uint8), np.asarray(y)[pages].view(np.uint8))


def check(spec: ArgSpec) -> Inputs:
    inputs = make_inputs(spec)
    written = write(inputs)
    assert_equal_bits(written, inputs.kv_pages)  # what XLA writes: test_kv_write compares with the same
    assert_equal_bits(written, inputs.pages_before, slice(0, 1))  # padding is not written
    return inputs


@pytest.mark.parametrize(
    ("page_dtype", "num_kv_heads", "head_dim"),
    [
        ("bfloat16", 8, 64),  # a token's rows are whole tiles
        ("bfloat16", 3, 128),  # two planes of new rows; a token's rows lie in two groups
        ("int8", 1, 16),  # pages smaller than a tile, blocks narrower than a register
        ("float8_e4m3fn", 3, 64),  # pages of one and a half tiles
    ],
)
def test_written_pages_are_the_expected_ones(page_dtype: str, num_kv_heads: int, head_dim: int) -> None:
    check(dataclasses.replace(MIXED, page_dtype=page_dtype, num_kv_heads=num_kv_heads, num_heads=8, head_dim=head_dim))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 64, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_written_pages_are_those_of_xla(page_dtype: str, num_kv_heads: int, page_size: int) -> None:
    lens = {"q_lens": (1, 1, 1, 7, page_size + 3), "kv_lens": (1, 100, 257, 12, 2 * page_size + 1)}
    shape = {"num_heads": num_kv_heads, "num_kv_heads": num_kv_heads, "page_size": page_size, "page_dtype": page_dtype}
    inputs = check(dataclasses.replace(MIXED, **lens, **shape))
    by_xla = jax.jit(write_kv_xla)(inputs.k, inputs.v, inputs.pages_before, inputs.meta)
    assert_equal_bits(by_xla, inputs.kv_pages)


@pytest.mark.parametrize("page_dtype", ["float32", "int8"])
def test_few_buffers_and_several_tiles(page_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_BUFFERS", 2)
    monkeypatch.setattr(plan, "_TILE_BYTES", 1)  # 8 tokens
    monkeypatch.setattr(plan, "_BLOCK_BYTES", 1)  # as small as they can be
    spec = dataclasses.replace(MIXED, page_dtype=page_dtype, num_kv_heads=2, page_size=128)
    blocks = choose_write_blocks(spec.page_spec, spec.num_tokens)
    assert (blocks.buffers, blocks.tile_tokens) == (2, 8)
    assert blocks.slots < spec.page_size
    check(spec)


@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_a_step_of_padding_writes_nothing(num_kv_heads: int) -> None:
    inputs = make_inputs(dataclasses.replace(MIXED, num_heads=8, num_kv_heads=num_kv_heads))
    assert_equal_bits(write(inputs, without_slots(inputs.meta)), inputs.pages_before, slice(None))


def test_slots_outside_the_pool_are_dropped() -> None:
    inputs = make_inputs(MIXED)
    spec = MIXED.page_spec
    meta = with_slots(inputs.meta, {0: spec.num_pages * spec.page_size})
    assert_equal_bits(write(inputs, meta), jax.jit(write_kv_xla)(inputs.k, inputs.v, inputs.pages_before, meta))


def test_a_plan_made_before_is_used_and_one_for_other_pages_is_not() -> None:
    inputs = make_inputs(MIXED)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Work:
        write: plan.WriteWork

    def written_by(work: plan.WriteWork) -> KVPages:
        return write(inputs, dataclasses.replace(inputs.meta, work=Work(work)))

    nothing = plan_once(without_slots(inputs.meta), MIXED.page_spec)
    assert_equal_bits(written_by(nothing), inputs.pages_before, slice(None))
    other = dataclasses.replace(nothing, blocks=dataclasses.replace(nothing.blocks, slots=1))
    assert_equal_bits(written_by(other), inputs.kv_pages)


def test_rows_that_write_one_page_are_found_to_race() -> None:
    inputs = make_inputs(MIXED)
    slots = np.asarray(inputs.meta.slot_mapping)
    meta = with_slots(inputs.meta, {3: int(slots[5]), 5: int(slots[3])})
    with pytest.raises(AssertionError, match="RACE DETECTED"):
        write(inputs, meta)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("num_kv_heads", [3, 8])
@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8"])
def test_compiled_for_tpus_it_copies_no_pool(
    page_dtype: str, num_kv_heads: int, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # or libtpu looks for the machine's metadata server
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    # Pages of 64 slots fill no whole registers of 3 heads' scales, and the pool is too large for vector memory.
    spec = PageSpec(2**13, 64, num_kv_heads, 64, jnp.dtype(page_dtype), "mosaic_tpu")
    scales = jax.ShapeDtypeStruct(spec.scales_shape, jnp.float32) if spec.quantized else None
    pages = KVPages(jax.ShapeDtypeStruct(spec.data_shape, spec.dtype), scales, spec)
    kv = jnp.zeros((MIXED.num_tokens, num_kv_heads, 64), jnp.bfloat16)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        ([pages, pages], kv, kv, make_metadata(MIXED, np.random.default_rng(0))),
    )

    def step(layers, k, v, meta):
        return [write_kv_tpu(k, v, kv_pages, meta) for kv_pages in layers]

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
    assert pool_copies(compiled, spec) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * spec.num_pages * spec.bytes_per_page
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 50


def items_of(slots: list[int], spec: PageSpec, num_rows: int) -> list[dict[str, int]]:
    meta = PagedMetadata(
        page_table=np.zeros((num_rows, 1), np.int32),
        kv_lens=np.zeros(num_rows, np.int32),
        cu_q_lens=np.zeros(num_rows + 1, np.int32),
        positions=np.zeros(len(slots), np.int32),
        slot_mapping=np.array(slots, np.int32),
        num_decode=np.int32(0),
        num_seqs=np.int32(num_rows),
    )
    work = plan_once(jax.device_put(meta), spec)
    names = ("page", "first", "groups", "lo", "hi", "source", "lane")
    fields = np.asarray(work.items).reshape(plan.NUM_FIELDS, -1)[:, : np.asarray(work.bounds)[-2]]
    return [dict(zip(names, item, strict=True)) for item in fields.T.tolist()]


def test_items_lie_in_one_block_of_one_page() -> None:
    spec = PageSpec(2**19, 1024, 3, 64, "bfloat16", "mosaic_tpu")
    block = choose_write_blocks(spec, 8).slots
    last = spec.num_pages - 1
    begin = last * 1024 + block - 2  # slots near 2**29, rows near 2**31
    found = items_of([5 * 1024 + 7, 0, 0, *range(begin, begin + 5)], spec, num_rows=2)
    in_group = (block - 2) * 3 % 16
    assert found == [
        {"page": 5, "first": 16, "groups": 1, "lo": 5, "hi": 8, "source": 16 - 5, "lane": 0},
        {
            "page": last,
            "first": (block - 2) * 3 - in_group,
            "groups": 1,
            "lo": in_group,
            "hi": in_group + 6,
            "source": 16 + 3 * 3 - in_group,
            "lane": 0,
        },
        {"page": last, "first": block * 3, "groups": 1, "lo": 0, "hi": 9, "source": 16 + 5 * 3, "lane": block * 3},
    ]


@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 32])
@pytest.mark.parametrize("page_size", [4, 16, 100, 256])
def test_blocks_are_whole_groups_and_fit(page_size: int, num_kv_heads: int, page_dtype: str) -> None:
    spec = PageSpec(64, page_size, num_kv_heads, 128, jnp.dtype(page_dtype), "mosaic_tpu")
    blocks = choose_write_blocks(spec, 4096)
    assert page_size % blocks.slots == 0
    assert blocks.rows == blocks.slots * num_kv_heads == blocks.num_groups * blocks.group
    if blocks.merges:
        assert blocks.buffers & (blocks.buffers - 1) == 0
        assert blocks.tile_rows * 256 * 4 <= 4 << 20
        assert blocks.buffers * (blocks.rows * 256 * spec.dtype.itemsize + 8 * blocks.lanes) <= 4 << 20
    if spec.quantized:
        assert blocks.lanes % 128 == 0 or blocks.slots == page_size


def test_capacity_holds_all_items_of_any_rows() -> None:
    spec = PageSpec(64, 16, 2, 64, jnp.dtype("float32"), "mosaic_tpu")
    block = choose_write_blocks(spec, 3).slots
    pages = range(1, 20)
    # Two tokens across a block border each: the most items that tokens can make.
    slots = [slot for page in pages for slot in (page * 16 + 15, (page + 20) * 16)]
    found = items_of(slots, spec, num_rows=len(pages))
    assert block == 16
    assert [item["page"] for item in found] == [page + step for page in pages for step in (0, 20)]

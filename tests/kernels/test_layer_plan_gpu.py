import pytest

from jpaged.model_shapes import MODEL_SHAPES
from jpaged.pallas_kernels.layer_plan_gpu import BOX_BYTES, WIDTH, cut, plan_layer


def shares(product, blocks):
    """(part, tile, box) of every block, as `layer_gpu` walks them."""
    lanes = product.lanes(blocks)
    for block in range(blocks):
        part, lane = block % product.parts, block // product.parts
        if lane >= lanes:
            continue
        first, end = (n * product.boxes // product.parts for n in (part, part + 1))
        assert 1 <= end - first <= product.longest
        for tile in range(lane, product.tiles, lanes):
            yield from ((part, tile, box) for box in range(first, end))


@pytest.mark.parametrize("shape", [(4096, 4096), (576, 3072), (1536, 576), (64, 64), (8192, 57344)])
@pytest.mark.parametrize("blocks", [132, 78])
def test_every_box_of_weights_is_read_once(shape, blocks):
    product = cut(1, *shape, blocks)
    boxes = [(tile, box) for _, tile, box in shares(product, blocks)]
    assert sorted(boxes) == [(tile, box) for tile in range(shape[1] // WIDTH) for box in range(shape[0] // WIDTH)]


def test_blocks_have_equal_shares_of_a_large_product():
    for shape in ((4096, 4096), (4096, 28672), (14336, 4096), (4096, 6144)):
        product = cut(8, *shape, 132)
        assert product.turns(132) * product.longest * 132 < 1.04 * product.tiles * product.boxes


@pytest.mark.parametrize("name", sorted(MODEL_SHAPES))
def test_what_a_block_keeps_fits_its_shared_memory(name):
    config = MODEL_SHAPES[name]
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shape = config.hidden_size, heads * dim, config.intermediate_size, (heads + 2 * kv_heads) * dim
    plan = plan_layer(1, *shape, 132)
    assert plan is not None
    assert plan.stages >= 16  # 128 KiB of weights a multiprocessor in flight
    assert plan.stages * BOX_BYTES + plan.row_boxes * plan.columns * WIDTH * 2 <= 227 * 1024


def test_shapes_that_are_not_taken():
    small, large = (576, 576, 1536, 960, 132), (4096, 4096, 14336, 6144, 132)
    taken = [tokens for tokens in (1, 2, 16, 17, 4096) if plan_layer(tokens, *small) is not None]
    assert taken == [1, 2, 16]
    assert plan_layer(1, *large) is not None
    assert plan_layer(2, *large) is None
    assert plan_layer(1, 576, 576, 1536, None, 132).qkv is None
    assert plan_layer(1, 32, 64, 64, 64, 132) is None
    assert plan_layer(1, 64, 64, 96, 64, 132) is None


@pytest.mark.parametrize("blocks", [1, 7, 8, 15, 16])
def test_a_slice_of_a_gpu_has_a_block_for_each_row_and_part(blocks):
    taken = [tokens for tokens in range(1, 17) if plan_layer(tokens, 576, 576, 1536, 960, blocks) is not None]
    assert taken == list(range(1, blocks + 1))
    for tokens in taken:
        for product in plan_layer(tokens, 576, 576, 1536, 960, blocks).products:
            assert product.lanes(blocks) >= 1

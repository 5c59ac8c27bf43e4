"""How the products of a layer are dealt out over the multiprocessors, by `layer_gpu`.

A product [T, K] x [K, N] is cut into tiles of 64 columns and into equal `parts` of the contraction. A block of threads
has one part, and every so manieth tile of it:

    block       0       1       2       3       4       5  ..
    part        0       1       0       1       0       1      (of two)
    tiles       0,L..   0,L..   1,L+1.. 1,L+1.. 2..     2..    (L = blocks // parts)

so that what it needs of the rows is one part of them, in shared memory, and neighbours read neighbouring columns.
"""

import functools
from dataclasses import dataclass

WIDTH = 64  # columns of a tile, rows of a box of weights: 8 KiB, the unit of all that follows
BOX_BYTES = WIDTH * WIDTH * 2
# Beyond them a launch for each product is quicker: what blocks do between products, where they wait for each other,
# takes longer with more tokens. In a small model launches take longer still.
MAX_TOKENS, MAX_TOKENS_OF_SMALL = 1, 16
_SMALL_BYTES = 32 << 20  # of a layer's weights
_MAX_TOKENS_EACH = 4  # that every block norms for itself
_SHARED_BYTES = 220 * 1024  # of 227: barriers, sums and scalars have the rest
_ROW_BYTES = 64 * 1024  # for a part of the rows, at most
_MAX_PARTS = 8


@dataclass(frozen=True)
class Product:
    """One matrix product: a kernel [inputs, outputs] in so many parts."""

    inputs: int
    outputs: int
    parts: int

    @property
    def tiles(self) -> int:
        return self.outputs // WIDTH

    @property
    def boxes(self) -> int:
        """Boxes of weights below each other."""
        return self.inputs // WIDTH

    @property
    def longest(self) -> int:
        """Boxes of the longest part."""
        return -(-self.boxes // self.parts)

    def lanes(self, blocks: int) -> int:
        """Blocks of threads of a part."""
        return blocks // self.parts

    def turns(self, blocks: int) -> int:
        """Tiles of a block, at most."""
        return -(-self.tiles // self.lanes(blocks))


@dataclass(frozen=True)
class LayerPlan:
    """How `layer_gpu` runs: what follows a layer's attention, up to the projection of the next one's.

    Attributes:
      tokens: rows of all products.
      blocks: of threads, each on a multiprocessor of its own: they wait for each other.
      qkv: of the next layer; `None` for the last one.
      apart: whether norm and gate are steps of their own, shared by all blocks, and not done by each that needs them.
    """

    tokens: int
    blocks: int
    o: Product
    gate_up: Product
    down: Product
    qkv: Product | None
    apart: bool

    @property
    def columns(self) -> int:
        """Tokens, as the narrow side of a matrix instruction takes them."""
        return -(-self.tokens // 8) * 8

    @property
    def products(self) -> list[Product]:
        return [self.o, self.gate_up, self.down, *([] if self.qkv is None else [self.qkv])]

    @property
    def row_boxes(self) -> int:
        """Boxes of rows in shared memory: those of the longest part of any product."""
        return max(product.longest for product in self.products)

    @property
    def stages(self) -> int:
        """Boxes of weights in shared memory."""
        return min(32, (_SHARED_BYTES - self.row_boxes * self.columns * WIDTH * 2) // BOX_BYTES)


def cut(tokens: int, inputs: int, outputs: int, blocks: int) -> Product | None:
    """The product in the parts that end soonest, or `None` where no part of the rows has room.

    A part costs its reader about as much as a box of weights.

    Example:
      >>> [cut(1, *shape, 132).parts for shape in ((4096, 4096), (14336, 4096), (576, 576))]
      [2, 4, 3]
    """
    if inputs % WIDTH or outputs % WIDTH:
        return None
    columns, best = -(-tokens // 8) * 8, None
    for parts in range(1, min(_MAX_PARTS, inputs // WIDTH, blocks) + 1):
        product = Product(inputs, outputs, parts)
        if product.longest * columns * WIDTH * 2 > _ROW_BYTES:
            continue
        cost = product.turns(blocks) * product.longest + parts
        if best is None or cost < best[0]:
            best = cost, product
    return None if best is None else best[1]


@functools.lru_cache
def plan_layer(
    tokens: int, hidden: int, attended: int, intermediate: int, projected: int | None, blocks: int
) -> LayerPlan | None:
    """The plan for a layer's shapes, or `None` where the kernel does not take them.

    Args:
      hidden: columns of the residual stream.
      attended: of what attention gives, Hq * D.
      intermediate: of the gated product.
      projected: of the next layer's projection; `None` for the last layer.
      blocks: multiprocessors.

    Example:
      >>> plan = plan_layer(1, 4096, 4096, 14336, 6144, 132)
      >>> plan.gate_up.parts, plan.stages
      (2, 20)
    """
    shapes = [(attended, hidden), (hidden, 2 * intermediate), (intermediate, hidden)]
    shapes += [] if projected is None else [(hidden, projected)]
    is_small = 2 * sum(inputs * outputs for inputs, outputs in shapes) <= _SMALL_BYTES
    if tokens > min(blocks, MAX_TOKENS_OF_SMALL if is_small else MAX_TOKENS):  # a block norms a row at most
        return None
    products = [cut(tokens, *shape, blocks) for shape in shapes]
    found = [product for product in products if product is not None]
    if len(found) < len(shapes) or intermediate % WIDTH:
        return None
    o, gate_up, down, *qkv = found
    return LayerPlan(tokens, blocks, o, gate_up, down, *(qkv or [None]), apart=tokens > _MAX_TOKENS_EACH)

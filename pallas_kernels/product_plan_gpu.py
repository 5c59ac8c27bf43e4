"""Which matrix products `product_gpu` takes, and how it cuts them: rules from measurements on one H200.

Products of 8 to 128 rows take the time of their kernel, which is read once: a launch has one unit of work for nearly
every multiprocessor, and none has two. So a kernel of few columns is cut along K, and what reads the product adds the
parts up. Of more rows only gate and up is ours, and only of 256: two full tiles of rows, whose factors then need not be
written and read again.
"""

from dataclasses import dataclass
from typing import Literal

Result = Literal["product", "parts", "silu"]

TILE_ROWS = 64  # of a matrix instruction
DEPTH = 64  # of K in a tile: 128 bytes, what a swizzle spans
_MIN_ROWS, _MAX_ROWS = 8, 128
_GATED_ROWS = 256
_MAX_PARTS = 8
_MIN_DEPTHS = 3  # tiles of K of a part
_STAGES = {(1, 128): 8, (1, 256): 5, (2, 128): 6, (2, 256): 4}  # by consumers and columns: 192 or 200 KiB


@dataclass(frozen=True)
class ProductBlocks:
    """How a product is cut.

    Attributes:
      consumers: computing warpgroups of a block of threads, each with 64 rows of a tile.
      columns: of a tile, 128 or 256.
      stages: tiles of the ring.
      parts: of K, each a unit of its own.
      num_blocks: blocks of threads of a launch.
    """

    consumers: int
    columns: int
    stages: int
    parts: int
    num_blocks: int


def product_blocks(rows: int, inputs: int, outputs: int, result: Result, multiprocessors: int) -> ProductBlocks | None:
    """How the kernel for Hopper multiplies rows by a kernel [inputs, outputs]; `None` where XLA is to do it.

    Example:
      >>> [product_blocks(64, *shape, "parts", 132).parts for shape in ((4096, 6144), (4096, 4096), (576, 960))]
      [2, 4, 3]
      >>> product_blocks(64, 4096, 28672, "silu", 132).columns
      256
      >>> product_blocks(256, 4096, 6144, "parts", 132) is None
      True
    """
    unit = 2 * DEPTH if result == "silu" else DEPTH
    if rows < _MIN_ROWS or rows % 8 or inputs % DEPTH or outputs % unit:
        return None
    # Wide tiles ask for their rows half as often, but narrow ones are more.
    columns = 256 if outputs > multiprocessors * 128 else 128
    if rows > _MAX_ROWS and (result != "silu" or rows != _GATED_ROWS or columns == 128):
        return None
    parts = 1
    if result == "parts":
        parts = min(_MAX_PARTS, multiprocessors // -(-outputs // columns), inputs // DEPTH // _MIN_DEPTHS)
    consumers = min(2, -(-rows // TILE_ROWS))
    return ProductBlocks(consumers, columns, _STAGES[consumers, columns], max(1, parts), multiprocessors)

"""Which matrix products `product_gpu` takes, and how it cuts them: rules from measurements on one H200.

Products of 8 to 128 rows take the time of their kernel, which is read once: a launch has one unit of work for nearly
every multiprocessor, and none has two. So a kernel of few columns is cut along K, and what reads the product adds the
parts up. Of more rows only gate and up is ours, whose factors then need not be written and read again: of 256, two full
tiles of rows, and of 1,024 and more by a kernel of its own (`gated_gpu`), where its tiles fill the multiprocessors.
"""

from dataclasses import dataclass
from typing import Literal

Result = Literal["product", "parts", "silu"]

TILE_ROWS = 64  # of a matrix instruction
DEPTH = 64  # of K in a tile: 128 bytes, what a swizzle spans
_MIN_ROWS, _MAX_ROWS = 8, 128
_FEW_GATED_ROWS = 256
_MAX_PARTS = 8
_MIN_DEPTHS = 3  # tiles of K of a part
_MANY_ROWS, _MANY_INPUTS = 1024, 4096
GATED_ROWS, GATED_COLUMNS = 128, 256  # of a block's tile of a gated product of many rows
_CLUSTER, _GROUP_ROWS = 2, 2048
_MIN_WAVES = 3  # of tiles that a cluster has one after the other
_LEAST_BUSY = 0.9  # of the waves, the part that is no padding
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
    if rows > _MAX_ROWS and (result != "silu" or rows != _FEW_GATED_ROWS or columns == 128):
        return None
    parts = 1
    if result == "parts":
        parts = min(_MAX_PARTS, multiprocessors // -(-outputs // columns), inputs // DEPTH // _MIN_DEPTHS)
    consumers = min(2, -(-rows // TILE_ROWS))
    return ProductBlocks(consumers, columns, _STAGES[consumers, columns], max(1, parts), multiprocessors)


@dataclass(frozen=True)
class GatedBlocks:
    """How the gated product of many rows is cut.

    Attributes:
      cluster: blocks of threads that ask for one tile of the kernel together, each with rows of its own; 1 or 2.
      group_rows: rows whose tiles are walked before the columns go on; they stay in L2.
      multiprocessors: that have a block of threads each.
    """

    cluster: int
    group_rows: int
    multiprocessors: int


def gated_blocks(rows: int, inputs: int, outputs: int, multiprocessors: int) -> GatedBlocks | None:
    """How the kernel for many rows multiplies them by gate and up [inputs, outputs]; `None` where XLA is to do it.

    Measured were 1,024 and 4,096 rows by [4096, 28672]. With fewer inputs a tile is sooner done, and the tensor cores
    wait for its end more often: those are left to XLA.

    Example:
      >>> [gated_blocks(rows, 4096, 28672, 132) is not None for rows in (512, 1024, 2048, 8192)]
      [False, True, True, True]
      >>> gated_blocks(2048, 2048, 16384, 132) is None
      True
    """
    if rows < _MANY_ROWS or rows % 8 or inputs < _MANY_INPUTS or inputs % DEPTH or outputs % (2 * DEPTH):
        return None
    tile, pairs = _CLUSTER * GATED_ROWS, multiprocessors // _CLUSTER
    tiles = -(-rows // tile) * -(-outputs // GATED_COLUMNS)
    waves = -(-tiles // pairs)
    needed = rows * outputs / (tile * GATED_COLUMNS * pairs)  # waves, if nothing were padding
    if waves < _MIN_WAVES or needed < _LEAST_BUSY * waves:
        return None
    return GatedBlocks(_CLUSTER, _GROUP_ROWS, multiprocessors)

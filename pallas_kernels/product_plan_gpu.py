"""Which matrix products `product_gpu` takes, and how it cuts them: rules from measurements on one H200.

Products of 8 to 128 rows take the time of their kernel, which is read once: a launch has one unit of work for nearly
every multiprocessor, and none has two. So a kernel of few columns is cut along K, and what reads the product adds the
parts up. So are those of up to 256 rows by small kernels. Of large ones of more than 128 rows only gate and up is ours,
whose factors then need not be written and read again: of 192 and 256, whole tiles of rows, at the pace of the tensor
cores, and of 1,024 and more by a kernel of its own (`gated_gpu`), where its tiles fill the multiprocessors. Of 256 rows
1.7 waves of tiles would take the time of 2, so tiles are cut where a block's share ends.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax

Result = Literal["product", "parts", "silu"]

TILE_ROWS = 64  # of a matrix instruction
DEPTH = 64  # of K in a tile: 128 bytes, what a swizzle spans
_MIN_ROWS, _MAX_ROWS = 8, 128
_FEW_GATED_ROWS = 192, 256
_SMALL_PRODUCT = 2**29  # multiplications that the chip does in less time than a launch takes
_JOIN_DEPTHS = 8  # tiles of K in whose time a block stores one piece of a cut tile and adds another: 7 us
_MAX_PARTS = 8
_MIN_DEPTHS = 3  # tiles of K of a part
_MANY_ROWS, _MANY_INPUTS = 1024, 2048
GATED_ROWS, GATED_COLUMNS = 128, 256  # of a block's tile of a gated product of many rows
_CLUSTER, _GROUP_ROWS = 2, 2048
_MIN_WAVES = 3  # of tiles that a cluster has one after the other
_LEAST_BUSY = 0.9  # of the waves, the part that is no padding
# By consumers and columns: 192 or 200 KiB.
_STAGES = {(1, 128): 8, (1, 256): 5, (2, 128): 6, (2, 256): 4, (3, 128): 5}


@dataclass(frozen=True)
class ProductBlocks:
    """How a product is cut.

    Attributes:
      consumers: computing warpgroups of a block of threads, each with 64 rows of a tile.
      columns: of a tile, 128 or 256.
      stages: tiles of the ring.
      parts: of K, each a unit of its own.
      num_blocks: blocks of threads of a launch.
      cut: whether blocks have equal shares of all K steps, and a tile where one ends and the next begins is cut there;
        else a block has whole units.
    """

    consumers: int
    columns: int
    stages: int
    parts: int
    num_blocks: int
    cut: bool


@dataclass(frozen=True)
class Walk:
    """The units of a product in the order in which blocks of threads walk them; a block and a number may be traced.

    Attributes:
      row_tiles, column_tiles, depths: tiles of rows, of columns, and of K.
      parts, cut: as in `ProductBlocks`.
      num_blocks: that have a unit.
    """

    row_tiles: int
    column_tiles: int
    depths: int
    parts: int
    cut: bool
    num_blocks: int

    @classmethod
    def of(cls, blocks: ProductBlocks, row_tiles: int, column_tiles: int, depths: int) -> "Walk":
        """The walk of so many tiles.

        There are no more shares than tiles, so a share is no shorter than a tile, and no tile is cut twice.

        Raises:
          ValueError: K is to be cut into parts, too, or there are fewer blocks than tiles of rows.
        """
        units = row_tiles * column_tiles * blocks.parts
        num_blocks = min(blocks.num_blocks, units)
        if blocks.cut:
            num_blocks -= num_blocks % row_tiles
            if blocks.parts > 1 or not num_blocks:
                shape = f"{row_tiles} x {column_tiles}"
                raise ValueError(f"{blocks} for {shape} tiles; expected one part, and a block for each tile of rows")
        return cls(row_tiles, column_tiles, depths, blocks.parts, blocks.cut, num_blocks)

    def _share(self, block):
        """A block's range of the steps of a tile of rows, which are those of all columns, one tile after the other.

        Neighbouring blocks have the same range of each tile of rows: they ask for a tile of the kernel at the same
        time, so that it comes from memory once.
        """
        shares, steps = self.num_blocks // self.row_tiles, self.column_tiles * self.depths
        begin, end = (lax.div((lax.div(block, self.row_tiles) + i) * steps, shares) for i in (0, 1))
        return begin, end

    def count(self, block):
        """How many units a block has."""
        if self.cut:
            begin, end = self._share(block)
            return lax.div(end - 1, self.depths) - lax.div(begin, self.depths) + 1
        return lax.div(self.row_tiles * self.column_tiles * self.parts - 1 - block, self.num_blocks) + 1

    def unit(self, block, nth):
        """Tile of rows and of columns, part, and the range of K tiles of a block's nth unit.

        A share begins with the last piece of a tile and ends with the first piece of another, after whole ones. So a
        last piece is stored within the first tile's time, and whoever has the first piece of that tile comes to it at
        its end: it need not wait, and does not store its own.
        """
        if self.cut:
            begin, end = self._share(block)
            tile = lax.div(begin, self.depths) + nth
            before = tile * self.depths
            first, end = jnp.maximum(begin - before, 0), jnp.minimum(end - before, self.depths)
            return lax.rem(block, self.row_tiles), tile, 0, first, end
        rest, row_tile = _div_rem(block + nth * self.num_blocks, self.row_tiles)
        column_tile, part = _div_rem(rest, self.parts)
        first, end = (lax.div(p * self.depths, self.parts) for p in (part, part + 1))
        return row_tile, column_tile, part, first, end

    def meeting(self, block, first):
        """A number, below `num_blocks`, of the place where a piece that begins at K tile `first` meets the other."""
        return block + jnp.where(first == 0, self.row_tiles, 0)


def _div_rem(x, y: int):
    return lax.div(x, y), lax.rem(x, y)


def product_blocks(rows: int, inputs: int, outputs: int, result: Result, multiprocessors: int) -> ProductBlocks | None:
    """How the kernel for Hopper multiplies rows by a kernel [inputs, outputs]; `None` where XLA is to do it.

    Example:
      >>> [product_blocks(64, *shape, "parts", 132).parts for shape in ((4096, 6144), (4096, 4096), (576, 960))]
      [2, 4, 3]
      >>> product_blocks(64, 4096, 28672, "silu", 132).columns
      256
      >>> product_blocks(256, 4096, 6144, "parts", 132) is None
      True
      >>> [product_blocks(rows, 4096, 28672, "silu", 132).cut for rows in (128, 192, 256)]
      [False, False, True]
    """
    unit = 2 * DEPTH if result == "silu" else DEPTH
    if rows < _MIN_ROWS or rows % 8 or inputs % DEPTH or outputs % unit:
        return None
    # Wide tiles ask for their rows half as often, but narrow ones are more.
    columns = 256 if outputs > multiprocessors * 128 else 128
    is_small = rows <= 2 * _MAX_ROWS and rows * inputs * outputs <= _SMALL_PRODUCT
    gated = result == "silu" and rows in _FEW_GATED_ROWS and columns == 256
    if rows > _MAX_ROWS and not (is_small or gated):
        return None
    consumers, parts, cut = min(2, -(-rows // TILE_ROWS)), 1, False
    if result == "parts":
        tiles = -(-rows // (consumers * TILE_ROWS)) * -(-outputs // columns)
        parts = min(_MAX_PARTS, multiprocessors // tiles, inputs // DEPTH // _MIN_DEPTHS)
    if gated and rows % (2 * TILE_ROWS):
        consumers, columns = 3, 128  # one tile of rows; of two the second would be half empty
    elif gated:
        cut = _cut_pays(rows // (2 * TILE_ROWS), -(-outputs // columns), inputs // DEPTH, multiprocessors)
    return ProductBlocks(consumers, columns, _STAGES[consumers, columns], max(1, parts), multiprocessors, cut)


def _cut_pays(row_tiles: int, column_tiles: int, depths: int, multiprocessors: int) -> bool:
    """Whether equal shares are done sooner than whole tiles, by the K tiles of the busiest block."""
    shares = multiprocessors // row_tiles
    whole = -(-row_tiles * column_tiles // multiprocessors) * depths
    return column_tiles > shares and whole - column_tiles * depths / shares > _JOIN_DEPTHS


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

    Measured were 1,024 to 4,096 rows by gate and up of 1B, 3B and 8B: 2 to 10 % less for the MLP than by XLA. With
    fewer inputs a tile is sooner done, and the tensor cores wait for its end more often: those are left to XLA.

    Example:
      >>> [gated_blocks(rows, 4096, 28672, 132) is not None for rows in (512, 1024, 2048, 8192)]
      [False, True, True, True]
      >>> gated_blocks(2048, 1024, 16384, 132) is None
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

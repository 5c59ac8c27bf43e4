"""Where 8-bit keys and values are loaded from: an address, bits of it turned over, and constants."""

import itertools

import pytest

from tests.kernels.int_arith import building, value_of
from tests.kernels.test_decode_gpu import needs_jax_011

_BASE = 1 << 14  # tiles are aligned to what a swizzle repeats after


@needs_jax_011
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_keys_are_loaded_from_where_the_swizzle_says(head_dim: int) -> None:
    from jpaged.pallas_kernels.combine_gpu import i32
    from jpaged.pallas_kernels.convert_gpu import _sum, _unit_offset, _units_on

    def address(group: int, row: int, unit: int):
        return _sum(i32(_BASE), _unit_offset(i32(group), i32(row), i32(unit), head_dim))

    with building():
        for group, row, unit in itertools.product((0, 5), range(8), range(2)):
            first = address(group, row, unit)
            for further in range(0, head_dim // 16, 2):
                here, rest = _units_on(first, further, head_dim)
                assert value_of(here) + rest == value_of(address(group, row, unit + further))


@needs_jax_011
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_are_loaded_from_where_the_swizzle_says(head_dim: int) -> None:
    from jpaged.pallas_kernels.combine_gpu import i32
    from jpaged.pallas_kernels.convert_gpu import _sum, _unit_offset, _units_on

    def address(group: int, row: int, unit: int):
        return _sum(i32(_BASE), _unit_offset(i32(group), i32(row), i32(unit), head_dim))

    with building():
        for warp, matrix, row, tile in itertools.product(range(4), (0, 3), (0, 3, 6), range(head_dim // 64)):
            here, rest = _units_on(address(matrix, row, warp), head_dim // 16 + 4 * tile, head_dim)
            for keys in (0, 4):  # so many rows of eight keys on
                unit = head_dim // 16 + 4 * tile + warp
                assert value_of(here) + rest + keys * 16 * head_dim == value_of(address(matrix + keys, row, unit))

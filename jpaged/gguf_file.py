"""The header of a GGUF file: key-value pairs and the list of tensors. Imports no jax.

Written here because the reader of the `gguf` package makes an array of every token of the vocabulary, which takes
seconds; this one takes a tenth of one. Turning blocks of quantised numbers into floats is left to that package.

    "GGUF" | version u32 | tensors u64 | pairs u64 | pairs ... | tensor infos ... | padding | data

    pair           key, type u32, value of that type
    string         bytes u64, UTF-8
    array          type of its items u32, items u64, items ...
    tensor info    name, axes u32, lengths u64 (last axis first), block type u32, offset into the data u64
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from jpaged.errors import ModelLoadError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
# dtypes of the scalar types by their number in the file.
_SCALARS: Final = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
# The least that an item of an array takes in the file: the length of a string, the head of an array.
_LEAST_BYTES: Final = {_STRING: 8, _ARRAY: 12} | {kind: np.dtype(dtype).itemsize for kind, dtype in _SCALARS.items()}
# A damaged count must not fill the memory. The largest vocabularies need 2 million items for all of their arrays.
_MAX_ITEMS: Final = 1 << 24
_MAX_DEPTH: Final = 16
_MAX_AXES: Final = 4
# Bytes that the gguf package dequantises at a time: its temporaries then stay in the processor's cache.
_CHUNK_BYTES: Final = 1 << 18


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
      name: the file's name for it.
      shape: numpy order, the last axis contiguous.
      type_id: number of its block type.
      offset: first byte, from the start of the file.
      num_bytes: bytes it takes.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


class _Cursor:
    """Reads a header front to back. Every read is checked against the end of the file before anything is made of it."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.at = 0
        self.items_left = _MAX_ITEMS

    def damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged, or too new: {what}; fetch it again")

    def take(self, num_bytes: int) -> int:
        """Moves past `num_bytes` and returns where they start."""
        start = self.at
        if num_bytes > len(self.data) - start:
            raise ModelLoadError(
                f"{self.path} is truncated or damaged: its header wants {num_bytes} bytes from byte {start} on, "
                f"the file ends at {len(self.data)}; fetch it again"
            )
        self.at = start + num_bytes
        return start

    def numbers(self, dtype: str, count: int) -> list[Any]:
        start = self.take(count * np.dtype(dtype).itemsize)
        return np.frombuffer(self.data, dtype, count, start).tolist()

    def u32(self) -> int:
        return self.numbers("<u4", 1)[0]

    def u64(self) -> int:
        return self.numbers("<u8", 1)[0]

    def string(self) -> str:
        num_bytes = self.u64()
        start = self.take(num_bytes)
        return self.data[start : start + num_bytes].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """`count` times `string`, written out: vocabularies hold hundreds of thousands."""
        data, end, length_at = self.data, len(self.data), struct.Struct("<Q").unpack_from
        at, result = self.at, []
        for _ in range(count):
            start = at + 8
            if start > end or (at := start + length_at(data, at)[0]) > end:
                self.at = start - 8
                self.string()  # raises
            result.append(data[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return result

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array(depth + 1)
        return self.scalars(type_id, 1)[0]

    def scalars(self, type_id: int, count: int) -> list[Any]:
        values = self.numbers(_SCALARS[self.known(type_id)], count)
        return [value != 0 for value in values] if type_id == _BOOL else values

    def array(self, depth: int) -> list[Any]:
        item_type, count = self.known(self.u32()), self.u64()
        if depth > _MAX_DEPTH:
            raise self.damaged(f"it has arrays in arrays, more than {_MAX_DEPTH} deep")
        if count * _LEAST_BYTES[item_type] > len(self.data) - self.at:
            self.take(count * _LEAST_BYTES[item_type])  # raises
        self.items_left -= count
        if self.items_left < 0:
            raise self.damaged(f"its arrays have more than {_MAX_ITEMS} items")
        if item_type == _STRING:
            return self.strings(count)
        if item_type == _ARRAY:
            return [self.array(depth + 1) for _ in range(count)]
        return self.scalars(item_type, count)

    def known(self, type_id: int) -> int:
        if type_id not in _LEAST_BYTES:
            raise self.damaged(f"a value before byte {self.at} has the unknown type {type_id}")
        return type_id


def is_gguf(path: Path | str) -> bool:
    """Whether a file starts like a GGUF file.

    Raises:
      ModelLoadError: it cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be opened: {error}") from error


class GGUFFile:
    """A GGUF file, opened.

    Args:
      path: the file.

    Attributes:
      path: the file.
      metadata: key-value pairs as Python values: str, int, float, bool, or a list of one of them or of lists.
      tensors: the tensors by the file's names.

    Raises:
      ModelLoadError: not a GGUF file, a version or byte order that is not supported, a truncated or damaged file.

    Reference:
      https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if (start := file.read(len(_MAGIC))) != _MAGIC:
                    raise ModelLoadError(f"{path} is no GGUF file: it starts with {start!r}, expected {_MAGIC!r}")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be opened: {error}") from error
        cursor = _Cursor(self._data, self.path)
        cursor.take(len(_MAGIC))
        version = cursor.u32()
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            order = " (a big-endian file?)" if swapped else ""
            raise ModelLoadError(
                f"{path} has GGUF version {version}{order}, expected 2 or 3, little-endian; convert the model again"
            )
        num_tensors, num_pairs = cursor.u64(), cursor.u64()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.damaged(f"it holds the key {key!r:.80} twice")
            self.metadata[key] = cursor.value(cursor.u32())
        self.tensors = {tensor.name: tensor for tensor in self._tensors(cursor, num_tensors)}

    def read(self, name: str) -> np.ndarray:
        """The tensor as f32.

        Raises:
          ModelLoadError: a block type that the `gguf` package cannot dequantise.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        try:
            values = dequantize(_long_rows(raw, tensor), GGMLQuantizationType(tensor.type_id))
        except NotImplementedError as error:
            raise ModelLoadError(f"{name} of {self.path}: {error}") from error
        # f32 comes back as a view of the file, which may change under us.
        return (values if values.flags.writeable else values.copy()).reshape(tensor.shape)

    def _tensors(self, cursor: _Cursor, count: int) -> Iterator[GGUFTensor]:
        """The tensors in the file's order, each one known to lie inside of the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # takes a tenth of a second

        sizes = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES}
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, num_axes = cursor.string(), cursor.u32()
            if name in infos:
                raise cursor.damaged(f"it holds the tensor {name!r:.80} twice")
            if num_axes > _MAX_AXES:
                raise cursor.damaged(f"{name!r:.80} has {num_axes} axes, expected at most {_MAX_AXES}")
            infos[name] = (tuple(cursor.numbers("<u8", num_axes)[::-1]), cursor.u32(), cursor.u64())
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise cursor.damaged(f"general.alignment is {alignment!r:.80}, expected an integer above 0")
        data_start = -(-cursor.at // alignment) * alignment
        for name, (shape, type_id, offset) in infos.items():
            if type_id not in sizes:
                raise cursor.damaged(f"{name!r:.80} has block type {type_id}, which is not known")
            block_size, block_bytes = sizes[type_id]
            if not shape or 0 in shape or shape[-1] % block_size:
                raise cursor.damaged(f"{name!r:.80} has shape {list(shape)}, expected whole blocks of {block_size}")
            start, num_bytes = data_start + offset, math.prod(shape) // block_size * block_bytes
            if start + num_bytes > len(self._data):
                raise ModelLoadError(
                    f"{self.path} is truncated or damaged: {name!r:.80} ends at byte {start + num_bytes}, "
                    f"the file at {len(self._data)}; fetch it again"
                )
            yield GGUFTensor(name, shape, type_id, start, num_bytes)


def _long_rows(raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """The bytes of a tensor in rows as long as a chunk allows.

    The gguf package works on 16 rows at a time. Blocks do not know rows, so longer rows mean fewer and larger steps.
    """
    num_rows = math.prod(tensor.shape[:-1])
    row_bytes = tensor.num_bytes // num_rows
    joined = max(1, min(num_rows, _CHUNK_BYTES // 16 // row_bytes))
    while num_rows % joined:
        joined -= 1
    return raw.reshape(-1, joined * row_bytes)

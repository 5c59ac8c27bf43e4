"""The header of a GGUF file: key-value pairs and the list of tensors. Imports no jax.

Written here because the reader of the `gguf` package makes an array of every token of the vocabulary, which takes
seconds; this one takes a tenth of one. Turning blocks of quantised numbers into floats is left to that package.

    "GGUF" | version u32 | tensors u64 | pairs u64 | pairs ... | tensor infos ... | padding | data
"""

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
# struct codes of the scalar types by their number in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
# Bytes that the gguf package dequantises at a time: its temporaries then stay in the processor's cache.
_CHUNK_BYTES = 1 << 18


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
    """Reads the header front to back; struct raises where the file ends too early."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise struct.error("a string reaches past the end of the file")
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Written out, since vocabularies hold hundreds of thousands."""
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            result.append(data[start:at].decode("utf-8", errors="replace"))
        if at > len(data):
            raise struct.error("a string reaches past the end of the file")
        self.at = at
        return result

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            (item_type,) = self.unpack("I")
            (count,) = self.unpack("Q")
            if count > len(self.data):
                raise struct.error("an array reaches past the end of the file")
            if item_type == _STRING:
                return self.strings(count)
            if item_type == _ARRAY:
                return [self.value(item_type) for _ in range(count)]
            values = self.unpack(_code(item_type), count)
            return [bool(v) for v in values] if item_type == _BOOL else list(values)
        (value,) = self.unpack(_code(type_id))
        return bool(value) if type_id == _BOOL else value


def _code(type_id: int) -> str:
    if type_id not in _SCALARS:
        raise struct.error(f"a value has the unknown type {type_id}")
    return _SCALARS[type_id]


class GGUFFile:
    """A GGUF file, opened.

    Args:
      path: the file.

    Attributes:
      path: the file.
      metadata: key-value pairs as Python values; arrays are lists.
      tensors: the tensors by the file's names.

    Raises:
      ModelLoadError: not a GGUF file, a version or byte order that is not supported, a truncated file, a tensor twice.

    Reference:
      https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if file.read(4) != _MAGIC:
                    raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be opened: {error}") from error
        try:
            self._read_header()
        except (struct.error, MemoryError, OverflowError, RecursionError) as error:
            raise ModelLoadError(f"{path} is truncated or damaged: {error}") from error

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

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        cursor.at = len(_MAGIC)
        (version,) = cursor.unpack("I")
        if version not in _VERSIONS:
            order = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise ModelLoadError(f"{self.path} has GGUF version {version}{order}, expected 2 or 3, little-endian")
        num_tensors, num_pairs = cursor.unpack("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            (type_id,) = cursor.unpack("I")
            self.metadata[key] = cursor.value(type_id)
        infos = [(cursor.string(), *self._info(cursor)) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelLoadError(f"general.alignment of {self.path} is {alignment!r}, expected an integer above 0")
        self.tensors: dict[str, GGUFTensor] = {}
        start = -(-cursor.at // alignment) * alignment
        for tensor in self._tensors(infos, start):
            if tensor.name in self.tensors:
                raise ModelLoadError(f"{self.path} holds the tensor {tensor.name} twice")
            self.tensors[tensor.name] = tensor

    @staticmethod
    def _info(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
        (num_axes,) = cursor.unpack("I")
        shape = cursor.unpack("Q", num_axes)[::-1]
        (type_id,) = cursor.unpack("I")
        (offset,) = cursor.unpack("Q")
        return shape, type_id, offset

    def _tensors(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterable[GGUFTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        for name, shape, type_id, offset in infos:
            try:
                block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
            except (ValueError, KeyError):
                raise ModelLoadError(f"{name} of {self.path} has block type {type_id}, which is not known") from None
            count = int(np.prod(shape, dtype=object))
            if not shape or shape[-1] % block_size:
                raise ModelLoadError(f"{name} of {self.path} has shape {list(shape)}, not whole blocks of {block_size}")
            tensor = GGUFTensor(name, shape, type_id, start + offset, count // block_size * block_bytes)
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise ModelLoadError(
                    f"{self.path} is truncated: {name} ends at byte {tensor.offset + tensor.num_bytes}, "
                    f"the file at {len(self._data)}; fetch it again"
                )
            yield tensor


def _long_rows(raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """The bytes of a tensor in rows as long as a chunk allows.

    The gguf package works on 16 rows at a time. Blocks do not know rows, so longer rows mean fewer and larger steps.
    """
    row_bytes = tensor.num_bytes // max(int(np.prod(tensor.shape[:-1])), 1)
    num_rows = tensor.num_bytes // max(row_bytes, 1)
    joined = max(1, min(num_rows, _CHUNK_BYTES // 16 // max(row_bytes, 1)))
    while num_rows % joined:
        joined -= 1
    return raw.reshape(-1, joined * row_bytes)

"""Reads the metadata of a GGUF file into plain Python values.

The `gguf` library builds several numpy views for every string, which takes seconds for the ~100,000 strings of a
vocabulary and its merges; this reader needs the metadata alone and takes a fraction of a second. Weights are read and
dequantised by the library.

A GGUF file starts with: magic "GGUF", version u32, tensor count u64, metadata count u64, and then the metadata: key
(u64 length, UTF-8 bytes), value type u32, value. All little-endian.
"""

import mmap
import struct
from pathlib import Path
from typing import Final

from jpaged.errors import ModelLoadError

# Value type -> struct code, for the types of fixed size. Strings are 8, arrays are 9.
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9


class _Cursor:
    """A position in the file. Every read is checked against the end, so that a truncated file is an error."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, num_bytes: int) -> int:
        """Moves past `num_bytes` and returns where they start."""
        start = self.at
        if num_bytes > len(self.data) - start:
            raise ModelLoadError(
                f"{self.path} ends inside its metadata (byte {start} of {len(self.data)}): it is truncated or damaged; "
                "download it again"
            )
        self.at = start + num_bytes
        return start

    def scalar(self, code: str) -> int | float | bool:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def size(self) -> int:
        return int(self.scalar("Q"))

    def string(self) -> str:
        num_bytes = self.size()
        start = self.take(num_bytes)
        return self.data[start : start + num_bytes].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """`count` strings. Written out, because vocabularies hold hundreds of thousands."""
        strings = []
        read_size = struct.Struct("<Q").unpack_from
        data, start, end = self.data, self.at, len(self.data)
        for _ in range(count):
            if start + 8 > end or start + 8 + (size := read_size(data, start)[0]) > end:
                self.take(end)
            strings.append(data[start + 8 : start + 8 + size].decode("utf-8", errors="replace"))
            start += 8 + size
        self.at = start
        return strings

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelLoadError(f"{self.path} has a metadata value of unknown type {kind}: it is damaged or too new")
        item_kind, count = int(self.scalar("I")), self.size()
        if item_kind in _SCALARS:
            layout = f"<{count}{_SCALARS[item_kind]}"
            start = self.take(count * struct.calcsize("<" + _SCALARS[item_kind]))
            return list(struct.unpack_from(layout, self.data, start))
        if count > len(self.data) - self.at:  # every item takes at least one byte
            self.take(count)
        if item_kind == _STRING:
            return self.strings(count)
        return [self.value(item_kind) for _ in range(count)]


def is_gguf(path: str | Path) -> bool:
    """Whether a file starts like a GGUF file."""
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf_metadata(path: str | Path) -> dict[str, object]:
    """Reads all metadata of a GGUF file: key -> str, int, float, bool or a list of them.

    Raises:
      ModelLoadError: the file is missing, is no GGUF file, is truncated, or has another version or byte order.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, path))
    except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path} cannot be read as a GGUF file: {error}") from error


def _read(cursor: _Cursor) -> dict[str, object]:
    if cursor.data[:4] != b"GGUF":
        raise ModelLoadError(f"{cursor.path} is no GGUF file: it starts with {cursor.data[:4]!r}, expected {b'GGUF'!r}")
    cursor.take(4)
    version = int(cursor.scalar("I"))
    if version not in (2, 3):
        order = " (a big-endian file?)" if version >= 1 << 24 else ""
        raise ModelLoadError(
            f"{cursor.path} has GGUF version {version}{order}, expected 2 or 3, little-endian; convert the model again"
        )
    cursor.size()  # tensors
    metadata: dict[str, object] = {}
    for _ in range(cursor.size()):
        key = cursor.string()
        metadata[key] = cursor.value(int(cursor.scalar("I")))
    return metadata

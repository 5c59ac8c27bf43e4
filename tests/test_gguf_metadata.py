import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jpaged.errors import ModelLoadError
from jpaged.gguf_metadata import is_gguf, read_gguf_metadata


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("some.u8", 200)
    writer.add_int16("some.i16", -3)
    writer.add_uint64("some.u64", 2**63)
    writer.add_float64("some.f64", 0.1)
    writer.add_float32("some.f32", 0.5)
    writer.add_bool("some.flag", True)
    writer.add_string("some.text", "déjà\0vu")
    writer.add_array("some.words", ["a", "", "漢字"])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_array("some.flags", [True, False])
    writer.add_tensor("weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_are_those_that_were_written(path: Path) -> None:
    assert read_gguf_metadata(path) == {
        "general.architecture": "llama",
        "some.u8": 200,
        "some.i16": -3,
        "some.u64": 2**63,
        "some.f64": 0.1,
        "some.f32": 0.5,
        "some.flag": True,
        "some.text": "déjà\0vu",
        "some.words": ["a", "", "漢字"],
        "some.numbers": [1, -2, 3],
        "some.flags": [True, False],
    }


def test_values_are_those_that_the_library_reads(path: Path) -> None:
    fields = gguf.GGUFReader(path).fields
    ours = read_gguf_metadata(path)
    assert ours == {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


def test_every_truncation_is_noticed(path: Path) -> None:
    data = path.read_bytes()
    end = data.index(b"weight") - 8
    for length in range(end):
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError):
            read_gguf_metadata(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(40), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99) + bytes(40), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60), "truncated"),
    ],
)
def test_foreign_and_damaged_files_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=words) as caught:
        read_gguf_metadata(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        read_gguf_metadata(tmp_path / "nowhere.gguf")


def test_is_gguf_looks_at_the_first_bytes(path: Path, tmp_path: Path) -> None:
    assert is_gguf(path)
    (tmp_path / "other").write_bytes(b"GG")
    assert not is_gguf(tmp_path / "other")

"""The reader of GGUF headers: it agrees with the library, and a damaged file is a ModelLoadError that names it."""

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from jpaged.errors import ModelLoadError
from jpaged.gguf_file import GGUFFile, is_gguf


def save(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = GGUFWriter(path, "llama")
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
    writer.add_tensor("weight", np.arange(128, dtype=np.float32).reshape(4, 32))
    blocks = np.full((2, 18), 3, np.uint8)
    writer.add_tensor("blocks", blocks, raw_shape=blocks.shape, raw_dtype=GGMLQuantizationType.Q4_0)
    save(writer)
    return path


def head(num_tensors: int, num_pairs: int, *rest: bytes, version: int = 3, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, num_tensors, num_pairs) + b"".join(rest)


def pair(type_id: int, value: bytes = b"", key: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type_id) + value


def array(type_id: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", type_id, count) + items


def tensor(*shape: int, type_id: int = 0, offset: int = 0, axes: int | None = None) -> bytes:
    num_axes = len(shape) if axes is None else axes
    return struct.pack(f"<Q1sI{len(shape)}QIQ", 1, b"t", num_axes, *shape, type_id, offset)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(data)
    return path


def test_values_are_those_that_were_written(path):
    assert GGUFFile(path).metadata == {
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
    assert GGUFFile(path).metadata["some.flag"] is True


def test_header_is_the_one_that_the_library_reads(path):
    theirs, ours = gguf.GGUFReader(path), GGUFFile(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert list(mine.shape) == tensor.shape.tolist()[::-1]
        assert (mine.type_id, mine.offset, mine.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_tensors_are_read_as_they_were_written(path):
    file = GGUFFile(path)
    values = file.read("weight")
    np.testing.assert_array_equal(values, np.arange(128, dtype=np.float32).reshape(4, 32))
    values[0, 0] = 5  # an array of the caller's own
    assert file.read("weight")[0, 0] == 0


def test_every_block_type_of_the_library_is_read(tmp_path):
    """Zero bytes are valid blocks of every type; the answer is that of the library, row by row."""
    count = 0
    for kind in GGMLQuantizationType:
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = np.zeros((6, 2 * block_bytes), np.uint8)
        blocks[3] = 1
        writer = GGUFWriter(tmp_path / f"{kind.name}.gguf", "llama")
        writer.add_tensor("t", blocks, raw_shape=blocks.shape, raw_dtype=kind)
        save(writer)
        file = GGUFFile(tmp_path / f"{kind.name}.gguf")
        try:
            expected = dequantize(blocks, kind)
        except NotImplementedError:
            with pytest.raises(ModelLoadError, match=rf"t of .*{kind.name}"):
                file.read("t")
            continue
        count += 1
        got = file.read("t")
        assert got.shape == (6, 2 * block_size)
        np.testing.assert_array_equal(got, expected, err_msg=kind.name)
    assert count > 20


def test_arrays_of_arrays_are_lists_of_lists(tmp_path):
    words = array(8, 2, struct.pack("<Q1sQ", 1, b"a", 0))
    flags = array(7, 3, b"\x00\x01\x02")
    nested = array(9, 3, words + array(9, 1, array(5, 2, struct.pack("<2i", 7, -7))) + flags)
    file = GGUFFile(write(tmp_path, head(0, 2, pair(9, nested), pair(9, array(9, 0), key=b"none"))))
    assert file.metadata == {"k": [["a", ""], [[7, -7]], [False, True, True]], "none": []}


def test_alignment_moves_the_data(tmp_path):
    start = head(1, 1, pair(4, struct.pack("<I", 256), key=b"general.alignment"), tensor(2))
    data = start.ljust(256, b"\xff") + struct.pack("<2f", 1.5, -2)
    assert GGUFFile(write(tmp_path, data)).read("t").tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no GGUF file: it starts with b''"),
        (b"GG", "no GGUF file: it starts with b'GG'"),
        (b"PK\x03\x04" + bytes(40), "no GGUF file"),
        (b"GGUF", "truncated"),
        (head(0, 0, version=1), "version 1, expected 2 or 3"),
        (head(0, 0, version=4), "version 4, expected 2 or 3"),
        (head(0, 0, order=">"), r"\(a big-endian file\?\)"),
        (head(2**60, 0), "truncated"),
        (head(0, 2**60), "truncated"),
        (head(0, 2**60, bytes(400)), "key '' twice"),
        (head(0, 1, struct.pack("<Q", 2**62)), "wants 4611686018427387904 bytes from byte 32"),
        (head(0, 1, pair(99, bytes(40))), "unknown type 99"),
        (head(0, 1, pair(8, struct.pack("<Q", 2**63))), "truncated"),
        (head(0, 1, pair(9, array(99, 0))), "unknown type 99"),
        (head(0, 1, pair(9, array(4, 2**60))), "truncated"),
        (head(0, 1, pair(9, array(8, 2**60))), "truncated"),
        (head(0, 1, pair(9, array(9, 2**60))), "truncated"),
        (head(0, 1, pair(9, array(8, 2, struct.pack("<QQ", 0, 1)))), "wants 1 bytes from byte 65 on, the file ends at"),
        (head(0, 1, pair(9, array(8, 2, struct.pack("<Q8s", 7, b"")))), "wants 8 bytes"),
        (head(0, 1, pair(9, array(9, 1) * 2000)), "more than 16 deep"),
        (head(0, 2, pair(7, b"\x01") * 2), "key 'k' twice"),
        (head(0, 1, pair(4, bytes(4), key=b"general.alignment")), "general.alignment is 0"),
        (head(0, 1, pair(8, bytes(8), key=b"general.alignment")), "general.alignment is ''"),
        (head(2, 0, tensor(4) * 2, bytes(64)), "tensor 't' twice"),
        (head(1, 0, tensor(32, type_id=99), bytes(64)), "block type 99"),
        (head(1, 0, tensor(33, type_id=2), bytes(64)), r"shape \[33\], expected whole blocks of 32"),
        (head(1, 0, tensor(32, 0), bytes(64)), r"shape \[0, 32\]"),
        (head(1, 0, tensor(), bytes(64)), r"shape \[\]"),
        (head(1, 0, tensor(axes=2**31), bytes(64)), "2147483648 axes"),
        (head(1, 0, tensor(2**50), bytes(64)), "truncated or damaged: 't' ends at byte 4503599627370560"),
        (head(1, 0, tensor(2**63, 2**63), bytes(64)), "truncated"),
        (head(1, 0, tensor(4, offset=2**63), bytes(64)), "truncated"),
    ],
)
def test_foreign_and_damaged_files_are_named(tmp_path, data, words):
    path = write(tmp_path, data)
    with pytest.raises(ModelLoadError, match=words) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_an_invented_count_fills_no_memory(tmp_path):
    """The file is long enough for the count (it has a hole), and the list would take gigabytes."""
    path = write(tmp_path, head(0, 1, pair(9, array(0, 2**29))))
    with path.open("r+b") as file:
        file.truncate(2**30)
    with pytest.raises(ModelLoadError, match="more than 16777216 items"):
        GGUFFile(path)
    nested = array(0, 2**23, bytes(2**23))
    with pytest.raises(ModelLoadError, match="more than 16777216 items"):  # in all, not in each array
        GGUFFile(write(tmp_path, head(0, 1, pair(9, array(9, 3, nested * 3)))))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for read in (GGUFFile, is_gguf):
        with pytest.raises(ModelLoadError, match=r"nowhere\.gguf cannot be opened"):
            read(tmp_path / "nowhere.gguf")
        with pytest.raises(ModelLoadError, match="cannot be opened"):
            read(tmp_path)


def test_is_gguf_looks_at_the_first_bytes(path, tmp_path):
    assert is_gguf(path)
    assert not is_gguf(write(tmp_path, b"GG"))
    assert not is_gguf(write(tmp_path, b""))


def test_every_truncation_is_noticed(path, tmp_path):
    """In the header and in the data, up to the last byte that a tensor needs."""
    data = path.read_bytes()
    tensors = GGUFFile(path).tensors
    end = max(tensor.offset + tensor.num_bytes for tensor in tensors.values())
    for length in (*range(tensors["weight"].offset), *range(tensors["weight"].offset, end, 7), end - 1):
        with pytest.raises(ModelLoadError, match=r"truncated|starts with"):
            GGUFFile(write(tmp_path, data[:length]))
    assert GGUFFile(write(tmp_path, data[:end])).read("blocks").shape == (2, 32)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_damaged_byte_is_an_error_or_harmless(path, tmp_path, mask):
    data = path.read_bytes()
    refused, read = 0, 0
    for at in range(GGUFFile(path).tensors["weight"].offset):
        damaged = bytearray(data)
        damaged[at] ^= mask
        try:
            file = GGUFFile(write(tmp_path, bytes(damaged)))
            for name in file.tensors:
                file.read(name)
            read += 1
        except ModelLoadError:
            refused += 1
    assert refused > 100  # lengths, types and counts
    assert read > 100  # names and values


def test_two_damages_at_once_are_an_error_or_harmless(path, tmp_path):
    data = path.read_bytes()
    end = GGUFFile(path).tensors["weight"].offset
    rng = np.random.default_rng(0)
    read = 0
    for _ in range(300):
        damaged = np.frombuffer(data, np.uint8).copy()
        start = rng.integers(4, end)
        damaged[start : start + 8] = rng.integers(0, 256, len(damaged[start : start + 8]))
        damaged[rng.integers(4, end)] ^= 1 << rng.integers(8)
        with contextlib.suppress(ModelLoadError):
            GGUFFile(write(tmp_path, damaged.tobytes()))
            read += 1
    assert 0 < read < 300


def test_the_default_model(smollm2_path):
    file = GGUFFile(smollm2_path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152

import io
import random
import struct
import zlib

import numpy as np
import pytest
import scipy.io

from shardprep.formats.sources import devkit as mat_reader
from shardprep.formats.sources.devkit import read_struct_array
from support.source_builders import Miniature


def saved(**variables: object) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, variables)
    return file.getvalue()


def test_it_reads_what_scipy_reads() -> None:
    meta = Miniature().meta()
    expected = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    rows = read_struct_array(meta, "synsets")
    assert len(rows) == len(expected) == 4
    for row, theirs in zip(rows, expected, strict=True):
        for field in ("ILSVRC2012_ID", "WNID", "words", "num_children", "num_train_images"):
            assert row[field] == theirs[field]


@pytest.mark.parametrize("value", [7, -3, 2.5, 1 << 40, np.uint8(200), np.float32(0.5), "Käse", "日本"])
def test_numbers_and_texts_of_every_kind_come_back(value: object) -> None:
    assert read_struct_array(saved(s={"field": value}), "s") == [{"field": value}]


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, 1j, np.array([], np.int8), np.array([{}], object)])
def test_a_field_that_is_neither_number_nor_text_is_none(value: object) -> None:
    assert read_struct_array(saved(s={"field": value}), "s") == [{"field": None}]


def test_other_variables_are_passed_over() -> None:
    assert read_struct_array(saved(x=[[1, 2]], s={"a": 1}, y="text"), "s") == [{"a": 1}]


def test_a_file_of_the_other_byte_order_is_read() -> None:
    def tagged(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    def flags_and_shape(array_class: int) -> bytes:
        return tagged(6, struct.pack(">II", array_class, 0)) + tagged(5, struct.pack(">ii", 1, 1))

    number = flags_and_shape(6) + tagged(1, b"") + tagged(9, struct.pack(">d", 4.0))
    text = flags_and_shape(4) + tagged(1, b"") + tagged(17, "é".encode("utf-16-be"))
    names = struct.pack(">HHi", 4, 5, 2) + struct.pack(">HH", 4, 1) + b"a\0b\0"  # tags of four bytes
    array = flags_and_shape(2) + tagged(1, b"s") + names + tagged(14, number) + tagged(14, text)
    file = bytes(124) + b"\x01\x00MI" + tagged(14, array)
    assert read_struct_array(file, "s") == [{"a": 4.0, "b": "é"}]


@pytest.mark.parametrize("data", [b"", b"not a mat file" * 20, saved(x=1), saved(s=[[1.0, 2.0]])])
def test_a_file_without_the_struct_array_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"struct array|MATLAB"):
        read_struct_array(data, "s")


def test_every_truncation_is_an_error() -> None:
    meta = Miniature().meta()
    for end in range(len(meta)):
        with pytest.raises(ValueError, match=r"\w"):
            read_struct_array(meta[:end], "synsets")


@pytest.mark.slow
def test_a_damaged_file_is_read_or_an_error_and_nothing_worse() -> None:
    meta = Miniature().meta()
    plain = meta[:128] + zlib.decompress(meta[136:])
    rng = random.Random(7)
    for _ in range(3000):
        damaged = bytearray(plain)
        damaged[rng.randrange(124, len(plain))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        try:
            read_struct_array(bytes(damaged), "synsets")
        except ValueError:
            continue


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mat_reader, "MAX_INFLATED_BYTES", 1 << 20)
    head, bomb = Miniature().meta()[:128], zlib.compress(bytes(8 << 20))
    packed = struct.pack("<II", 15, len(bomb)) + bomb
    plain = struct.pack("<II", 14, 8 << 20) + bytes(8 << 20)
    for data in (head + packed, head + plain):
        with pytest.raises(ValueError, match="1048576 bytes"):
            read_struct_array(data, "synsets")

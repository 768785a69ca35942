import io
import random
import struct
import zlib

import pytest
import scipy.io

from shardprep.formats.sources import devkit as mat_reader
from shardprep.formats.sources.devkit import read_struct_array
from support.source_builders import Miniature


def test_it_reads_what_scipy_reads() -> None:
    meta = Miniature().meta()
    expected = scipy.io.loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    rows = read_struct_array(meta, "synsets")
    assert len(rows) == len(expected) == 4
    for row, theirs in zip(rows, expected, strict=True):
        for field in ("ILSVRC2012_ID", "WNID", "words", "num_children", "num_train_images"):
            assert row[field] == theirs[field]


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

"""The reader of LMDB files does not trust its file: anything unexpected is refused, and ends no process."""

import os
import struct
from pathlib import Path

import pytest

from shardprep.formats.errors import ShardDamaged
from shardprep.formats.shards.lmdb_reader import LmdbShardReader
from support.shard_files import HEADER, THREE, read, stored, values, write, write_lmdb

PAGE = os.sysconf("SC_PAGE_SIZE")
HONEST = values(THREE)
FIRST = bytes(8)

# Fields of a meta page, after mdb.c's MDB_page and MDB_meta of 64-bit platforms.
VERSION, PAGE_SIZE, FLAGS, DEPTH, ENTRIES, ROOT, TRANSACTION = 20, 40, 92, 94, 120, 128, 144


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard.lmdb"


VALUES = {
    "nothing": (b"", "cut short"),
    "half a header": (HONEST[FIRST][: HEADER.size - 1], "cut short"),
    "half a key": (HONEST[FIRST][: HEADER.size + 2], "unknown header"),
    "a key longer than the value": (HEADER.pack(1, 0, 0xFFFF, 0, 0) + b"key", "unknown header"),
    "version 0": (bytes(64), "unknown header"),
    "version 2": (b"\x02" + HONEST[FIRST][1:], "unknown header"),
}


@pytest.mark.parametrize(("value", "message"), VALUES.values(), ids=VALUES)
def test_a_value_that_is_no_record_is_refused(path: Path, value: bytes, message: str) -> None:
    write_lmdb(path, HONEST | {FIRST: value})

    with pytest.raises(ShardDamaged, match=f"record 0 .*{message}"):
        read(path, "lmdb", 3)


ORDINALS = {
    "missing": {k: v for k, v in HONEST.items() if k != FIRST} | {(3).to_bytes(8, "big"): HONEST[FIRST]},
    "longer": {k + b"\0": v for k, v in HONEST.items()},
    "shorter": {k[4:]: v for k, v in HONEST.items()},
    "little-endian": {k[::-1]: v for k, v in HONEST.items()},
    "text": {str(i).encode(): v for i, v in enumerate(HONEST.values())},
}


@pytest.mark.parametrize("pairs", ORDINALS.values(), ids=ORDINALS)
def test_keys_that_are_not_the_ordinals_are_refused(path: Path, pairs: dict[bytes, bytes]) -> None:
    write_lmdb(path, pairs)

    with pytest.raises(ShardDamaged, match="has no record"):
        read(path, "lmdb", 3)


def test_a_key_too_many_is_refused(path: Path) -> None:
    write_lmdb(path, HONEST | {FIRST + b"\0": b"more"})

    with pytest.raises(ShardDamaged, match="4 records, not 3"):
        read(path, "lmdb", 3)


def with_meta(path: Path, offset: int, value: bytes) -> Path:
    """A shard with changes in both meta pages."""
    with write(path, "lmdb", THREE).open("r+b") as file:
        for page in (0, PAGE):
            file.seek(page + offset)
            file.write(value)
    return path


METAS = {
    "a root behind the end": (ROOT, struct.pack("<Q", 1 << 40)),
    "a root among the metas": (ROOT, struct.pack("<Q", 0)),
    "no root": (ROOT, b"\xff" * 8),
    "2**64 - 1 entries": (ENTRIES, b"\xff" * 8),
    "2**63 entries": (ENTRIES, struct.pack("<Q", 1 << 63)),
    "2**62 entries": (ENTRIES, struct.pack("<Q", 1 << 62)),
    "no entries": (ENTRIES, bytes(8)),
    "another version": (VERSION, struct.pack("<I", 2)),
    "a page size of 0": (PAGE_SIZE, struct.pack("<I", 0)),
    "a page size of 4095": (PAGE_SIZE, struct.pack("<I", 4095)),
    "a page size of 2**31": (PAGE_SIZE, struct.pack("<I", 1 << 31)),
    "65535 levels": (DEPTH, b"\xff\xff"),
    "keys in reverse": (FLAGS, b"\x02\0"),
}


@pytest.mark.parametrize(("offset", "value"), METAS.values(), ids=METAS)
def test_a_crafted_meta_page_is_refused(path: Path, offset: int, value: bytes) -> None:
    with_meta(path, offset, value)

    with pytest.raises(ShardDamaged):
        read(path, "lmdb", 3)


def test_a_file_cut_short_anywhere_is_damage_or_has_the_records(path: Path) -> None:
    data = write(path, "lmdb", THREE).read_bytes()

    for size in range(0, len(data), 61):
        path.write_bytes(data[:size])
        with pytest.raises(ShardDamaged):
            read(path, "lmdb", 3)


def test_pages_that_lead_in_circles_end(path: Path) -> None:
    """A tree of two levels with a root that points to itself, and one of more levels than pages."""
    write(path, "lmdb", [stored(f"n{n}", n, bytes(9)) for n in range(1000)])
    data = bytearray(path.read_bytes())
    meta = max((0, PAGE), key=lambda page: struct.unpack_from("<Q", data, page + TRANSACTION))
    (root,) = struct.unpack_from("<Q", data, meta + ROOT)
    assert struct.unpack_from("<H", data, meta + DEPTH) == (2,)
    first = root * PAGE + struct.unpack_from("<H", data, root * PAGE + 16)[0]
    struct.pack_into("<HHH", data, first, root & 0xFFFF, root >> 16, root >> 32)
    for deep in (2, 3, 32):
        for page in (0, PAGE):
            struct.pack_into("<H", data, page + DEPTH, deep)
        path.write_bytes(data)
        with (
            pytest.raises(ShardDamaged, match=r"page .* is not the one|more pages than any tree"),
            LmdbShardReader(path) as reader,
        ):
            reader.checked(0)

"""LMDB trusts its file: what is not ours is refused, and what kills the library kills only a child."""

import contextlib
import os
import struct
from pathlib import Path

import lmdb
import pytest
from shard_files import HEADER, THREE, read, values, write, write_lmdb

from shardprep.formats.child import ChildDied, isolated
from shardprep.formats.errors import CorruptRecord, ShardDamaged
from shardprep.formats.lmdb_shard import LmdbShardReader

PAGE = os.sysconf("SC_PAGE_SIZE")
HONEST = values(THREE)
FIRST, LAST = (bytes(8), (2).to_bytes(8, "big"))

# Fields of a meta page, after mdb.c's MDB_page and MDB_meta of 64-bit platforms.
MAP_SIZE, FLAGS, DEPTH, ENTRIES, ROOT, LAST_PAGE = 32, 92, 94, 120, 128, 136


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


@pytest.mark.parametrize(("beside", "message"), [(HONEST, "4 records"), ({LAST: b""}, "2 records")])
def test_a_database_inside_is_refused(path: Path, beside: dict[bytes, bytes], message: str) -> None:
    environment = lmdb.open(os.fspath(write_lmdb(path, beside)), subdir=False, lock=False, max_dbs=1)
    with environment:
        inside = environment.open_db(b"hidden")
        with environment.begin(write=True, db=inside) as transaction:
            transaction.put(FIRST, HONEST[FIRST])

    with pytest.raises(ShardDamaged, match=message):
        read(path, "lmdb", 3)


@pytest.mark.parametrize("data", [b"", b"\0", b"no LMDB" * 3000, bytes(3 * PAGE), b"\xff" * 3 * PAGE])
def test_what_is_no_lmdb_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)

    with pytest.raises(ShardDamaged, match="not an LMDB file"):
        LmdbShardReader(path)


def with_meta(path: Path, offset: int, value: bytes) -> Path:
    """A shard whose both meta pages say something else."""
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
    "another version": (20, struct.pack("<I", 2)),
}


@pytest.mark.parametrize(("offset", "value"), METAS.values(), ids=METAS)
def test_a_crafted_meta_page_is_refused(path: Path, offset: int, value: bytes) -> None:
    with_meta(path, offset, value)

    with pytest.raises(ShardDamaged):
        isolated(60, read, path, "lmdb", 3)


HARMLESS_METAS = {
    "a lower last page": (LAST_PAGE, struct.pack("<Q", 1)),
    "a higher last page": (LAST_PAGE, struct.pack("<Q", 1 << 60)),
    "a deep tree": (DEPTH, b"\xff\xff"),
    "reversed and integer keys": (FLAGS, b"\x0a\x00"),
    "a map of 2**62 bytes": (MAP_SIZE, struct.pack("<Q", 1 << 62)),
    "a map of one page": (MAP_SIZE, struct.pack("<Q", PAGE)),
}


@pytest.mark.parametrize(("offset", "value"), HARMLESS_METAS.values(), ids=HARMLESS_METAS)
def test_a_meta_page_that_may_be_wrong_gives_the_records_or_none(
    path: Path, offset: int, value: bytes
) -> None:
    with_meta(path, offset, value)

    with contextlib.suppress(ShardDamaged, CorruptRecord):
        assert isolated(60, read, path, "lmdb", 3) == THREE


def test_a_file_cut_short_kills_only_the_process_that_reads_it(path: Path) -> None:
    os.truncate(write(path, "lmdb", THREE), 2 * PAGE)

    with pytest.raises(ChildDied, match="SIGBUS"):
        isolated(60, read, path, "lmdb", 3)

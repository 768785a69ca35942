"""Shards written, read and damaged without the package, to compare with what the package does."""

import io
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import h5py
import lmdb
import numpy as np

from shardprep.formats.errors import CorruptRecord, ShardDamaged
from shardprep.formats.images.header import read_image_header
from shardprep.formats.records.record import record_crc
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.shards.manifest import index_dtype, index_row
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    Address,
    FileEntry,
    Rows,
    Shard,
    StoredRecord,
    container,
)

HEADER = struct.Struct("<BBHiI")  # of a value in LMDB, according to its documentation


def stored(key: str, label: int, image: bytes) -> StoredRecord:
    return StoredRecord(key.encode(), label, record_crc(key.encode(), label, image), image)


THREE = [stored("n1/a", 0, b"one"), stored("é", -1, bytes(range(60))), stored("n2/c", 999, b"\xff\xd8")]


def unit_of(records: Sequence[StoredRecord]) -> Unit:
    size, key_bytes = sum(len(r.image) for r in records), max((len(r.key) for r in records), default=1)
    return Unit("", 0, 0, len(records), size, key_bytes)


def write(path: Path, kind: str, records: Sequence[StoredRecord]) -> Path:
    places = archived(path, records) if kind == "tar" else [0] * len(records)
    with container(kind).write(path, unit_of(records)) as writer:
        for record, place in zip(records, places, strict=True):
            writer.append(record._replace(offset=place))
    return path


def archived(path: Path, records: Sequence[StoredRecord]) -> list[int]:
    """Put the images into the archive beside a table; return where they begin."""
    with tarfile.open(path.with_name(ARCHIVE_NAME), "w") as archive:
        for number, record in enumerate(records):
            member = tarfile.TarInfo(f"{number}.JPEG")
            member.size = len(record.image)
            archive.addfile(member, io.BytesIO(record.image))
    with tarfile.open(path.with_name(ARCHIVE_NAME)) as archive:
        return [member.offset_data for member in archive]


def opened(path: Path, kind: str, records: int) -> Shard:
    return Shard(path, kind, FileEntry(path.name, path.stat().st_size, "", records))


def address(record: StoredRecord) -> Address:
    """The record's address, without an offset as in format 1.0 unless the record has one."""
    return record.key, record.label, record.crc32c, record.offset, len(record.image)


def read(path: Path, kind: str, records: int) -> list[StoredRecord]:
    """What the shard says of its records; each is read by its address, too, and without its offset."""
    found = []
    with Shard(path, kind) as reader, opened(path, kind, records) as shard:
        for ordinal in range(records):
            record = reader.read_record(ordinal)
            found.append(record._replace(offset=0))
            assert shard.read_image(ordinal, address(record)) == record.image
            assert shard.read_image(ordinal, address(found[-1])) == record.image
    return found


def index_rows(records: Sequence[StoredRecord]) -> Rows:
    """The rows of the index for these records of shard 0."""
    rows = np.zeros(len(records), index_dtype(unit_of(records).key_bytes))
    for ordinal, record in enumerate(records):
        rows[ordinal] = index_row(record, read_image_header(record.image), 0, ordinal)
    return rows


def columns(records: Sequence[StoredRecord]) -> dict[str, np.ndarray]:
    ends = np.cumsum([0, *(len(r.image) for r in records)])
    return {
        "data": np.frombuffer(b"".join(r.image for r in records), "u1"),
        "offsets": ends.astype("<i8"),
        "labels": np.array([r.label for r in records], "<i4"),
        "keys": np.array([r.key for r in records], f"S{unit_of(records).key_bytes}"),
        "crc32c": np.array([r.crc32c for r in records], "<u4"),
    }


def values(records: Iterable[StoredRecord]) -> dict[bytes, bytes]:
    """The records of an LMDB shard."""
    return {
        ordinal.to_bytes(8, "big"): HEADER.pack(1, 0, len(r.key), r.label, r.crc32c) + r.key + r.image
        for ordinal, r in enumerate(records)
    }


def write_around(path: Path, kind: str, records: Sequence[StoredRecord]) -> Path:
    """Write a shard with plain calls of its library."""
    if kind == "lmdb":
        return write_lmdb(path, values(records))
    if kind == "tar":
        with path.open("wb") as table:
            np.save(table, places(records, archived(path, records)))
        return path
    with h5py.File(path, "w") as file:
        for name, column in columns(records).items():
            file[name] = column
    return path


def places(records: Sequence[StoredRecord], offsets: Iterable[int]) -> Rows:
    """The rows of a table, according to its documentation."""
    columns = {"offset": "<u8", "length": "<u4", "label": "<i4", "crc32c": "<u4"}
    columns["key"] = f"S{unit_of(records).key_bytes}"
    rows = [(at, len(r.image), r.label, r.crc32c, r.key) for at, r in zip(offsets, records, strict=True)]
    return np.array(rows, [*columns.items()])


def write_lmdb(path: Path, pairs: dict[bytes, bytes]) -> Path:
    environment = lmdb.open(os.fspath(path), subdir=False, lock=False, map_size=16 << 20)
    with environment, environment.begin(write=True) as transaction:
        for key, value in pairs.items():
            transaction.put(key, value)
    return path


def read_around(path: Path, kind: str) -> list[StoredRecord]:
    if kind == "lmdb":
        environment = lmdb.open(os.fspath(path), subdir=False, lock=False, readonly=True)
        with environment, environment.begin() as transaction:
            pairs = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
        assert [key for key, _ in pairs] == [i.to_bytes(8, "big") for i in range(len(pairs))]
        return [_parsed(value) for _, value in pairs]
    if kind == "tar":
        archive = path.with_name(ARCHIVE_NAME).read_bytes()
        rows = [row.item() for row in np.load(path)]
        return [StoredRecord(key, label, crc, archive[at : at + size]) for at, size, label, crc, key in rows]
    with h5py.File(path, "r") as file:
        data, offsets, labels, keys, crcs = (file[name][()] for name in columns([]))
    return [
        StoredRecord(
            bytes(keys[i]), int(labels[i]), int(crcs[i]), data[offsets[i] : offsets[i + 1]].tobytes()
        )
        for i in range(len(labels))
    ]


def _parsed(value: bytes) -> StoredRecord:
    _, _, key_bytes, label, crc32c = HEADER.unpack_from(value)
    image = HEADER.size + key_bytes
    return StoredRecord(value[HEADER.size : image], label, crc32c, value[image:])


def try_flips(path: Path, kind: str, todo: list[tuple[int, int]], tried: Path, unseen: Path) -> None:
    """Flip each (position, bit) of a shard of THREE in turn, and read it.

    Before each flip a byte is appended to ``tried``, so that the parent knows which one killed this process.
    A line is appended to ``unseen`` for each flip that gave other records, or an undocumented error.
    """
    with path.open("r+b", buffering=0) as file, tried.open("wb", buffering=0) as log:
        for position, bit in todo:
            log.write(b".")
            original = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([original[0] ^ 1 << bit]), position)
            outcome = _outcome(lambda: read(path, kind, len(THREE)))
            os.pwrite(file.fileno(), original, position)
            if outcome not in (THREE, "refused"):
                with unseen.open("a") as found:
                    found.write(f"{position}.{bit}: {outcome}\n")


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except (ShardDamaged, CorruptRecord):
        return "refused"
    except Exception as error:  # anything else is a finding
        return repr(error)

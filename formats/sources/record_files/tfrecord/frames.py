"""The frames of a TFRecord file: a length, its checksum, the data, its checksum."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile

ADVICE = "copy or download the file again"
HEAD = struct.Struct("<QI")  # length, masked CRC-32C of its 8 bytes
TAIL = struct.Struct("<I")  # masked CRC-32C of the data

_GZIP, _ZLIB = b"\x1f\x8b", b"\x78"
_MASK = 0xA282EAD8


class Frame(NamedTuple):
    """The place of a record: the offset of its frame, and that of its data with its length."""

    start: int
    data: int
    length: int


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C as TFRecord files have it, rotated and with a constant added."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def frames(file: ArchiveFile) -> Iterator[Frame]:
    """Yield the frames in their order; each length is checked, and no data is read. Raises SourceDamaged."""
    at = 0
    while at < file.end:
        with foreign_file(f"{file.path}, byte {at}", ADVICE):
            length = _length(file.read_at(HEAD.size, at), at)
            if length > file.end - at - HEAD.size - TAIL.size:
                raise ValueError("the file is cut off within a record")
        yield Frame(at, at + HEAD.size, length)
        at += HEAD.size + length + TAIL.size


def _length(head: bytes, at: int) -> int:
    if len(head) < HEAD.size:
        raise ValueError("the file is cut off within the length of a record")
    length, crc = HEAD.unpack(head)
    if crc != masked_crc(head[:8]):
        if at == 0 and head.startswith((_GZIP, _ZLIB)):
            raise ValueError("the file is compressed, and records are read in place: write it without that")
        raise ValueError("the checksum of a record's length is wrong")
    return int(length)


def read_frame(file: ArchiveFile, start: int, length: int) -> bytes:
    """Return the data of the frame at ``start``. Raises SourceDamaged unless length and checksums match."""
    with foreign_file(f"{file.path}, byte {start}", ADVICE):
        whole = file.read_at(HEAD.size + length + TAIL.size, start)
        if _length(whole[: HEAD.size], start) != length or len(whole) < HEAD.size + length + TAIL.size:
            raise ValueError("there is another record than was listed")
        data = whole[HEAD.size : -TAIL.size]
        if TAIL.unpack(whole[-TAIL.size :]) != (masked_crc(data),):
            raise ValueError("the checksum of a record's data is wrong")
    return data


def begins_with_frame(path: Path) -> bool:
    """Whether a file begins with a length and its checksum. Raises OSError."""
    with ArchiveFile(path) as file:
        head = file.read_at(HEAD.size, 0)
    return len(head) == HEAD.size and HEAD.unpack(head)[1] == masked_crc(head[:8])

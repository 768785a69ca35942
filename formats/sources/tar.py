"""Tar archives, read in place on a disk or in object storage: headers, members and official MD5s.

Damage is an error, never a shorter listing. Python's tarfile ends silently at a damaged header
(cpython#120740), so it is not used.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import adler32

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.runtime.files import ArchiveFile, Identity, ReadAt, errors_as_damage
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.owners import Owner
from shardprep.formats.runtime.progress import NoProgress, Progress
from shardprep.formats.sources.source import Archive, Entries, ResourceReader, WholeArchive
from shardprep.formats.storage.archive import HEADERS_AT_ONCE, PIECE_BYTES, RemoteArchive, RemoteFile
from shardprep.formats.storage.store import PATIENT, Location, RemoteDenied, RemoteFolder, StoredFile

BLOCK = 512
USTAR, GNU = b"ustar\x0000", b"ustar  \x00"
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_PAX_LENGTH = re.compile(rb"([1-9][0-9]{0,6}) ")


class Header(NamedTuple):
    """A header's fields; the name is unchecked."""

    name: bytes
    size: int
    kind: bytes


def parse_header(block: bytes) -> Header:
    """Parse a header. Raises ValueError unless checksum, magic and size are valid."""
    # The low half of Adler-32 is the sum plus one, exact for 256 bytes (255 * 256 < 65521) and ten times as
    # fast as ``sum``. The checksum field itself counts as spaces.
    halves = (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF) - 2
    if _octal(block[148:156]) != halves - sum(block[148:156]) + 8 * ord(" "):
        raise ValueError("the header's checksum is wrong")
    magic = block[257:265]
    if magic not in (USTAR, GNU):
        raise ValueError("the header has no ustar magic")
    name = block[:100].rstrip(b"\0")
    if magic == USTAR and block[345]:
        name = block[345:500].rstrip(b"\0") + b"/" + name
    is_base_256 = block[124] == 0x80  # GNU's; 0xff would be negative
    size = int.from_bytes(block[125:136], "big") if is_base_256 else _octal(block[124:136])
    return Header(name, size, block[156:157])


def _octal(field: bytes) -> int:
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise ValueError("the header has an invalid or negative number")
    return int(match[1], 8)


def parse_pax(data: bytes) -> dict[bytes, bytes]:
    """Parse the records ``<length> <keyword>=<value>`` of a pax extended header. Raises ValueError."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        match = _PAX_LENGTH.match(data, at)
        stop = at + int(match[1]) if match else 0
        record = data[match.end() : stop] if match else b""
        keyword, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not equals or not record.endswith(b"\n") or stop > len(data) or keyword in records:
            raise ValueError("the pax header is damaged")
        records[keyword] = value
        at = stop
    return records


def decode_name(raw: bytes) -> str:
    """Decode a name. Raises ValueError unless it is a relative path without ``..`` and the like."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise ValueError("its name is not UTF-8: rename the file before it is packed") from None
    name = name.removeprefix("./")
    if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError("its name is not a plain relative path")
    return name


@dataclass
class TarReader(ResourceReader[ArchiveFile | RemoteArchive]):
    """Reader of an uncompressed archive, in object storage or a local file with the ``identity`` listed."""

    path: Path | RemoteFile
    identity: Identity | None = None

    def open_resource(self) -> ArchiveFile | RemoteArchive:
        return open_archive(self.path, self.identity)

    def expect(self, entries: Entries) -> None:
        if isinstance(self.resource, RemoteArchive):
            self.resource.expect(zip(entries["length"].tolist(), entries["offset"].tolist(), strict=True))

    def read(self, entry: np.void) -> bytes:
        length = int(entry["length"])
        data = self.resource.read_at(length, int(entry["offset"]))
        if len(data) < length:
            raise SourceDamaged("ends before the image does; copy it again", path=self.location_of(entry))
        return data

    @property
    def archive(self) -> WholeArchive | None:
        if isinstance(self.path, RemoteFile) or self.identity is None:
            return None
        return WholeArchive(self.path, self.identity.size)

    def location_of(self, entry: np.void) -> str:
        place = self.path.url if isinstance(self.path, RemoteFile) else self.path
        return f"{place}, byte {entry['offset']}"


def open_archive(path: Path | RemoteFile, expected: Identity | None = None) -> ArchiveFile | RemoteArchive:
    """Return the context of a file to read by offset; a local file must be the ``expected`` one."""
    return RemoteArchive(path) if isinstance(path, RemoteFile) else ArchiveFile(path, expected)


MAX_EXTENSION_BYTES = 64 << 10  # of a long name or a pax header; paths have at most 4 KiB
_ZEROS = bytes(BLOCK)
_PIECE = 1 << 20
_FILE, _FOLDER, _EXTENSIONS = (b"0", b"\0"), b"5", (b"L", b"x", b"g")


class Member(NamedTuple):
    """A regular file in the archive; ``offset`` is where its bytes start."""

    name: str
    offset: int
    size: int


def walk_tar(read_at: ReadAt, *, archive: str, end: int, start: int = 0) -> Iterator[Member]:
    """Yield the regular files of the tar from ``start`` to ``end``, in order; folders are skipped.

    ``read_at`` is called with increasing offsets only, so it may read a stream; ``end`` may then be beyond
    the stream's end. ``archive`` names the archive in errors. Raises SourceDamaged for a damaged or truncated
    archive, for links, devices, fifos and sparse files, and for hostile or repeated names.
    """
    at, seen = start, set[str]()
    extended: dict[str, Any] = {}  # the next member's name and size from its extended headers
    current: bytes | None = None  # the name of the member

    def place() -> str:
        member = "" if current is None else f", member {current.decode(errors='backslashreplace')!r}"
        return f"at byte {at}{member}: "

    with errors_as_damage(archive, "copy or download the archive again", place=place):
        while (block := read_at(BLOCK, at) if at + BLOCK <= end else b"") != _ZEROS:
            if len(block) < BLOCK:
                raise ValueError("the archive is truncated: its end mark is missing")
            header = parse_header(block)
            if extended and header.kind not in _EXTENSIONS:
                header, extended = header._replace(**extended), {}
            current = header.name
            body, padded = at + BLOCK, -(-header.size // BLOCK) * BLOCK
            if padded > end - body:
                raise ValueError(f"its {header.size} bytes do not fit into the archive")
            if header.kind in _FILE:
                name = decode_name(header.name)
                if name in seen:
                    raise ValueError("its name occurs twice")
                seen.add(name)
                yield Member(name, body, header.size)
            elif header.kind in _EXTENSIONS:
                if header.size > MAX_EXTENSION_BYTES:
                    raise ValueError(f"it is an extended header of {header.size} bytes")
                _read_extension(extended, header, read_at(header.size, body))
            elif header.kind != _FOLDER:
                raise ValueError(f"it is a link, a device or sparse (type {header.kind!r}), not a plain file")
            elif header.size:  # some readers skip that many bytes, and others do not
                raise ValueError("it is a folder with data")
            at, current = body + padded, None
        if extended:
            raise ValueError("an extended header has no member")
        at += BLOCK
        mark = at + BLOCK
        while at < end and (piece := read_at(min(_PIECE, end - at), at)):
            if piece.count(0) != len(piece):
                raise ValueError("data after a block of zeros, which marks the end")
            at += len(piece)
        if at < mark:
            raise ValueError("the archive is truncated: half of its end mark is missing")


def _read_extension(extended: dict[str, Any], header: Header, data: bytes) -> None:
    if len(data) < header.size:
        raise ValueError("the archive is truncated within an extended header")
    records = {b"path": data.rstrip(b"\0")} if header.kind == b"L" else parse_pax(data)
    if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
        raise ValueError("it is a sparse file")
    if header.kind == b"g" and not records.keys().isdisjoint({b"path", b"size"}):
        raise ValueError("it is a global header that gives all members one path or size")
    if (name := records.get(b"path")) is not None:
        if "name" in extended or not name:
            raise ValueError("extended headers give the member no name, or two")
        extended["name"] = name
    if (digits := records.get(b"size")) is not None:
        if "size" in extended or not digits.isdigit() or len(digits) > 19:
            raise ValueError("extended headers give the member no valid size, or two")
        extended["size"] = int(digits)


OFFICIAL_FILES = {  # MD5s of the download page of 2012, and of 2019 for the patched test images
    "ILSVRC2012_img_train.tar": "1d675b47d978889d74fa0da5fadfb00e",
    "ILSVRC2012_img_val.tar": "29b22e2961454d5413ddabcf34fc5622",
    "ILSVRC2012_img_test.tar": "fe64ceb247e473635708aed23ab6d839",
    "ILSVRC2012_img_test_v10102019.tar": "e1b8681fff3d63731c599df9b4b6fc02",
    "ILSVRC2012_img_train_t3.tar": "ccaf1013018ac1037801578038d370da",
    "ILSVRC2012_devkit_t12.tar.gz": "fa75699e90414af021442c21a62c3abf",
    "ILSVRC2012_bbox_train_v2.tar.gz": "9271167e2176350e65cfe4e546f14b17",
    "ILSVRC2012_bbox_val_v3.tgz": "f4cd18b5ea29fe6bbea62ec9c20d80f0",
}


def describe_archive(
    path: Path | RemoteFile, *, check_md5: bool = False, progress: Progress | None = None
) -> Archive:
    """Return a file's entry for a listing, with the MD5 of all its bytes if that is known and to be checked.

    Raises SourceDamaged for an official name with another MD5, OSError, RemoteFailed.
    """
    if isinstance(path, RemoteFile):
        entry = Archive(path.name, path.stored.size, 0, e_tag=path.stored.e_tag)
    else:
        status = path.stat()
        entry = Archive(path.name, status.st_size, status.st_mtime_ns)
    if not check_md5 or entry.name not in OFFICIAL_FILES:
        return entry
    md5, official = _md5_of(path, progress or NoProgress()), OFFICIAL_FILES[entry.name]
    if md5 != official:
        place = path.url if isinstance(path, RemoteFile) else path
        raise SourceDamaged(f"has MD5 {md5}, not {official}; download it again", path=place)
    return replace(entry, md5=md5)


def _md5_of(path: Path | RemoteFile, progress: Progress) -> str:
    digest, title = hashlib.md5(usedforsecurity=False), f"check the MD5 of {path.name}"
    with open_archive(path) as archive, progress.task(title, records=0, size=archive.end):
        reads = [(min(PIECE_BYTES, archive.end - at), at) for at in range(0, archive.end, PIECE_BYTES)]
        if isinstance(archive, RemoteArchive):
            archive.expect(reads)
        for length, at in reads:
            digest.update(archive.read_at(length, at))
            progress.at(0, at + length)
    return digest.hexdigest()


SEGMENT_BYTES = 16 << 20  # at least
WINDOW_BYTES = 256 << 10  # read at once to find a segment's first header


def prefetch_headers(archive: RemoteArchive) -> ReadAt:
    """Prefetch the archive's headers, and return a ``read_at`` for a walk that has most of them.

    Following a chain of headers means one request after another. So the archive is split into segments, and
    in all of them at once the first apparent header is found and its chain followed. The walk only uses
    headers at offsets where its own chain leads; others, such as in a tar within an image, have no effect.
    """
    count = max(1, min(HEADERS_AT_ONCE, archive.end // SEGMENT_BYTES))
    starts = (archive.end * number // count // BLOCK * BLOCK for number in range(count))
    ahead: dict[int, bytes] = {}
    segments = pairwise([*starts, archive.end])
    for blocks in archive.map(lambda segment: _follow_headers(archive, *segment), segments):
        ahead.update(blocks)

    def read_at(length: int, offset: int) -> bytes:
        block = ahead.pop(offset, None) if length == BLOCK else None
        return archive.read_at(length, offset) if block is None else block

    return read_at


def _follow_headers(archive: RemoteArchive, start: int, stop: int) -> dict[int, bytes]:
    """Return the chain of blocks from a segment's first header to the first block without one, by offset."""
    blocks: dict[int, bytes] = {}
    at = start if start == 0 else _find_first_header(archive, start, stop)
    while at < stop:
        block = archive.read_at(BLOCK, at)
        blocks[at] = block
        header = _try_header(block)
        if header is None:
            break
        at += BLOCK + -(-header.size // BLOCK) * BLOCK
    return blocks


def _find_first_header(archive: RemoteArchive, start: int, stop: int) -> int:
    for at in range(start, stop, WINDOW_BYTES):
        window = archive.read_at(min(WINDOW_BYTES, stop - at), at)
        for place in range(0, len(window) - BLOCK + 1, BLOCK):
            if _try_header(window[place : place + BLOCK]):
                return at + place
    return stop


def _try_header(block: bytes) -> Header | None:
    try:
        return parse_header(block)
    except (ValueError, IndexError):
        return None


def find_remote_files(place: Location, names: Sequence[str]) -> dict[str, RemoteFile]:
    """Return the files in a place by name; a web server lists none, so the readable ones of ``names``.

    Raises RemoteMissing, RemoteDenied, RemoteFailed, OperationError where obstore is not installed.
    """
    with LoopThread(threads=1) as loop:
        files = loop.run(_find_files(RemoteFolder(place, PATIENT), names))
    return {name: RemoteFile(place, name, files[name]) for name in sorted(files)}


async def _find_files(folder: RemoteFolder, names: Sequence[str]) -> dict[str, StoredFile]:
    if folder.place.scheme not in ("http", "https"):
        return {name: file for name, file in (await folder.list_files()).items() if file}

    denied: list[RemoteDenied] = []

    async def metadata(name: str) -> StoredFile | None:
        try:
            return await folder.metadata(name)
        except RemoteDenied as error:  # the answer of a public bucket without listing for a missing file
            denied.append(error)
            return None

    files = await asyncio.gather(*map(metadata, names))
    if denied and not any(files):
        raise denied[0]
    return {name: file for name, file in zip(names, files, strict=True) if file is not None}


class TemporaryCopies(Owner):
    """A temporary folder with copies of files, which is removed when nothing refers to this object.

    Raises SourceDamaged for a file that has changed, RemoteFailed, OSError.
    """

    def __init__(self, files: Iterable[RemoteFile]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
        weakref.finalize(self, _remove_folder, self.folder, os.getpid())
        for file in files:
            path = self.folder / file.name
            with RemoteArchive(file) as archive, path.open("wb") as copy:
                for piece in archive.pieces():
                    copy.write(piece)
            os.utime(path, (0, 0))  # with the time of the copy, each run would be a different conversion


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)

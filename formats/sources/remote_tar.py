"""Tar archives in object storage: listed by their headers, and read by offset."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shardprep.formats.runtime.files import ReadAt
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.sources.source import Archive, Entries
from shardprep.formats.sources.tar import (
    BLOCK,
    ArchiveReader,
    Header,
    parse_header,
    verified_by_md5,
    verified_by_size,
)
from shardprep.formats.storage.archive import HEADERS_AT_ONCE, RemoteArchive, RemoteFile
from shardprep.formats.storage.store import PATIENT, Location, RemoteDenied, RemoteFolder, StoredFile

SEGMENT_BYTES = 16 << 20  # the least that a segment has
WINDOW_BYTES = 256 << 10  # read at a time to find a segment's first header

_MAGIC, _MAGIC_AT = b"ustar", 257


def headers_ahead(archive: RemoteArchive) -> ReadAt:
    """Return the archive's ``read_at``, for a walk, which finds most headers there already.

    A chain of headers is one answer after the other. So the archive is cut into segments; in each, all at
    once, what looks like a header is found, and the chain from there is read. The walk decides which of these
    blocks it uses: those at the offsets that its own chain leads to. Others, such as a tar within an image,
    change nothing.
    """
    count = max(1, min(HEADERS_AT_ONCE, archive.end // SEGMENT_BYTES))
    starts = [archive.end * number // count // BLOCK * BLOCK for number in range(count)]
    known: dict[int, bytes] = {}
    for blocks in archive.mapped(lambda segment: _chain(archive, *segment), pairwise([*starts, archive.end])):
        known.update(blocks)

    def read_at(length: int, offset: int) -> bytes:
        block = known.pop(offset, None) if length == BLOCK else None
        return archive.read_at(length, offset) if block is None else block

    return read_at


def _chain(archive: RemoteArchive, start: int, stop: int) -> dict[int, bytes]:
    """Return the blocks of a segment from the first header that is found to what is none, by offset."""
    blocks: dict[int, bytes] = {}
    at = start if start == 0 else _first_header(archive, start, stop)
    while at < stop:
        block = archive.read_at(BLOCK, at)
        blocks[at] = block
        header = _header(block)
        if header is None:
            break
        at += BLOCK + -(-header.size // BLOCK) * BLOCK
    return blocks


def _first_header(archive: RemoteArchive, start: int, stop: int) -> int:
    for at in range(start, stop, WINDOW_BYTES):
        window = archive.read_at(min(WINDOW_BYTES, stop - at), at)
        for place in range(0, len(window) - BLOCK + 1, BLOCK):
            is_marked = window.startswith(_MAGIC, place + _MAGIC_AT)
            if is_marked and _header(window[place : place + BLOCK]):
                return at + place
    return stop


def _header(block: bytes) -> Header | None:
    if len(block) < BLOCK:
        return None
    try:
        return parse_header(block)
    except ValueError:
        return None


def remote_archive_of(file: RemoteFile, *, check_md5: bool) -> Archive:
    """Return the entry of a file; ``check_md5`` reads all of it.

    Raises SourceDamaged for an official name with another MD5, and RemoteFailed.
    """
    size, e_tag = file.stored.size, file.stored.e_tag
    if not check_md5:
        return Archive(file.name, size, 0, verified=verified_by_size(file.name, size), e_tag=e_tag)
    digest = hashlib.md5(usedforsecurity=False)
    with RemoteArchive(file) as archive:
        for piece in archive.pieces():
            digest.update(piece)
    md5 = digest.hexdigest()
    return Archive(file.name, size, 0, md5, verified_by_md5(file.name, md5, file.url), e_tag)


def files_in(place: Location, names: Sequence[str]) -> dict[str, RemoteFile]:
    """Return the files in a place by name; on a web server, which lists none, the readable ones of ``names``.

    Raises RemoteMissing, RemoteDenied, RemoteFailed, OperationError where obstore is not installed.
    """
    with LoopThread(threads=1) as loop:
        found = loop.run(_found(RemoteFolder(place, PATIENT), names))
    return {name: RemoteFile(place, name, found[name], PATIENT) for name in sorted(found)}


async def _found(folder: RemoteFolder, names: Sequence[str]) -> dict[str, StoredFile]:
    if folder.place.scheme not in ("http", "https"):
        return await folder.files()

    async def asked(name: str) -> StoredFile | None:
        try:
            return await folder.about(name)
        except RemoteDenied:  # which a public bucket without listing says of what is not there
            return None

    every = await asyncio.gather(*map(asked, names))
    return {name: found for name, found in zip(names, every, strict=True) if found is not None}


class CopiedFiles(Owned):
    """A temporary folder with copies of files; it is removed when nothing refers to this object."""

    def __init__(self, files: Iterable[RemoteFile]) -> None:
        """Copy the files. Raises SourceDamaged for one that has changed, RemoteFailed, OSError."""
        self.folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
        weakref.finalize(self, _remove, self.folder, os.getpid())
        for file in files:
            path = self.folder / file.name
            with RemoteArchive(file) as archive, path.open("wb") as copy:
                for piece in archive.pieces():
                    copy.write(piece)
            os.utime(path, (0, 0))  # a time of this copy would make each run another conversion


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RemoteTarReader(ArchiveReader):
    """Reader of an archive in object storage."""

    file: RemoteFile

    def opening(self) -> RemoteArchive:
        return RemoteArchive(self.file)

    def expect(self, entries: Entries) -> None:
        self.opened.expect(zip(entries["length"].tolist(), entries["offset"].tolist(), strict=True))

    def where(self, entry: np.void) -> str:
        return f"{self.file.url}, byte {entry['offset']}"

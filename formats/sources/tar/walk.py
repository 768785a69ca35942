"""The walk over a tar's headers: damage is an error, never a shorter listing.

Python's tarfile is not used, because it ends silently at a damaged header (cpython#120740).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ReadAt

from .header import BLOCK, Header, parse_header, parse_pax, plain_name

MAX_EXTENSION_BYTES = 64 << 10  # of a long name or a pax header; paths have at most 4 KiB

_ZEROS = bytes(BLOCK)
_PIECE = 1 << 20
_FILE, _FOLDER, _EXTENSIONS = (b"0", b"\0"), b"5", (b"L", b"x", b"g")
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a fifo",
    b"K": "a link with a long name",
    b"S": "a sparse file",
}


class Member(NamedTuple):
    """A regular file in the archive; ``offset`` is the start of its bytes for ``read_at``."""

    name: str
    offset: int
    size: int


def walk(read_at: ReadAt, *, archive: str, end: int, start: int = 0) -> Iterator[Member]:
    """Yield the regular files of the tar at ``start`` … ``end``, in their order; folders are skipped.

    ``read_at`` is called with rising offsets only, so it may read a stream; ``end`` may then be after the
    stream's end. ``archive`` names the archive in errors. Raises SourceDamaged for a damaged or truncated
    archive, for links, devices, fifos and sparse files, and for hostile or repeated names.
    """
    return _Walk(read_at, archive, start, end).members()


class _Walk:
    def __init__(self, read_at: ReadAt, archive: str, start: int, end: int) -> None:
        self._read_at, self._archive, self._at, self._end = read_at, archive, start, end
        self._seen: set[str] = set()
        self._name: bytes | None = None
        self._size: int | None = None
        self._last: bytes | None = None
        self._is_behind = False

    def members(self) -> Iterator[Member]:
        with foreign_file(self._archive, "copy or download the archive again", place=self._place):
            while (header := self._header()) is not None:
                self._last, self._is_behind = header.name, False
                if (member := self._member(header)) is not None:
                    yield member
                self._is_behind = True  # a later error is in a header without a known name
            self._last = None
            self._check_end()

    def _header(self) -> Header | None:
        """Return the next header, with its extensions applied; None at a block of zeros."""
        block = self._read_at(BLOCK, self._at) if self._at + BLOCK <= self._end else b""
        if len(block) < BLOCK:
            raise ValueError("the archive is cut off: its end mark is missing")
        if block == _ZEROS:
            return None
        header = parse_header(block)
        if header.kind in _EXTENSIONS or (self._name is None and self._size is None):
            return header
        name, size = self._name or header.name, header.size if self._size is None else self._size
        self._name = self._size = None
        return Header(name, size, header.kind)

    def _member(self, header: Header) -> Member | None:
        body = self._at + BLOCK
        padded = -(-header.size // BLOCK) * BLOCK
        if padded > self._end - body:
            raise ValueError(f"its {header.size} bytes do not fit into the archive")
        member = None
        if header.kind in _FILE:
            member = Member(self._unseen(plain_name(header.name)), body, header.size)
        elif header.kind in _EXTENSIONS:
            self._extend(header, self._extension(header, body))
        elif header.kind == _FOLDER:
            _check_folder(header)
        else:
            raise ValueError(f"it is {_REFUSED.get(header.kind, f'of the unknown type {header.kind!r}')}")
        self._at = body + padded
        return member

    def _unseen(self, name: str) -> str:
        if name in self._seen:
            raise ValueError("its name occurs twice")
        self._seen.add(name)
        return name

    def _extension(self, header: Header, body: int) -> bytes:
        if header.size > MAX_EXTENSION_BYTES:
            raise ValueError(f"it is an extended header of {header.size} bytes")
        data = self._read_at(header.size, body)
        if len(data) < header.size:
            raise ValueError("the archive is cut off within an extended header")
        return data

    def _extend(self, header: Header, data: bytes) -> None:
        if header.kind == b"L":
            self._rename(data.rstrip(b"\0"))
            return
        records = parse_pax(data)
        if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
            raise ValueError("it is a sparse file")
        if header.kind == b"g" and not records.keys().isdisjoint({b"path", b"size"}):
            raise ValueError("it is a global header that gives all members one path or size")
        if b"path" in records:
            self._rename(records[b"path"])
        if b"size" in records:
            self._resize(records[b"size"])

    def _rename(self, name: bytes) -> None:
        if self._name is not None or not name:
            raise ValueError("extended headers give the member no name, or two")
        self._name = name

    def _resize(self, digits: bytes) -> None:
        if self._size is not None or not digits.isdigit() or len(digits) > 19:
            raise ValueError("extended headers give the member no sound size, or two")
        self._size = int(digits)

    def _check_end(self) -> None:
        """Check that only zeros follow a block of zeros, and at least one block of them."""
        if self._name is not None or self._size is not None:
            raise ValueError("an extended header has no member")
        self._at += BLOCK
        mark = self._at + BLOCK
        while self._at < self._end and (piece := self._read_at(min(_PIECE, self._end - self._at), self._at)):
            if piece.count(0) != len(piece):
                raise ValueError("data after a block of zeros, which marks the end")
            self._at += len(piece)
        if self._at < mark:
            raise ValueError("the archive is cut off: half of its end mark is missing")

    def _place(self) -> str:
        """Return the place of the walk, for an error."""
        if self._last is None:
            return f"at byte {self._at}: "
        name = self._last.decode(errors="backslashreplace")
        return f"at byte {self._at}, {'behind ' if self._is_behind else ''}member {name!r}: "


def _check_folder(header: Header) -> None:
    if header.size:
        raise ValueError("it is a folder with bytes of its own")
    name = header.name.rstrip(b"/")
    if header.name.startswith(b"/") or name != b".":
        plain_name(name)

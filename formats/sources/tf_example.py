"""Messages of ``tf.train.Example`` in frames of TFRecord, read with bounds and without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from shardprep.formats.records.codecs import MAX_VALUE_BYTES
from shardprep.formats.runtime.files import ArchiveFile, ReadAt, foreign_file
from shardprep.formats.sources.record_files import ADVICE

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_VARINT = 10  # bytes

_PIECE, _PIECES = 1 << 12, 4  # bytes of a piece, and pieces that are kept
_SIZES = {FIXED64: 8, FIXED32: 4}


class ByteWindow:
    """Bytes that are read in small pieces: those passed over are not read."""

    def __init__(self, read_at: ReadAt, end: int) -> None:
        self.end = end
        self._read_at = read_at
        self._pieces: list[tuple[int, bytes]] = []

    def take(self, start: int, end: int) -> bytes:
        """Return the bytes between two offsets. Raises ValueError if the file ends before."""
        for at, piece in self._pieces:
            if at <= start and end <= at + len(piece):
                return piece[start - at : end - at]
        piece = self._read_at(min(max(end - start, _PIECE), self.end - start), start)
        if len(piece) < end - start:
            raise ValueError("the file ends within a record")
        self._pieces = [(start, piece), *self._pieces[: _PIECES - 1]]
        return piece[: end - start]


def window_of(data: bytes) -> ByteWindow:
    """Return a window on bytes in memory."""
    return ByteWindow(lambda length, offset: data[offset : offset + length], len(data))


class WireField(NamedTuple):
    """A field of a message: its number, its type on the wire, and the place of its value."""

    number: int
    kind: int
    start: int
    end: int


def parts(window: ByteWindow, start: int, end: int) -> Iterator[WireField]:
    """Yield the fields of the message between two offsets. Raises ValueError for damaged ones."""
    at = start
    while at < end:
        head = window.take(at, min(at + 2 * MAX_VARINT, end))
        tag, used = varint(head, 0)
        number, kind = tag >> 3, tag & 7
        size, after = _SIZES.get(kind, -1), used
        if kind == LENGTH:
            size, after = varint(head, used)
        elif kind == VARINT:
            size = varint(head, used)[1] - used
        begin = at + after
        if not 0 <= size <= end - begin or not number:
            raise ValueError(f"a field of type {kind} and {size} bytes does not fit into its message")
        at = begin + size
        yield WireField(number, kind, begin, at)


def varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at a place, 0 to 2**64 - 1, and the place after it. Raises ValueError."""
    number = 0
    for place, byte in enumerate(data[start : start + MAX_VARINT]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80 and number < 1 << 64:
            return number, start + place + 1
    raise ValueError("a number is cut off, or has more than 64 bits")


def integers(data: bytes) -> npt.NDArray[np.int64]:
    """Return the numbers of a packed field, int64 [n]. Raises ValueError."""
    raw = np.frombuffer(data, np.uint8)
    is_end = raw < 0x80
    if (count := np.count_nonzero(is_end)) > MAX_VALUE_BYTES // 8:
        raise ValueError(f"a list has {count:,} numbers; a value has at most {MAX_VALUE_BYTES // 8:,}")
    ends = np.flatnonzero(is_end)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise ValueError("a list of numbers is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    sizes = ends - starts + 1
    if len(sizes) and (sizes.max() > MAX_VARINT or (raw[ends[sizes == MAX_VARINT]] > 1).any()):
        raise ValueError("a number in a list has more than 64 bits")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(sizes.max(initial=0))):
        longer = sizes > place
        bits = raw[starts[longer] + place].astype(np.uint64) & np.uint64(0x7F)
        found[longer] |= bits << np.uint64(7 * place)
    return found.view(np.int64)


BYTES, FLOATS, INTEGERS = "bytes", "floats", "integers"
MAX_FEATURES = 256
MAX_NAME_BYTES = 256
MAX_VALUES = 1 << 20  # of one list, where numbers are not packed

_KINDS = {1: BYTES, 2: FLOATS, 3: INTEGERS}


class Feature(NamedTuple):
    """The place of a feature's list in a record; ``kind`` is "" for a feature that was never set."""

    window: ByteWindow
    kind: str
    start: int
    end: int

    @property
    def is_empty(self) -> bool:
        """Whether the list has no values."""
        return self.start == self.end

    def bounded(self, most: int) -> Feature:
        """Return the feature. Raises ValueError if its list has more bytes than ``most``."""
        if self.end - self.start > most:
            raise ValueError(f"a list of {self.end - self.start} bytes is too long for its values")
        return self

    def is_single(self) -> bool:
        """Whether the list has exactly one value; a long list is not read. Raises ValueError."""
        first = next(self._values(), None)
        if first is None or first.end != self.end:
            return False
        if self.kind == FLOATS:
            return first.end - first.start == 4
        if self.kind == INTEGERS:
            number = self.window.take(first.start, min(first.end, first.start + MAX_VARINT))
            return bool(number) and first.start + varint(number, 0)[1] == first.end
        return True

    def only_value(self, most: int) -> bytes | int | None:
        """Return the value if there is one, of bytes no more than ``most``; None for other lists."""
        if self.kind == BYTES and self.is_single():
            return self.byte_values(most)[0]
        if self.kind == INTEGERS and self.is_single():
            return int(self.integers()[0])
        return None

    def byte_values(self, most: int | None = None) -> list[bytes]:
        """Return a list of bytes, each no longer than ``most``. Raises ValueError for other lists."""
        self._check_kind(BYTES)
        values = list(self._values())
        if any(value.kind != LENGTH for value in values):
            raise ValueError("has something other than bytes in its list")
        ends = (value.end if most is None else min(value.end, value.start + most) for value in values)
        return [self.window.take(value.start, end) for value, end in zip(values, ends, strict=True)]

    def floats(self) -> npt.NDArray[np.float32]:
        """Return a list of floats, float32 [n]. Raises ValueError for other lists."""
        return np.frombuffer(self._numbers(FLOATS), "<f4").astype(np.float32, copy=False)

    def integers(self) -> npt.NDArray[np.int64]:
        """Return a list of integers, int64 [n]. Raises ValueError for other lists."""
        return integers(self._numbers(INTEGERS))

    def _check_kind(self, kind: str) -> None:
        """Raise ValueError for a list of another kind; an empty one is of any."""
        if self.kind != kind and not self.is_empty:
            raise ValueError(f"a feature has {self.kind}, not {kind}")

    def _numbers(self, kind: str) -> bytes:
        """Return the bytes of all numbers of a list, which has this kind."""
        self._check_kind(kind)
        own, size = (FIXED32, 4) if kind == FLOATS else (VARINT, 1)
        data = bytearray()
        for value in self._values():
            if value.kind not in (LENGTH, own) or (value.end - value.start) % size:
                raise ValueError(f"has something other than {kind} in its list")
            data += self.window.take(value.start, value.end)
        return bytes(data)

    def _values(self) -> Iterator[WireField]:
        """Yield the parts of a list: numbers are packed into one of them, or each has its own."""
        for count, value in enumerate(parts(self.window, self.start, self.end)):
            if value.number != 1 or count == MAX_VALUES:
                raise ValueError(
                    f"a list has a field that it should not have, or more than {MAX_VALUES} of them"
                )
            yield value


NONE = Feature(ByteWindow(lambda length, offset: b"", 0), "", 0, 0)


class Features(dict[str, Feature]):
    """The features of a record by their names. Raises ValueError for one that is not there."""

    def __missing__(self, name: str) -> Feature:
        raise ValueError(f"it lacks the feature {name!r}, which the first record has")


def features(window: ByteWindow, start: int, end: int) -> Features:
    """Return the features of the example between two offsets. Raises ValueError for anything else."""
    found = Features()
    for example in _few(window, start, end):
        if example.number != 1 or example.kind != LENGTH:
            raise ValueError("the record is not a tf.train.Example")
        for entry in parts(window, example.start, example.end):
            name, feature = _named(window, entry)
            if name in found or len(found) == MAX_FEATURES:
                raise ValueError(f"the feature {name!r} occurs twice, or there are more than {MAX_FEATURES}")
            found[name] = feature
    return found


def _named(window: ByteWindow, entry: WireField) -> tuple[str, Feature]:
    if entry.number != 1 or entry.kind != LENGTH:
        raise ValueError("the record is not a tf.train.Example")
    name, feature = "", Feature(window, "", entry.end, entry.end)
    for part in _few(window, entry.start, entry.end):
        if part.kind != LENGTH or part.number not in (1, 2):
            raise ValueError("a feature has something other than a name and a value")
        if part.number == 2:
            feature = Feature(window, "", part.end, part.end)
            for of_kind in _few(window, part.start, part.end):
                if of_kind.kind != LENGTH or of_kind.number not in _KINDS or feature.kind:
                    raise ValueError("a feature is not one list of bytes, floats or integers")
                feature = Feature(window, _KINDS[of_kind.number], of_kind.start, of_kind.end)
        elif part.end - part.start > MAX_NAME_BYTES:
            raise ValueError(f"the name of a feature has {part.end - part.start} bytes")
        else:
            name = window.take(part.start, part.end).decode()
    return name, feature


def _few(window: ByteWindow, start: int, end: int) -> Iterator[WireField]:
    """Yield the fields of a message that has few of them: millions of empty ones take minutes."""
    for count, field in enumerate(parts(window, start, end)):
        if count == MAX_FEATURES:
            raise ValueError(f"the record is not a tf.train.Example: a message has more than {count} fields")
        yield field


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
            raise ValueError("the file is compressed, but records are read in place; write it uncompressed")
        raise ValueError("the checksum of a record's length is wrong")
    return int(length)


def read_frame(file: ArchiveFile, start: int, length: int) -> bytes:
    """Return the data of the frame at ``start``. Raises SourceDamaged unless length and checksums match."""
    with foreign_file(f"{file.path}, byte {start}", ADVICE):
        whole = file.read_at(HEAD.size + length + TAIL.size, start)
        if _length(whole[: HEAD.size], start) != length or len(whole) < HEAD.size + length + TAIL.size:
            raise ValueError("the record differs from the one that was listed")
        data = whole[HEAD.size : -TAIL.size]
        if TAIL.unpack(whole[-TAIL.size :]) != (masked_crc(data),):
            raise ValueError("the checksum of a record's data is wrong")
    return data


def begins_with_frame(path: Path) -> bool:
    """Whether a file begins with a length and its checksum. Raises OSError."""
    with ArchiveFile(path) as file:
        head = file.read_at(HEAD.size, 0)
    return len(head) == HEAD.size and HEAD.unpack(head)[1] == masked_crc(head[:8])

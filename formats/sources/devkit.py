"""The development kit of ILSVRC12: its classes, and the reader of its MATLAB files.

The reader of MATLAB 5 files (MAT-File Format, chapter 1) with a struct array, as in the devkit. scipy reads
all such files, but crashes on some damaged ones; this reader raises.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import MAX_WORDS, LabelSpace
from shardprep.formats.runtime.files import ArchiveFile, GzipStream, foreign_file
from shardprep.formats.sources.listing import read_small_file
from shardprep.formats.sources.tar import walk

MAX_INFLATED_BYTES = 16 << 20  # the 1,860 synsets of the official one take about 1 KB each
MAX_FIELDS = 1 << 8  # of a struct; the official one has 8
MAX_VALUES = 1 << 17  # of all fields of all rows
MAX_DIMENSIONS = 32

_HEADER_BYTES = 128
_BYTE_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}
_MATRIX, _COMPRESSED = 14, 15  # table 1-1, data types
_INTEGERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 12: "q", 13: "Q"}
_NUMBERS = _INTEGERS | {7: "f", 9: "d"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_STRUCT, _CHAR, _FIRST_NUMERIC, _LAST_NUMERIC = 2, 4, 6, 15  # table 1-3, array types

Value = str | int | float | None


class _Element(NamedTuple):
    kind: int
    data: bytes


def read_struct_array(data: bytes, name: str) -> list[dict[str, Value]]:
    """Return the rows of the struct array ``name``: numbers and text, None for any other field.

    Raises ValueError for a damaged file, and for one that inflates to more than MAX_INFLATED_BYTES, or has
    more fields, values or dimensions than MAX_FIELDS, MAX_VALUES and MAX_DIMENSIONS.
    """
    order = _BYTE_ORDERS.get(data[124:_HEADER_BYTES])
    if order is None:
        raise ValueError("not a MATLAB 5 file")
    if len(data) > MAX_INFLATED_BYTES:
        raise ValueError(f"it has more than {MAX_INFLATED_BYTES} bytes")
    for element in _variables(data, order):
        parts = _parts(element, order, most=5 + MAX_VALUES)
        if len(parts) >= 5 and parts[2].data == name.encode():
            return _rows(parts, order)
    raise ValueError(f"there is no struct array {name!r}")


def _variables(data: bytes, order: str) -> Iterator[_Element]:
    """Yield the elements of the whole file, inflated if they are compressed."""
    budget = MAX_INFLATED_BYTES
    for element in _elements(data[_HEADER_BYTES:], order):
        if element.kind == _COMPRESSED:
            inflated = _inflate(element.data, budget)
            budget -= len(inflated)
            yield from _elements(inflated, order)
        else:
            yield element


def _inflate(data: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(f"it cannot be inflated ({error})") from None
    if len(inflated) > limit or not inflater.eof:
        raise ValueError(f"it is cut off, or inflates to more than {MAX_INFLATED_BYTES} bytes")
    return inflated


def _elements(data: bytes, order: str) -> Iterator[_Element]:
    """Yield elements of tag and data: padded to 8 bytes, or both in 8 bytes if the data has at most 4."""
    at = 0
    while at < len(data):
        if len(data) - at < 8:
            raise ValueError("it is cut off")
        kind, size = struct.unpack_from(order + "II", data, at)
        start = at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if size > (len(data) - start if start == at + 8 else 4):
            raise ValueError("it is cut off")
        yield _Element(kind, data[start : start + size])
        at = start + size if kind == _COMPRESSED else -(-(start + size) // 8) * 8


def _parts(element: _Element, order: str, *, most: int) -> list[_Element]:
    """Return the elements of an array, none for any other kind. Raises ValueError for more than ``most``."""
    if element.kind != _MATRIX:
        return []
    parts = list(islice(_elements(element.data, order), most + 1))
    if len(parts) > most:
        raise ValueError(f"it has an array of more than {most} parts")
    return parts


def _rows(parts: list[_Element], order: str) -> list[dict[str, Value]]:
    """Return the rows; the parts are flags, dimensions, name, length of a field's name, names, values."""
    shape = _integers(parts[1], order, most=MAX_DIMENSIONS)
    length = next(iter(_integers(parts[3], order, most=1)), 0)
    if _class(parts, order) != _STRUCT or length < 1:
        raise ValueError("it is not a struct array")
    names, values = _names(parts[4].data, length), parts[5:]
    if not names or min(shape, default=0) < 0 or math.prod(shape) * len(names) != len(values):
        raise ValueError("its struct array is not complete")
    starts = range(0, len(values), len(names))
    fields = [_value(value, order) for value in values]
    return [dict(zip(names, fields[at : at + len(names)], strict=True)) for at in starts]


def _names(text: bytes, length: int) -> list[str]:
    if len(text) > length * MAX_FIELDS:
        raise ValueError(f"its struct array has more than {MAX_FIELDS} fields")
    return [text[at : at + length].split(b"\0")[0].decode("latin-1") for at in range(0, len(text), length)]


def _value(element: _Element, order: str) -> Value:
    if element.kind != _MATRIX:
        return None
    parts = list(islice(_elements(element.data, order), 5))
    if len(parts) != 4:  # flags, dimensions, name, data; complex numbers and structs have more
        return None
    array_class = _class(parts, order)
    if array_class == _CHAR:
        return _mat_text(parts[3], order)
    return _number(parts[3], order) if _FIRST_NUMERIC <= array_class <= _LAST_NUMERIC else None


def _class(parts: list[_Element], order: str) -> int:
    flags = _integers(parts[0], order, most=2)
    return flags[0] & 0xFF if flags else 0


def _mat_text(element: _Element, order: str) -> str | None:
    codec = _TEXTS.get(element.kind)
    if codec == "utf-16":
        codec += "-le" if order == "<" else "-be"
    return None if codec is None else element.data.decode(codec, errors="replace")


def _number(element: _Element, order: str) -> int | float | None:
    """Return the number if the element has exactly one."""
    letter = _NUMBERS.get(element.kind)
    if letter is None:
        raise ValueError("it has numbers of an unknown kind")
    if len(element.data) != struct.calcsize(order + letter):
        return None
    number: int | float = struct.unpack(order + letter, element.data)[0]
    return number


def _integers(element: _Element, order: str, *, most: int) -> tuple[int, ...]:
    """Return the integers that describe an array. Raises ValueError for other data, or more than ``most``."""
    letter = _INTEGERS.get(element.kind)
    count, rest = divmod(len(element.data), struct.calcsize(order + letter)) if letter else (0, 1)
    if rest or count > most:
        raise ValueError(f"it has an array that is not described by whole numbers, at most {most} of them")
    return struct.unpack(f"{order}{count}{letter}", element.data)


FORMS = ("ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12.tar", "ILSVRC2012_devkit_t12")
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
MAX_DEVKIT_BYTES = 64 << 20  # packed or not; the official one has 2.5 MB packed

_WNID = re.compile(r"n\d{8}", re.ASCII)
_ID = re.compile(r"\d{1,9}", re.ASCII)


class _Leaf(NamedTuple):
    wnid: str
    words: str
    number: int
    train_images: int


@dataclass(frozen=True)
class Devkit:
    """The contents of a devkit.

    ``classes`` have their ILSVRC2012_ID; ``train_images`` is the number of training images by wnid;
    ``ground_truth[i]`` is the ILSVRC2012_ID of validation image *i* + 1.
    """

    classes: LabelSpace
    train_images: Mapping[str, int]
    ground_truth: tuple[int, ...]


def read_devkit(path: Path) -> Devkit:
    """Read the devkit from its archive, gunzipped or not, or its folder. Raises SourceDamaged, OSError."""
    with foreign_file(path, f"download {FORMS[0]} again"):
        files = _files_of_folder(path) if path.is_dir() else _files_of_archive(path)
        for name in (META, GROUND_TRUTH):
            if name not in files:
                raise ValueError(f"holds no {name}")
        leaves = _leaves(_synsets(files[META]))
        truth = _ground_truth(files[GROUND_TRUTH], len(leaves))
        classes = LabelSpace.of(
            (leaf.wnid for leaf in leaves),
            words={leaf.wnid: leaf.words for leaf in leaves},
            ids={leaf.wnid: leaf.number for leaf in leaves},
        )
    return Devkit(classes, {leaf.wnid: leaf.train_images for leaf in leaves}, truth)


def _files_of_folder(path: Path) -> dict[str, bytes]:
    present = (name for name in (META, GROUND_TRUTH) if (path / name).exists())
    return {name: read_small_file(path / name, MAX_DEVKIT_BYTES) for name in present}


def _files_of_archive(path: Path) -> dict[str, bytes]:
    if path.stat().st_size > MAX_DEVKIT_BYTES:
        raise SourceDamaged(f"has more than {MAX_DEVKIT_BYTES} bytes; it is not the devkit", path=path)
    files: dict[str, bytes] = {}
    with _open(path) as archive:
        for member in walk(archive.read_at, archive=str(path), end=archive.end):
            name = "/".join(PurePosixPath(member.name).parts[-2:])
            if name in (META, GROUND_TRUTH):
                files[name] = archive.read_at(member.size, member.offset)
    return files


def _open(path: Path) -> ArchiveFile | GzipStream:
    return GzipStream(path, MAX_DEVKIT_BYTES) if path.suffix == ".gz" else ArchiveFile(path)


def _synsets(mat: bytes) -> list[dict[str, Value]]:
    try:
        return read_struct_array(mat, "synsets")
    except ValueError as error:
        raise ValueError(f"{META}: {error}") from error


def _leaves(synsets: list[dict[str, Value]]) -> list[_Leaf]:
    """Return the synsets without children. Raises ValueError unless their ids are 1 … n and wnids unique."""
    leaves = [_leaf(synset) for synset in synsets if _integer(synset, "num_children") == 0]
    if sorted(leaf.number for leaf in leaves) != list(range(1, len(leaves) + 1)) or not leaves:
        raise ValueError(f"{META}: the ILSVRC2012_IDs of the classes are not 1 to their number")
    if len({leaf.wnid for leaf in leaves}) < len(leaves):
        raise ValueError(f"{META}: two classes have the same WNID")
    return leaves


def _leaf(synset: Mapping[str, Value]) -> _Leaf:
    wnid, words = _text(synset, "WNID"), _text(synset, "words")
    if not _WNID.fullmatch(wnid):
        raise ValueError(f"{META}: {wnid!r} is no WNID")
    return _Leaf(wnid, words, _integer(synset, "ILSVRC2012_ID"), _integer(synset, "num_train_images"))


def _integer(synset: Mapping[str, Value], field: str) -> int:
    value = synset.get(field)
    if not isinstance(value, int | float) or not 0 <= value < 1 << 31 or not float(value).is_integer():
        raise ValueError(f"{META}: {field} is missing or not a whole number")
    return int(value)


def _text(synset: Mapping[str, Value], field: str) -> str:
    value = synset.get(field)
    if not isinstance(value, str) or len(value) > MAX_WORDS:
        raise ValueError(f"{META}: {field} is missing, not text, or longer than {MAX_WORDS} characters")
    return value


def _ground_truth(data: bytes, classes: int) -> tuple[int, ...]:
    """Read one ILSVRC2012_ID per line. Raises ValueError with the number of an invalid line."""
    lines = data.decode("ascii", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not _ID.fullmatch(line.strip()) or not 1 <= int(line) <= classes:
            raise ValueError(f"{GROUND_TRUTH}: line {number} is not a number from 1 to {classes}")
    return tuple(map(int, lines))

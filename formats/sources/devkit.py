"""The development kit of ILSVRC12, with a reader of its MATLAB file.

It reads a struct array in a little-endian MATLAB 5 file (MAT-File Format, chapter 1). scipy can read more,
but crashes on some damaged files.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import MAX_WORDS, LabelSpace
from shardprep.formats.runtime.files import ArchiveFile, GzipStream, foreign_file
from shardprep.formats.sources.listing import read_small_file
from shardprep.formats.sources.tar import walk

MAX_INFLATED_BYTES = 8 << 20  # the 1,860 official synsets take about 1 KB each
MAX_FIELDS = 1 << 8  # of a struct; the official file has 8
_LITTLE_ENDIAN = b"\x00\x01IM"
_MATRIX, _COMPRESSED = 14, 15  # table 1-1, data types
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}
_STRUCT, _CHAR, _NUMERIC = 2, 4, range(6, 16)  # table 1-3, array types
Value = str | int | float | None


Element = tuple[int, bytes]
"""A data type and data."""


def read_struct_array(data: bytes, name: str) -> list[dict[str, Value]]:
    """Return the rows of the struct array ``name``: numbers and text, None for others. Raises ValueError."""
    if data[124:128] != _LITTLE_ENDIAN or len(data) > MAX_INFLATED_BYTES:
        raise ValueError(f"not a MATLAB 5 file of at most {MAX_INFLATED_BYTES} bytes")
    for element in _elements(data[128:]):
        for each in _elements(_inflated(element[1])) if element[0] == _COMPRESSED else [element]:
            parts = _parts(each)
            if len(parts) >= 5 and parts[2][1] == name.encode():
                return _rows(parts)
    raise ValueError(f"there is no struct array {name!r}")


def _inflated(data: bytes) -> bytes:
    inflater, inflated = zlib.decompressobj(), b""
    with suppress(zlib.error):
        inflated = inflater.decompress(data, MAX_INFLATED_BYTES + 1)
    if len(inflated) > MAX_INFLATED_BYTES or not inflater.eof:
        raise ValueError(f"it is damaged, or inflates to more than {MAX_INFLATED_BYTES} bytes")
    return inflated


def _elements(data: bytes) -> list[Element]:
    """Return the elements, each a tag and data, padded to 8 bytes; small ones have both in 8 bytes."""
    at, found = 0, []
    while at < len(data):
        kind, size, start = *struct.unpack_from("<II", data.ljust(at + 8, b"\0"), at), at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if len(data) - at < 8 or size > (len(data) - start if start == at + 8 else 4):
            raise ValueError("it is truncated")
        found.append((kind, data[start : start + size]))
        at = start + size if kind == _COMPRESSED else -(-(start + size) // 8) * 8
    return found


def _parts(element: Element) -> list[Element]:
    """Return the elements of an array; empty for any other kind."""
    return _elements(element[1]) if element[0] == _MATRIX else []


def _rows(parts: list[Element]) -> list[dict[str, Value]]:
    """Return the rows; the parts are flags, dimensions, name, length of field names, field names, values."""
    width, raw, values = _number(parts[3]), parts[4][1], parts[5:]
    if _class_of(parts) != _STRUCT or not isinstance(width, int) or not 0 < len(raw) <= width * MAX_FIELDS:
        raise ValueError(f"it is not a struct array of 1 to {MAX_FIELDS} fields")
    names = [raw[at : at + width].split(b"\0")[0].decode("latin-1") for at in range(0, len(raw), width)]
    if len(values) % len(names):
        raise ValueError("its struct array is incomplete")
    fields = map(_value, values)
    return [dict(zip(names, row, strict=True)) for row in zip(*[fields] * len(names), strict=True)]


def _value(element: Element) -> Value:
    parts = _parts(element)
    if len(parts) != 4:  # flags, dimensions, name, data; complex numbers and structs have more
        return None
    array_class, (kind, data) = _class_of(parts), parts[3]
    if array_class == _CHAR and kind in _TEXTS:
        return data.decode(_TEXTS[kind], errors="replace")
    return _number(parts[3]) if array_class in _NUMERIC else None


def _class_of(parts: list[Element]) -> int:
    return parts[0][1][0] if parts[0][1] else -1


def _number(element: Element) -> int | float | None:
    """Return the value of an element with exactly one number, else None."""
    kind, data = element
    is_one = kind in _NUMBERS and len(data) == np.dtype(_NUMBERS[kind]).itemsize
    number: int | float | None = np.frombuffer(data, f"<{_NUMBERS[kind]}")[0].item() if is_one else None
    return number


FORMS = ("ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12.tar", "ILSVRC2012_devkit_t12")
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
MAX_DEVKIT_BYTES = 64 << 20  # packed or not; the official devkit has 2.5 MB packed
WNID = re.compile(r"n\d{8}", re.ASCII)
_ID = re.compile(r"\d{1,9}", re.ASCII)


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
    """Read the devkit from its archive, gzipped or not, or its folder. Raises SourceDamaged, OSError."""
    with foreign_file(path, f"download {FORMS[0]} again"):
        files = _files_in(path)
        for name in (META, GROUND_TRUTH):
            if name not in files:
                raise ValueError(f"holds no {name}")
        classes, images = _classes_in(files[META])
        truth = files[GROUND_TRUTH].decode("ascii", errors="replace").splitlines()
        for number, line in enumerate(truth, start=1):
            if not _ID.fullmatch(line.strip()) or not 1 <= int(line) <= len(classes):
                raise ValueError(f"{GROUND_TRUTH}: line {number} is not a number from 1 to {len(classes)}")
    return Devkit(classes, images, tuple(map(int, truth)))


def _files_in(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        there = [name for name in (META, GROUND_TRUTH) if (path / name).exists()]
        return {name: read_small_file(path / name, MAX_DEVKIT_BYTES) for name in there}
    if path.stat().st_size > MAX_DEVKIT_BYTES:
        raise SourceDamaged(f"has more than {MAX_DEVKIT_BYTES} bytes; it is not the devkit", path=path)
    files = {}
    with GzipStream(path, MAX_DEVKIT_BYTES) if path.suffix == ".gz" else ArchiveFile(path) as archive:
        for member in walk(archive.read_at, archive=str(path), end=archive.end):
            name = "/".join(PurePosixPath(member.name).parts[-2:])
            if name in (META, GROUND_TRUTH):
                files[name] = archive.read_at(member.size, member.offset)
    return files


def _classes_in(meta: bytes) -> tuple[LabelSpace, dict[str, int]]:
    """Return the classes, the synsets without children, and their numbers of training images."""
    words, ids, images = dict[str, str](), dict[str, int](), dict[str, int]()
    for synset in read_struct_array(meta, "synsets"):
        match synset:
            case {"num_children": int() | float() as children} if children >= 1:
                continue
            case {
                "num_children": 0,
                "WNID": str(wnid),
                "words": str(text),
                "ILSVRC2012_ID": int() | float() as number,
                "num_train_images": int() | float() as count,
            } if WNID.fullmatch(wnid) and wnid not in ids and len(text) <= MAX_WORDS and 0 <= count < 1 << 31:
                words[wnid], ids[wnid], images[wnid] = text, int(number), int(count)
            case wrong:
                raise ValueError(f"{META} has the invalid class {str(wrong)[:200]}")
    if not ids or sorted(ids.values()) != [*range(1, len(ids) + 1)]:
        raise ValueError(f"the ILSVRC2012_IDs in {META} are not 1 to their number")
    return LabelSpace.of(words, words=words, ids=ids), images

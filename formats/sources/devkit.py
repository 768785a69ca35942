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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import MAX_WORDS, LabelSpace
from shardprep.formats.runtime.files import ArchiveFile, GzipStream, foreign_file
from shardprep.formats.sources.listing import read_small_file
from shardprep.formats.sources.tar import walk

MAX_INFLATED_BYTES = 16 << 20  # the 1,860 synsets of the official one take about 1 KB each
MAX_FIELDS = 1 << 8  # of a struct; the official one has 8
MAX_VALUES = 1 << 17  # of all fields of all rows
MAX_DIMENSIONS = 32
_BYTE_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}
_MATRIX, _COMPRESSED = 14, 15  # table 1-1, data types
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_STRUCT, _CHAR, _NUMERIC = 2, 4, range(6, 16)  # table 1-3, array types
Value = str | int | float | None


class _Element(NamedTuple):
    kind: int
    data: bytes


def read_struct_array(data: bytes, name: str) -> list[dict[str, Value]]:
    """Return the rows of the struct array ``name``: numbers and text, None for any other field.

    Raises ValueError for a damaged file, and for one that inflates to more than MAX_INFLATED_BYTES, or has
    more fields, values or dimensions than MAX_FIELDS, MAX_VALUES and MAX_DIMENSIONS.
    """
    order = _BYTE_ORDERS.get(data[124:128])
    if order is None:
        raise ValueError("not a MATLAB 5 file")
    left = MAX_INFLATED_BYTES
    for element in _elements(data[128:], order):
        variables = [element]
        if element.kind == _COMPRESSED:
            inflater = zlib.decompressobj()
            try:
                inflated = inflater.decompress(element.data, left + 1)
            except zlib.error as error:
                raise ValueError(f"it cannot be inflated ({error})") from None
            if len(inflated) > left or not inflater.eof:
                raise ValueError(f"it is cut off, or inflates to more than {MAX_INFLATED_BYTES} bytes")
            variables = [*islice(_elements(inflated, order), MAX_VALUES)]
        left -= sum(len(each.data) for each in variables)
        if left < 0:
            raise ValueError(f"it has more than {MAX_INFLATED_BYTES} bytes")
        for each in variables:
            parts = _parts(each, order, 5 + MAX_VALUES + 1)
            if len(parts) >= 5 and parts[2].data == name.encode():
                return _rows(parts, order)
    raise ValueError(f"there is no struct array {name!r}")


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


def _parts(element: _Element, order: str, most: int) -> list[_Element]:
    """Return the first elements of an array, none for any other kind."""
    return [*islice(_elements(element.data, order), most)] if element.kind == _MATRIX else []


def _rows(parts: list[_Element], order: str) -> list[dict[str, Value]]:
    """Return the rows; the parts are flags, dimensions, name, length of a field's name, names, values."""
    flags, shape = _integers(parts[0], order, 2), _integers(parts[1], order, MAX_DIMENSIONS)
    width = sum(_integers(parts[3], order, 1))
    raw, values = parts[4].data, parts[5:]
    if not flags or flags[0] & 0xFF != _STRUCT or width < 1:
        raise ValueError("it is not a struct array")
    if len(raw) > width * MAX_FIELDS or len(values) > MAX_VALUES:
        raise ValueError(f"its struct array has more than {MAX_FIELDS} fields or {MAX_VALUES} values")
    names = [raw[at : at + width].split(b"\0")[0].decode("latin-1") for at in range(0, len(raw), width)]
    if not names or min(shape, default=0) < 0 or math.prod(shape) * len(names) != len(values):
        raise ValueError("its struct array is not complete")
    fields = iter([_value(value, order) for value in values])
    return [dict(zip(names, row, strict=True)) for row in zip(*[fields] * len(names), strict=True)]


def _value(element: _Element, order: str) -> Value:
    parts = _parts(element, order, 5)
    if len(parts) != 4:  # flags, dimensions, name, data; complex numbers and structs have more
        return None
    flags, data = _integers(parts[0], order, 2), parts[3]
    array_class = flags[0] & 0xFF if flags else 0
    if array_class == _CHAR and (codec := _TEXTS.get(data.kind)):
        codec += ("-le" if order == "<" else "-be") if codec == "utf-16" else ""
        return data.data.decode(codec, errors="replace")
    if array_class not in _NUMERIC:
        return None
    numbers = _numbers(data, order)
    return numbers[0].item() if len(numbers) == 1 else None


def _integers(element: _Element, order: str, most: int) -> list[int]:
    """Return the integers that describe an array. Raises ValueError for other data, or more than ``most``."""
    numbers = _numbers(element, order)
    if numbers.dtype.kind == "f" or len(numbers) > most:
        raise ValueError(f"it has an array that is not described by whole numbers, at most {most} of them")
    found: list[int] = numbers.tolist()
    return found


def _numbers(element: _Element, order: str) -> npt.NDArray[Any]:
    dtype = np.dtype(order + _NUMBERS.get(element.kind, "V0"))
    if not dtype.itemsize or len(element.data) % dtype.itemsize:
        raise ValueError("it has no whole numbers, or numbers of an unknown kind")
    return np.frombuffer(element.data, dtype)


FORMS = ("ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12.tar", "ILSVRC2012_devkit_t12")
META = "data/meta.mat"
GROUND_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
MAX_DEVKIT_BYTES = 64 << 20  # packed or not; the official one has 2.5 MB packed
_WNID = re.compile(r"n\d{8}", re.ASCII)
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
    """Read the devkit from its archive, gunzipped or not, or its folder. Raises SourceDamaged, OSError."""
    files: dict[str, bytes] = {}
    with foreign_file(path, f"download {FORMS[0]} again"):
        if path.is_dir():
            there = [name for name in (META, GROUND_TRUTH) if (path / name).exists()]
            files = {name: read_small_file(path / name, MAX_DEVKIT_BYTES) for name in there}
        elif path.stat().st_size > MAX_DEVKIT_BYTES:
            raise SourceDamaged(f"has more than {MAX_DEVKIT_BYTES} bytes; it is not the devkit", path=path)
        else:
            with GzipStream(path, MAX_DEVKIT_BYTES) if path.suffix == ".gz" else ArchiveFile(path) as archive:
                for member in walk(archive.read_at, archive=str(path), end=archive.end):
                    name = "/".join(PurePosixPath(member.name).parts[-2:])
                    if name in (META, GROUND_TRUTH):
                        files[name] = archive.read_at(member.size, member.offset)
        for name in (META, GROUND_TRUTH):
            if name not in files:
                raise ValueError(f"holds no {name}")
        leaves = _leaves(files[META])
        truth = files[GROUND_TRUTH].decode("ascii", errors="replace").splitlines()
        for number, line in enumerate(truth, start=1):
            if not _ID.fullmatch(line.strip()) or not 1 <= int(line) <= len(leaves):
                raise ValueError(f"{GROUND_TRUTH}: line {number} is not a number from 1 to {len(leaves)}")
        of_wnid = {_text(leaf, "WNID"): leaf for leaf in leaves}
        classes = LabelSpace.of(
            of_wnid,
            words={wnid: _text(leaf, "words") for wnid, leaf in of_wnid.items()},
            ids={wnid: _integer(leaf, "ILSVRC2012_ID") for wnid, leaf in of_wnid.items()},
        )
        images = {wnid: _integer(leaf, "num_train_images") for wnid, leaf in of_wnid.items()}
    return Devkit(classes, images, tuple(map(int, truth)))


def _leaves(meta: bytes) -> list[dict[str, Value]]:
    """Return the synsets without children. Raises ValueError unless their ids are 1 … n and wnids unique."""
    try:
        synsets = read_struct_array(meta, "synsets")
    except ValueError as error:
        raise ValueError(f"{META}: {error}") from error
    leaves = [synset for synset in synsets if _integer(synset, "num_children") == 0]
    for wnid in (_text(leaf, "WNID") for leaf in leaves):
        if not _WNID.fullmatch(wnid):
            raise ValueError(f"{META}: {wnid!r} is no WNID")
    ids = sorted(_integer(leaf, "ILSVRC2012_ID") for leaf in leaves)
    if not leaves or ids != [*range(1, len(leaves) + 1)]:
        raise ValueError(f"{META}: the ILSVRC2012_IDs of the classes are not 1 to their number")
    if len({leaf["WNID"] for leaf in leaves}) < len(leaves):
        raise ValueError(f"{META}: two classes have the same WNID")
    return leaves


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

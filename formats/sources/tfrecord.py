"""The source of TFRecord files of tf.train.Example, read in place and with bounds."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import UNLABELLED, LabelSpace
from shardprep.formats.records.schema import MAX_COLUMNS, MAX_VALUE_BYTES, Field, Schema, TextCodec
from shardprep.formats.runtime.files import ArchiveFile, errors_as_damage
from shardprep.formats.shards.columns import SIDES
from shardprep.formats.shards.read import Rows
from shardprep.formats.sources.listing import Classes, GrowingTable, read_lines
from shardprep.formats.sources.record_files import (
    ADVICE,
    HEAD_BYTES,
    MAX_VARINT,
    ByteWindow,
    FilesReader,
    RecordContents,
    RecordSource,
    SplitFiles,
    column_name,
    find_split_files,
    guess_image,
    guess_label,
    name_source_in_errors,
    read_varint,
    resolve_name,
)
from shardprep.formats.sources.source import SourceOptions, boxes_by_key

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_VALUES = 1 << 20  # of one list, where numbers are not packed
_SIZES = {FIXED64: 8, FIXED32: 4}


class WireField(NamedTuple):
    """A field of a message: its number, wire type, and the offsets of its value."""

    number: int
    kind: int
    start: int
    end: int


def read_fields(
    window: ByteWindow, start: int, end: int, most: int = MAX_VALUES, only: tuple[int, ...] = ()
) -> Iterator[WireField]:
    """Yield the fields of the message between two offsets; those with numbers in ``only`` have a length.

    Raises ValueError for damaged and other fields, and for more than ``most``: millions of empty ones take
    minutes.
    """
    at, count = start, 0
    while at < end:
        count += 1
        if count > most:
            raise ValueError(f"the record is not a tf.train.Example: a message has more than {most} fields")
        head = window.take(at, min(at + 2 * MAX_VARINT, end))
        tag, used = read_varint(head, 0)
        number, kind = tag >> 3, tag & 7
        size, after = _SIZES.get(kind, -1), used
        if kind == LENGTH:
            size, after = read_varint(head, used)
        elif kind == VARINT:
            size = read_varint(head, used)[1] - used
        begin = at + after
        if not 0 <= size <= end - begin or not number:
            raise ValueError(f"a field of type {kind} and {size} bytes does not fit into its message")
        if only and (kind != LENGTH or number not in only):
            raise ValueError("the record is not a tf.train.Example")
        at = begin + size
        yield WireField(number, kind, begin, at)


def decode_integers(data: bytes) -> npt.NDArray[np.int64]:
    """Return the numbers in a packed field, int64 [n]. Raises ValueError."""
    if 0 < len(data) < MAX_VARINT and data[-1] < 0x80 and (single := read_varint(data, 0))[1] == len(data):
        return np.array(single[:1], np.int64)
    raw = np.frombuffer(data, np.uint8)
    is_end = raw < 0x80
    if (count := np.count_nonzero(is_end)) > MAX_VALUE_BYTES // 8:
        raise ValueError(f"a list has {count:,} numbers; a value has at most {MAX_VALUE_BYTES // 8:,}")
    ends = np.flatnonzero(is_end)
    sizes = np.diff(ends, prepend=-1)
    starts, longest = ends - sizes + 1, int(sizes.max(initial=0))
    has_more_bits = longest > MAX_VARINT or (raw[ends[sizes == MAX_VARINT]] > 1).any()
    if not data[-1:] < b"\x80" or has_more_bits:
        raise ValueError("a list of numbers is truncated, or one has more than 64 bits")
    numbers = np.zeros(count, np.uint64)
    for place in range(longest):
        longer = sizes > place
        bits = raw[starts[longer] + place].astype(np.uint64) & np.uint64(0x7F)
        numbers[longer] |= bits << np.uint64(7 * place)
    return numbers.view(np.int64)


BYTES, FLOATS, INTEGERS = "bytes", "floats", "integers"
MAX_FEATURES = 256
MAX_NAME_BYTES = 256
MAX_SINGLE = 2 * MAX_VARINT  # bytes of a list of one number
_KINDS = {1: BYTES, 2: FLOATS, 3: INTEGERS}
_NOT_PACKED = {BYTES: LENGTH, FLOATS: FIXED32, INTEGERS: VARINT}


class Feature(NamedTuple):
    """The location of a feature's list in a record; ``kind`` is "" for an unset feature."""

    window: ByteWindow
    kind: str
    start: int
    end: int

    def is_single(self) -> bool:
        """Whether the list has exactly one value; a long list is not read. Raises ValueError."""
        if self.kind == BYTES:
            first = next(self._parts(BYTES), None)
            return first is not None and first.end == self.end
        if not 0 < self.end - self.start <= MAX_SINGLE:
            return False
        data = b"".join(self._data(self.kind))
        return len(data) == 4 if self.kind == FLOATS else sum(byte < 0x80 for byte in data) == 1

    def byte_values(self, most: int = MAX_VALUE_BYTES) -> list[bytes]:
        """Return a list of bytes, at most ``most`` of each value. Raises ValueError for other lists."""
        return list(self._data(BYTES, most))

    def floats(self) -> npt.NDArray[np.float32]:
        """Return a list of floats, float32 [n]. Raises ValueError for other lists."""
        return np.frombuffer(b"".join(self._data(FLOATS)), "<f4")

    def integers(self) -> npt.NDArray[np.int64]:
        """Return a list of integers, int64 [n]. Raises ValueError for other lists."""
        return decode_integers(b"".join(self._data(INTEGERS)))

    def _data(self, kind: str, most: int = MAX_VALUE_BYTES) -> Iterator[bytes]:
        for part in self._parts(kind):
            yield self.window.take(part.start, min(part.end, part.start + most))

    def _parts(self, kind: str) -> Iterator[WireField]:
        """Yield the parts of a list: numbers are packed into one part, or have one each.

        Raises ValueError for a list of another kind, but an empty one is of any kind.
        """
        for part in read_fields(self.window, self.start, self.end):
            is_valid = part.number == 1 and part.kind in (LENGTH, _NOT_PACKED[kind])
            if self.kind != kind or not is_valid or self.end - self.start > MAX_VALUE_BYTES:
                raise ValueError(f"a feature has more than {MAX_VALUE_BYTES} bytes, or no list of {kind}")
            yield part


UNSET = Feature(ByteWindow.of(b""), "", 0, 0)


class Features(dict[str, Feature]):
    """The features of a record by name. Raises ValueError for a missing one."""

    def __missing__(self, name: str) -> Feature:
        raise ValueError(f"it lacks the feature {name!r}, which the first record has")


def read_features(window: ByteWindow) -> Features:
    """Return the features of an example. Raises ValueError for anything else."""
    features, most = Features(), MAX_FEATURES
    for example in read_fields(window, window.start, window.end, most, (1,)):
        for entry in read_fields(window, example.start, example.end, most, (1,)):
            name, feature = "", Feature(window, "", entry.end, entry.end)
            for part in read_fields(window, entry.start, entry.end, most, (1, 2)):
                if part.number == 2:
                    feature = _read_feature(window, part)
                elif part.end - part.start > MAX_NAME_BYTES:
                    raise ValueError(f"the name of a feature has {part.end - part.start} bytes")
                else:
                    name = window.take(part.start, part.end).decode()
            if name in features or len(features) == most:
                raise ValueError(f"the feature {name!r} occurs twice, or there are more than {most}")
            features[name] = feature
    return features


def _read_feature(window: ByteWindow, value: WireField) -> Feature:
    lists = [*read_fields(window, value.start, value.end, MAX_FEATURES, tuple(_KINDS))]
    if len(lists) > 1:
        raise ValueError("a feature is not one list of bytes, floats or integers")
    number, _, start, end = lists[0] if lists else (0, 0, value.end, value.end)
    return Feature(window, _KINDS.get(number, ""), start, end)


HEAD = struct.Struct("<QI")  # length, masked CRC-32C of its 8 bytes
TAIL = struct.Struct("<I")  # masked CRC-32C of the data
_GZIP, _ZLIB = b"\x1f\x8b", b"\x78"
_MASK = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C as in TFRecord files, rotated and with a constant added."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def read_frames(file: ArchiveFile) -> Iterator[tuple[int, ByteWindow]]:
    """Yield the offset and the unread data of each frame. Raises SourceDamaged for a wrong length."""
    at = 0
    while at < file.end:
        with errors_as_damage(f"{file.path}, byte {at}", ADVICE):
            head = file.read_at(HEAD.size, at)
            length, crc = HEAD.unpack(head.ljust(HEAD.size, b"\0"))
            if len(head) == HEAD.size and crc != masked_crc(head[:8]):
                if at == 0 and head.startswith((_GZIP, _ZLIB)):
                    raise ValueError(
                        "the file is compressed, but records are read in place; write it uncompressed"
                    )
                raise ValueError("the checksum of a record's length is wrong")
            if length > file.end - at - HEAD.size - TAIL.size:
                raise ValueError("the file is truncated within a record")
        yield at, ByteWindow(file.read_at, at + HEAD.size, at + HEAD.size + length)
        at += HEAD.size + length + TAIL.size


BOX_SIDES = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
BOX_LABEL = "image/object/bbox/label"
MAX_BOXES = 10_000  # of one image
BOX = np.dtype([(name, "<i8") for name in ("record", "label")] + [(side, "<f8") for side in SIDES])
T = TypeVar("T")
Example = tuple[Features, Mapping[str, Feature]]
"""The features of a record in memory by their own names, and by column names."""

_SINGLE = {BYTES: "bytes", FLOATS: "float", INTEGERS: "int"}
_LISTS = {BYTES: "json", FLOATS: "float32[*]", INTEGERS: "int64[*]"}
_NAMED = r".+\.tfrec(?:ords?)?(?:-\d+-of-\d+)?"
_FILE = re.compile(rf"{_NAMED}|.+-\d+-of-\d+|.+\.record", re.DOTALL | re.ASCII)


def recognise_tfrecord(path: Path, split: str | None, options: SourceOptions) -> TfRecord | None:
    """Return the source of a TFRecord file or a folder of them, else None. Raises UsageError, OSError.

    A file without ``.tfrecord`` in its name is one if it begins with a record.
    """
    files = find_split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    first = next(iter(files.by_split.values()))[0]
    if not re.fullmatch(_NAMED, first, re.DOTALL | re.ASCII):
        with ArchiveFile(files.top / first) as file:
            head = file.read_at(HEAD.size, 0)
        if len(head) < HEAD.size or HEAD.unpack(head)[1] != masked_crc(head[:8]):
            return None
    with name_source_in_errors(path):
        return TfRecord(files, options, _detect_first_layout(files, options))


def _detect_first_layout(files: SplitFiles, options: SourceOptions) -> ExampleLayout:
    """Return the layout of the first readable record. Raises UsageError."""
    for name in (name for names in files.by_split.values() for name in names):
        try:
            with ArchiveFile(files.top / name) as file:
                for _, data in read_frames(file):
                    return detect_layout(read_features(data), options)
        except (SourceDamaged, ValueError):  # reported with all other problems
            continue
    return ExampleLayout()


@dataclass(frozen=True)
class ExampleLayout:
    """The features of the image, its label, the class name and the file name; "" for none.

    ``first_label`` is the label of the first class in the file, stored as 0.
    """

    image: str = ""
    label: str = ""
    class_name: str = ""
    file_name: str = ""
    first_label: int = 0
    boxes: bool = False

    @property
    def non_columns(self) -> frozenset[str]:
        """The features whose values are not columns, but in the record itself, its classes or its boxes."""
        boxes = (*BOX_SIDES, BOX_LABEL) if self.boxes else ()
        return frozenset({self.image, self.label, self.class_name, *boxes} - {""})


def detect_layout(features: Features, options: SourceOptions) -> ExampleLayout:
    """Return the layout of a record from the official scripts for ImageNet or from TensorFlow Datasets.

    The official scripts write the synset beside the label, and count from 1. Without it, labels stay: other
    programs with the same names count from 0 or 1. Raises UsageError for missing features in the ``options``.
    """

    def value_of(name: str) -> object:
        feature = features[name]
        if feature.kind == FLOATS or not feature.is_single():
            return None
        return feature.byte_values(HEAD_BYTES)[0] if feature.kind == BYTES else int(feature.integers()[0])

    def present(*names: str) -> str:
        return next((name for name in names if name in features), "")

    layout = ExampleLayout(present("image"), present("label"), "", present("file_name", "image/filename"))
    if "image/encoded" in features:
        label, boxes = present("image/class/label"), set(BOX_SIDES) <= features.keys()
        synset = present("image/class/synset") if label else ""
        layout = ExampleLayout(
            "image/encoded", label, synset, present("image/filename"), int(bool(synset)), boxes
        )
    image, label = layout.image, layout.label
    if options.image_column is not None:
        image = resolve_name(features, options.image_column, "--image-column")
    elif not image or not isinstance(value_of(image), bytes):
        image = guess_image(features, value_of) or image
    if options.label_column is not None:
        label = resolve_name(features, options.label_column, "--label-column")
    elif not label:
        label = guess_label(features, value_of)
    if label != layout.label:
        layout = replace(layout, class_name="", first_label=0)
    return replace(layout, image=image, label=label)


def read_boxes(features: Features, first_label: int) -> list[tuple[int, float, float, float, float]]:
    """Return each box's label and its sides, swapped if reversed and clipped. Raises ValueError."""
    lists, label_list = [features[name] for name in BOX_SIDES], features.get(BOX_LABEL, UNSET)
    if any(each.end - each.start > MAX_BOXES * MAX_VARINT for each in (*lists, label_list)):
        raise ValueError(f"it has more than {MAX_BOXES} boxes")
    sides = [each.floats() for each in lists]
    labels = np.full(len(sides[0]), UNLABELLED)
    if BOX_LABEL in features:
        labels = label_list.integers() - first_label
    if {len(side) for side in sides} != {len(labels)} or not np.isfinite(sides).all():
        raise ValueError("its boxes do not have one finite number for each side")
    xs, ys = np.sort(sides[0::2], axis=0).clip(0, 1), np.sort(sides[1::2], axis=0).clip(0, 1)
    return list(zip(*(column.tolist() for column in (labels, xs[0], ys[0], xs[1], ys[1])), strict=True))


def _single_value(values: Sequence[T]) -> T:
    (value,) = values
    return value


_DECODERS: Mapping[str, Callable[[Feature], Any]] = {
    "bytes": lambda feature: _single_value(feature.byte_values()),
    "json": lambda feature: list(map(TextCodec().decode, feature.byte_values())),
    "int": lambda feature: _single_value(feature.integers().tolist()),
    "float": lambda feature: _single_value(feature.floats().tolist()),
    "int64[*]": Feature.integers,
    "float32[*]": Feature.floats,
}


class ExampleReader(FilesReader):
    """Reader of the examples in TFRecord files; an entry's offset is its frame's."""

    def read(self, entry: np.void) -> bytes:
        if not self.layout.image:
            return b""
        example: Example = self.record(entry)
        with errors_as_damage(self.location_of(entry), ADVICE, key=entry["key"].decode()):
            return _single_value(example[0].get(self.layout.image, UNSET).byte_values())

    def read_record(self, file: ArchiveFile, entry: np.void) -> Example:
        length = int(entry["length"])
        data = file.read_at(length + TAIL.size, int(entry["offset"]) + HEAD.size)
        with errors_as_damage(self.location_of(entry), ADVICE, key=entry["key"].decode()):
            if data[length:] != TAIL.pack(masked_crc(data[:length])):
                raise ValueError("the checksum of a record's data is wrong")
            features = read_features(ByteWindow.of(data[:length]))
        names = features.keys() - self.layout.non_columns
        return features, {column_name(name): features[name] for name in names}

    def value(self, column: Field, record: Example, entry: np.void) -> Any:
        return _DECODERS[column.kind](record[1].get(column.name, UNSET))


class ExampleContents(RecordContents):
    READER = ExampleReader

    def __init__(self, source: RecordSource, classes: Classes) -> None:
        super().__init__(source, classes)
        self._boxes = GrowingTable(BOX)
        self._kinds: dict[str, str] = {}  # of features; that of an empty list only until another is found
        self._with_values: set[str] = set()
        self._single = Counter[str]()  # the records with exactly one value
        self._records = 0

    def read(self, file: ArchiveFile) -> None:
        for start, data in read_frames(file):
            place = f"{file.path}, byte {start}"
            with self.problems.collect("record"), errors_as_damage(place, "write the file again"):
                features = read_features(data)
                boxes = read_boxes(features, self.layout.first_label) if self.layout.boxes else []
                single = self._single_features(features)
                if self.append(self._name(features), self._label(features), length=data.length, offset=start):
                    self._single.update(single)
                    for box in boxes:
                        self._boxes.append((self._records, *box))
                    self._records += 1

    def _name(self, features: Features) -> str:
        """Return the image's file name without its extension; "" for none."""
        name = ""
        if self.layout.file_name in features:
            with suppress(ValueError):
                name = _read_text(features[self.layout.file_name])
        stem = name.rpartition("/")[2].rpartition(".")[0]
        return name[: name.rindex(".")] if stem else name

    def _label(self, features: Features) -> int:
        """Return the record's label, counted from 0."""
        layout = self.layout
        if not layout.label:
            return UNLABELLED
        feature = features[layout.label]
        if feature.kind == BYTES:
            return self.label_of(_read_text(feature))
        if not feature.is_single():
            raise ValueError("it has no label, or several")
        label = int(feature.integers()[0])
        if not layout.class_name:
            return self.classes.add_number(label)
        name = _read_text(features[layout.class_name])
        if label in (0, UNLABELLED) and not name:
            return UNLABELLED  # the official scripts' background
        if label < layout.first_label:
            raise ValueError(
                f"its {layout.label} is {label}, but labels beside {layout.class_name} begin with 1"
            )
        return self.classes.add_number(label - layout.first_label, name)

    def _single_features(self, features: Features) -> list[str]:
        """Return the columns' features with exactly one value. Raises ValueError for invalid records."""
        image = self.layout.image
        if image and (features.get(image, UNSET).kind != BYTES or not features[image].is_single()):
            raise ValueError(f"it has no image, or several, in the feature {image!r}")
        names = sorted(features.keys() - self.layout.non_columns)
        names = [name for name in names if self.takes(column_name(name))]
        for name in names:
            kind, expected = features[name].kind, self._kinds.get(name, "")
            if features[name].start == features[name].end:
                self._kinds[name] = expected or kind
            elif name not in self._with_values:
                self._with_values.add(name)
                self._kinds[name] = kind
            elif kind != expected:
                raise ValueError(f"the feature {name!r} has {kind}, but {expected} in other records")
        if len(self._kinds) > MAX_COLUMNS:
            raise ValueError(f"it has more than {MAX_COLUMNS} features that would become columns")
        return [name for name in names if features[name].is_single()]

    def columns(self) -> tuple[Schema, bool]:
        """Return the columns, of lists unless all records have exactly one value."""
        if self.layout.boxes and self._records:
            self.boxes = self._boxes.finish()
        fields = []
        for name, kind in sorted(self._kinds.items()):
            kinds = _SINGLE if self._single[name] == self._records else _LISTS
            fields.append(Field(column_name(name), kinds[kind or BYTES]))
        return Schema(fields), bool(self.layout.image)


def _read_text(feature: Feature) -> str:
    if feature.start == feature.end:
        return ""
    if not feature.is_single():
        raise ValueError("it has several names")
    return feature.byte_values()[0].decode()


@dataclass(frozen=True)
class TfRecord(RecordSource):
    """TFRecord files; keys are the images' file names without extension if unique, else file and number."""

    LAYOUT = "tfrecord"
    CONTENTS = ExampleContents

    @property
    def description(self) -> str:
        return super().description + (", labels from 1 stored from 0" if self.layout.first_label else "")

    def new_contents(self, split: str, classes: Classes) -> RecordContents:
        contents = super().new_contents(split, classes)
        path = self.files.top / f"{self.layout.label.replace('/', '-')}.labels.txt"
        if path.is_file():  # as TensorFlow Datasets writes it beside the files
            with contents.problems.collect(), errors_as_damage(path, "correct the list"):
                for label, name in enumerate(read_lines(path)):
                    contents.classes.add_number(label, name)
        return contents

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        contents = self.contents_by_split[split]
        boxes, keys = contents.boxes, contents.entries["key"]
        return None if boxes is None else boxes_by_key(boxes, keys, labels)

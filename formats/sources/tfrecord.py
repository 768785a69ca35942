"""The source of TFRecord files, read in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.schema import MAX_COLUMNS, Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, foreign_file
from shardprep.formats.sources.listing import GrowingTable, read_small_file, text_lines
from shardprep.formats.sources.record_files import (
    ADVICE,
    HEAD_BYTES,
    FilesReader,
    RecordContents,
    RecordSource,
    SplitFiles,
    chosen,
    column_name,
    naming_source,
    split_files,
    usual_image,
    usual_label,
)
from shardprep.formats.sources.source import Box, SourceOptions
from shardprep.formats.sources.tf_example import (
    BYTES,
    FLOATS,
    INTEGERS,
    MAX_VARINT,
    NONE,
    ByteWindow,
    Feature,
    Features,
    Frame,
    begins_with_frame,
    features,
    frames,
    read_frame,
    window_of,
)
from shardprep.formats.sources.trees import wrapped

SIDES = ("xmin", "ymin", "xmax", "ymax")
BOX_SIDES = tuple(f"image/object/bbox/{side}" for side in SIDES)
BOX_LABEL = "image/object/bbox/label"
MAX_BOXES = 10_000  # of one image
BOX = np.dtype([(name, "<i8") for name in ("row", "label")] + [(side, "<f8") for side in SIDES])
MAX_LABEL_BYTES = 4096  # of a list with a label, or with a name

T = TypeVar("T")
Example = tuple[Features, Mapping[str, Feature]]
"""The features of a record in memory by their names, and by those of columns."""

_SINGLE = {BYTES: "bytes", FLOATS: "float", INTEGERS: "int"}
_LISTS = {BYTES: "json", FLOATS: "float32[*]", INTEGERS: "int64[*]"}
_NAMED = r".+\.tfrec(?:ords?)?(?:-\d+-of-\d+)?"
_FILE = re.compile(rf"{_NAMED}|.+-\d+-of-\d+", re.DOTALL | re.ASCII)


def tfrecord(path: Path, split: str | None, options: SourceOptions) -> TfRecord | None:
    """Return the source of the TFRecord files at a path, or in the folder there; None if there are none.

    A file without ``.tfrecord`` in its name begins with a record. Raises UsageError, OSError.
    """
    files = split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    first = next(iter(files.of_split.values()))[0]
    if not re.fullmatch(_NAMED, first, re.DOTALL | re.ASCII) and not begins_with_frame(files.top / first):
        return None
    with naming_source(path):
        return TfRecord(files, options, _dialect(files, options))


def _dialect(files: SplitFiles, options: SourceOptions) -> Dialect:
    """Return the dialect of the first record that can be read. Raises UsageError."""
    for name in (name for names in files.of_split.values() for name in names):
        try:
            with ArchiveFile(files.top / name) as file:
                frame = next(frames(file), None)
                if frame is not None:
                    end = frame.data + frame.length
                    found = features(ByteWindow(file.read_at, end), frame.data, end)
                    return dialect_of(found, options)
        except (SourceDamaged, ValueError):  # said with all other problems
            continue
    return Dialect()


@dataclass(frozen=True)
class TfRecord(RecordSource):
    """TFRecord files of tf.train.Example.

    A record's key is the name of its image's file without extension, where each has one and no two the same;
    else that of the TFRecord file with the record's number.
    """

    LAYOUT: ClassVar[str] = "tfrecord"

    dialect: Dialect

    @property
    def description(self) -> str:
        counted_from = self.dialect.first_label
        return super().description + (", labels from 1 stored from 0" if counted_from else "")

    def contents(self, split: str) -> ExampleContents:
        contents = ExampleContents(self.files.top, self.dialect)
        path = self.files.top / f"{self.dialect.label.replace('/', '-')}.labels.txt"
        if path.is_file():  # as TensorFlow Datasets writes it beside the files
            with contents.problems.collected(), foreign_file(path, "correct the list"):
                for label, name in enumerate(text_lines(read_small_file(path), path)):
                    contents.classes.add(label, name)
        return contents

    def boxes(self, split: str) -> Iterator[Box] | None:
        found = self.scanned(split)
        if found.boxes is None:
            return None
        names = [each.name for each in self.labels.classes]
        keys = found.entries["key"]
        rows = found.boxes[np.argsort(keys[found.boxes["row"]], kind="stable")].tolist()
        return (
            Box(keys[row].decode(), names[label] if 0 <= label < len(names) else "", *sides)
            for row, label, *sides in rows
        )


@dataclass(frozen=True)
class Dialect:
    """The features that have the image, its label, the class's name and the file's name; "" for none.

    ``first_label`` is the number of the first class in the file; it is stored as 0. ``may_be_text`` says that
    labels may be the names of their classes.
    """

    image: str = ""
    label: str = ""
    class_name: str = ""
    file_name: str = ""
    first_label: int = 0
    boxes: bool = False
    may_be_text: bool = False

    @property
    def no_columns(self) -> frozenset[str]:
        """The features that are no columns: the record itself, its classes or its boxes have their values."""
        boxes = (*BOX_SIDES, BOX_LABEL) if self.boxes else ()
        return frozenset({self.image, self.label, self.class_name, *boxes} - {""})


def dialect_of(found: Features, options: SourceOptions) -> Dialect:
    """Return the dialect of a record. Raises UsageError for features in the ``options`` that it lacks."""

    def value_of(name: str) -> object:
        return found[name].only_value(HEAD_BYTES)

    known = _known(found)
    image, label = known.image, known.label
    if options.image_column is not None:
        image = chosen(found, options.image_column, "--image-column")
    elif not image or not isinstance(value_of(image), bytes):
        image = usual_image(found, value_of) or image
    if options.label_column is not None:
        label = chosen(found, options.label_column, "--label-column")
    elif not label:
        label = usual_label(found, value_of)
    if label != known.label:
        known = replace(known, class_name="", first_label=0)
    return replace(known, image=image, label=label, may_be_text=options.label_column is not None)


def _known(names: Collection[str]) -> Dialect:
    """Return the dialect of the official scripts for ImageNet, or of TensorFlow Datasets.

    The official scripts have the synset beside the label, and count from 1. Other programs that have taken
    their names count from 0 or from 1, which cannot be known: labels stay.
    """

    def there(name: str) -> str:
        return name if name in names else ""

    if "image/encoded" in names:
        label = there("image/class/label")
        synset = there("image/class/synset") if label else ""
        boxes = set(BOX_SIDES) <= set(names)
        return Dialect("image/encoded", label, synset, there("image/filename"), int(bool(synset)), boxes)
    file_name = there("file_name") or there("image/filename")
    return Dialect(there("image"), there("label"), "", file_name)


def boxes_of(found: Features, first_label: int) -> list[tuple[int, float, float, float, float]]:
    """Return label and sides of each box, within the image; the file may have sides swapped.

    Raises ValueError for other numbers of sides than of boxes, and for sides that are no numbers.
    """
    most = MAX_BOXES * MAX_VARINT
    sides = [found[name].bounded(most).floats() for name in BOX_SIDES]
    labels = np.full(len(sides[0]), UNLABELLED, np.int64)
    if BOX_LABEL in found:
        labels = found[BOX_LABEL].bounded(most).integers() - first_label
    if {len(side) for side in sides} != {len(labels)} or not np.isfinite(sides).all():
        raise ValueError("its boxes do not have one finite number for each side")
    xs, ys = np.sort(sides[0::2], axis=0).clip(0, 1), np.sort(sides[1::2], axis=0).clip(0, 1)
    columns = (labels, xs[0], ys[0], xs[1], ys[1])
    return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass
class _Column:
    """The values of a feature in the records so far; ``records`` of them have exactly one.

    ``if_empty`` is the kind of lists without values, which counts if there are no others.
    """

    kind: str = ""
    if_empty: str = ""
    records: int = 0


class ExampleContents(RecordContents):
    """The records so far, their labels, boxes and columns."""

    def __init__(self, top: Path, dialect: Dialect) -> None:
        super().__init__(top)
        self._dialect = dialect
        self._boxes = GrowingTable(BOX)
        self._columns: dict[str, _Column] = {}
        self._records = 0

    def read(self, name: str) -> None:
        with ArchiveFile(self.top / name) as file:
            file.expect_random_reads()
            for frame in frames(file):
                with self.problems.collected("record"):
                    self._add(frame, name, file)

    def _add(self, frame: Frame, name: str, file: ArchiveFile) -> None:
        end = frame.data + frame.length
        window = ByteWindow(file.read_at, end)
        with foreign_file(f"{file.path}, byte {frame.start}", "write the file again"):
            found = features(window, frame.data, end)
            boxes = boxes_of(found, self._dialect.first_label) if self._dialect.boxes else []
            self._add_columns(found)
            is_taken = self.append(
                self._name(found),
                self._label(found),
                length=frame.length,
                path=name,
                offset=frame.start,
                mtime_ns=wrapped(file.identity.mtime_ns),
            )
        if is_taken:
            for box in boxes:
                self._boxes.append((self._records, *box))
            self._records += 1

    def _name(self, found: Features) -> str:
        """Return the name of the image's file without its extension; "" for none."""
        if self._dialect.file_name not in found:
            return ""
        try:
            name = _text_in(found[self._dialect.file_name])
        except ValueError:
            return ""
        stem = name.rpartition("/")[2].rpartition(".")[0]
        return name[: name.rindex(".")] if stem else name

    def _label(self, found: Features) -> int:
        """Return the record's label, counted from 0."""
        dialect = self._dialect
        if not dialect.label:
            return UNLABELLED
        feature = found[dialect.label]
        if feature.kind == BYTES:
            if not dialect.may_be_text:
                advice = f"--label-column {dialect.label} takes them for the names of classes"
                raise ValueError(f"the feature {dialect.label!r} has bytes, not integers: {advice}")
            return self.classes.add_text(_text_in(feature))
        labels = feature.bounded(MAX_LABEL_BYTES).integers()
        if len(labels) != 1:
            raise ValueError(f"it has {len(labels)} labels, not one")
        label = int(labels[0])
        if not dialect.class_name:
            return self.classes.add(label)
        name = _text_in(found[dialect.class_name])
        if label in (0, UNLABELLED) and not name:
            return UNLABELLED  # background, as the official scripts have it
        if label < dialect.first_label:
            raise ValueError(
                f"its {dialect.label} is {label}, but labels beside {dialect.class_name} begin with 1"
            )
        return self.classes.add(label - dialect.first_label, name)

    def _add_columns(self, found: Features) -> None:
        image = self._dialect.image
        if image and (found.get(image, NONE).kind != BYTES or not found[image].is_single()):
            raise ValueError(f"it has no image, or several, in the feature {image!r}")
        for name in found.keys() - self._dialect.no_columns:
            column, feature = self._columns.setdefault(name, _Column()), found[name]
            if feature.is_empty:
                column.if_empty = column.if_empty or feature.kind
            elif column.kind in ("", feature.kind):
                column.kind = feature.kind
            else:
                raise ValueError(
                    f"the feature {name!r} has {feature.kind}, but {column.kind} in other records"
                )
            column.records += feature.is_single()
        if len(self._columns) > MAX_COLUMNS:
            raise ValueError(f"it has more features than the {MAX_COLUMNS} columns that are possible")

    def columns(self) -> tuple[Schema, bool]:
        """Return the columns: one value where all records have exactly one, and lists otherwise."""
        fields = []
        for name, column in sorted(self._columns.items()):
            kinds = _SINGLE if column.records == self._records else _LISTS
            fields.append(Field(column_name(name), kinds[column.kind or column.if_empty or BYTES]))
        return Schema(fields), bool(self._dialect.image)

    def reader(self) -> ExampleReader:
        return ExampleReader(self.top, self.schema, self._dialect)

    def scan(self, names: Iterable[str]) -> Self:
        super().scan(names)
        if self._dialect.boxes and self._records:
            self.boxes = self._boxes.finish()
        return self


def _text_in(feature: Feature) -> str:
    values = feature.bounded(MAX_LABEL_BYTES).byte_values()
    if len(values) > 1:
        raise ValueError(f"it has {len(values)} names, not one")
    return values[0].decode() if values else ""


@dataclass
class ExampleReader(FilesReader):
    """Reader of the examples in TFRecord files. An entry's offset is that of its frame."""

    dialect: Dialect

    def read(self, entry: np.void) -> bytes:
        if not self.dialect.image:
            return b""
        example: Example = self.record(entry)
        with foreign_file(self.where(entry), ADVICE, key=entry["key"].decode()):
            return _only(example[0].get(self.dialect.image, NONE).byte_values())

    def record_in(self, file: ArchiveFile, entry: np.void) -> Example:
        data = read_frame(file, int(entry["offset"]), int(entry["length"]))
        with foreign_file(self.where(entry), ADVICE, key=entry["key"].decode()):
            found = features(window_of(data), 0, len(data))
        columns = found.keys() - self.dialect.no_columns
        return found, {column_name(name): found[name] for name in columns}

    def value(self, column: Field, record: Example, entry: np.void) -> Any:
        return _READ[column.kind](record[1].get(column.name, NONE))


def _only(values: Sequence[T]) -> T:
    (value,) = values
    return value


_READ: Mapping[str, Callable[[Feature], Any]] = {
    "bytes": lambda feature: _only(feature.byte_values()),
    "json": lambda feature: [value.decode() for value in feature.byte_values()],
    "int": lambda feature: _only(feature.integers().tolist()),
    "float": lambda feature: _only(feature.floats().tolist()),
    "int64[*]": Feature.integers,
    "float32[*]": Feature.floats,
}

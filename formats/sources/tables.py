"""Text tables, CSV and JSON Lines, read row by row: their rows, classes, and kinds of cells."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.records.schema import (
    CLASS_CODECS,
    FINITE_JSON,
    INT64,
    RESERVED,
    ArrayCodec,
    BadValue,
    ColumnChoice,
    Field,
)
from shardprep.formats.runtime.files import ArchiveFile, Identity, errors_as_damage
from shardprep.formats.runtime.json_record import is_text
from shardprep.formats.sources.listing import MAX_CLASSES
from shardprep.formats.sources.source import ResourceReader
from shardprep.formats.sources.trees import TreeReader

Row = TypeVar("Row")


@dataclass
class ImagesAndFile(ResourceReader[tuple[TreeReader, ArchiveFile]]):
    """Reader of images below a folder and of their rows in the file at ``path``, which must be unchanged."""

    images: TreeReader
    path: Path
    identity: Identity

    @contextmanager
    def open_resource(self) -> Iterator[tuple[TreeReader, ArchiveFile]]:
        with ArchiveFile(self.path, self.identity) as file, self.images.open() as images:
            yield images, file

    def read(self, entry: np.void) -> bytes:
        return self.resource[0].read(entry)

    def location_of(self, entry: np.void) -> str:
        return self.images.location_of(entry)


def read_row(file: ArchiveFile, length: int, offset: int, parse: Callable[[bytes], Row]) -> Row:
    """Read and parse a row at an offset. Raises SourceDamaged if it cannot be parsed or is truncated."""
    data = file.read_at(length, offset)
    if len(data) < length:
        raise SourceDamaged("ends within its last row; start again", path=file.path)
    with errors_as_damage(file.path, "start again", place=lambda: f"the row at byte {offset}: "):
        return parse(data)


def relative_path(path: str, roots: Sequence[Path]) -> str:
    """Return a path relative to the root, which has the names ``roots``. Raises ValueError for others."""
    if path.startswith("/"):
        root = next((root for root in roots if Path(path).is_relative_to(root)), None)
        if root is None and not os.path.isfile(f"{roots[0]}{path}"):  # noqa: PTH113 - a Path raises for long names
            raise ValueError(f"{path[:200]!r} is not below {roots[0]}; give another --root")
        path = str(Path(path).relative_to(root or "/"))  # those of Places365 begin with a slash
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path[:200]!r} may lead out of the folder; write it without ..")
    place = "/".join(parts)
    if not is_text(place) or not 0 < len(place.encode()) <= MAX_KEY_BYTES or "\0" in place:
        raise ValueError(f"names no file with a path of at most {MAX_KEY_BYTES} bytes")
    return place


MAX_LINE_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20


class Lines(Iterator[str]):
    """The lines of a UTF-8 file, each with a newline at its end.

    ``number`` counts the lines read, and ``offset`` is where the next one begins in the file. Raises
    ValueError for other encodings, NUL bytes, and a line of more than MAX_LINE_BYTES.
    """

    def __init__(self, file: ArchiveFile) -> None:
        self.number = self.offset = 0
        self._end = file.end
        self._raw = _read_raw_lines(file)

    def __next__(self) -> str:
        self.number += 1
        raw = next(self._raw)
        self.offset = min(self.offset + len(raw) + 1, self._end)
        if len(raw) > MAX_LINE_BYTES:
            raise ValueError(f"has more than {MAX_LINE_BYTES} bytes")
        try:
            text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 text at its byte {error.start}") from error
        if "\0" in text:
            raise ValueError("has a NUL byte; remove it")
        return text + "\n"


def _read_raw_lines(file: ArchiveFile) -> Iterator[bytes]:
    rest = b""
    for offset in range(0, file.end, _PIECE_BYTES):
        *whole, rest = (rest + file.read_at(_PIECE_BYTES, offset)).split(b"\n")
        yield from whole
        if len(rest) > MAX_LINE_BYTES:
            break
    if rest:
        yield rest


SEPARATOR = "|"  # of several labels in one cell of CSV
_ACCEPTED_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


def encode_cell(field: Field, cell: Any, *, typed: bool) -> bytes:
    """Encode a cell for its column; ``typed`` cells are JSON values. Raises BadValue."""
    try:
        return field.codec.encode(_parse_cell(field, cell, typed=typed))
    except (ValueError, BadValue, RecursionError) as error:
        what = "is not JSON: " if isinstance(error, json.JSONDecodeError) else ""
        raise BadValue(f"the column {field.name}: {what}{getattr(error, 'message', error)}") from error


def parse_class_names(cell: Any, kind: str, *, typed: bool) -> Sequence[str]:
    """Return the class names in a cell of kind label or labels. Raises ValueError."""
    if kind == "labels" and typed:
        if not isinstance(cell, list):
            raise ValueError(f"has labels that are not a list: {str(cell)[:80]!r}")
        return [label_name(each) for each in cell]
    text = "" if cell is None else label_name(cell)
    names = [name.strip() for name in text.split(SEPARATOR)] if kind == "labels" else [text.strip()]
    return [name for name in names if name]


def _parse_cell(field: Field, cell: Any, *, typed: bool) -> Any:
    kind, codec = field.kind, field.codec
    if kind in CLASS_CODECS:
        names = parse_class_names(cell, kind, typed=typed)
        return names if kind == "labels" else (names[0] if names else -1)
    if isinstance(codec, ArrayCodec):
        return _parse_array(codec, cell if typed else json.loads(cell))
    if kind == "float" and (cell is None if typed else not cell.strip()):
        return math.nan
    if typed or kind == "text":
        return cell
    if kind == "json":
        return json.loads(cell) if cell.strip() else None
    with suppress(ValueError):
        if "_" not in cell:
            return int(cell) if kind == "int" else float(cell)
    raise ValueError(f"expected a {'whole ' * (kind == 'int')}number, not {cell[:80]!r}")


def _parse_array(codec: ArrayCodec, value: Any) -> npt.NDArray[Any]:
    """Convert nested lists of numbers to an array of the codec. Raises ValueError for other values."""
    if value == [] and codec.shape[:1] == (None,):
        return np.zeros([size or 0 for size in codec.shape], codec.elements)
    numbers = np.asarray(value)
    if numbers.dtype == np.object_ and codec.elements.kind == "f":
        numbers = np.asarray(_nan_for_null(value))
    if numbers.size and numbers.dtype.kind not in _ACCEPTED_KINDS.get(codec.elements.kind, ""):
        raise ValueError(f"expected numbers for {codec.kind}, not {str(value)[:80]}")
    with np.errstate(over="ignore"):
        array: npt.NDArray[Any] = numbers.astype(codec.elements)
    is_float = codec.elements.kind == "f"
    if not (np.isfinite(array) == np.isfinite(numbers)).all() or (not is_float and (array != numbers).any()):
        raise ValueError(f"expected numbers that {codec.kind} can hold, not {str(value)[:80]}")
    return array if codec.shape else array[()]


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan_for_null(each) for each in value]
    return math.nan if value is None else value


def label_name(value: Any) -> str:
    """Return the class name in a JSON or CSV value. Raises ValueError unless it is text or an integer."""
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise ValueError(f"has a label that is neither text nor a whole number: {str(value)[:80]!r}")


_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_NUMBER_CELL = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,4})?"  # 1.50, .5, 1.0E10
    r"|-?(?:0|[1-9][0-9]*)e[+-][0-9]{1,4}"  # 1e-05; without the sign it may be an identifier
    r"|-0|-?(?:nan|inf|infinity)",
    re.ASCII | re.IGNORECASE,
)


class ColumnKind:
    """The kind of one column, guessed from all of its cells; ``header`` is its name in the table.

    Guesses are int, float, text, and json for other JSON values. CSV cells are text (``typed`` is False); an
    empty one is not an integer, and NaN as a float. A guess of int or float never loses a digit, so a column
    with cells such as ``007``, ``+49``, 20 digits, or a whole number beyond 2**53 beside fractions is text.
    """

    def __init__(self, header: str, choice: ColumnChoice | None = None, *, typed: bool) -> None:
        self.header, self._choice, self._typed = header, choice, typed
        self._kind = choice.kind if choice else ""
        self._seen: set[str] = set()
        self._has_empty = False
        self._classes: dict[str, None] = {}
        if choice and self._kind in ("image", "bytes"):
            raise UsageError(
                f"the column {choice.name} of kind {self._kind} cannot come from a table; give a folder of "
                "images with --pair"
            )

    def add(self, cell: Any) -> None:
        """Take a cell into account. Raises ValueError for invalid class names."""
        if self._kind in CLASS_CODECS:
            self._classes.update(dict.fromkeys(parse_class_names(cell, self._kind, typed=self._typed)))
            if len(self._classes) > MAX_CLASSES:
                raise ValueError(
                    f"has a class of {self.header!r} that exceeds the limit of {MAX_CLASSES} classes"
                )
        elif not self._kind and self._typed:
            self._seen.add(_kind_of_value(cell))
        elif not self._kind and not cell.strip():
            self._has_empty = True
        elif not self._kind and "text" not in self._seen:
            self._seen.add(_kind_of_text(cell.strip()))

    @property
    def field(self) -> Field:
        """The field for the cells so far. Raises UsageError if the header is not a valid column name."""
        if self._choice:
            return Field(self._choice.name, self._kind or self.guess, tuple(sorted(self._classes)))
        name = f"{self.header}_" if self.header.lower() in RESERVED else self.header
        try:
            return Field(name, self.guess)
        except UsageError as error:
            advice = "choose columns with --column NAME=HEADER"
            raise UsageError(f"the table's column {self.header!r}: {error.message}; {advice}") from error

    @property
    def guess(self) -> str:
        """The kind that fits all cells so far."""
        if self._seen and self._seen <= {"int", "wide int"} and not self._has_empty:
            return "int"
        if self._seen and self._seen <= {"int", "float"}:
            return "float"
        return "json" if self._typed and self._seen - {"text"} else "text"


def column_kinds(
    names: Sequence[str], choices: Iterable[ColumnChoice], used: Iterable[str | None], *, typed: bool
) -> dict[str, ColumnKind]:
    """Return the kinds by header: of the chosen columns, or all that are not ``used``. Raises UsageError."""
    chosen = list(choices)
    if not chosen:
        used = {*used}
        return {name: ColumnKind(name, typed=typed) for name in names if name not in used}
    kinds = dict[str, ColumnKind]()
    for choice in chosen:
        if choice.origin not in names:
            available = ", ".join(names)[:200]
            raise UsageError(f"the table has no column {choice.origin!r}; its columns are: {available}")
        if choice.origin in kinds:
            raise UsageError(f"the column {choice.origin!r} of the table is chosen twice; choose it once")
        kinds[choice.origin] = ColumnKind(choice.origin, choice, typed=typed)
    return kinds


def _kind_of_text(cell: str) -> str:
    if _INTEGER.fullmatch(cell):
        kind = _kind_of_value(int(cell))
        return "text" if kind == "json" else kind
    if not _NUMBER_CELL.fullmatch(cell):
        return "text"
    if cell[-1].isalpha():  # nan, inf
        return "float"
    digits = re.sub("[-.]|[eE].*", "", cell).lstrip("0")
    given_back = Decimal(f"{float(cell):.{max(0, len(digits) - 1)}e}")
    return "float" if given_back == Decimal(cell) else "text"


def _kind_of_value(cell: Any) -> str:
    if type(cell) is int and INT64.min <= cell <= INT64.max:
        return "int" if int(float(cell)) == cell else "wide int"
    if isinstance(cell, str):
        return "text"
    return "float" if isinstance(cell, float) else "json"


CSV_SUFFIXES, JSON_SUFFIXES = (".csv", ".tsv"), (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*CSV_SUFFIXES, *JSON_SUFFIXES, ".json")
_DELIMITERS = ",;\t"
_CSV_ADVICE = (
    "quote values, double the quotes in them, end lines with a line feed, and write values of more than 131,072 "
    "characters to JSON Lines"
)


class TableRow(NamedTuple):
    """A row: the number of its first line, its place in the file, and its cells by column."""

    line: int
    offset: int
    length: int
    cells: Mapping[str, Any]


Rows = Iterator[TableRow | ValueError]
"""Rows, and the problems of lines that are not rows."""


@dataclass(frozen=True)
class TableForm:
    """The format of a table: the ``names`` of its columns, and a ``delimiter``, empty for JSON Lines.

    CSV cells are text; JSON Lines have JSON values. An open form accepts objects with additional names. A
    line of plain text is a path and a label, separated by a tab, or else by the last space.
    """

    names: tuple[str, ...]
    delimiter: str = ""
    has_header: bool = True
    is_open: bool = False
    is_text: bool = False

    @classmethod
    def of(cls, file: ArchiveFile, *, unique: bool = True) -> TableForm:
        """Return the form of a table from its first line.

        Raises ValueError if that is neither a header nor an object, or if names are not ``unique``, and
        UsageError if the file's suffix is not that of a table.
        """
        if (suffix := file.path.suffix.lower()) not in CSV_SUFFIXES + JSON_SUFFIXES:
            known = ", ".join(CSV_SUFFIXES + JSON_SUFFIXES)
            raise UsageError(f"is not a known kind of table; known kinds are {known}", path=file.path)
        first = next(Lines(file), "")
        if not first.strip():
            raise ValueError("is empty; a table begins with the names of its columns")
        delimiter = "" if suffix in JSON_SUFFIXES else max(_DELIMITERS, key=first.count)
        names = tuple(_parse_csv(first, delimiter) if delimiter else _parse_object(first))
        if unique and len(set(names)) != len(names):
            raise ValueError("has two columns with the same name; rename one")
        return cls(names, delimiter)

    @classmethod
    def of_objects(cls, file: ArchiveFile) -> TableForm:
        """Return the open form of JSON Lines with the names of the first object; empty if there is none."""
        form = cls((), is_open=True)
        with suppress(ValueError):  # reported when the rows are read
            rows = (row for row in form.rows(Lines(file)) if isinstance(row, TableRow))
            return replace(form, names=tuple(row.cells if (row := next(rows, None)) else ()))
        return form

    def rows(self, lines: Lines) -> Rows:
        """Yield the rows of the table, given all its lines. Raises ValueError where no more can be read."""
        if self.is_text:
            return self._text_rows(lines)
        return self._csv_rows(lines) if self.delimiter else self._json_rows(lines)

    def parse_row(self, data: bytes) -> Mapping[str, Any]:
        """Parse the bytes of one row. Raises ValueError."""
        text = data.decode("utf-8-sig")
        return self._name_cells(_parse_csv(text, self.delimiter) if self.delimiter else _parse_object(text))

    def _text_rows(self, lines: Lines) -> Rows:
        for line in filter(None, map(str.strip, lines)):
            path, separator, label = line.partition("\t") if "\t" in line else line.rpartition(" ")
            if separator and "\t" not in label:
                yield TableRow(lines.number, 0, 0, {"path": path, "label": label})
            else:
                yield ValueError(f"{line[:80]!r} is not a path and its label")

    def _csv_rows(self, lines: Lines) -> Rows:
        if self.has_header:
            next(lines)
        rows = csv.reader(lines, delimiter=self.delimiter, strict=True)
        while True:
            line, offset = lines.number + 1, lines.offset
            try:
                cells = next(rows, None)
            except csv.Error as error:
                raise ValueError(
                    f"the row that begins in line {line} is not CSV ({error}); {_CSV_ADVICE}"
                ) from error
            if cells is None:
                return
            if not cells:
                continue
            try:
                yield TableRow(line, offset, lines.offset - offset, self._name_cells(cells))
            except ValueError as error:
                yield error

    def _json_rows(self, lines: Lines) -> Rows:
        offset = 0
        for text in lines:
            try:
                if text.strip():
                    cells = self._name_cells(_parse_object(text))
                    yield TableRow(lines.number, offset, lines.offset - offset, cells)
            except (ValueError, RecursionError) as error:
                yield ValueError(f"is not a row: {error}")
            offset = lines.offset

    def _name_cells(self, row: Sequence[str] | Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the cells of a CSV row or an object by name. Raises ValueError for other names."""
        names = self.names
        if not isinstance(row, Mapping):
            if len(row) != len(names):
                columns = f"{len(row)} column{'' if len(row) == 1 else 's'}"
                raise ValueError(f"has {columns}, but the first line has {len(names)}")
            return dict(zip(names, row, strict=True))
        missing = next((name for name in names if name not in row), None)
        if missing is not None or (len(row) > len(names) and not self.is_open):
            other = f"no {missing!r}" if missing is not None else repr(next(n for n in row if n not in names))
            raise ValueError(f"has {other}, unlike the first line; give every object the same names")
        return row


def _parse_csv(text: str, delimiter: str) -> list[str]:
    lines = (line + "\n" for line in text.removesuffix("\n").split("\n"))
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise ValueError(f"is not CSV ({error}); {_CSV_ADVICE}") from error


def _parse_object(text: str) -> Mapping[str, Any]:
    value = FINITE_JSON.decode(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object; write one object per line")
    return value

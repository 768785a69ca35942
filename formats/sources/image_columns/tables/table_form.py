"""Tables of values in files of text: CSV and JSON lines, read in place row by row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardprep.formats.errors import UsageError
from shardprep.formats.sources.labelled_list.lines import Lines
from shardprep.formats.system.regular_file import ArchiveFile

CSV_SUFFIXES, JSON_SUFFIXES = (".csv", ".tsv"), (".jsonl", ".ndjson")
MAX_ROW_BYTES = 16 << 20
_DELIMITERS = ",;\t"


class TableRow(NamedTuple):
    """A row: the number of its first line, its place in the file, and its cells in the order of the names."""

    line: int
    offset: int
    length: int
    cells: tuple[Any, ...]


Rows = Iterator[TableRow | ValueError]
"""Rows, and for lines that are none what is wrong with them."""


@dataclass(frozen=True)
class TableForm:
    """How the rows of a table are read: ``names`` of its columns, and ``delimiter``, empty for JSON lines.

    Cells of CSV are text; those of JSON lines are values of JSON.
    """

    names: tuple[str, ...]
    delimiter: str = ""

    @classmethod
    def of(cls, file: ArchiveFile) -> TableForm:
        """Return the form of a table by its first line.

        Raises ValueError if that is neither a header nor an object, or if a name is there twice, and
        UsageError if the file has not the name of a table.
        """
        path, first = file.path, next(Lines(file, MAX_ROW_BYTES), "")
        if not first.strip():
            raise ValueError("is empty; a table begins with the names of its columns")
        delimiter = "" if is_json(path) else max(_DELIMITERS, key=first.count)
        names = tuple(_cells(first, delimiter) if delimiter else _object_of(first))
        if len(set(names)) != len(names):
            raise ValueError("has a name twice; rename one column")
        return cls(names, delimiter)

    def rows(self, lines: Lines) -> Rows:
        """Yield the rows of the table's lines, which begin with its first.

        A quoted value of CSV may have newlines. Raises ValueError where no further row can be told.
        """
        return self._csv_rows(lines) if self.delimiter else self._json_rows(lines)

    def cells(self, data: bytes) -> tuple[Any, ...]:
        """Return the cells of one row, given as the bytes at its place. Raises ValueError."""
        text = data.decode("utf-8-sig")
        return self._fitting(_cells(text, self.delimiter)) if self.delimiter else self._values_of(text)

    def _csv_rows(self, lines: Lines) -> Rows:
        next(lines)  # the header
        rows = csv.reader(_without_nul(lines), delimiter=self.delimiter, strict=True)
        while True:
            line, offset = lines.number + 1, lines.offset
            try:
                cells = next(rows, None)
            except csv.Error as error:
                begun = f"the row that begins in line {line} "
                raise ValueError(f"{begun}{_no_csv(error)}") from error
            if cells is None:
                return
            if not cells:
                continue
            try:
                yield TableRow(line, offset, lines.offset - offset, self._fitting(cells))
            except ValueError as error:
                yield error

    def _json_rows(self, lines: Lines) -> Rows:
        offset = 0
        for text in lines:
            try:
                if text.strip():
                    cells = self._values_of(text)
                    yield TableRow(lines.number, offset, lines.offset - offset, cells)
            except (ValueError, RecursionError) as error:
                yield ValueError(f"is not a row: {error}")
            offset = lines.offset

    def _fitting(self, cells: list[str]) -> tuple[str, ...]:
        if len(cells) != len(self.names):
            found = f"{len(cells)} column{'' if len(cells) == 1 else 's'}"
            raise ValueError(f"has {found}, but the first line has {len(self.names)}")
        return tuple(cells)

    def _values_of(self, text: str) -> tuple[Any, ...]:
        value = _object_of(text)
        if value.keys() != set(self.names):
            missing = [name for name in self.names if name not in value]
            what = f"no {missing[0]!r}" if missing else f"{next(n for n in value if n not in self.names)!r}"
            raise ValueError(f"has {what}, unlike the first line; give every object the same names")
        return tuple(value[name] for name in self.names)


def is_json(path: Path) -> bool:
    """Whether a file of this name has JSON lines. Raises UsageError for a name that no table has."""
    suffix = path.suffix.lower()
    if suffix not in CSV_SUFFIXES + JSON_SUFFIXES:
        known = ", ".join(CSV_SUFFIXES + JSON_SUFFIXES)
        raise UsageError(f"is not the name of a table; known are {known}", path=path)
    return suffix in JSON_SUFFIXES


def _cells(text: str, delimiter: str) -> list[str]:
    if "\0" in text:
        raise ValueError("has a NUL byte; remove it")
    lines = (line + "\n" for line in text.removesuffix("\n").split("\n"))
    try:
        return next(csv.reader(lines, delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise _no_csv(error) from error


def _no_csv(error: csv.Error) -> ValueError:
    return ValueError(f"is not CSV ({error}); quote values, and double the quotes in them")


def _without_nul(lines: Lines) -> Iterator[str]:
    for text in lines:
        if "\0" in text:
            raise ValueError("has a NUL byte; remove it")
        yield text


def _object_of(text: str) -> Mapping[str, Any]:
    value = json.loads(text, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object; write one object per line")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

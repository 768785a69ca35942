"""The rows of a list of images: a path and a label each, in three forms."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardprep.formats.sources.listing.source_options import SourceOptions

from .lines import Lines

PATH_COLUMNS = (
    *("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_file"),
    *("img", "img_path", "image_name"),
)
LABEL_COLUMNS = (
    *("label", "class", "class_name", "category", "target", "labels", "label_name", "class_id", "label_id"),
    *("wnid", "synset", "y"),
)
_DELIMITERS = ",;\t"


class Row(NamedTuple):
    """One image as listed: its path and its label."""

    path: str
    label: str


Rows = Iterator[Row | ValueError]
"""Rows, and for a line that is none what is wrong with it."""
ReadRows = Callable[[Lines, SourceOptions], Rows]


def reader_of(path: Path, options: SourceOptions) -> ReadRows | None:
    """Return the reader for a file of this name; None if it is not how a list is called.

    With options that only lists have, any other name is one of a text file.
    """
    return _READERS.get(path.suffix.lower()) or (read_text if options.for_lists else None)


def read_text(lines: Lines, options: SourceOptions) -> Rows:
    """Yield ``path label`` of each line; they are separated by a tab, or else by the last space."""
    if options.path_column or options.label_column:
        raise ValueError("is of a text file, which has no names of columns; give a CSV file or JSON lines")
    for line in filter(None, map(str.strip, lines)):
        path, separator, label = line.partition("\t") if "\t" in line else line.rpartition(" ")
        if separator:
            yield Row(path.strip(), label.strip())
        else:
            yield ValueError(f"{line[:80]!r} is no path and its label")


def read_csv(lines: Lines, options: SourceOptions) -> Rows:
    """Yield the rows of a CSV file below its header; two columns of images and labels need none."""
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=first.count)
    if not first.strip():
        raise ValueError("is empty; begin the list with the names of its columns")
    (header,) = csv.reader([first], delimiter=delimiter, strict=True)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names = [name.strip() for name in header]
    if len(names) == 2 and "." in names[0] and not options.path_column and not options.label_column:
        yield Row(*names)
        path, label = 0, 1
    else:
        path, label = map(names.index, _columns(names, options))
    for row in filter(None, rows):
        if len(row) == len(names):
            yield Row(row[path].strip(), row[label].strip())
        else:
            columns = f"{len(row)} column{'' if len(row) == 1 else 's'}"
            yield ValueError(f"has {columns}, but the first line has {len(names)}")


def read_json(lines: Lines, options: SourceOptions) -> Rows:
    """Yield the rows of JSON lines, with one object in each."""
    columns: tuple[str, str] | None = None
    for line in filter(str.strip, lines):
        try:
            value = _object_of(line)
            columns = columns or _columns(list(value), options)
            yield Row(_text_of(value, columns[0]), _text_of(value, columns[1], number=True))
        except ValueError as error:
            yield error


_READERS: Mapping[str, ReadRows] = {
    **dict.fromkeys((".txt", ".lst", ".list"), read_text),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), read_json),
}


def _columns(names: Sequence[str], options: SourceOptions) -> tuple[str, str]:
    """Return the names of the columns of paths and labels."""
    return (
        _column(names, options.path_column, PATH_COLUMNS, "--path-column"),
        _column(names, options.label_column, LABEL_COLUMNS, "--label-column"),
    )


def _object_of(line: str) -> Mapping[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object; write one object per line")
    return value


def _column(names: Sequence[str], wanted: str | None, usual: Iterable[str], option: str) -> str:
    by_lower = {name.lower(): name for name in reversed(names)}
    found = wanted if wanted in names else None
    if wanted is None:
        found = next((by_lower[name] for name in usual if name in by_lower), None)
    if found is None:
        there = ", ".join(names)[:200]
        what = f"no column {wanted!r}" if wanted else "none of the usual columns"
        raise ValueError(f"has {what}; name it with {option}, of these: {there}")
    return found


def _text_of(value: Mapping[str, Any], name: str, *, number: bool = False) -> str:
    found = value.get(name)
    if isinstance(found, str):
        return found.strip()
    if number and type(found) is int:
        return str(found)
    raise ValueError(f"has no text{' or whole number' if number else ''} under {name!r}")

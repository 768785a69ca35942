"""WebDataset: tars in which files of one name with several extensions make a sample."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from shardprep.formats.columns.schema import Field
from shardprep.formats.containers.table import Rows
from shardprep.formats.images.header import read_image_header

from .export_format import Exportable, ShardFormat, cannot_hold
from .export_record import ExportRecord, corners, kind_of
from .names import SUFFIXES, digests, repeated, stem_of, suffix_of, without_suffix

BLOCK = 512
BOXES = "boxes.json"
EXTENSIONS = {
    "bytes": "bin",
    "text": "txt",
    "json": "json",
    "int": "index",
    "float": "json",
    "label": "cls",
    "labels": "json",
}
"""The extension of a column by its kind, after the column's name; arrays are ``npy``.

The decoder of webdataset gives an int for ``index`` and ``cls``, text for ``txt``, a value for ``json``.
"""


class WebDatasetTars(ShardFormat):
    """Tars (ustar) of samples: image, label as ``cls``, boxes and columns.

    A stem is the key, as :func:`.names.stem_of` makes it, without the suffix of an image file where this
    leaves the stems of all records unique.
    """

    name = "webdataset"

    def __init__(self, source: Exportable, index: Rows) -> None:
        super().__init__(source, index)
        bare = digests(without_suffix(key.decode()) for key in index["key"].tolist())
        self._bare = not repeated(bare)
        for field in source.schema:
            if self._extension(field, "JPEG") == BOXES and source.has_boxes:
                raise cannot_hold(self.name, field, "boxes have that name", instead="parquet or mds")

    def unit_name(self, number: int, count: int) -> str:
        return f"{self.source.split}-{number:06d}.tar"

    def names(self, rows: Rows) -> list[str]:
        keys = super().names(rows)
        return [stem_of(without_suffix(key) if self._bare else key) for key in keys]

    def bytes_beside(self) -> int:
        return 2 * BLOCK * (3 + len(self.source.schema))

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        for record in records:
            for extension, data in self._members(record):
                file.write(header(f"{record.name}.{extension}", len(data)))
                file.write(data)
                file.write(bytes(-len(data) % BLOCK))
        file.write(bytes(2 * BLOCK))

    def _members(self, record: ExportRecord) -> Iterator[tuple[str, bytes]]:
        if self.source.has_images:
            yield suffix_of(record.kind, int(record.row["components"])), record.image
        if self.source.has_labels:
            yield "cls", str(record.label).encode()
        if record.boxes is not None:
            yield BOXES, _json({"bbox": corners(record.boxes), "label": record.boxes["label"].tolist()})
        for field in self.source.schema:
            value = record.columns[field.name]
            yield self._extension(field, _kind_in(field, value)), encoded(field, value)

    def _extension(self, field: Field, kind: str) -> str:
        last = SUFFIXES[kind][0] if field.kind == "image" else EXTENSIONS.get(field.kind, "npy")
        return f"{field.name.lower()}.{last}"


def _kind_in(field: Field, value: Any) -> str:
    return kind_of(read_image_header(value).flags) if field.kind == "image" else "JPEG"


def header(name: str, size: int) -> bytes:
    """Return the header of a tar's member, readable by all and of the time 0.

    It is one of ustar; a name too long for it stands in an extended header of POSIX before.
    """
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    try:
        return info.tobuf(tarfile.USTAR_FORMAT)
    except ValueError:
        return info.tobuf(tarfile.PAX_FORMAT)


def encoded(field: Field, value: Any) -> bytes:
    """Return a column's value as the file of its extension."""
    match field.kind:
        case "bytes" | "image":
            return bytes(value)
        case "text":
            return str(value).encode()
        case "json" | "float":
            return _json(value)
        case "int" | "label":
            return str(value).encode()
        case "labels":
            return _json(value.tolist())
    return _npy(np.asarray(value))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return file.getvalue()

"""WebDataset: tars of samples; the files of a sample share a name and differ in extension."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from shardprep.formats.exports.format import (
    SUFFIXES,
    ExportFormat,
    ExportRecord,
    ExportSource,
    corners,
    digest_names,
    encode_stem,
    find_repeated,
    in_chunks,
    strip_suffix,
    suffix_of,
)
from shardprep.formats.images.header import kind_of, read_image_header
from shardprep.formats.shards.read import Rows

BLOCK = 512
BOXES = "boxes.json"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


EXTENSIONS = {"bytes": "bin", "text": "txt", "int": "index", "label": "cls"}
EXTENSIONS |= dict.fromkeys(("json", "float", "labels"), "json")
"""The extension after a column's name, by kind; arrays are ``npy``.

webdataset decodes ``index`` and ``cls`` to an int, ``txt`` to text, and ``json`` to its value.
"""


def _encode(value: Any, extension: str) -> bytes:
    match extension:
        case "bin":
            return bytes(value)
        case "txt" | "index" | "cls":
            return str(value).encode()
        case "json":
            return _json(value.tolist() if isinstance(value, np.ndarray) else value)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), version=(1, 0), allow_pickle=False)
    return file.getvalue()


class WebDatasetTars(ExportFormat):
    """Tars (ustar) of samples: image, label as ``cls``, boxes and columns.

    A sample's name is its key's :func:`.format.encode_stem`. Suffixes of image files are dropped if all names
    stay unique without them.
    """

    name = "webdataset"
    unit_names = "{split}-{number:06d}.tar"
    box_names = ("boxes",)

    def __init__(self, source: ExportSource, index: Rows, report_done: Callable[[int], None]) -> None:
        super().__init__(source, index, report_done)
        members = source.has_images + len(source.schema) + source.has_labels + source.has_boxes
        self.overhead = BLOCK * (members + source.has_labels)  # headers, and the block of a label
        chunks = (rows["key"].tolist() for rows in in_chunks(index, report_done))
        bare = digest_names(strip_suffix(key.decode()) for keys in chunks for key in keys)
        self._bare = not find_repeated(bare)

    def names(self, rows: Rows) -> list[str]:
        return [encode_stem(strip_suffix(key) if self._bare else key) for key in super().names(rows)]

    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        for record in records:
            for extension, data in self._members(record):
                file.write(tar_header(f"{record.name}.{extension}", len(data)))
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
            value, name = record.columns[field.name], field.name.lower()
            if field.kind == "image":
                yield f"{name}.{SUFFIXES[kind_of(read_image_header(value).flags)][0]}", value
            else:
                extension = EXTENSIONS.get(field.kind, "npy")
                yield f"{name}.{extension}", _encode(value, extension)


def tar_header(name: str, size: int) -> bytes:
    """Return the ustar header of a member with time 0, after an extended POSIX header if the name is long."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    try:
        return info.tobuf(tarfile.USTAR_FORMAT)
    except ValueError:
        return info.tobuf(tarfile.PAX_FORMAT)

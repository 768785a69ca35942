"""The formats of an export by name."""

from __future__ import annotations

from shardprep.formats.errors import UsageError

from .export_format import ExportFormat
from .folders import FoldersFormat
from .mds import MDSFormat
from .parquet import ParquetFormat
from .tfrecord import TFRecordFormat
from .webdataset import WebDatasetFormat

FORMATS: dict[str, type[ExportFormat]] = {
    kind.name: kind for kind in (WebDatasetFormat, TFRecordFormat, MDSFormat, ParquetFormat, FoldersFormat)
}


def export_format(name: str) -> type[ExportFormat]:
    """Return the format of that name. Raises UsageError for an unknown name."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    return FORMATS[name]

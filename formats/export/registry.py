"""The formats of an export by name."""

from __future__ import annotations

from shardprep.formats.errors import UsageError

from .export_format import ExportFormat
from .folders import Folders
from .mds import MDS
from .parquet import Parquet
from .tfrecord import TFRecord
from .webdataset import WebDatasetTars

FORMATS: dict[str, type[ExportFormat]] = {
    kind.name: kind for kind in (WebDatasetTars, TFRecord, MDS, Parquet, Folders)
}


def export_format(name: str) -> type[ExportFormat]:
    """Return the format of that name. Raises UsageError for an unknown name."""
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; known are {', '.join(FORMATS)}")
    return FORMATS[name]

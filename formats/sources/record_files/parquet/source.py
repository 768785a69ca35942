"""The source of Parquet files of Hugging Face's datasets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.record_files.record_source import RecordSource, Scanned
from shardprep.formats.sources.record_files.split_files import split_files

from .contents import RowContents, changed_schema
from .layout import ParquetLayout, layout_of
from .library import arrow_reads, opened, parquet_module
from .reader import RowReader

_FILE = re.compile(r".+\.parquet", re.DOTALL)


def parquet(path: Path, split: str | None, options: SourceOptions) -> ParquetRows | None:
    """Return the source of the Parquet files at a path, or in the folder there; None if there are none.

    Raises UsageError, also without the library pyarrow, and OSError.
    """
    files = split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    parquet_module(path)
    return ParquetRows(files, options)


@dataclass(frozen=True)
class ParquetRows(RecordSource):
    """Rows of Parquet files.

    A record's key is the path of its image, where each row has one and no two the same; else the file and the
    number of its row.
    """

    LAYOUT: ClassVar[str] = "parquet"

    def scan(self, split: str) -> Scanned:
        problems, names = Problems(), self.files.of_split[split]
        layout = self._layout(split, problems)
        contents = RowContents(self.files, layout)
        with problems.collected(), arrow_reads(self.files.top / names[0]):
            contents.add_names()
        contents.problems.merge(problems)
        for name in names if not problems else ():
            with contents.problems.collected():
                contents.read(name)
        schema = contents.schema()
        return Scanned(
            entries=contents.table.finish(may_number=True),
            reader=RowReader(self.files.top, schema, layout),
            problems=contents.problems,
            classes=contents.classes,
            schema=schema,
            has_images=bool(layout.image),
        )

    def _layout(self, split: str, problems: Problems) -> ParquetLayout:
        """Return the layout of a split's files; one that cannot be read, or has another, is a problem."""
        schema, first, nullable = None, "", set[str]()
        for name in self.files.of_split[split]:
            path = self.files.top / name
            with problems.collected(), arrow_reads(path), opened(path) as file:
                if schema is None:
                    schema, first = file.schema_arrow, name
                elif not schema.equals(file.schema_arrow, check_metadata=True):
                    raise changed_schema(path, first)
                nullable |= set(_with_nulls(file.metadata))
        if schema is None:
            return ParquetLayout("", False, "", (), {})
        with arrow_reads(self.files.top / first):
            return layout_of(schema, frozenset(nullable))


def _with_nulls(metadata: Any) -> Iterator[str]:
    """Yield the columns in which there are nulls."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            statistics = chunk.statistics if chunk.is_stats_set else None
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                yield chunk.path_in_schema

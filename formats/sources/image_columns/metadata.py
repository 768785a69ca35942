"""The source of images with a table beside them: metadata.csv or metadata.jsonl, as in an image folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import UsageError
from shardprep.formats.sources.listing.archive_md5 import archive_of
from shardprep.formats.sources.listing.source import SPLITS, Listing, Source, no_such_split
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.tree_reader import TreeReader

from .metadata_reader import ROW_COLUMNS, MetadataReader
from .metadata_tables import MetadataTables, ReadTable

LAYOUT = "metadata"
NAMES = ("metadata.csv", "metadata.jsonl")


def metadata_folder(path: Path, split: str | None, options: SourceOptions) -> MetadataFolder | None:
    """Return the source of a folder with a table in it, or in its splits; None without any.

    Without folders of splits it is taken for ``split``, or for train. Raises UsageError for two tables of the
    same images.
    """
    places = {name: name for name in SPLITS if (path / name).is_dir()}
    of_split = {name: table for name in places if (table := _table_in(path / name))}
    whole = _table_in(path)
    if whole and of_split:
        raise UsageError(
            "has a table, and a folder of a split has one, too; keep one for each image", path=whole
        )
    if not whole and not of_split:
        return None
    if whole and not places:
        places = {split or "train": ""}
    tables = dict.fromkeys(places, whole) if whole else of_split
    for name in places:
        if not tables.get(name):
            raise UsageError(f"has no table, as other splits have; add {NAMES[0]}", path=path / name)
    return MetadataFolder(path, places, {name: table for name, table in tables.items() if table}, options)


def _table_in(folder: Path) -> Path | None:
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise UsageError(f"has {' and '.join(NAMES)}; keep one of them", path=folder)
    return found[0] if found else None


@dataclass(frozen=True)
class MetadataFolder(Source):
    """Images in folders, and a row for each of them in a table.

    ``places`` has the folder of each split relative to ``root``, and ``tables`` the table of each: its own,
    or one for all. All tables have the same columns.
    """

    root: Path
    places: Mapping[str, str]
    tables: Mapping[str, Path]
    source_options: SourceOptions

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.places)

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(self.root / place for place in self.places.values())

    @property
    def description(self) -> str:
        names = ", ".join(dict.fromkeys(str(table.relative_to(self.root)) for table in self.tables.values()))
        return f"{LAYOUT}: {', '.join(self.splits)}, with columns of {names}"

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that the manifest keeps."""
        return self.source_options.kept("follow_symlinks", "path_column", "label_column", "columns")

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        found = self._found
        table, entries = found.tables[self.tables[split]], found.images[split].entries
        if entries is None:
            raise ValueError("the tables are not read")
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=entries,
            labels=found.labels,
            reader=self._reader(table),
            archives=(archive_of(table.path),),
            problems=found.problems,
            ignored=dict(found.ignored[split]),
            options=self.options,
            schema=Schema(found.fields),
        )

    def _reader(self, table: ReadTable) -> MetadataReader:
        columns = ("path", ROW_COLUMNS[0][0], "mtime_ns")
        images = TreeReader(self.root, self.source_options.follow_symlinks, columns)
        return MetadataReader(images, table.path, table.identity, table.form, self._found.fields, table.cells)

    @cached_property
    def _found(self) -> MetadataTables:
        found = MetadataTables(self.root, self.tables, self.places)
        found.read(self.source_options)
        return found

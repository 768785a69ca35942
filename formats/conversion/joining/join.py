"""Columns are joined to a finished dataset: their files are added, and last the manifest is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.columns.column_entry import ColumnEntry, DatasetColumns
from shardprep.formats.columns.schema import Schema
from shardprep.formats.columns.unlisted_columns import remove_unlisted_columns
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.conversion.building.column_of_shard import BuiltColumn
from shardprep.formats.conversion.building.work_folder import WorkFolder, noting_kept
from shardprep.formats.conversion.column_tables import column_entry
from shardprep.formats.conversion.preflight import check_room
from shardprep.formats.dataset.manifest import (
    JOINED,
    MANIFEST_NAME,
    WORK_FOLDER_NAME,
    Manifest,
    read_manifest,
)
from shardprep.formats.dataset.splits import refuse_folder_of_splits
from shardprep.formats.dataset.table_checks import checked_index
from shardprep.formats.errors import OutputBusy, PlanMismatch, UsageError
from shardprep.formats.progress import Progress, shown
from shardprep.formats.records.canonical_json import sha256_of
from shardprep.formats.system.atomic_write import hash_file, publish, publish_bytes
from shardprep.formats.system.user_path import user_path

from .join_job import COMMIT_SUFFIX, JoinJob
from .join_request import requested
from .join_runner import run_joins
from .joined_values import JoinedColumn
from .matching import Keys

ROW_BYTES = 16  # of a column's table, and of a container, for each value


@dataclass(frozen=True)
class Joined:
    """The result of :func:`join`.

    ``path`` is the dataset's folder and ``manifest`` its :class:`Manifest`, now with the columns. ``added``
    are the names of the columns that are new, and ``rebuilt`` the damaged files of columns that were joined
    before, which have their old bytes again.
    """

    path: Path
    manifest: Manifest
    added: tuple[str, ...]
    rebuilt: tuple[str, ...]


def join(
    dataset: str | os.PathLike[str],
    columns: Mapping[str, str | os.PathLike[str]],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Joined:
    """Add columns to a finished dataset. After a kill at any point, the same call finishes the work.

    No file of the dataset is written again: those of the columns are added, and last the manifest is replaced
    at once. A dataset that is open already goes on without the columns. The ``content_root`` is that of a
    dataset that was converted with the same columns.

    ``dataset`` is the folder of one split. ``columns`` maps ``"NAME"`` or ``"NAME:KIND"`` to where the values
    come from: the folder of a dataset, for its images, or, as ``"FOLDER#COLUMN"``, for one of its columns;
    a ``.npy`` file with an array of a row for each record, in stored order; or a table (``.csv``, ``.tsv``,
    ``.jsonl``) with a column ``key`` or ``file_name`` and a column NAME, or, as ``"FILE#COLUMN"``, another.
    Datasets and tables have one partner for each record, matched by key, or by key or file name without
    extension where these are unique. ``workers`` is the number of processes; None is one per usable CPU, and
    0 works in this process. ``progress`` receives the progress; None shows a bar in a notebook.

    Columns that were joined before, with the same values, stay as they are; damaged files of them are built
    again. Raises UsageError for a column that is there with other values, SourceIncomplete, which names a
    record without a partner or a partner without a record, DataError for damage of the dataset or the values,
    OperationError (OutputBusy, NoSpace, WorkerDied) and OSError.
    """
    path, progress = user_path(dataset), shown(progress)
    refuse_folder_of_splits(path)
    manifest = read_manifest(path)
    if manifest.archive:
        raise UsageError(
            "has its images in an archive; prep convert makes shards of it to join to", path=path
        )
    keys = checked_index(path, manifest)["key"]
    asked = _Asked(path, manifest, requested(columns, manifest, keys))
    if not asked.to_build and not (path / WORK_FOLDER_NAME).exists():
        return Joined(path, manifest, (), ())
    check_room({path: asked.bytes_to_write(len(keys))})
    with WorkFolder(path) as work_folder:
        if read_manifest(path).root != manifest.root:
            raise OutputBusy("was changed by another process meanwhile; repeat the command", path=path)
        with noting_kept(lambda: _kept(path, manifest)):
            return _Join(asked, keys, work_folder).result(workers, progress)


def _kept(path: Path, manifest: Manifest) -> str:
    done = len([*(path / WORK_FOLDER_NAME).glob(f"*{COMMIT_SUFFIX}")])
    return f"{done} of {len(manifest.shards)} shards are done" if done else ""


@dataclass(frozen=True)
class _Asked:
    """What was asked for, and what of it is there already."""

    path: Path
    manifest: Manifest
    columns: Sequence[JoinedColumn]

    @cached_property
    def to_build(self) -> list[JoinedColumn]:
        """The columns that are new, or damaged. Raises UsageError for one that has other values."""
        new = [one.field for one in self.columns if self._entry(one) is None]
        Schema([*self.manifest.schema, *new])
        return [one for one in self.columns if one.field in new or self._is_damaged(one)]

    @property
    def added(self) -> list[JoinedColumn]:
        """The columns that are new."""
        return [one for one in self.to_build if self._entry(one) is None]

    @property
    def damaged(self) -> list[FileEntry]:
        """The damaged files of columns that were joined before."""
        entries = [entry for one in self.to_build if (entry := self._entry(one)) is not None]
        return [file for entry in entries for file in entry.files if not self._is_intact(file)]

    @cached_property
    def guard(self) -> dict[str, Any]:
        """What must be equal when a join is resumed."""
        return {
            "joined to": self.manifest.root,
            "columns": [one.field.to_json() for one in self.to_build],
            JOINED: [dict(one.custody) for one in self.to_build],
        }

    def bytes_to_write(self, records: int) -> int:
        """Return about how many bytes the columns take that are not there yet."""
        needed = sum(one.values.bytes_of(records) + ROW_BYTES * records for one in self.to_build)
        there = [path for name in _names(self.to_build) for path in self.path.glob(f"column-{name}-*")]
        return max(0, needed - sum(path.stat().st_size for path in there))

    def _entry(self, one: JoinedColumn) -> ColumnEntry | None:
        name = one.field.name
        if name not in self.manifest.schema or self.manifest.columns is None:
            return None
        if one.custody not in self.manifest.source.get(JOINED, []) or self.manifest.schema[name] != one.field:
            raise UsageError(f"has a column {name} with other values; choose another name", path=self.path)
        return self.manifest.columns[name]

    def _is_damaged(self, one: JoinedColumn) -> bool:
        entry = self._entry(one)
        return entry is not None and not all(map(self._is_intact, entry.files))

    def _is_intact(self, file: FileEntry) -> bool:
        path = self.path / file.name
        return path.is_file() and not path.is_symlink() and hash_file(path) == file.sha256


@dataclass(frozen=True)
class _Join:
    """The join in one work folder."""

    asked: _Asked
    keys: Keys
    work_folder: WorkFolder

    def result(self, workers: int | None, progress: Progress) -> Joined:
        added, damaged = self.asked.added, self.asked.damaged
        manifest = self.asked.manifest
        self._claim()
        if self.asked.to_build:
            built = run_joins(self._jobs(), manifest, workers=workers, progress=progress)
            entries = self._tables(built)
            if added:
                manifest = self._manifest([entry for entry in entries if entry.field.name in _names(added)])
                publish_bytes(
                    self.work_folder.output / MANIFEST_NAME, manifest.to_bytes(), self.work_folder.run
                )
        self.work_folder.remove()
        return Joined(
            self.work_folder.output, manifest, tuple(_names(added)), tuple(file.name for file in damaged)
        )

    def _claim(self) -> None:
        """Begin the join, or go on with it; files of another one that was not finished are removed."""
        try:
            self.work_folder.claim(self.asked.guard)
        except PlanMismatch:
            listed = {file.name for file in self.asked.manifest.files}
            remove_unlisted_columns(self.work_folder.output, listed)
            self.work_folder.clear()
            self.work_folder.claim(self.asked.guard)

    def _jobs(self) -> Iterator[JoinJob]:
        manifest = self.asked.manifest
        expected = {file.name: file.sha256 for file in manifest.column_files}
        plan = sha256_of(self.asked.guard)
        bounds = np.cumsum([0, *(shard.records for shard in manifest.shards)]).tolist()
        for number, shard in enumerate(manifest.shards):
            first, last = bounds[number : number + 2]
            yield JoinJob(
                output=self.work_folder.output,
                run=self.work_folder.run,
                name=shard.name,
                number=number,
                container=manifest.container,
                keys=self.keys[first:last],
                columns=tuple(
                    replace(one, values=one.values.only(first, last)) for one in self.asked.to_build
                ),
                plan=plan,
                expected=expected,
            )

    def _tables(self, built: Sequence[tuple[BuiltColumn, ...]]) -> list[ColumnEntry]:
        """Publish the columns' tables. Raises PlanMismatch for one that differs from that in the manifest."""
        listed = {file.name: file for file in self.asked.manifest.column_files}
        entries = []
        for number, one in enumerate(self.asked.to_build):
            entry = column_entry(self.work_folder, one.field, [columns[number] for columns in built])
            path = self.work_folder.output / entry.table.name
            if listed.get(path.name, entry.table) != entry.table:
                raise PlanMismatch("was joined with other values than these", path=path)
            publish(self.work_folder.run / path.name, path)
            entries.append(entry)
        return entries

    def _manifest(self, entries: Sequence[ColumnEntry]) -> Manifest:
        old = self.asked.manifest
        known = old.columns.entries if old.columns else ()
        columns = DatasetColumns((*known, *entries), old.records_root, old.has_images)
        custody = [dict(one.custody) for one in self.asked.added]
        source = old.source | {JOINED: [*old.source.get(JOINED, []), *custody]}
        return replace(old, columns=columns, content_root=columns.content_root, source=source)


def _names(columns: Sequence[JoinedColumn]) -> list[str]:
    return [one.field.name for one in columns]

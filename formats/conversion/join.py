"""Joining columns to a finished dataset: their files are added, and the manifest is replaced last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.finish import column_entry
from shardprep.formats.conversion.joined_values import JoinedColumn, Keys, of_array, of_dataset, of_table
from shardprep.formats.conversion.plan import PlannedShard
from shardprep.formats.conversion.prepare import check_room
from shardprep.formats.conversion.shard import BuiltColumn, ColumnOfShard, PublishingJob
from shardprep.formats.errors import OutputBusy, PlanMismatch, SourceDamaged, UsageError
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.schema import ColumnChoice, Schema, column_choice
from shardprep.formats.runtime.files import hash_file, publish, publish_bytes, user_path
from shardprep.formats.runtime.jobs import DecodesNothing, JobRunner, ProgressCounters, ShardCounter
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder, finished_shards, noting_kept
from shardprep.formats.shards.columns import ColumnEntry, DatasetColumns, remove_unlisted_columns
from shardprep.formats.shards.container import Extent
from shardprep.formats.shards.dataset import refuse_folder_of_splits
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.shards.manifest import JOINED, MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.shards.tables import checked_index

JOINED_SUFFIX = ".joined"
Built = tuple[BuiltColumn, ...]


@dataclass(frozen=True, kw_only=True)
class JoinJob(DecodesNothing, PublishingJob):
    """All that a worker needs to build columns of the shard that has these ``keys``. Picklable.

    ``plan`` is the digest of the joined columns.
    """

    keys: Keys
    columns: tuple[JoinedColumn, ...]
    plan: str

    def build(self) -> Built:
        """Build, check and publish the columns, unless they are finished. Safe to kill and repeat.

        Raises SourceDamaged for a value that its column cannot hold, and what reading the values and
        publishing the files raises.
        """
        built = self._finished()
        if built is None:
            built = tuple(self._built(column) for column in self.columns)
            commit = {"plan": self.plan, "columns": [asdict(column) for column in built]}
            publish_bytes(self.beside(JOINED_SUFFIX), canonical_json(commit), self.run)
        with closing(ShardCounter(self.run, self.shard.number)) as counter:
            counter.set(len(self.keys))
        return built

    def key_at(self, place: int) -> str:
        """Return the key of the record at that place, or of the last one."""
        key: bytes = self.keys[min(place, len(self.keys) - 1)]
        return key.decode()

    def _finished(self) -> Built | None:
        """Return the columns of a finished job if all their files are as they were written."""
        try:
            commit = parse_canonical_json(self.beside(JOINED_SUFFIX).read_bytes())
            built = tuple(BuiltColumn(**column) for column in commit["columns"])
            is_intact = all(column.is_intact(self.output, self.work_folder) for column in built)
            return built if commit["plan"] == self.plan and is_intact else None
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def _built(self, column: JoinedColumn) -> BuiltColumn:
        collected = ColumnOfShard(column.field, self)
        with column.values.opened() as value:
            for number, key in enumerate(self.keys.tolist()):
                try:
                    data = value(number)
                    column.field.codec.decode(data)
                except BadValue as error:
                    place = column.values.where(number)
                    raise SourceDamaged(error.message, path=place, key=key.decode()) from error
                collected.append(key, data)
        return collected.built()


def requested(
    columns: Mapping[str, str | os.PathLike[str]], manifest: Manifest, keys: Keys
) -> list[JoinedColumn]:
    """Return the columns to join to the dataset with these keys, in order.

    Raises UsageError for columns that cannot be, and what finding and matching their values raises.
    """
    if not columns:
        raise UsageError("name at least one column to join")
    choices = [column_choice(name, "NAME or NAME:KIND") for name in columns]
    Schema({choice.name: "bytes" for choice in choices})
    if len({choice.name for choice in choices}) != len(choices):
        raise UsageError("a column is named twice")
    origins = [os.fspath(origin) for origin in columns.values()]
    return [_found(choice, origin, manifest, keys) for choice, origin in zip(choices, origins, strict=True)]


def _found(choice: ColumnChoice, origin: str, manifest: Manifest, keys: Keys) -> JoinedColumn:
    path, part = _parts(origin)
    if not path.exists():
        raise UsageError(
            f"does not exist; the column {choice.name} comes from a dataset or a file", path=path
        )
    if path.is_dir():
        return of_dataset(path, part, choice, keys, manifest.split)
    if path.suffix.lower() != ".npy":
        return of_table(path.resolve(), part or choice.name, choice, keys)
    if part:
        raise UsageError("is an array, which has no columns", path=path)
    return of_array(path.resolve(), choice, manifest.records)


def _parts(origin: str) -> tuple[Path, str]:
    """Return the path, and the name of a column in it after the last ``#``, empty without one."""
    path = user_path(origin)
    if path.exists() or "#" not in origin:
        return path, ""
    place, _, part = origin.rpartition("#")
    return user_path(place), part


ROW_BYTES = 16  # of a column's table, and of a container, for each value


@dataclass(frozen=True)
class Joined:
    """The result of :func:`join`.

    Attributes:
        path: The dataset's folder.
        manifest: Its manifest, now with the columns.
        added: Names of the new columns.
        rebuilt: Names of the damaged files of columns joined before, which have their old bytes again.
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
    at once. A dataset that is already open continues without the columns. The ``content_root`` is that of a
    dataset that was converted with the same columns. Columns that were joined before with the same values
    stay as they are, and their damaged files are rebuilt.

    Args:
        dataset: Folder of one split.
        columns: Maps "NAME" or "NAME:KIND" to where the values come from: the folder of a dataset, for its
            images, or "FOLDER#COLUMN" for one of its columns; a ``.npy`` file with a row for each record, in
            stored order; or a table (``.csv``, ``.tsv``, ``.jsonl``) with a column of keys or paths (``key``,
            ``file_name``, ``path``, …) and a column NAME, or another as "FILE#COLUMN". Datasets and tables
            have one partner for each record, matched by key, or by key or file name without extension where
            these are unique.
        workers: Number of processes; None is one per usable CPU, 0 works in this process.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The columns, and whether they were joined already.

    Raises:
        UsageError: A column exists with different values, or an argument is not valid.
        SourceIncomplete: A record has no partner, or a partner no record; it names one.
        DataError: The dataset or the values are damaged.
        OperationError: OutputBusy, NoSpace or WorkerDied.
        OSError: A file cannot be read or written.
    """
    path, progress = user_path(dataset), shown(progress)
    refuse_folder_of_splits(path)
    manifest = read_manifest(path)
    if manifest.archive:
        raise UsageError(
            "has its images in an archive; make shards of it with prep convert, and join to those", path=path
        )
    keys = checked_index(path, manifest)["key"]
    asked = _RequestedColumns(path, manifest, requested(columns, manifest, keys))
    if not asked.to_build and not (path / WORK_FOLDER_NAME).exists():
        return Joined(path, manifest, (), ())
    check_room({path: asked.bytes_to_write(len(keys))})
    with WorkFolder(path) as work_folder:
        if read_manifest(path).root != manifest.root:
            raise OutputBusy("was changed by another process in the meantime; try again", path=path)
        with noting_kept(lambda: _kept(path, manifest)):
            return _Join(asked, keys, work_folder).result(JobRunner(workers, progress=progress))


def _kept(path: Path, manifest: Manifest) -> str:
    done = len(finished_shards(path, JOINED_SUFFIX))
    return f"{done} of {len(manifest.shards)} shards are done" if done else ""


@dataclass(frozen=True)
class _RequestedColumns:
    """Columns of a join, and those that exist already."""

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
        """Values that must be equal when a join is resumed."""
        return {
            "joined to": self.manifest.root,
            "columns": [one.field.to_json() for one in self.to_build],
            JOINED: [dict(one.custody) for one in self.to_build],
        }

    def bytes_to_write(self, records: int) -> int:
        """Return about how many bytes the columns take that are not there yet."""
        needed = sum(one.values.size() + ROW_BYTES * records for one in self.to_build)
        there = [path for name in _names(self.to_build) for path in self.path.glob(f"column-{name}-*")]
        return max(0, needed - sum(path.stat().st_size for path in there))

    def _entry(self, one: JoinedColumn) -> ColumnEntry | None:
        name = one.field.name
        if name not in self.manifest.schema or self.manifest.columns is None:
            return None
        if one.custody not in self.manifest.source.get(JOINED, []) or self.manifest.schema[name] != one.field:
            raise UsageError(
                f"has a column {name} with different values; choose another name", path=self.path
            )
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

    asked: _RequestedColumns
    keys: Keys
    work_folder: WorkFolder

    def result(self, runner: JobRunner) -> Joined:
        added, damaged = self.asked.added, self.asked.damaged
        manifest = self.asked.manifest
        self._claim()
        if self.asked.to_build:
            shards = self._shards()
            counters = ProgressCounters(self.work_folder.run, shards)
            with runner.progress.task(
                "join", records=manifest.records, size=sum(shard.size for shard in shards)
            ):
                built = runner.run(self._jobs(shards), counters)
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

    def _shards(self) -> list[PlannedShard]:
        """Return the dataset's shards, each with its records."""
        shards = self.asked.manifest.shards
        bounds = np.cumsum([0, *(shard.records for shard in shards)]).tolist()
        return [
            PlannedShard(shard.name, number, first, last, Extent(shard.records, shard.size, 0))
            for number, (shard, first, last) in enumerate(zip(shards, bounds, bounds[1:], strict=False))
        ]

    def _jobs(self, shards: Iterable[PlannedShard]) -> Iterator[JoinJob]:
        manifest = self.asked.manifest
        expected = {file.name: file.sha256 for file in manifest.column_files}
        plan = sha256_of(self.asked.guard)
        for shard in shards:
            columns = (
                replace(one, values=one.values.only(shard.first, shard.last)) for one in self.asked.to_build
            )
            yield JoinJob(
                output=self.work_folder.output.absolute(),
                run=self.work_folder.run.absolute(),
                shard=shard,
                container=manifest.container,
                keys=self.keys[shard.first : shard.last],
                columns=tuple(columns),
                plan=plan,
                expected_sha256=expected,
            )

    def _tables(self, built: Sequence[tuple[BuiltColumn, ...]]) -> list[ColumnEntry]:
        """Publish the columns' tables. Raises PlanMismatch for one that differs from that in the manifest."""
        listed = {file.name: file for file in self.asked.manifest.column_files}
        entries = []
        for number, one in enumerate(self.asked.to_build):
            parts = [columns[number] for columns in built]
            entry = column_entry(self.work_folder, one.field, parts, offsets=self.asked.manifest.offsets)
            path = self.work_folder.output / entry.table.name
            if listed.get(path.name, entry.table) != entry.table:
                raise PlanMismatch("was joined with different values", path=path)
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

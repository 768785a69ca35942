"""Joining columns to a finished dataset: their files are added, and the manifest is replaced last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from shardprep.formats.conversion.finish import build_column
from shardprep.formats.conversion.joined_values import JoinedColumn, Keys, of_array, of_dataset, of_table
from shardprep.formats.conversion.plan import PlannedShard
from shardprep.formats.conversion.prepare import check_room
from shardprep.formats.conversion.shard import BuiltColumn, ColumnOfShard, PublishingJob
from shardprep.formats.errors import OutputBusy, PlanMismatch, SourceDamaged, UsageError
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.schema import ColumnChoice, Schema, column_choice
from shardprep.formats.runtime.files import publish, publish_bytes, user_path
from shardprep.formats.runtime.jobs import DecodesNothing, JobRunner, ShardCounter
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder, finished_shards, noting_kept
from shardprep.formats.shards.columns import (
    ColumnEntry,
    DatasetColumns,
    remove_unlisted_columns,
    unlisted_columns,
)
from shardprep.formats.shards.container import Extent
from shardprep.formats.shards.dataset import refuse_folder_of_splits
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


ROW_BYTES = 64  # of a column's table, its rows with digests, and a container, for each value


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
    wanted = requested(columns, manifest, keys)
    added = _new(wanted, manifest, path)
    files = {entry.field.name: entry.files for entry in manifest.column_entries}
    damaged = [file for one in wanted for file in files.get(one.field.name, ()) if not file.is_in(path)]
    to_build = [
        one
        for one in wanted
        if one.field.name not in files or any(file in damaged for file in files[one.field.name])
    ]
    if not to_build and not (path / WORK_FOLDER_NAME).exists():
        return Joined(path, manifest, (), ())
    check_room({path: _bytes_to_write(path, manifest, to_build)})

    def kept() -> str:
        done = len(finished_shards(path, JOINED_SUFFIX))
        return f"{done} of {len(manifest.shards)} shards are done" if done else ""

    with WorkFolder(path) as work_folder:
        if read_manifest(path).root != manifest.root:
            raise OutputBusy("was changed by another process in the meantime; try again", path=path)
        with noting_kept(kept):
            entries = _built(work_folder, manifest, keys, to_build, JobRunner(workers, progress=progress))
            if added:
                manifest = _with_columns(manifest, added, entries)
                publish_bytes(path / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
        work_folder.remove()
    rebuilt = tuple(file.name for file in damaged)
    return Joined(path, manifest, tuple(one.field.name for one in added), rebuilt)


def _new(columns: Sequence[JoinedColumn], manifest: Manifest, path: Path) -> list[JoinedColumn]:
    """Return the columns that the dataset lacks. Raises UsageError for one that it has with other values."""
    known, schema = manifest.source.get(JOINED, []), manifest.schema
    new = [one for one in columns if one.field.name not in schema]
    for one in columns:
        name = one.field.name
        if name in schema and (one.custody not in known or schema[name] != one.field):
            raise UsageError(f"has a column {name} with different values; choose another name", path=path)
    Schema([*schema, *(one.field for one in new)])
    return new


def _bytes_to_write(path: Path, manifest: Manifest, columns: Sequence[JoinedColumn]) -> int:
    """Return about how many bytes the columns take that are not there yet.

    Values in a table are in the work folder, too, until the end. What a join left that was not finished is
    kept, or removed first.
    """
    sizes = [one.values.size() * (2 if one.field.is_fixed else 1) for one in columns]
    listed = {file.name for file in manifest.files}
    left = [*unlisted_columns(path, listed), *(path / WORK_FOLDER_NAME).glob("*.rows")]
    needed = sum(sizes) + ROW_BYTES * manifest.records * len(sizes)
    return max(0, needed - sum(file.stat().st_size for file in left))


def _built(
    work_folder: WorkFolder,
    manifest: Manifest,
    keys: Keys,
    columns: Sequence[JoinedColumn],
    runner: JobRunner,
) -> list[ColumnEntry]:
    """Begin the join, or go on with it, and return the columns with their files published.

    Files of another join that was not finished are removed. Raises PlanMismatch for a table that differs from
    that in the manifest.
    """
    output, custody = work_folder.output, [dict(one.custody) for one in columns]
    fields = [one.field.to_json() for one in columns]
    guard = {"joined to": manifest.root, "columns": fields, JOINED: custody}
    plan, listed = sha256_of(guard), {file.name: file for file in manifest.column_files}
    try:
        work_folder.claim(guard)
    except PlanMismatch:
        remove_unlisted_columns(output, {file.name for file in manifest.files})
        work_folder.clear()
        work_folder.claim(guard)
    if not columns:
        return []
    bounds = pairwise(accumulate((shard.records for shard in manifest.shards), initial=0))
    shards = [
        PlannedShard(shard.name, number, first, last, Extent(shard.records, shard.size, 0))
        for number, (shard, (first, last)) in enumerate(zip(manifest.shards, bounds, strict=True))
    ]
    jobs = (
        JoinJob(
            output=output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            container=manifest.container,
            keys=keys[shard.first : shard.last],
            columns=tuple(replace(one, values=one.values.only(shard.first, shard.last)) for one in columns),
            plan=plan,
            expected_sha256={name: file.sha256 for name, file in listed.items()},
        )
        for shard in shards
    )
    built, entries = runner.run("join", jobs, work_folder.run, shards), []
    for one, parts in zip(columns, zip(*built, strict=True), strict=True):
        entry = build_column(work_folder, one.field, parts, offsets=manifest.offsets)
        path = output / entry.table.name
        if listed.get(path.name, entry.table) != entry.table:
            raise PlanMismatch("was joined with different values", path=path)
        publish(work_folder.run / path.name, path)
        entries.append(entry)
    return entries


def _with_columns(
    manifest: Manifest, added: Sequence[JoinedColumn], entries: Sequence[ColumnEntry]
) -> Manifest:
    """Return the manifest with the entries of the added columns."""
    fields, custody = [one.field for one in added], [dict(one.custody) for one in added]
    new = [entry for entry in entries if entry.field in fields]
    columns = DatasetColumns((*manifest.column_entries, *new), manifest.records_root, manifest.has_images)
    source = manifest.source | {JOINED: [*manifest.source.get(JOINED, []), *custody]}
    return replace(manifest, columns=columns, content_root=columns.content_root, source=source)

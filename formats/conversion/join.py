"""Joins of columns to a finished dataset: their files are added, and the manifest is replaced last.

The values come from arrays, tables or other datasets, and are matched to records by key.
"""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.conversion.prepare import check_room, class_notes, lock_dataset, name_notes
from shardprep.formats.conversion.shard import ShardJob, write_column_tables
from shardprep.formats.errors import PlanMismatch, SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.records.schema import (
    BadValue,
    ColumnChoice,
    Field,
    FloatCodec,
    IntegerCodec,
    Schema,
    parse_column_choice,
)
from shardprep.formats.runtime.files import (
    ArchiveFile,
    Identity,
    errors_as_damage,
    hash_file,
    publish,
    publish_bytes,
)
from shardprep.formats.runtime.jobs import JobRunner, Unit
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.runtime.progress import Progress, count_of, progress_or_bar
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import (
    PLAN_NAME,
    WORK_FOLDER_NAME,
    WorkFolder,
    add_resume_note,
    describe_finished,
    finished_shards,
)
from shardprep.formats.shards.columns import (
    ColumnEntry,
    DatasetColumns,
    remove_unlisted_columns,
    unlisted_columns,
)
from shardprep.formats.shards.dataset import open_with_root, refuse_folder_of_splits, splits_of
from shardprep.formats.shards.manifest import JOINED, Manifest, check_column, read_index, read_manifest
from shardprep.formats.shards.read import MANIFEST_NAME
from shardprep.formats.sources.listing import GrowingTable, repeated_keys
from shardprep.formats.sources.lists import PATH_COLUMNS, find_column
from shardprep.formats.sources.source import ResourceReader, entry_dtype
from shardprep.formats.sources.tables import ColumnKind, Lines, TableForm, encode_cell, read_row

JOINED_TO = "joined to"  # the root of a dataset, in the plan of a join
Keys = npt.NDArray[np.bytes_]
ReadValue = Callable[[int, int], bytes]
"""A function that returns the encoded value at a place, of a length."""


@dataclass(frozen=True)
class Origin:
    """The file or dataset with the values of a column, in which ``unit`` names a place. Picklable."""

    path: Path
    unit: str
    open: Callable[[], AbstractContextManager[ReadValue]]


@dataclass(frozen=True)
class JoinedColumn:
    """A column to join: for each record the ``places`` and ``lengths`` of its value, in bytes or records.

    ``custody`` describes the origin in the manifest. ``surplus`` values there belong to no record.
    """

    field: Field
    origin: Origin
    places: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    custody: Mapping[str, Any]
    surplus: int = 0


@dataclass
class JoinReader(ResourceReader[list[ReadValue]]):
    """Reader of the values to join, which are where the entry's ``places`` and ``lengths`` say."""

    columns: tuple[tuple[Field, Origin], ...]

    @contextmanager
    def open_resource(self) -> Iterator[list[ReadValue]]:
        with ExitStack() as stack:
            yield [stack.enter_context(origin.open()) for _, origin in self.columns]

    def read(self, entry: np.void) -> bytes:
        return b""

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        places = zip(entry["places"].tolist(), entry["lengths"].tolist(), strict=True)
        values = []
        for (field, origin), value, (place, length) in zip(self.columns, self.resource, places, strict=True):
            try:
                values.append(value(place, length))
                field.codec.decode(values[-1])
            except BadValue as error:
                where = f"{origin.path}, {origin.unit} {place}"
                raise SourceDamaged(error.message, path=where, key=entry["key"].decode()) from error
        return tuple(values)

    def location_of(self, entry: np.void) -> str:
        return f"record {entry['offset']}"


def resolve_columns(
    columns: Mapping[str, str | os.PathLike[str]], manifest: Manifest, keys: Keys
) -> list[JoinedColumn]:
    """Return the columns to join to a dataset with these keys, in order. Raises UsageError, DataError."""
    if not columns or not isinstance(columns, Mapping):
        raise UsageError(f"name at least one column to join: {{'NAME': FILE}}, not {columns!r}")
    choices = [parse_column_choice(str(name), "NAME or NAME:KIND") for name in columns]
    Schema(Field(choice.name, "bytes") for choice in choices)
    found, tables = list[JoinedColumn](), dict[Path, list[ColumnChoice]]()
    for choice, origin in zip(choices, columns.values(), strict=True):
        path, part = _locate(choice, origin)
        if path.is_dir():
            found.append(dataset_column(path, part, choice, keys, manifest.split))
        elif path.suffix.lower() != ".npy":
            tables.setdefault(path.absolute(), []).append(choice._replace(origin=part or choice.name))
        elif part:
            raise UsageError("is an array, which has no columns", path=path)
        else:
            found.append(array_column(path.absolute(), choice, manifest.records))
    for path, chosen in tables.items():
        found += table_columns(path, chosen, keys)
    by_name = {column.field.name: column for column in found}
    return [by_name[choice.name] for choice in choices]


def _locate(choice: ColumnChoice, origin: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the path of a column's origin, and the part of it that is named after a #."""
    path, part = user_path(origin), ""
    if not path.exists() and "#" in (text := os.fspath(origin)):
        place, _, part = text.rpartition("#")
        path = user_path(place)
    if not path.exists():
        raise UsageError(f"does not exist; give a dataset or a file for the column {choice.name}", path=path)
    return path, part


ROW_BYTES = 64  # per value, in a column's table, its rows with digests, and a container


@dataclass(frozen=True)
class Joined:
    """The result of :func:`join`.

    Attributes:
        path: The dataset's folder.
        manifest: Its manifest, now with the columns.
        added: Names of the new columns.
        rebuilt: Names of damaged files of columns joined before, which now have their old bytes again.
        notes: Sentences on values of new columns that belong to no record, and on new columns whose classes
            look alike, or are numbered otherwise than their names say or than in a split beside the dataset.
    """

    path: Path
    manifest: Manifest
    added: tuple[str, ...]
    rebuilt: tuple[str, ...]
    notes: tuple[str, ...] = ()


def join(
    dataset: str | os.PathLike[str],
    columns: Mapping[str, str | os.PathLike[str]],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Joined:
    """Add columns to a finished dataset. After a kill at any point, the same call finishes the work.

    No file of the dataset is rewritten: the columns' files are added, and finally the manifest is replaced
    atomically. An already open dataset continues without the columns. The ``content_root`` is the same as if
    the dataset had been converted with these columns. Columns joined before with the same values are kept,
    and their damaged files are rebuilt.

    Args:
        dataset: Folder of one split.
        columns: Maps "NAME" or "NAME:KIND" to the source of the values: the folder of a dataset, for its
            images, or "FOLDER#COLUMN" for one of its columns; a ``.npy`` file with one row per record, in
            stored order; or a table (``.csv``, ``.tsv``, ``.jsonl``) with a column of keys or paths (``key``,
            ``file_name``, ``path``, …) and a column NAME, or another as "FILE#COLUMN". Datasets and tables
            have one partner per record, matched by key, or by key or file name without extension if these
            are unique. By key, there may be more, such as those of other splits.
        workers: Number of processes; None is one per usable CPU, 0 works in this process.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The dataset's new manifest, and the names of added columns and rebuilt files.

    Raises:
        UsageError: A column exists with different values, or an argument is invalid.
        SourceIncomplete: A record has no partner, an array another number of rows, or a partner matched by
            file name no record.
        DataError: The dataset or the values are damaged.
        OperationError: OutputBusy, NoSpace or WorkerDied.
        OSError: A file cannot be read or written.
    """
    path, progress = user_path(dataset), progress_or_bar(progress)
    refuse_folder_of_splits(path)
    manifest = read_manifest(path)
    if manifest.archive:
        raise UsageError(
            "has its images in an archive; convert it to shards with prep convert, and join there", path=path
        )
    keys = read_index(path, manifest)["key"]
    progress.note(f"looking up the values of {count_of(len(keys), 'record')}")
    wanted = resolve_columns(columns, manifest, keys)
    added = _new_columns(wanted, manifest, path)
    files = {entry.field.name: entry.files for entry in manifest.column_entries}
    damaged = [file for column in wanted for file in files.get(column.field.name, ()) if not file.is_in(path)]
    to_build = [
        column
        for column in wanted
        if column.field.name not in files or any(file in damaged for file in files[column.field.name])
    ]
    if not to_build and not (path / WORK_FOLDER_NAME).exists():
        return Joined(path, manifest, (), ())
    check_room({path: _bytes_to_write(path, manifest, to_build)})

    with lock_dataset(path, manifest) as work_folder:
        with add_resume_note(lambda: describe_finished(path, [shard.name for shard in manifest.shards])):
            entries = _build(work_folder, manifest, keys, to_build, JobRunner(workers, progress=progress))
            if added:
                fields = [column.field for column in added]
                custody = [dict(column.custody) for column in added]
                entries = [*manifest.column_entries, *(entry for entry in entries if entry.field in fields)]
                joined = DatasetColumns(tuple(entries), manifest.records_root, manifest.has_images)
                manifest = replace(
                    manifest,
                    columns=joined,
                    content_root=joined.content_root,
                    source=manifest.source | {JOINED: [*manifest.source_objects(JOINED), *custody]},
                )
                publish_bytes(path / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
        work_folder.remove()
    rebuilt, names = (file.name for file in damaged), tuple(column.field.name for column in added)
    surplus = (
        f"left out {count_of(column.surplus, 'value')} of {column.origin.path}: no record here has such a key"
        for column in added
        if column.surplus
    )
    doubts = (*name_notes(column.field.classes for column in added), *class_notes(path, manifest, names))
    return Joined(path, manifest, names, tuple(rebuilt), (*surplus, *doubts))


def _new_columns(columns: Sequence[JoinedColumn], manifest: Manifest, path: Path) -> list[JoinedColumn]:
    """Return the columns that the dataset lacks. Raises UsageError if it has one with different values."""
    joined, schema = manifest.source_objects(JOINED), manifest.schema
    new = [column for column in columns if column.field.name not in schema]
    for column in columns:
        name = column.field.name
        if name in schema and (column.custody not in joined or schema[name] != column.field):
            raise UsageError(f"has a column {name} with different values; choose another name", path=path)
    Schema([*schema, *(column.field for column in new)])
    return new


def _bytes_to_write(path: Path, manifest: Manifest, columns: Sequence[JoinedColumn]) -> int:
    """Estimate how many more bytes the columns take.

    Values in a table are also in the work folder until the end. The files of an unfinished join count as
    there: they are kept or removed first.
    """
    sizes = [int(column.lengths.sum()) * (2 if column.field.is_fixed else 1) for column in columns]
    listed = {file.name for file in manifest.files}
    left = [*unlisted_columns(path, listed), *(path / WORK_FOLDER_NAME).glob("*.rows")]
    needed = sum(sizes) + ROW_BYTES * manifest.records * len(sizes)
    return max(0, needed - sum(file.stat().st_size for file in left))


MAX_JOB_BYTES = 64 << 20  # of values of a fixed size; a job takes about four times as much memory


def _build(
    work_folder: WorkFolder,
    manifest: Manifest,
    keys: Keys,
    columns: Sequence[JoinedColumn],
    runner: JobRunner,
) -> list[ColumnEntry]:
    """Begin or resume the join; publish the columns' files, and return the columns.

    Removes the files of a different, unfinished join. Raises PlanMismatch for a table that differs from the
    manifest's.
    """
    output, custody = work_folder.output, [dict(column.custody) for column in columns]
    fields = [column.field.to_json() for column in columns]
    guard: dict[str, Any] = {JOINED_TO: manifest.root, "columns": fields, JOINED: custody}
    sizes = [column.field.codec.size for column in columns]
    # values of a fixed size go to a table, so that a job may have fewer records than a shard: memory
    step = max(1, len(keys) if None in sizes else MAX_JOB_BYTES // (sum(filter(None, sizes)) or 1))
    if step < len(keys):
        guard["step"] = step  # other than an earlier release's, whose commits are of whole shards
    listed = {file.name: file for file in manifest.column_files}
    plan = work_folder.folder / PLAN_NAME
    if not plan.exists() or plan.read_bytes() != canonical_json(guard):
        remove_unlisted_columns(output, {file.name for file in manifest.files})
        work_folder.clear()  # also the commits of a killed repair
    work_folder.claim(guard)
    if not columns:
        return []
    of_values = [(name, "<i8", (len(columns),)) for name in ("places", "lengths")]
    rows = np.zeros(len(keys), [*entry_dtype(keys.dtype.itemsize, 1).descr, *of_values])
    rows["key"], rows["offset"] = keys, np.arange(len(keys))
    for number, column in enumerate(columns):
        rows["places"][:, number], rows["lengths"][:, number] = column.places, column.lengths
    starts = accumulate((shard.records for shard in manifest.shards), initial=0)
    shards = list[Unit]()
    for shard, (first, last) in zip(manifest.shards, pairwise(starts), strict=True):
        for at in range(first, max(last, first + 1), step):
            end = min(at + step, last)
            name = shard.name if end == last else f"{shard.name}-{at}"
            shards.append(Unit(name, len(shards), at, end, int(rows["lengths"][at:end].sum())))
    schema = Schema(column.field for column in columns)
    jobs = (
        ShardJob(
            output=output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            entries=rows[shard.first : shard.last],
            reader=JoinReader(tuple((column.field, column.origin) for column in columns)),
            options=PlanOptions(container=manifest.container),
            plan=sha256_of(guard),
            schema=schema,
            has_images=False,
            only_columns=True,
            expected_sha256={name: file.sha256 for name, file in listed.items()},
        )
        for shard in shards
    )
    built = runner.run("join", jobs, work_folder.run, shards, finished_shards(output))
    entries = list(write_column_tables(work_folder, schema, built, offsets=manifest.offsets))
    for table in (entry.table for entry in entries):
        path = output / table.name
        if listed.get(path.name, table) != table:
            raise PlanMismatch("was joined with different values", path=path)
        publish(work_folder.run / path.name, path)
    return entries


def is_being_joined(work_folder: WorkFolder, manifest: Manifest) -> bool:
    """Whether the work folder has an unfinished join to this dataset. Raises OSError."""
    with suppress(FileNotFoundError, ValueError):
        plan = parse_canonical_json((work_folder.folder / PLAN_NAME).read_bytes())
        return isinstance(plan, dict) and plan.get(JOINED_TO) == manifest.root
    return False


HEADER_BYTES = 1 << 16
DTYPE_KINDS = "biuf"  # of dtypes: bool, signed, unsigned, float


def array_column(path: Path, choice: ColumnChoice, records: int) -> JoinedColumn:
    """Return the column in a .npy file: an array [records, …] of bool, int, uint or float.

    One number per record becomes the kind int or float; other rows become arrays of their dtype and shape.
    Raises UsageError, SourceDamaged, and SourceIncomplete for a wrong number of rows.
    """
    with ArchiveFile(path) as file:
        with errors_as_damage(path, "write it with numpy.save"):
            shape, dtype, start = _read_header(file)
        if shape[0] != records:
            raise SourceIncomplete(f"has {shape[0]:,} rows; the dataset has {records:,} records", path=path)
        size = math.prod(shape[1:]) * dtype.itemsize
        if file.end != start + records * size:
            raise SourceDamaged("does not have the size its header gives; copy it again", path=path)
        identity = file.identity
    field = _choose_field(path, choice, dtype, shape[1:])
    encode = partial(_encode_row, field, dtype, shape[1:])
    origin = Origin(path, AT_BYTE, partial(_open_file, path, identity, encode))
    places, lengths = start + size * np.arange(records), np.full(records, size)
    return JoinedColumn(field, origin, places, lengths, {"name": choice.name, "sha256": hash_file(path)})


AT_BYTE = "the row at byte"


@contextmanager
def _open_file(path: Path, identity: Identity, encode: Callable[[bytes], bytes]) -> Iterator[ReadValue]:
    with ArchiveFile(path, identity) as file:
        yield lambda place, length: read_row(file, length, place, encode)


def _read_header(file: ArchiveFile) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    head = BytesIO(file.read_at(HEADER_BYTES, 0))
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"is a .npy file of the unknown version {version}")
    read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(head)
    if dtype.kind not in DTYPE_KINDS or dtype.itemsize > 8:
        raise ValueError(f"holds {dtype}; a column takes bool, int, uint and float of up to 64 bits")
    if not shape or (is_fortran and len(shape) > 1):
        raise ValueError("does not have rows in C order, as numpy.ascontiguousarray arranges them")
    return shape, dtype, head.tell()


def _choose_field(path: Path, choice: ColumnChoice, dtype: np.dtype[Any], row: tuple[int, ...]) -> Field:
    """Return the field for such rows. Raises UsageError if the chosen kind cannot hold them."""
    exact = f"{dtype.newbyteorder('=').name}[{','.join(map(str, row))}]"
    fits = [exact]
    if not row and dtype.kind != "b":
        fits = ["float", exact] if dtype.kind == "f" else ["int", "float", exact]
    field = Field(choice.name, choice.kind or fits[0])
    if field.kind not in fits:
        raise UsageError(f"holds {exact}, which is not {field.kind}; omit the kind", path=path)
    return field


def _encode_row(field: Field, dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes) -> bytes:
    row = np.frombuffer(data, dtype).reshape(shape)
    if isinstance(field.codec, IntegerCodec | FloatCodec):
        return field.codec.encode(row.item())
    return field.codec.encode(row.astype(dtype.newbyteorder("<")))


def match_keys(keys: Keys, partners: Keys, path: Path) -> npt.NDArray[np.int64]:
    """Return the position of each record's partner, int64. ``path`` is the partners', for messages.

    Matches by key, by key without extension, or by file name without extension, whichever first gives each
    record one partner. By file name, each partner must have a record, too: splits often share names. Raises
    SourceIncomplete, which names a record without a partner, or a partner without a record.
    """
    closest, most = (keys, partners), -1
    for form, (mine, others) in enumerate(zip(_key_forms(keys), _key_forms(partners), strict=True)):
        if not repeated_keys(mine) and not repeated_keys(others):
            _, own, partner = np.intersect1d(mine, others, assume_unique=True, return_indices=True)
            if len(own) == len(mine) and (form < 2 or len(own) == len(others)):
                places = np.empty(len(mine), np.int64)
                places[own] = partner
                return places
            if len(own) > most:
                closest, most = (mine, others), len(own)
    raise _mismatch_error(keys, partners, *closest, path)


def _mismatch_error(keys: Keys, partners: Keys, mine: Keys, others: Keys, path: Path) -> SourceIncomplete:
    if repeated := repeated_keys(others):
        message = "occurs twice, but a record has one partner; remove one"
        return SourceIncomplete(message, path=path, key=repeated[0].decode())
    missing, surplus = keys[~np.isin(mine, others)], partners[~np.isin(others, mine)]
    if not len(missing):
        message = f"keys match only by file name, and no record has this one (one of {len(surplus)}); leave out other splits"
        return SourceIncomplete(message, path=path, key=surplus[0].decode())
    message = f"this record of the dataset has no partner here (one of {len(missing)})"
    if len(surplus):
        message += f"; {surplus[0].decode()} here belongs to no record (one of {len(surplus)})"
    return SourceIncomplete(message, path=path, key=missing[0].decode())


def _key_forms(keys: Keys) -> Iterator[Keys]:
    yield keys
    stems = [posixpath.splitext(key)[0] for key in keys.tolist()]
    yield np.array(stems, np.bytes_)
    yield np.array([*map(posixpath.basename, stems)], np.bytes_)


def dataset_column(folder: Path, column: str, choice: ColumnChoice, keys: Keys, split: str) -> JoinedColumn:
    """Return a column of the dataset in ``folder``, or in its folder of this split; "" is the images."""
    folder = splits_of(folder).get(split, folder)
    manifest = read_manifest(folder)
    if not column and not manifest.has_images:
        raise UsageError("has no images; name one of its columns with FOLDER#COLUMN", path=folder)
    source = manifest.schema[column] if column else Field(choice.name, "image")
    if choice.kind not in ("", source.kind):
        raise UsageError(f"holds values of kind {source.kind}, not {choice.kind}; omit the kind", path=folder)
    rows = read_index(folder, manifest)
    places = match_keys(keys, rows["key"], folder)
    table = check_column(folder, manifest, manifest.columns[column]) if manifest.columns and column else rows
    lengths = np.full(len(rows), source.codec.size) if table is None else table["length"].astype(np.int64)
    custody = {"name": choice.name, "root": manifest.root} | ({"column": column} if column else {})
    origin = Origin(folder, "record", partial(_open_dataset, folder.resolve(), manifest.root, column))
    field = Field(choice.name, source.kind, source.classes)
    return JoinedColumn(field, origin, places, lengths[places], custody, len(rows) - len(keys))


@contextmanager
def _open_dataset(folder: Path, root: str, column: str) -> Iterator[ReadValue]:
    with open_with_root(folder, root) as dataset:
        if column:
            yield lambda place, _: dataset.columns.data(column, dataset.place(place))
        else:
            yield lambda place, _: dataset[place].image


KEY_NAMES = ("key", "file_name", *PATH_COLUMNS)
NO_KEYS = "of keys or paths (key, file_name, path, …); its columns are"


def table_columns(path: Path, choices: Sequence[ColumnChoice], keys: Keys) -> Iterator[JoinedColumn]:
    """Yield columns of a table with a column of keys; guess their kinds if none is chosen."""
    table = GrowingTable(np.dtype([("key", "S1"), ("offset", "<i8"), ("length", "<i8")]))
    line = 1  # 0 between two rows
    with ArchiveFile(path) as file:
        lines = Lines(file)
        with errors_as_damage(path, "correct the table", place=lambda: f"line {line or lines.number}: "):
            form = TableForm.of(file)
            keys_name = find_column(form.names, KEY_NAMES)
            kinds = list[ColumnKind]()
            for choice in choices:
                if not keys_name or choice.origin not in form.names:
                    missing = f"{choice.origin!r}; name one as FILE#COLUMN, of" if keys_name else NO_KEYS
                    raise ValueError(f"has no column {missing}: {', '.join(form.names)[:200]}")
                chosen = choice if choice.kind else None
                kinds.append(ColumnKind(choice.origin, chosen, typed=not form.delimiter))
            line = 0
            for row in form.rows(lines):
                if isinstance(row, ValueError):
                    raise row
                line = row.line
                for kind in kinds:
                    kind.add(row.cells[kind.header])
                table.append((_parse_key(row.cells[keys_name]), row.offset, row.length))
                line = 0
        identity = file.identity
    rows = table.finish()
    places, surplus, sha256 = match_keys(keys, rows["key"], path), len(rows) - len(keys), hash_file(path)
    offsets, lengths = rows["offset"][places], rows["length"][places]
    for choice, kind in zip(choices, kinds, strict=True):
        field = replace(kind.field, name=choice.name) if choice.kind else Field(choice.name, kind.guess)
        encode = partial(_encode_cell, field, form, kind.header)
        origin = Origin(path, AT_BYTE, partial(_open_file, path, identity, encode))
        custody = {"name": choice.name, "sha256": sha256}
        custody |= {"column": kind.header} if kind.header != choice.name else {}
        yield JoinedColumn(field, origin, offsets, lengths, custody, surplus)


def _parse_key(cell: object) -> bytes:
    key = str(cell).encode() if isinstance(cell, str) or type(cell) is int else b""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError("has no key")
    return key


def _encode_cell(field: Field, form: TableForm, header: str, row: bytes) -> bytes:
    return encode_cell(field, _parse_row(form, row)[header], typed=not form.delimiter)


_parse_row = lru_cache(maxsize=1)(TableForm.parse_row)  # for the next column of the same row

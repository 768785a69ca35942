"""The job that builds and publishes one shard of a plan, on any executor.

After all shards come the tables of their rows, the provenance and, last, the manifest.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.plan import Plan, PlanOptions, check_machine
from shardprep.formats.errors import BadImage, CorruptRecord, DataError, OperationError
from shardprep.formats.images.crop_ready import stored_image
from shardprep.formats.images.decode import check_decodes, crash_reason
from shardprep.formats.images.header import NO_IMAGE, ImageFlag, ImageInfo, begins_as_image, read_image_header
from shardprep.formats.records.record import UNLABELLED, content_digest, content_root, record_crc
from shardprep.formats.records.schema import BadValue, Field, Schema
from shardprep.formats.runtime.files import (
    flush_file,
    hash_file,
    name_in_os_errors,
    open_for_publishing,
    publish,
    publish_bytes,
    temporary_path,
)
from shardprep.formats.runtime.jobs import Job, Unit, counted_range
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, parse_fields
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.columns import (
    BOX_DTYPE,
    ColumnEntry,
    DatasetColumns,
    column_row,
    shard_name,
    table_name,
)
from shardprep.formats.shards.manifest import (
    BOXES_NAME,
    INDEX_NAME,
    PROVENANCE_NAME,
    QUARANTINE_NAME,
    Manifest,
    index_dtype,
    index_dtype_of_width,
    index_row,
    kinds_in,
    tables_of,
)
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    BLOCK_BYTES,
    MANIFEST_NAME,
    FileEntry,
    IndexedArchive,
    Region,
    Rows,
    RowType,
    Shard,
    ShardWriter,
    StoredRecord,
    container,
    hash_region,
    link_archive,
    read_table,
    table_header,
    write_table,
)
from shardprep.formats.sources.source import DECODED_SUFFIXES, IMAGE_SUFFIXES, ByteReader, Entries, Listing
from shardprep.formats.sources.trees import TreeReader
from shardprep.formats.storage.store import StoredFile

if TYPE_CHECKING:
    from shardprep.formats.conversion.prepare import PreparedSplit  # start-up time of workers


def read_back(path: Path, kind: str, crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Read a shard back, compare its checksums, and return the records' offsets. Raises CorruptRecord."""
    offsets = np.zeros(len(crcs), np.uint64)
    with Shard(path, kind) as reader:
        for ordinal, crc32c in enumerate(crcs.tolist()):
            stored = reader.read_record(ordinal)
            if stored.crc32c != crc32c:
                raise CorruptRecord("reads back differently than it was written", path=path)
            offsets[ordinal] = stored.offset
        if reader.records != len(crcs):
            raise CorruptRecord(f"reads back {reader.records} records of {len(crcs)}", path=path)
    return offsets


@dataclass(frozen=True, kw_only=True)
class BuiltFile:
    """A finished shard of records or of a column's values, as in the commit record.

    ``rows`` is the file of its rows in the work folder. ``name``, ``size`` and ``sha256`` describe the shard;
    they are empty and 0 for values in a table.
    """

    rows: str = ""
    rows_sha256: str = ""
    records: int = 0
    name: str = ""
    size: int = 0
    sha256: str = ""

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.name, self.size, self.sha256, self.records)


@dataclass(frozen=True, kw_only=True)
class BuiltColumn(BuiltFile):
    """A finished column of a shard.

    ``other_sizes`` counts images whose width or height differs from the record's image; ``first_other`` is
    the key of the first.
    """

    other_sizes: int = 0
    first_other: str = ""


def build_column(
    job: ShardJob, field: Field, values: Iterable[tuple[bytes, bytes, ImageInfo]]
) -> BuiltColumn:
    """Publish a column's rows and, unless its values are in a table, its shard.

    ``values`` has for each record its key, the encoded value, and the properties of its image.
    """
    stored, others = list[StoredRecord](), list[bytes]()
    for key, value, image in values:
        if image.width and field.kind == "image":
            own = read_image_header(value)
            if (own.width, own.height) != (image.width, image.height):
                others.append(key)
        stored.append(StoredRecord(key, UNLABELLED, record_crc(key, UNLABELLED, value), value))
    row = column_row(field)
    rows = np.zeros(len(stored), stored_row_dtype(row))
    if field.is_fixed:
        data = b"".join(each.image + each.crc32c.to_bytes(4, "little") for each in stored)
        rows["row"] = np.frombuffer(data, row)
    else:  # offsets are known once the shard is written
        rows["row"]["length"] = [len(each.image) for each in stored]
        rows["row"]["crc32c"] = [each.crc32c for each in stored]
    rows["digest"] = np.array([content_digest(each.key, UNLABELLED, each.image) for each in stored], "V32")
    name = "" if field.is_fixed else shard_name(field.name, job.shard.number, job.options.container)
    built = temporary_path(job.run, name)
    if name and job.writes(name):
        key_bytes = max((len(each.key) for each in stored), default=1)
        size = sum(len(each.image) for each in stored)
        unit = Unit(name, job.shard.number, 0, len(stored), size, key_bytes)
        with container(job.options.container).write(built, unit) as writer:
            for each in stored:
                writer.append(each)
    published = job.publish_file(name, built, f".{field.name}.rows", rows)
    return BuiltColumn(**published, other_sizes=len(others), first_other=others[0].decode() if others else "")


def stored_row_dtype(row: npt.DTypeLike) -> np.dtype[np.void]:
    """Return the dtype of a row of the index or a column's table, plus the content digest."""
    return np.dtype([("row", row), ("digest", "V32")])


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """A bad image that was left out on request, with its key, its place in the source, and the problem."""

    key: str
    where: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BuiltShard(BuiltFile):
    """A finished shard with its columns; without a ``name``, only the columns were built.

    ``stored`` has the store's metadata of the files that were uploaded, by name.
    """

    plan: str
    image_bytes: int = 0
    skipped: tuple[SkippedImage, ...] = ()
    columns: tuple[BuiltColumn, ...] = ()
    region_sha256: str = ""
    stored: dict[str, StoredFile] = field(default_factory=dict)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(file.entry for file in (self, *self.columns) if file.name)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuiltShard:
        rows = f"{value['name']}.rows"  # releases before 0.4 did not note it
        return cls(**parse_fields(cls, {"rows": rows, **value}))


Sample = tuple[StoredRecord, ImageInfo, tuple[bytes, ...]]
"""A record to store, its image's properties, and the encoded values of its columns."""


def is_non_image(reader: ByteReader, entry: np.void) -> bool:
    """Whether a bad image is a file that ``--skip-non-images`` would leave out."""
    is_named = entry["path"].decode().lower().endswith(IMAGE_SUFFIXES)
    return isinstance(reader, TreeReader) and not is_named and not begins_as_image(reader.read(entry))


@dataclass(frozen=True, kw_only=True)
class ShardJob(Job[Any]):
    """Everything a worker needs to build a shard with its columns, or ``only_columns``. Picklable.

    ``output`` is the dataset's folder. ``run`` is the folder of unfinished files; once the end of the run has
    removed it, nothing can be published. ``expected_sha256`` maps file names to the SHA-256 required for
    publishing. ``files_to_write`` has their names, None for all.

    ``crashes`` maps the position of an image to the signal with which it crashes the decoder. ``region`` is
    the images' region of the reader's archive, if they stay there. ``home_versions`` are those of the machine
    that planned the shard, if another may build it. ``builder`` is called instead of :func:`build_shard`.
    """

    output: Path
    run: Path
    shard: Unit
    entries: Entries
    reader: ByteReader
    options: PlanOptions
    plan: str
    schema: Schema = field(default_factory=Schema)
    has_images: bool = True
    only_columns: bool = False
    expected_sha256: Mapping[str, str] = field(default_factory=dict)
    files_to_write: frozenset[str] | None = None
    crashes: Mapping[int, str] = field(default_factory=dict)
    region: Region | None = None
    home_versions: Mapping[str, str] | None = None
    builder: Callable[[ShardJob], Any] | None = None

    @property
    def decodes(self) -> bool:
        keys = self.entries["key"].tolist() if self.has_images else []
        return self.options.decode_check or any(
            key.decode().lower().endswith(DECODED_SUFFIXES) for key in keys
        )

    def work_path(self, suffix: str) -> Path:
        """Return the path of the shard's file with this suffix in the work folder."""
        return self.output / WORK_FOLDER_NAME / (self.shard.name + suffix)

    def build(self) -> Any:
        """Build the shard, or call the ``builder``. Raises OtherMachine if this machine cannot."""
        if self.home_versions is not None:
            check_machine(self.home_versions, self.options, self.run, self.reader, self.entries)
        return (self.builder or build_shard)(self)

    def key_at(self, place: int) -> str:
        key: bytes = self.entries["key"][min(place, len(self.entries) - 1)]
        return key.decode()

    def decode(self, place: int) -> None:
        if place < len(self.entries) and place not in self.crashes:
            with self.reader.open() as reader:
                _read_sample(self, reader, self.entries[place])

    def with_crash_at(self, place: int, signal: str) -> Self:
        return replace(self, crashes={**self.crashes, place: signal})

    def writes(self, name: str) -> bool:
        return self.files_to_write is None or name in self.files_to_write

    def publish_file(self, name: str, built: Path, suffix: str, rows: Rows) -> dict[str, Any]:
        """Publish the shard ``built``, if it has a name, and its rows; return the fields of a BuiltFile.

        Both are checked first. A shard that is not to be written is there already, and only checked.
        """
        sha256, final, path = "", self.output / name, self.work_path(suffix)
        kind, crcs = self.options.container, rows["row"]["crc32c"]
        if name and not self.writes(name):
            sha256 = self.expected_sha256[name]
            rows["row"]["offset"] = read_back(final, kind, crcs)
        elif name:
            with ThreadPoolExecutor(1) as disk:  # flush while this thread reads the file back
                flushed = disk.submit(flush_file, built)
                sha256 = hash_file(built)
                rows["row"]["offset"] = read_back(built, kind, crcs)
                flushed.result()
            if self.expected_sha256.get(name, sha256) != sha256:
                libraries = container(kind).library().items()
                versions = ", ".join(f"{library} {version}" for library, version in libraries)
                raise OperationError(
                    "was rebuilt, but its bytes differ from the published ones: the source has changed, or "
                    f"other versions of the libraries than these wrote it ({versions}; prep inspect prints its "
                    "own)",
                    path=final,
                )
            publish(built, final)
        with open_for_publishing(path, self.run) as file:
            write_table(file, rows)
        return {
            "rows": path.name,
            "rows_sha256": hash_file(path),
            "records": len(rows),
            "name": name,
            "size": final.stat().st_size if name else 0,
            "sha256": sha256,
        }


def shard_jobs(
    plan: Plan, shards: Iterable[Unit], work_folder: WorkFolder, **fields: Any
) -> Iterator[ShardJob]:
    """Yield the jobs of some of a plan's shards, lazily, because each job holds its entries.

    Their paths are absolute, because another process may have another current folder. ``fields`` are further
    fields of the jobs.
    """
    listing, regions = plan.listing, plan.regions
    for shard in shards:
        entries = plan.entries_of(shard)
        yield ShardJob(
            output=work_folder.output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            entries=entries,
            reader=listing.reader.restrict_to(entries),
            options=plan.options,
            plan=plan.work_digest,
            schema=listing.schema,
            has_images=listing.has_images,
            region=regions[shard.number] if regions else None,
            **fields,
        )


def build_shard(job: ShardJob) -> BuiltShard:
    """Build, check and publish a shard, unless it is finished. Safe to kill and repeat."""
    if finished := read_trusted_commit(job):
        return finished
    skipped = list[SkippedImage]()
    samples = _read_samples(job, skipped)
    shard, held = ({}, list(samples)) if job.only_columns else _write_shard(job, samples)
    columns = [
        build_column(job, field, ((stored.key, values[number], info) for stored, info, values in held))
        for number, field in enumerate(job.schema)
    ]
    commit = BuiltShard(plan=job.plan, **shard, skipped=tuple(skipped), columns=tuple(columns))
    return write_commit(job, commit)


def write_commit(job: ShardJob, commit: BuiltShard) -> BuiltShard:
    publish_bytes(job.work_path(".commit"), canonical_json(asdict(commit)), job.run)
    return commit


def read_trusted_commit(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a finished shard if plan, sizes and hashes match, else None."""
    commit = read_commit(job)
    return commit if commit and all(file.is_in(job.output) for file in commit.files) else None


def read_commit(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a shard if its plan and rows match, wherever its files are; else None.

    A shard without bad images is the same for any policy. One that left some out counts only with "skip".
    """
    try:
        commit = BuiltShard.from_json(parse_canonical_json(job.work_path(".commit").read_bytes()))
        if commit.plan != job.plan or (commit.skipped and job.options.on_bad_image != "skip"):
            return None
        files, folder = (commit, *commit.columns), job.output / WORK_FOLDER_NAME
        is_same = all(hash_file(folder / file.rows) == file.rows_sha256 for file in files if file.rows)
        return commit if is_same else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _write_shard(job: ShardJob, samples: Iterable[Sample]) -> tuple[dict[str, Any], Sequence[Sample]]:
    """Publish the shard and its rows; return its part of the commit, and its samples if there are columns.

    With columns, all samples are read before the first is written, because the listing's lengths are not the
    images'.
    """
    built, name, unit = temporary_path(job.run, job.shard.name), job.shard.name, job.shard
    rows, count = np.zeros(len(job.entries), stored_row_dtype(index_dtype(unit.key_bytes))), 0
    held, archive = list[Sample](), job.reader.archive if job.region else None
    if len(job.schema) or not job.has_images:
        samples = held = list(samples)
        size = sum(len(stored.image) for stored, _, _ in held)
        unit = replace(unit, first=0, last=len(held), size=size)
    if archive:
        with suppress(FileExistsError):  # another shard made it
            (job.run / ARCHIVE_NAME).symlink_to(archive.path)  # the shard is read back next to it
    writing: AbstractContextManager[ShardWriter | None] = nullcontext()
    if job.writes(name):
        writing = container(job.options.container).write(built, unit)
    with writing as writer:
        for stored, info, _ in samples:
            if writer is not None:
                writer.append(stored)
            row = index_row(stored, info, job.shard.number, count)
            rows[count] = row, content_digest(stored.key, stored.label, stored.image)
            count += 1
    rows = rows[:count]
    published, region_sha256 = job.publish_file(name, built, ".rows", rows), ""
    if job.region and archive:
        with job.reader.open():  # raises if the archive has changed, or changes meanwhile
            region_sha256 = hash_region(archive.path, job.region)
    image_bytes = int(rows["row"]["length"].sum(dtype=np.int64))
    return published | {"image_bytes": image_bytes, "region_sha256": region_sha256}, held


def _read_samples(job: ShardJob, skipped: list[SkippedImage]) -> Iterator[Sample]:
    """Yield the shard's samples in order; raise bad ones, or append them to ``skipped``."""
    places = counted_range(job.run, job.shard.number, len(job.entries))
    with closing(places), job.reader.open() as reader:
        reader.expect(job.entries)
        for done in places:
            entry = job.entries[done]
            try:
                if done in job.crashes:
                    raise BadImage(crash_reason(job.crashes[done]))
                yield _read_sample(job, reader, entry)
            except (BadImage, BadValue) as error:
                bad = BadImage(error.message, path=reader.location_of(entry), key=entry["key"].decode())
                if job.options.on_bad_image == "fail":
                    advice = "or add --on-bad-image skip to leave such images out and continue from here"
                    if is_non_image(reader, entry):
                        advice = (
                            "or add --skip-non-images --restart to leave out all files that are not images"
                        )
                    bad.message += f"; repair or remove it, {advice}"
                    raise bad from error
                place = entry["path"].decode() or f"at byte {entry['offset']}"  # relative to the source
                skipped.append(SkippedImage(str(bad.key), place, bad.message))


def _read_sample(job: ShardJob, reader: ByteReader, entry: np.void) -> Sample:
    """Read a sample, and re-encode its image according to the options."""
    image, info, options = b"", NO_IMAGE, job.options
    if job.has_images:
        image = reader.read(entry)
        info = read_image_header(image)
        if options.decode_check:
            check_decodes(image)
        segments, shorter_side = options.crop_ready, options.shorter_side
        image, info = stored_image(
            image, info, segments=segments, shorter_side=shorter_side, quality=options.quality
        )
    key, label = entry["key"].item(), int(entry["label"])
    stored = StoredRecord(key, label, record_crc(key, label, image), image, int(entry["offset"]))
    values = reader.values(entry)
    for column, value in zip(job.schema, values, strict=True) if options.decode_check else ():
        try:
            if column.kind == "image":
                check_decodes(value)
        except BadImage as error:
            raise BadValue(f"the column {column.name}: {error.message}") from error
    return stored, info, values


TABLE_NAMES = {INDEX_NAME, BOXES_NAME, QUARANTINE_NAME}


def finish(work_folder: WorkFolder, prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Manifest:
    """Publish the tables, the provenance and, last, the manifest, then remove the work folder."""
    output = work_folder.output
    manifest = publish_tables(work_folder, prepared, built)
    if archive := prepared.plan.in_place:
        link_archive(output / ARCHIVE_NAME, archive.path, work_folder.run)
    publish_bytes(output / PROVENANCE_NAME, canonical_json(_provenance(prepared.listing)), work_folder.run)
    publish_bytes(output / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
    work_folder.remove()
    return manifest


def publish_tables(work_folder: WorkFolder, prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Manifest:
    """Publish the tables of all shards, and return the manifest. Raises DataError if there are no images."""
    output, plan, listing = work_folder.output, prepared.plan, prepared.listing
    if not any(b.records for b in built):
        raise DataError("the source has no intact image", path=output)
    index = build_index(work_folder, plan, built)
    tables = build_tables(work_folder, index, built, prepared.boxes)
    records_root = content_root(rows["digest"].tobytes() for rows in read_shard_rows(work_folder, built))
    columns = None
    if len(listing.schema) or not listing.has_images:
        entries = tuple(write_column_tables(work_folder, listing.schema, built))
        columns = DatasetColumns(entries, records_root, listing.has_images)
    archive = None
    if plan.in_place:
        regions = tuple(
            replace(region, sha256=shard.region_sha256)
            for region, shard in zip(plan.regions, built, strict=True)
        )
        archive = IndexedArchive(plan.in_place.path.name, regions, BLOCK_BYTES)
    manifest = Manifest(
        split=listing.split,
        records=len(index),
        image_bytes=sum(b.image_bytes for b in built),
        partial=listing.is_partial,
        class_sorted=plan.class_sorted,
        skipped=sum(len(b.skipped) for b in built),
        labels=listing.labels,
        source={
            "layout": listing.layout,
            "archives": [a.to_json() for a in listing.archives],
            **listing.options,
        },
        plan=plan.options.to_json() | {"sha256": plan.digest},
        container=plan.options.container,
        writer=container(plan.options.container).library(),
        tables=tables,
        shards=tuple(shard.entry for shard in built),
        content_root=columns.content_root if columns else records_root,
        kinds=kinds_in(index["flags"]),
        archive=archive,
        crop_ready=int(np.count_nonzero(index["flags"] & ImageFlag.CROP_READY)),
        columns=columns,
    )
    names = [table.name for table in tables_of(manifest)]
    for stale in TABLE_NAMES - set(names):  # left by an unfinished conversion
        (output / stale).unlink(missing_ok=True)
    for name in names:
        publish(work_folder.run / name, output / name)
    return manifest


def _provenance(listing: Listing) -> dict[str, Any]:
    """Return the time, host, command and archives of a conversion: for information only, in no hash."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:  # it was removed
        folder = None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "folder": folder,
        "python": sys.version.split()[0],
        "archives": [asdict(archive) for archive in listing.archives],
    }


def build_tables(
    work_folder: WorkFolder, index: Rows, built: Sequence[BuiltShard], boxes: Rows | None
) -> tuple[FileEntry, ...]:
    """Write the index and, if there are any, the boxes and the quarantine list into the run's folder."""
    tables = {INDEX_NAME: index}
    if boxes is not None:
        tables[BOXES_NAME] = _sort_boxes(boxes, index)
    entries = [
        _write_file(work_folder, name, len(rows), (table_header(rows.dtype, len(rows)), rows.tobytes()))
        for name, rows in tables.items()
    ]
    if skipped := [asdict(image) for shard in built for image in shard.skipped]:
        entries.append(_write_file(work_folder, QUARANTINE_NAME, len(skipped), [canonical_json(skipped)]))
    return tuple(entries)


def _sort_boxes(boxes: Rows, index: Rows) -> Rows:
    """Return the boxes in the order of the index, without those of images not in it."""
    by_key = np.argsort(index["key"], kind="stable")
    sorted_keys = index["key"][by_key]
    at = np.minimum(np.searchsorted(sorted_keys, boxes["key"]), len(sorted_keys) - 1)
    is_known = sorted_keys[at] == boxes["key"]
    rows = boxes[list(BOX_DTYPE.names or ())][is_known].astype(BOX_DTYPE)
    rows["record"] = by_key[at][is_known]
    in_order: Rows = rows[np.argsort(rows["record"], kind="stable")]
    return in_order


def _write_file(work_folder: WorkFolder, name: str, records: int, parts: Iterable[bytes]) -> FileEntry:
    """Write and flush a file in the run's folder; return its entry."""
    path = work_folder.run / name
    with name_in_os_errors(path), path.open("xb") as file:
        file.writelines(parts)
    flush_file(path)
    return FileEntry(name, path.stat().st_size, hash_file(path), records)


def read_shard_rows(work_folder: WorkFolder, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    """Yield each shard's rows, with content digests. Raises ManifestDamaged if they changed."""

    def row_of(width: int) -> np.dtype[np.void] | None:
        row = index_dtype_of_width(width - 32, offsets=True)  # without the digest
        return None if row is None else stored_row_dtype(row)

    return _read_rows(work_folder, built, row_of)


def _read_rows(work_folder: WorkFolder, built: Iterable[BuiltFile], row: RowType) -> Iterator[Rows]:
    for file in (each for each in built if each.records):  # the key width of empty shards is unknown
        path = work_folder.folder / file.rows
        yield read_table(path, FileEntry(file.rows, path.stat().st_size, file.rows_sha256, file.records), row)


def build_index(
    work_folder: WorkFolder, plan: Plan, built: Sequence[BuiltShard], *, offsets: bool = True
) -> Rows:
    """Return the index of all shards' rows. Format 1.0 has no ``offsets``."""
    index = np.zeros(sum(b.records for b in built), index_dtype(plan.key_bytes, offsets=offsets))
    names = list(index.dtype.names or ())
    start = 0
    for rows in read_shard_rows(work_folder, built):
        index[start : start + len(rows)] = rows["row"][names]
        start += len(rows)
    return index


def write_column_tables(
    work_folder: WorkFolder, schema: Schema, built: Sequence[BuiltShard], *, offsets: bool = True
) -> Iterator[ColumnEntry]:
    """Write the tables of the columns into the run's folder; yield the columns' entries."""
    for number, column in enumerate(schema):
        parts = [shard.columns[number] for shard in built]
        row, of_built = column_row(column, offsets=offsets), stored_row_dtype(column_row(column))
        records, names = sum(part.records for part in parts), list(row.names or ())
        body = (rows["row"][names].astype(row).tobytes() for rows in _read_rows(work_folder, parts, of_built))
        table = chain([table_header(row, records)], body)
        yield ColumnEntry(
            column,
            _write_file(work_folder, table_name(column.name), records, table),
            tuple(part.entry for part in parts if part.name),
            content_root(rows["digest"].tobytes() for rows in _read_rows(work_folder, parts, of_built)),
        )

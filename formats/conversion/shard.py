"""The job that builds and publishes one shard of a plan, on any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.plan import Plan, PlannedShard, PlanOptions, check_machine
from shardprep.formats.errors import BadImage, CorruptRecord, OperationError
from shardprep.formats.images.crop_ready import stored_image
from shardprep.formats.images.decode import check_decodes, crashes_decoder
from shardprep.formats.images.header import begins_as_image, read_image_header
from shardprep.formats.images.info import NO_IMAGE, ImageInfo
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import (
    flush_file,
    hash_file,
    publish,
    publish_bytes,
    publishing,
    unfinished,
)
from shardprep.formats.runtime.jobs import ShardCounter
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json
from shardprep.formats.runtime.owned import starting_thread
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.columns import column_row, rows_of, shard_name
from shardprep.formats.shards.in_place import Region, hash_region
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    Extent,
    FileEntry,
    Rows,
    Shard,
    ShardWriter,
    StoredRecord,
    container,
    write_table,
)
from shardprep.formats.shards.tables import index_dtype, index_row
from shardprep.formats.sources.source import IMAGE_SUFFIXES, ByteReader, Entries
from shardprep.formats.sources.trees import TreeReader


@dataclass(frozen=True, kw_only=True)
class PublishingJob:
    """Base of jobs that make ``container`` files for one ``shard`` of a dataset. Picklable.

    ``output`` is the dataset's folder. ``run`` is the folder of unfinished files; once the end of the run has
    removed it, nothing can be published. ``expected_sha256`` maps file names to the SHA-256 required for
    publishing. ``wanted`` has the names of the files to write, None for all.
    """

    output: Path
    run: Path
    shard: PlannedShard
    container: str
    expected_sha256: Mapping[str, str] = field(default_factory=dict)
    wanted: frozenset[str] | None = None

    @property
    def work_folder(self) -> Path:
        return self.output / WORK_FOLDER_NAME

    def beside(self, suffix: str) -> Path:
        """Return the path of the shard's file with this suffix in the work folder."""
        return self.work_folder / (self.shard.name + suffix)

    def writes(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted

    def published(
        self, name: str, built: Path, crcs: npt.NDArray[np.uint32]
    ) -> tuple[str, npt.NDArray[np.uint64]]:
        """Check and publish the file ``built``, or check the existing file if it is not written.

        ``crcs`` are the records' checksums. Returns the file's SHA-256 and the records' offsets.
        """
        final = self.output / name
        if not self.writes(name):
            return self.expected_sha256[name], check_written(final, self.container, crcs)
        with ThreadPoolExecutor(1) as disk:  # flush while this thread reads the file back
            with starting_thread():
                flushed = disk.submit(flush_file, built)
            sha256 = hash_file(built)
            offsets = check_written(built, self.container, crcs)
            flushed.result()
        if self.expected_sha256.get(name, sha256) != sha256:
            library = container(self.container).library()
            versions = ", ".join(f"{name} {version}" for name, version in library.items())
            raise OperationError(
                "was rebuilt with different bytes than were published: the source has changed, or it was "
                f"written with other versions of the libraries than these ({versions}; prep inspect names "
                "the others)",
                path=final,
            )
        publish(built, final)
        return sha256, offsets


def check_written(path: Path, kind: str, crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Read a shard back, compare its checksums, and return the records' offsets. Raises CorruptRecord."""
    offsets = np.zeros(len(crcs), np.uint64)
    with Shard(path, kind) as reader:
        for ordinal, crc32c in enumerate(crcs.tolist()):
            stored = reader.checked(ordinal)
            if stored.crc32c != crc32c:
                raise CorruptRecord("reads back differently than it was written", path=path)
            offsets[ordinal] = stored.offset
        if reader.records != len(crcs):
            raise CorruptRecord(f"reads back {reader.records} records of {len(crcs)}", path=path)
    return offsets


@dataclass(frozen=True, slots=True)
class BuiltColumn:
    """A finished column of a shard, as in the commit record.

    ``rows`` is the file of its rows in the work folder. ``name``, ``size`` and ``sha256`` describe the
    column's shard; they are empty and 0 for values in a table. ``other_sizes`` counts images whose width or
    height differs from the record's image; ``first_other`` is the key of the first.
    """

    rows: str
    rows_sha256: str
    records: int
    name: str = ""
    size: int = 0
    sha256: str = ""
    other_sizes: int = 0
    first_other: str = ""

    def has_rows(self, work_folder: Path) -> bool:
        """Whether the file of the rows is unchanged. Raises OSError."""
        return hash_file(work_folder / self.rows) == self.rows_sha256

    @property
    def shard(self) -> FileEntry | None:
        """The column's shard; None for values in a table."""
        return FileEntry(self.name, self.size, self.sha256, self.records) if self.name else None


def build_column(
    job: PublishingJob, field: Field, values: Iterable[tuple[bytes, bytes, ImageInfo]]
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
    crcs = np.array([each.crc32c for each in stored], np.uint32)
    rows = np.zeros(len(stored), built_row(field))
    rows["row"] = rows_of(field, [each.image for each in stored], crcs.tolist())
    rows["digest"] = np.array([content_digest(each.key, UNLABELLED, each.image) for each in stored], "V32")
    name = sha256 = ""
    if not field.is_fixed:
        name = shard_name(field.name, job.shard.number, job.container)
        built = unfinished(job.run, name)
        if job.writes(name):
            key_bytes = max((len(each.key) for each in stored), default=1)
            extent = Extent(len(stored), sum(len(each.image) for each in stored), key_bytes)
            with container(job.container).write(built, extent) as writer:
                for each in stored:
                    writer.append(each)
        sha256, rows["row"]["offset"] = job.published(name, built, crcs)
    path = job.beside(f".{field.name}.rows")
    with publishing(path, job.run) as file:
        write_table(file, rows)
    return BuiltColumn(
        rows=path.name,
        rows_sha256=hash_file(path),
        records=len(rows),
        name=name,
        size=(job.output / name).stat().st_size if name else 0,
        sha256=sha256,
        other_sizes=len(others),
        first_other=others[0].decode() if others else "",
    )


def built_row(field: Field) -> np.dtype[np.void]:
    """Return the dtype of a row of the column's table plus the value's content digest."""
    return np.dtype([("row", column_row(field)), ("digest", "V32")])


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """A bad image that was left out on request, with its key, its place in the source, and the problem."""

    key: str
    where: str
    reason: str


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard, as in its commit record."""

    plan: str
    name: str
    size: int
    sha256: str
    records: int
    image_bytes: int
    rows_sha256: str
    skipped: tuple[SkippedImage, ...] = ()
    columns: tuple[BuiltColumn, ...] = ()
    region_sha256: str = ""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        shard = FileEntry(self.name, self.size, self.sha256, self.records)
        return (shard, *(column.shard for column in self.columns if column.shard))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuiltShard:
        skipped = tuple(SkippedImage(**s) for s in value["skipped"])
        columns = tuple(BuiltColumn(**c) for c in value["columns"])
        return cls(**{**value, "skipped": skipped, "columns": columns})


Sample = tuple[StoredRecord, ImageInfo, tuple[bytes, ...]]
"""A record to store, its image's properties, and the encoded values of its columns."""


def is_other_file(reader: ByteReader, entry: np.void) -> bool:
    """Whether a bad image is a file that ``--skip-non-images`` would leave out."""
    is_named = entry["path"].decode().lower().endswith(IMAGE_SUFFIXES)
    return isinstance(reader, TreeReader) and not is_named and not begins_as_image(reader.read(entry))


@dataclass(frozen=True, kw_only=True)
class ShardJob(PublishingJob):
    """Everything a worker needs to build a shard. Picklable.

    ``crashes`` maps the position of an image to the signal with which it crashes the decoder. ``region`` is
    the images' region of the reader's archive, if they stay there. ``home`` has the versions of the machine
    that planned the shard, if another may build it. ``builder`` replaces :func:`build_shard`.
    """

    entries: Entries
    reader: ByteReader
    options: PlanOptions
    plan: str
    key_bytes: int
    schema: Schema = field(default_factory=Schema)
    has_images: bool = True
    crashes: Mapping[int, str] = field(default_factory=dict)
    region: Region | None = None
    home: Mapping[str, str] | None = None
    builder: Callable[[ShardJob], BuiltShard] | None = None

    @property
    def decodes(self) -> bool:
        return self.options.decode_check

    def build(self) -> BuiltShard:
        """Build the shard. Raises OtherMachine if this machine cannot."""
        if self.home is not None:
            check_machine(self.home, self.options, self.run, self.reader, self.entries)
        return (self.builder or build_shard)(self)

    def key_at(self, place: int) -> str:
        key: bytes = self.entries["key"][min(place, len(self.entries) - 1)]
        return key.decode()

    def decode(self, place: int) -> None:
        if place < len(self.entries) and place not in self.crashes:
            with copy(self.reader) as reader:
                check_decodes(reader.read(self.entries[place]))

    def crashed(self, place: int, signal: str) -> ShardJob:
        return replace(self, crashes={**self.crashes, place: signal})


def shard_jobs(
    planned: Plan,
    shards: Iterable[PlannedShard],
    work_folder: WorkFolder,
    *,
    expected: dict[str, str] | None = None,
    wanted: frozenset[str] | None = None,
    home: Mapping[str, str] | None = None,
    builder: Callable[[ShardJob], BuiltShard] | None = None,
) -> Iterator[ShardJob]:
    """Yield the jobs of some of a plan's shards, lazily, because each job holds its entries.

    ``expected`` maps the names of shards and columns' shards to the SHA-256 required for publishing. For
    ``wanted``, ``home`` and ``builder`` see :class:`ShardJob`. The jobs' paths are absolute, because another
    process may have another current folder.
    """
    listing, regions = planned.listing, planned.regions
    for shard in shards:
        entries = planned.entries_of(shard)
        yield ShardJob(
            output=work_folder.output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            container=planned.options.container,
            entries=entries,
            reader=listing.reader.only(entries),
            options=planned.options,
            plan=planned.work_digest,
            key_bytes=planned.key_bytes,
            schema=listing.schema,
            has_images=listing.has_images,
            expected_sha256=expected or {},
            wanted=wanted,
            region=regions[shard.number] if regions else None,
            home=home,
            builder=builder,
        )


def row_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return the dtype of a row of the index plus the record's content digest."""
    return np.dtype([("row", index_dtype(key_bytes)), ("digest", "V32")])


def build_shard(job: ShardJob) -> BuiltShard:
    """Build, check and publish a shard, unless it is finished. Safe to kill and repeat."""
    if finished := trusted_commit(job):
        return finished
    built, skipped = unfinished(job.run, job.shard.name), list[SkippedImage]()
    rows, samples = _write(job, built, skipped)
    if finished := trusted_commit(job):  # another process may have built it in the meantime
        built.unlink(missing_ok=True)
        return finished
    sha256, rows["row"]["offset"] = job.published(job.shard.name, built, rows["row"]["crc32c"])
    columns = [
        build_column(job, field, ((stored.key, values[number], info) for stored, info, values in samples))
        for number, field in enumerate(job.schema)
    ]
    return _commit(job, rows, skipped, sha256, columns)


def trusted_commit(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a finished shard if plan, sizes and hashes match, else None."""
    commit = committed(job)
    return commit if commit and all(file.is_in(job.output) for file in commit.files) else None


def committed(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a shard if its plan and rows match, wherever its files are; else None.

    A shard without bad images is the same for any policy. One that left some out counts only with "skip".
    """
    try:
        commit = BuiltShard.from_json(parse_canonical_json(job.beside(".commit").read_bytes()))
        is_wanted = job.options.on_bad_image == "skip" or not commit.skipped
        if not is_wanted or commit.plan != job.plan or hash_file(job.beside(".rows")) != commit.rows_sha256:
            return None
        return commit if all(column.has_rows(job.work_folder) for column in commit.columns) else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _write(job: ShardJob, built: Path, skipped: list[SkippedImage]) -> tuple[Rows, Sequence[Sample]]:
    """Write the shard's file, and return its rows, and its samples if there are columns.

    With columns, all samples are read before the first is written, because the listing's lengths are not the
    images'.
    """
    rows, count = np.zeros(len(job.entries), row_dtype(job.key_bytes)), 0
    samples: Iterable[Sample] = _read(job, skipped)
    extent, known = job.shard.extent, list[Sample]()
    if len(job.schema) or not job.has_images:
        samples = known = list(samples)
        size = sum(len(stored.image) for stored, _, _ in known)
        extent = replace(extent, records=len(known), payload_bytes=size)
    if job.region and (archive := job.reader.archive):
        with suppress(FileExistsError):  # another shard made it
            (job.run / ARCHIVE_NAME).symlink_to(archive.path)  # the shard is read back next to it
    writing: AbstractContextManager[ShardWriter | None] = nullcontext()
    if job.writes(job.shard.name):
        writing = container(job.container).write(built, extent)
    with writing as writer:
        for stored, info, _ in samples:
            if writer is not None:
                writer.append(stored)
            row = index_row(stored, info, job.shard.number, count)
            rows[count] = row, content_digest(stored.key, stored.label, stored.image)
            count += 1
    return rows[:count], known


def _read(job: ShardJob, skipped: list[SkippedImage]) -> Iterator[Sample]:
    """Yield the shard's samples in order; raise bad ones, or append them to ``skipped``."""
    counter = ShardCounter(job.run, job.shard.number)
    with closing(counter), copy(job.reader) as reader:  # threads must not share an open reader
        reader.expect(job.entries)
        for done, entry in enumerate(job.entries):
            counter.set(done)
            try:
                if done in job.crashes:
                    raise BadImage(crashes_decoder(job.crashes[done]))
                yield _sample(job, reader, entry)
            except (BadImage, BadValue) as error:
                bad = BadImage(error.message, path=reader.where(entry), key=entry["key"].decode())
                if job.options.on_bad_image == "fail":
                    advice = "or add --on-bad-image skip to leave such images out and continue from here"
                    if is_other_file(reader, entry):
                        advice = (
                            "or add --skip-non-images --restart to leave out all files that are not images"
                        )
                    bad.message += f"; remove it, {advice}"
                    raise bad from error
                place = entry["path"].decode() or f"at byte {entry['offset']}"  # relative to the source
                skipped.append(SkippedImage(str(bad.key), place, bad.message))
        counter.set(len(job.entries))


def _sample(job: ShardJob, reader: ByteReader, entry: np.void) -> Sample:
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
    return stored, info, reader.values(entry)


def _commit(
    job: ShardJob, rows: Rows, skipped: list[SkippedImage], sha256: str, columns: list[BuiltColumn]
) -> BuiltShard:
    with publishing(job.beside(".rows"), job.run) as file:
        write_table(file, rows)
    region_sha256 = ""
    if job.region and (archive := job.reader.archive):
        with copy(job.reader):  # raises if the archive has changed, or changes meanwhile
            region_sha256 = hash_region(archive.path, job.region)
    commit = BuiltShard(
        plan=job.plan,
        name=job.shard.name,
        size=(job.output / job.shard.name).stat().st_size,
        sha256=sha256,
        records=len(rows),
        image_bytes=int(rows["row"]["length"].sum(dtype=np.int64)),
        rows_sha256=hash_file(job.beside(".rows")),
        skipped=tuple(skipped),
        columns=tuple(columns),
        region_sha256=region_sha256,
    )
    publish_bytes(job.beside(".commit"), canonical_json(asdict(commit)), job.run)
    return commit

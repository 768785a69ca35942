"""The job that builds and publishes one shard of a plan, on any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.plan import Plan, PlanOptions, check_machine
from shardprep.formats.errors import BadImage, CorruptRecord, OperationError
from shardprep.formats.images.crop_ready import stored_image
from shardprep.formats.images.decode import check_decodes, crashes_decoder
from shardprep.formats.images.header import NO_IMAGE, ImageInfo, begins_as_image, read_image_header
from shardprep.formats.records.record import UNLABELLED, content_digest, record_crc
from shardprep.formats.records.schema import BadValue, Field, Schema
from shardprep.formats.runtime.files import (
    flush_file,
    hash_file,
    publish,
    publish_bytes,
    publishing,
    unfinished,
)
from shardprep.formats.runtime.jobs import Job, Unit, counted
from shardprep.formats.runtime.json_record import built_fields, canonical_json, parse_canonical_json
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.columns import column_row, shard_name
from shardprep.formats.shards.manifest import index_dtype, index_row
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    FileEntry,
    Region,
    Rows,
    Shard,
    ShardWriter,
    StoredRecord,
    container,
    hash_region,
    write_table,
)
from shardprep.formats.sources.source import DECODED_SUFFIXES, IMAGE_SUFFIXES, ByteReader, Entries
from shardprep.formats.sources.trees import TreeReader
from shardprep.formats.storage.store import StoredFile


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
    rows = np.zeros(len(stored), built_row(row))
    if field.is_fixed:
        data = b"".join(each.image + each.crc32c.to_bytes(4, "little") for each in stored)
        rows["row"] = np.frombuffer(data, row)
    else:  # offsets are known once the shard is written
        rows["row"]["length"] = [len(each.image) for each in stored]
        rows["row"]["crc32c"] = [each.crc32c for each in stored]
    rows["digest"] = np.array([content_digest(each.key, UNLABELLED, each.image) for each in stored], "V32")
    name = "" if field.is_fixed else shard_name(field.name, job.shard.number, job.options.container)
    built = unfinished(job.run, name)
    if name and job.writes(name):
        key_bytes = max((len(each.key) for each in stored), default=1)
        size = sum(len(each.image) for each in stored)
        unit = Unit(name, job.shard.number, 0, len(stored), size, key_bytes)
        with container(job.options.container).write(built, unit) as writer:
            for each in stored:
                writer.append(each)
    published = job.published(name, built, f".{field.name}.rows", rows)
    return BuiltColumn(**published, other_sizes=len(others), first_other=others[0].decode() if others else "")


def built_row(row: npt.DTypeLike) -> np.dtype[np.void]:
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
        return tuple(entry_of(one) for one in (self, *self.columns) if one.name)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuiltShard:
        rows = f"{value['name']}.rows"  # releases before 0.4 did not note it
        return cls(**built_fields(cls, {"rows": rows, **value}))


def entry_of(built: BuiltFile) -> FileEntry:
    return FileEntry(built.name, built.size, built.sha256, built.records)


Sample = tuple[StoredRecord, ImageInfo, tuple[bytes, ...]]
"""A record to store, its image's properties, and the encoded values of its columns."""


def is_other_file(reader: ByteReader, entry: np.void) -> bool:
    """Whether a bad image is a file that ``--skip-non-images`` would leave out."""
    is_named = entry["path"].decode().lower().endswith(IMAGE_SUFFIXES)
    return isinstance(reader, TreeReader) and not is_named and not begins_as_image(reader.read(entry))


@dataclass(frozen=True, kw_only=True)
class ShardJob(Job[Any]):
    """Everything a worker needs to build a shard with its columns, or ``only_columns``. Picklable.

    ``output`` is the dataset's folder. ``run`` is the folder of unfinished files; once the end of the run has
    removed it, nothing can be published. ``expected_sha256`` maps file names to the SHA-256 required for
    publishing. ``wanted`` has the names of the files to write, None for all.

    ``crashes`` maps the position of an image to the signal with which it crashes the decoder. ``region`` is
    the images' region of the reader's archive, if they stay there. ``home`` has the versions of the machine
    that planned the shard, if another may build it. ``builder`` is called instead of
    :func:`build_shard`.
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
    wanted: frozenset[str] | None = None
    crashes: Mapping[int, str] = field(default_factory=dict)
    region: Region | None = None
    home: Mapping[str, str] | None = None
    builder: Callable[[ShardJob], Any] | None = None

    @property
    def decodes(self) -> bool:
        keys = self.entries["key"].tolist() if self.has_images else []
        return self.options.decode_check or any(
            key.decode().lower().endswith(DECODED_SUFFIXES) for key in keys
        )

    def beside(self, suffix: str) -> Path:
        """Return the path of the shard's file with this suffix in the work folder."""
        return self.output / WORK_FOLDER_NAME / (self.shard.name + suffix)

    def build(self) -> Any:
        """Build the shard, or call the ``builder``. Raises OtherMachine if this machine cannot."""
        if self.home is not None:
            check_machine(self.home, self.options, self.run, self.reader, self.entries)
        return (self.builder or build_shard)(self)

    def key_at(self, place: int) -> str:
        key: bytes = self.entries["key"][min(place, len(self.entries) - 1)]
        return key.decode()

    def decode(self, place: int) -> None:
        if place < len(self.entries) and place not in self.crashes:
            with self.reader.open() as reader:
                _sample(self, reader, self.entries[place])

    def crashed(self, place: int, signal: str) -> Self:
        return replace(self, crashes={**self.crashes, place: signal})

    def writes(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted

    def published(self, name: str, built: Path, suffix: str, rows: Rows) -> dict[str, Any]:
        """Publish the shard ``built``, if it has a name, and its rows; return the fields of a BuiltFile.

        Both are checked first. A shard that is not to be written is there already, and only checked.
        """
        sha256, final, path = "", self.output / name, self.beside(suffix)
        kind, crcs = self.options.container, rows["row"]["crc32c"]
        if name and not self.writes(name):
            sha256 = self.expected_sha256[name]
            rows["row"]["offset"] = check_written(final, kind, crcs)
        elif name:
            with ThreadPoolExecutor(1) as disk:  # flush while this thread reads the file back
                flushed = disk.submit(flush_file, built)
                sha256 = hash_file(built)
                rows["row"]["offset"] = check_written(built, kind, crcs)
                flushed.result()
            if self.expected_sha256.get(name, sha256) != sha256:
                versions = ", ".join(
                    f"{name} {version}" for name, version in container(kind).library().items()
                )
                raise OperationError(
                    "was rebuilt, but its bytes differ from the published ones: the source has changed, or "
                    f"other versions of the libraries than these wrote it ({versions}; prep inspect prints its "
                    "own)",
                    path=final,
                )
            publish(built, final)
        with publishing(path, self.run) as file:
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
    planned: Plan, shards: Iterable[Unit], work_folder: WorkFolder, **given: Any
) -> Iterator[ShardJob]:
    """Yield the jobs of some of a plan's shards, lazily, because each job holds its entries.

    Their paths are absolute, because another process may have another current folder. ``given`` are further
    fields of the jobs.
    """
    listing, regions = planned.listing, planned.regions
    for shard in shards:
        entries = planned.entries_of(shard)
        yield ShardJob(
            output=work_folder.output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            entries=entries,
            reader=listing.reader.only(entries),
            options=planned.options,
            plan=planned.work_digest,
            schema=listing.schema,
            has_images=listing.has_images,
            region=regions[shard.number] if regions else None,
            **given,
        )


def build_shard(job: ShardJob) -> BuiltShard:
    """Build, check and publish a shard, unless it is finished. Safe to kill and repeat."""
    if finished := trusted_commit(job):
        return finished
    skipped = list[SkippedImage]()
    samples = _read(job, skipped)
    shard, known = ({}, list(samples)) if job.only_columns else _write(job, samples)
    columns = [
        build_column(job, field, ((stored.key, values[number], info) for stored, info, values in known))
        for number, field in enumerate(job.schema)
    ]
    commit = BuiltShard(plan=job.plan, **shard, skipped=tuple(skipped), columns=tuple(columns))
    return committed_as(job, commit)


def committed_as(job: ShardJob, commit: BuiltShard) -> BuiltShard:
    publish_bytes(job.beside(".commit"), canonical_json(asdict(commit)), job.run)
    return commit


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
        is_same = is_wanted and commit.plan == job.plan
        files, folder = [one for one in (commit, *commit.columns) if one.rows], job.output / WORK_FOLDER_NAME
        is_same = is_same and all(hash_file(folder / one.rows) == one.rows_sha256 for one in files)
        return commit if is_same else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _write(job: ShardJob, samples: Iterable[Sample]) -> tuple[dict[str, Any], Sequence[Sample]]:
    """Publish the shard and its rows; return its part of the commit, and its samples if there are columns.

    With columns, all samples are read before the first is written, because the listing's lengths are not the
    images'.
    """
    built, name, unit = unfinished(job.run, job.shard.name), job.shard.name, job.shard
    rows, count = np.zeros(len(job.entries), built_row(index_dtype(unit.key_bytes))), 0
    known, archive = list[Sample](), job.reader.archive if job.region else None
    if len(job.schema) or not job.has_images:
        samples = known = list(samples)
        size = sum(len(stored.image) for stored, _, _ in known)
        unit = replace(unit, first=0, last=len(known), size=size)
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
    published, region_sha256 = job.published(name, built, ".rows", rows), ""
    if job.region and archive:
        with job.reader.open():  # raises if the archive has changed, or changes meanwhile
            region_sha256 = hash_region(archive.path, job.region)
    image_bytes = int(rows["row"]["length"].sum(dtype=np.int64))
    return published | {"image_bytes": image_bytes, "region_sha256": region_sha256}, known


def _read(job: ShardJob, skipped: list[SkippedImage]) -> Iterator[Sample]:
    """Yield the shard's samples in order; raise bad ones, or append them to ``skipped``."""
    places = counted(job.run, job.shard.number, len(job.entries))
    with closing(places), job.reader.open() as reader:
        reader.expect(job.entries)
        for done in places:
            entry = job.entries[done]
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
                    bad.message += f"; repair or remove it, {advice}"
                    raise bad from error
                place = entry["path"].decode() or f"at byte {entry['offset']}"  # relative to the source
                skipped.append(SkippedImage(str(bad.key), place, bad.message))


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

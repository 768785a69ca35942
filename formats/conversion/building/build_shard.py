"""The job that builds one shard from its plan, on any executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.schema import Schema
from shardprep.formats.containers.archive import ARCHIVE_NAME, Region, hash_region
from shardprep.formats.containers.container import Extent, ShardWriter
from shardprep.formats.containers.registry import container
from shardprep.formats.containers.table import Rows, write_table
from shardprep.formats.dataset.index import index_dtype, index_row
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.errors import BadImage
from shardprep.formats.images.decode_check import check_decodes, crashes_decoder
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.records.record import content_digest
from shardprep.formats.sources.listing.source import ByteReader, Entries
from shardprep.formats.system.atomic_write import hash_file, publish_bytes, publishing, unfinished

from .built_shard import BuiltShard, SkippedImage
from .checked_sample import CheckedSample, checked_sample
from .column_of_shard import BuiltColumn, ColumnOfShard
from .discarding_writer import DiscardingWriter
from .machine import check_machine
from .plan import PlannedShard, PlanOptions
from .progress_counters import COUNTERS_NAME, ShardCounter
from .publish_shard import publish_shard


@dataclass(frozen=True)
class ShardJob:
    """All that a worker needs to build a shard. Picklable.

    ``run`` is the folder of unfinished files. The end of the run removes it, and nothing can be published
    after that. ``crashes`` maps an image's place among the entries to the signal by which it crashes the
    decoder. ``region`` is where the images are in the reader's archive, if they stay there. ``home`` has
    the versions of the machine that planned the shard, if another may build it.
    """

    output: Path
    run: Path
    shard: PlannedShard
    entries: Entries
    reader: ByteReader
    options: PlanOptions
    plan: str
    key_bytes: int
    schema: Schema = field(default_factory=Schema)
    has_images: bool = True
    expected_sha256: Mapping[str, str] = field(default_factory=dict)
    wanted: frozenset[str] | None = None
    crashes: Mapping[int, str] = field(default_factory=dict)
    region: Region | None = None
    home: Mapping[str, str] | None = None

    @property
    def work_folder(self) -> Path:
        return self.output / WORK_FOLDER_NAME

    def writes(self, name: str) -> bool:
        """Whether that file is to be written."""
        return self.wanted is None or name in self.wanted

    def beside(self, suffix: str) -> Path:
        """Return the path of the shard's file with that suffix in the work folder."""
        return self.work_folder / (self.shard.name + suffix)

    def loaded(self) -> ShardJob:
        """Return the job with all that is known only when its shard is built: here, the same job."""
        return self

    @property
    def decodes(self) -> bool:
        return self.options.decode_check

    def build(self) -> BuiltShard:
        """Build the shard with :func:`build_shard`. Raises OtherMachine before that."""
        if self.home is not None:
            check_machine(self.home, self.options, self.run, self.reader, self.entries)
        return build_shard(self)

    def key_at(self, place: int) -> str:
        """Return the key of the entry at that place, or of the last one."""
        key: bytes = self.entries["key"][min(place, len(self.entries) - 1)]
        return key.decode()

    def decode(self, place: int) -> None:
        """Decode one image, in a process that may crash, unless it is known to. Raises BadImage."""
        if place < len(self.entries) and place not in self.crashes:
            with copy(self.reader) as reader:
                check_decodes(reader.read(self.entries[place]))

    def crashed(self, place: int, signal: str) -> ShardJob:
        """Return the job with an image that crashes the decoder by that signal."""
        return replace(self, crashes={**self.crashes, place: signal})


def row_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Return the dtype of a row of the index with the record's content digest."""
    return np.dtype([("row", index_dtype(key_bytes)), ("digest", "V32")])


def build_shard(job: ShardJob) -> BuiltShard:
    """Build, check and publish a shard, unless it is already finished. Safe to kill and repeat.

    Raises BadImage (policy ``fail``), SourceDamaged, NoSpace, OSError.
    """
    finished = trusted_commit(job)
    if finished is not None:
        return finished
    job = job.loaded()
    built = unfinished(job.run, job.shard.name)
    rows, skipped, columns = _write(job, built)
    finished = trusted_commit(job)  # another process may have built the same shard since
    if finished is not None:
        built.unlink(missing_ok=True)
        return finished
    sha256 = _published(job, built, rows)
    return _commit(job, rows, skipped, sha256, [_column(job, values) for values in columns])


def _published(job: ShardJob, built: Path, rows: Rows) -> str:
    """Publish the shard if it was written; return its SHA-256."""
    name = job.shard.name
    if not job.writes(name):
        return job.expected_sha256[name]
    final, kind = job.output / name, job.options.container
    return publish_shard(built, final, kind, rows["row"]["crc32c"], job.expected_sha256)


def _column(job: ShardJob, values: ColumnOfShard) -> BuiltColumn:
    name = values.file_name(job.shard.number, job.options.container)
    if name and job.writes(name):
        sha256 = values.publish(job.run, job.output / name, job.options.container, job.expected_sha256)
    else:
        sha256 = job.expected_sha256.get(name, "")
    return values.built(job.run, job.output, name, sha256)


def trusted_commit(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a finished shard if plan, size and SHA-256 match, else None."""
    commit = committed(job)
    if commit is None or not all(file.is_in(job.output) for file in commit.files):
        return None
    return commit


def committed(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a shard if its plan and its rows match, wherever its files are; else None.

    A shard without bad images is the same for any policy; one that lacks some is right only to skip them.
    """
    try:
        commit = BuiltShard.from_json(parse_canonical_json(job.beside(".commit").read_bytes()))
        is_wanted = job.options.on_bad_image == "skip" or not commit.skipped
        if not is_wanted or commit.plan != job.plan or hash_file(job.beside(".rows")) != commit.rows_sha256:
            return None
        return commit if all(column.has_rows(job.work_folder) for column in commit.columns) else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _write(job: ShardJob, built: Path) -> tuple[Rows, list[SkippedImage], list[ColumnOfShard]]:
    rows = np.zeros(len(job.entries), row_dtype(job.key_bytes))
    skipped: list[SkippedImage] = []
    samples, extent = _samples(job, skipped)
    columns = [ColumnOfShard(field, job.shard.name) for field in job.schema]
    count = 0
    if job.region and (archive := job.reader.archive):
        with suppress(FileExistsError):  # of another shard
            (job.run / ARCHIVE_NAME).symlink_to(archive.path)  # the table is read back beside it
    with _writer(job, built, extent) as writer:
        for sample in samples:
            writer.append(sample.stored, sample.offset)
            rows[count] = _row(sample, job.shard.number, count)
            for column, value in zip(columns, sample.values, strict=True):
                column.append(sample.stored.key, value)
            count += 1
    return rows[:count], skipped, columns


def _writer(job: ShardJob, built: Path, extent: Extent) -> ShardWriter:
    if job.writes(job.shard.name):
        return container(job.options.container).write(built, extent)
    return DiscardingWriter()


def _samples(job: ShardJob, skipped: list[SkippedImage]) -> tuple[Iterable[CheckedSample], Extent]:
    """Return the shard's samples, and the extent of its images.

    With columns, the listing's lengths are not those of the images: all samples are read before the first
    is written.
    """
    samples = _read(job, skipped)
    if job.has_images and not len(job.schema):
        return samples, job.shard.extent
    known = list(samples)
    size = sum(len(sample.stored.image) for sample in known)
    return known, replace(job.shard.extent, records=len(known), payload_bytes=size)


def _read(job: ShardJob, skipped: list[SkippedImage]) -> Iterator[CheckedSample]:
    """Yield the shard's samples in order; bad ones are raised, or appended to ``skipped``."""
    counter = ShardCounter(job.run / COUNTERS_NAME, job.shard.number)
    with closing(counter), copy(job.reader) as reader:  # an open reader would be shared between threads
        reader.expect(job.entries)
        for done, entry in enumerate(job.entries):
            counter.set(done)
            try:
                if done in job.crashes:
                    raise BadImage(crashes_decoder(job.crashes[done]))
                yield checked_sample(reader, entry, job.options, has_images=job.has_images)
            except (BadImage, BadValue) as error:
                bad = BadImage(error.message, path=reader.where(entry), key=entry["key"].decode())
                if job.options.on_bad_image == "fail":
                    raise _with_advice(bad) from error
                skipped.append(SkippedImage(str(bad.key), _place(entry), bad.message))
        counter.set(len(job.entries))


def _with_advice(bad: BadImage) -> BadImage:
    advice = "or add --on-bad-image skip to leave such images out, and go on from here"
    return BadImage(f"{bad.message}; remove it, {advice}", path=bad.path, key=bad.key)


def _place(entry: np.void) -> str:
    """Return an entry's place relative to the source, as written into a dataset."""
    return entry["path"].decode() or f"at byte {entry['offset']}"


def _row(sample: CheckedSample, shard: int, ordinal: int) -> tuple[tuple[object, ...], object]:
    stored = sample.stored
    return index_row(stored, sample.info, shard, ordinal), content_digest(
        stored.key, stored.label, stored.image
    )


def _commit(
    job: ShardJob, rows: Rows, skipped: list[SkippedImage], sha256: str, columns: list[BuiltColumn]
) -> BuiltShard:
    with publishing(job.beside(".rows"), job.run) as file:
        write_table(file, rows)
    region_sha256 = ""
    if job.region and (archive := job.reader.archive):
        with copy(job.reader):  # the archive has not changed, and does not
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
    publish_bytes(job.beside(".commit"), canonical_json(commit.to_json()), job.run)
    return commit

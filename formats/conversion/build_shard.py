"""The job that builds one shard from its plan, on any executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.containers.archive import ARCHIVE_NAME, Region, hash_region, link_archive
from shardprep.formats.containers.container import Stored
from shardprep.formats.containers.registry import IN_PLACE, container
from shardprep.formats.dataset.index import Rows, index_dtype, index_row
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.errors import BadImage, CorruptRecord, OperationError, ShardprepError
from shardprep.formats.images.crop_ready.transcoding import stored_image
from shardprep.formats.images.decode_check import check_decodes, crashes_decoder
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import ImageInfo
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.records.table_file import write_table
from shardprep.formats.sources.listing.source import ByteReader, Entries
from shardprep.formats.system.atomic_write import (
    flush_file,
    hash_file,
    publish,
    publish_bytes,
    publishing,
)

from .plan import Plan, PlannedShard, PlanOptions
from .progress_counters import COUNTERS_NAME, ShardCounter
from .work_folder import WorkFolder


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """A bad image that was left out on request: its key, its place in the source, and what is wrong."""

    key: str
    where: str
    reason: str


@dataclass(frozen=True)
class ShardJob:
    """All that a worker needs to build a shard. Picklable.

    ``run`` is the folder of unfinished files. The end of the run removes it, and nothing can be published
    after that. ``crashes`` maps an image's place among the entries to the signal by which it crashes the
    decoder. ``region`` is where the images are in the reader's archive, if they stay there.
    """

    output: Path
    run: Path
    shard: PlannedShard
    entries: Entries
    reader: ByteReader
    options: PlanOptions
    plan: str
    key_bytes: int
    expected_sha256: str | None = None
    crashes: Mapping[int, str] = field(default_factory=dict)
    region: Region | None = None

    @property
    def work_folder(self) -> Path:
        return self.output / WORK_FOLDER_NAME

    def beside(self, suffix: str) -> Path:
        """Return the path of the shard's file with that suffix in the work folder."""
        return self.work_folder / (self.shard.name + suffix)


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
    region_sha256: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuiltShard:
        """Return the shard of a commit record; the inverse of ``to_json``."""
        skipped = tuple(SkippedImage(**s) for s in value["skipped"])
        return cls(**{**value, "skipped": skipped})


def shard_jobs(
    planned: Plan,
    shards: Iterable[PlannedShard],
    reader: ByteReader,
    work_folder: WorkFolder,
    *,
    expected: dict[str, str] | None = None,
) -> Iterator[ShardJob]:
    """Yield the jobs of some of a plan's shards, one at a time, because a job holds its entries.

    ``expected`` maps a shard's name to the SHA-256 that it must have to be published.
    """
    archive = reader.archive if planned.options.container == IN_PLACE else None
    regions = planned.regions(archive.size) if archive else ()
    for shard in shards:
        yield ShardJob(
            output=work_folder.output,
            run=work_folder.run,
            shard=shard,
            entries=planned.entries_of(shard),
            reader=reader,
            options=planned.options,
            plan=planned.work_digest,
            key_bytes=planned.key_bytes,
            expected_sha256=(expected or {}).get(shard.name),
            region=regions[shard.number] if regions else None,
        )


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
    built = job.run / (job.shard.name + ".tmp")
    built.unlink(missing_ok=True)
    rows, skipped = _write(job, built)
    with ThreadPoolExecutor(1) as disk:  # flushes while this thread reads the file back
        with starting_thread():
            flushed = disk.submit(flush_file, built)
        sha256 = hash_file(built)
        check_written(built, job.options.container, rows)
        flushed.result()
    if job.expected_sha256 not in (None, sha256):
        raise _other_bytes(job)
    publish(built, job.output / job.shard.name)
    return _commit(job, rows, skipped, sha256)


def _other_bytes(job: ShardJob) -> ShardprepError:
    versions = ", ".join(f"{name} {v}" for name, v in container(job.options.container).library().items())
    return OperationError(
        f"was rebuilt with other bytes than were published: the source has changed, or it was written with "
        f"other libraries than these ({versions}; prep inspect names those)",
        path=job.output / job.shard.name,
    )


def trusted_commit(job: ShardJob) -> BuiltShard | None:
    """Return the commit record of a finished shard if plan, size and SHA-256 match, else None.

    A shard without bad images is the same for any policy; one that lacks some is right only to skip them.
    """
    final, rows = job.output / job.shard.name, job.beside(".rows")
    if final.is_symlink():
        return None
    try:
        commit = BuiltShard.from_json(parse_canonical_json(job.beside(".commit").read_bytes()))
        is_wanted = job.options.on_bad_image == "skip" or not commit.skipped
        fits = is_wanted and commit.plan == job.plan and commit.size == final.stat().st_size
        if fits and hash_file(rows) == commit.rows_sha256 and hash_file(final) == commit.sha256:
            return commit
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return None


def _write(job: ShardJob, built: Path) -> tuple[Rows, list[SkippedImage]]:
    rows = np.zeros(len(job.entries), row_dtype(job.key_bytes))
    skipped: list[SkippedImage] = []
    count = 0
    if job.region and (archive := job.reader.archive):
        link_archive(job.run / ARCHIVE_NAME, archive.path)  # the table is read back beside it
    with container(job.options.container).write(built, job.shard.extent) as writer:
        for image in _images(job, skipped):
            writer.append(image.stored, image.offset)
            rows[count] = _row(image, job.shard.number, count)
            count += 1
    return rows[:count], skipped


class _Image(NamedTuple):
    stored: Stored
    info: ImageInfo
    offset: int


def _images(job: ShardJob, skipped: list[SkippedImage]) -> Iterator[_Image]:
    """Yield the shard's images in order; bad ones are raised, or appended to ``skipped``."""
    counter = ShardCounter(job.run / COUNTERS_NAME, job.shard.number)
    with closing(counter), copy(job.reader) as reader:  # an open reader would be shared between threads
        for done, entry in enumerate(job.entries):
            counter.set(done)
            try:
                if done in job.crashes:
                    raise BadImage(crashes_decoder(job.crashes[done]))
                yield _checked(reader.read(entry), entry, job.options)
            except BadImage as error:
                bad = BadImage(error.message, path=reader.where(entry), key=entry["key"].decode())
                if job.options.on_bad_image == "fail":
                    raise _with_advice(bad) from error
                skipped.append(SkippedImage(str(bad.key), _place(entry), bad.message))
        counter.set(len(job.entries))


def _with_advice(bad: BadImage) -> BadImage:
    advice = "or add --on-bad-image skip to leave such images out, and go on from here"
    return BadImage(f"{bad.message}; remove it, {advice}", path=bad.path, key=bad.key)


def decode_alone(job: ShardJob, place: int) -> None:
    """Decode one image of the shard, in a process that may crash. Raises BadImage."""
    with copy(job.reader) as reader:
        check_decodes(reader.read(job.entries[place]))


def _place(entry: np.void) -> str:
    """Return an entry's place relative to the source, as written into a dataset."""
    return entry["path"].decode() or f"at byte {entry['offset']}"


def _checked(image: bytes, entry: np.void, options: PlanOptions) -> _Image:
    info = read_image_header(image)
    if options.decode_check:
        check_decodes(image)
    image, info = stored_image(
        image,
        info,
        segments=options.crop_ready,
        shorter_side=options.shorter_side,
        quality=options.quality,
    )
    key, label = entry["key"].item(), int(entry["label"])
    return _Image(Stored(key, label, record_crc(key, label, image), image), info, int(entry["offset"]))


def _row(image: _Image, shard: int, ordinal: int) -> tuple[tuple[object, ...], object]:
    stored = image.stored
    return index_row(stored, image.info, shard, ordinal), content_digest(
        stored.key, stored.label, stored.image
    )


def check_written(path: Path, kind: str, rows: Rows) -> None:
    """Read a shard back and compare each record's checksum. Raises CorruptRecord."""
    with container(kind).read(path) as reader:
        for ordinal, crc32c in enumerate(rows["row"]["crc32c"].tolist()):
            if reader.checked(ordinal).crc32c != crc32c:
                raise CorruptRecord("reads back as another record than was written", path=path)
        if len(reader) != len(rows):
            raise CorruptRecord(f"reads back {len(reader)} records of {len(rows)}", path=path)


def _commit(job: ShardJob, rows: Rows, skipped: list[SkippedImage], sha256: str) -> BuiltShard:
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
        region_sha256=region_sha256,
    )
    publish_bytes(job.beside(".commit"), canonical_json(commit.to_json()), job.run)
    return commit

"""One shard from its plan: the job that any executor can run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .board import BOARD_NAME, Counter
from .canonical import canonical_json, parse_canonical_json
from .decode_check import check_decodes
from .errors import BadImage, CorruptRecord, OperationError, ShardprepError
from .image_header import ImageInfo, read_image_header
from .index import Rows, index_dtype, write_table
from .plan import Plan, PlannedShard, PlanOptions
from .publish import flush_file, hash_file, publish, publish_bytes, publishing
from .record import content_digest, record_crc
from .shard import Stored, container
from .source import ByteReader, Entries
from .workplace import WORKPLACE_NAME


@dataclass(frozen=True, slots=True)
class Skipped:
    """A bad image that was left out on request: its key, where it lay, and what is wrong."""

    key: str
    where: str
    reason: str


@dataclass(frozen=True)
class ShardJob:
    """All that a worker needs to build a shard. Picklable."""

    output: Path
    shard: PlannedShard
    entries: Entries
    reader: ByteReader
    options: PlanOptions
    plan: str
    key_bytes: int
    expected_sha256: str | None = None

    @property
    def workplace(self) -> Path:
        return self.output / WORKPLACE_NAME

    def beside(self, suffix: str) -> Path:
        """The shard's file of that kind in the workplace."""
        return self.workplace / (self.shard.name + suffix)


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard, as its commit record says it."""

    plan: str
    name: str
    size: int
    sha256: str
    records: int
    image_bytes: int
    rows_sha256: str
    skipped: tuple[Skipped, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuiltShard:
        """The law: ``BuiltShard.from_json(built.to_json()) == built``."""
        skipped = tuple(Skipped(**s) for s in value["skipped"])
        return cls(**{**value, "skipped": skipped})


def shard_jobs(
    planned: Plan,
    shards: Iterable[PlannedShard],
    reader: ByteReader,
    output: Path,
    *,
    expected: dict[str, str] | None = None,
) -> Iterator[ShardJob]:
    """The jobs of some of a plan's shards, made one at a time: a job holds its entries.

    ``expected`` gives the SHA-256 that a shard of that name must get to be published.
    """
    for shard in shards:
        yield ShardJob(
            output=output,
            shard=shard,
            entries=planned.entries_of(shard),
            reader=reader,
            options=planned.options,
            plan=planned.digest,
            key_bytes=planned.key_bytes,
            expected_sha256=(expected or {}).get(shard.name),
        )


def row_dtype(key_bytes: int) -> np.dtype[np.void]:
    """A row of the index, and the record's content digest beside it until the root is made."""
    return np.dtype([("row", index_dtype(key_bytes)), ("digest", "V32")])


def build_shard(job: ShardJob) -> BuiltShard:
    """Build, check and publish a shard, unless it is finished already. Safe to kill and repeat.

    Raises BadImage (policy ``fail``), SourceDamaged, NoSpace, OSError.
    """
    finished = trusted_commit(job)
    if finished is not None:
        return finished
    built = job.beside(".tmp")
    built.unlink(missing_ok=True)
    rows, skipped = _write(job, built)
    with ThreadPoolExecutor(1) as disk:  # the disk writes while we read back what it was given
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
    """The commit record of a finished shard, if plan, size and SHA-256 all hold; else None."""
    final, rows = job.output / job.shard.name, job.beside(".rows")
    if final.is_symlink():
        return None
    try:
        commit = BuiltShard.from_json(parse_canonical_json(job.beside(".commit").read_bytes()))
        fits = commit.plan == job.plan and commit.size == final.stat().st_size
        if fits and hash_file(rows) == commit.rows_sha256 and hash_file(final) == commit.sha256:
            return commit
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return None


def _write(job: ShardJob, built: Path) -> tuple[Rows, list[Skipped]]:
    rows = np.zeros(len(job.entries), row_dtype(job.key_bytes))
    skipped: list[Skipped] = []
    count = 0
    with container(job.options.container).write(built, job.shard.extent) as writer:
        for image in _images(job, skipped):
            writer.append(image.stored)
            rows[count] = _row(image, job.shard.number, count)
            count += 1
    return rows[:count], skipped


class _Image(NamedTuple):
    stored: Stored
    info: ImageInfo


def _images(job: ShardJob, skipped: list[Skipped]) -> Iterator[_Image]:
    """The shard's images in order; bad ones are raised or put among ``skipped``."""
    counter = Counter(job.workplace / BOARD_NAME, job.shard.number)
    with closing(counter), copy(job.reader) as reader:  # threads would share an open one
        for done, entry in enumerate(job.entries):
            counter.set(done)
            try:
                yield _checked(reader.read(entry), entry, decode=job.options.decode_check)
            except BadImage as error:
                bad = BadImage(error.message, path=reader.where(entry), key=entry["key"].decode())
                if job.options.on_bad_image == "fail":
                    raise bad from error
                skipped.append(Skipped(str(bad.key), _place(entry), bad.message))
        counter.set(len(job.entries))


def _place(entry: np.void) -> str:
    """Where in the source an entry lies, wherever the source does: what is written into a dataset."""
    return entry["path"].decode() or f"at byte {entry['offset']}"


def _checked(image: bytes, entry: np.void, *, decode: bool) -> _Image:
    info = read_image_header(image)
    if decode:
        check_decodes(image)
    key, label = entry["key"].item(), int(entry["label"])
    return _Image(Stored(key, label, record_crc(key, label, image), image), info)


def _row(image: _Image, shard: int, ordinal: int) -> tuple[tuple[object, ...], object]:
    stored = image.stored
    return index_row(stored, image.info, shard, ordinal), content_digest(
        stored.key, stored.label, stored.image
    )


def index_row(stored: Stored, info: ImageInfo, shard: int, ordinal: int) -> tuple[object, ...]:
    """A record's row of the index."""
    return (
        stored.key,
        stored.label,
        shard,
        ordinal,
        len(stored.image),
        stored.crc32c,
        info.width,
        info.height,
        info.flags,
        info.components,
        info.orientation,
    )


def check_written(path: Path, kind: str, rows: Rows) -> None:
    """Read a shard back record by record: what was meant is what is there. Raises CorruptRecord."""
    with container(kind).read(path) as reader:
        for ordinal, crc32c in enumerate(rows["row"]["crc32c"].tolist()):
            if reader.checked(ordinal).crc32c != crc32c:
                raise CorruptRecord("reads back as another record than was written", path=path)
        if len(reader) != len(rows):
            raise CorruptRecord(f"reads back {len(reader)} records of {len(rows)}", path=path)


def _commit(job: ShardJob, rows: Rows, skipped: list[Skipped], sha256: str) -> BuiltShard:
    with publishing(job.beside(".rows"), job.workplace) as file:
        write_table(file, rows)
    commit = BuiltShard(
        plan=job.plan,
        name=job.shard.name,
        size=(job.output / job.shard.name).stat().st_size,
        sha256=sha256,
        records=len(rows),
        image_bytes=int(rows["row"]["length"].sum(dtype=np.int64)),
        rows_sha256=hash_file(job.beside(".rows")),
        skipped=tuple(skipped),
    )
    publish_bytes(job.beside(".commit"), canonical_json(commit.to_json()), job.workplace)
    return commit

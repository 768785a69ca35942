"""The job that builds the joined columns of one shard, on any executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.conversion.building.column_of_shard import BuiltColumn, ColumnOfShard
from shardprep.formats.dataset.manifest import WORK_FOLDER_NAME
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json
from shardprep.formats.system.atomic_write import publish_bytes

from .joined_values import JoinedColumn
from .matching import Keys

COMMIT_SUFFIX = ".joined"


@dataclass(frozen=True)
class JoinJob:
    """All that a worker needs to build columns of the shard ``name``, which has these ``keys``. Picklable.

    ``run`` is the folder of unfinished files, ``plan`` the digest of what is joined, and ``expected`` maps
    names of files to the SHA-256 that they must have to be published.
    """

    output: Path
    run: Path
    name: str
    number: int
    container: str
    keys: Keys
    columns: tuple[JoinedColumn, ...]
    plan: str
    expected: Mapping[str, str] = field(default_factory=dict)

    @property
    def commit(self) -> Path:
        """The file that says that the job is done."""
        return self.output / WORK_FOLDER_NAME / (self.name + COMMIT_SUFFIX)


def join_shard(job: JoinJob) -> tuple[BuiltColumn, ...]:
    """Build, check and publish the columns, unless they are finished. Safe to kill and repeat.

    Raises SourceDamaged for a value that its column cannot hold, and what reading the values and publishing
    the files raises.
    """
    finished = _finished(job)
    if finished is not None:
        return finished
    built = tuple(_build(job, column) for column in job.columns)
    commit = {"plan": job.plan, "columns": [asdict(column) for column in built]}
    publish_bytes(job.commit, canonical_json(commit), job.run)
    return built


def _finished(job: JoinJob) -> tuple[BuiltColumn, ...] | None:
    """Return the columns of a finished job if all their files are as they were written."""
    try:
        commit = parse_canonical_json(job.commit.read_bytes())
        built = tuple(BuiltColumn(**column) for column in commit["columns"])
        if commit["plan"] == job.plan and all(one.is_intact(job.output, job.commit.parent) for one in built):
            return built
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return None


def _build(job: JoinJob, column: JoinedColumn) -> BuiltColumn:
    collected = ColumnOfShard(column.field, job.name)
    with column.values as values:
        for number, key in enumerate(job.keys.tolist()):
            try:
                data = values.data(number)
                column.field.codec.decode(data)
            except BadValue as error:
                raise SourceDamaged(error.message, path=values.where(number), key=key.decode()) from error
            collected.append(key, data)
    name, sha256 = collected.file_name(job.number, job.container), ""
    if name:
        sha256 = collected.publish(job.run, job.output / name, job.container, job.expected)
    return collected.built(job.run, job.output, name, sha256)

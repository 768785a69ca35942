"""The jobs of a plan's shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardprep.formats.containers.registry import IN_PLACE
from shardprep.formats.sources.listing.source import ByteReader

from .build_shard import ShardJob
from .plan import Plan, PlannedShard
from .work_folder import WorkFolder


def shard_jobs(
    planned: Plan,
    shards: Iterable[PlannedShard],
    reader: ByteReader,
    work_folder: WorkFolder,
    *,
    expected: dict[str, str] | None = None,
    wanted: frozenset[str] | None = None,
    home: Mapping[str, str] | None = None,
) -> Iterator[ShardJob]:
    """Yield the jobs of some of a plan's shards, one at a time, because a job holds its entries.

    ``expected`` maps the names of shards, and of columns' shards, to the SHA-256 that they must have to be
    published; ``wanted`` are those that are written, None for all. ``home`` is that of the jobs, of which
    the paths are absolute: another process has another current folder.
    """
    archive = reader.archive if planned.options.container == IN_PLACE else None
    regions = planned.regions(archive.size) if archive else ()
    for shard in shards:
        entries = planned.entries_of(shard)
        yield ShardJob(
            output=work_folder.output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            entries=entries,
            reader=reader.only(entries),
            options=planned.options,
            plan=planned.work_digest,
            key_bytes=planned.key_bytes,
            schema=planned.schema,
            has_images=planned.has_images,
            expected_sha256=expected or {},
            wanted=wanted,
            region=regions[shard.number] if regions else None,
            home=home,
        )

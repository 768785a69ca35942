"""The containers by name: CONTAINERS hold the images, and IN_PLACE has them in their archive."""

from __future__ import annotations

from pathlib import Path

from shardprep.formats.errors import ShardDamaged, UsageError

from .container import Container, ShardReader

CONTAINERS = ("lmdb", "hdf5")
IN_PLACE = "tar"
ALL_CONTAINERS = (*CONTAINERS, IN_PLACE)


def container(name: str) -> Container:
    """Return the container of that name. Raises UsageError for an unknown name."""
    if name == "lmdb":
        from . import (  # start-up time: only the library that is used is imported
            lmdb_shard,
        )

        return lmdb_shard.CONTAINER
    if name == "hdf5":
        from . import hdf5_shard  # start-up time

        return hdf5_shard.CONTAINER
    if name == IN_PLACE:
        from . import tar_table  # start-up time

        return tar_table.CONTAINER
    raise UsageError(f"unknown shard format {name!r}; known are {', '.join(CONTAINERS)}")


def open_shard(path: Path, name: str, *, size: int, records: int) -> ShardReader:
    """Open a finished shard; check its size before and its number of records after."""
    found = path.stat().st_size
    if found != size:
        raise ShardDamaged(f"has {found} bytes, not {size}; prep repair rebuilds it", path=path)
    reader = container(name).read(path)
    if len(reader) != records:
        reader.close()
        raise ShardDamaged(f"has {len(reader)} records, not {records}", path=path)
    return reader

"""The room of a cache, and what it has."""

from contextlib import suppress
from pathlib import Path

from shardprep.formats import read_manifest


def limit_of(path: Path, share: float) -> int:
    """The bytes of a share of a dataset's shards, and of all its tables."""
    manifest = read_manifest(path)
    return int(sum(shard.size for shard in manifest.shards) * share) + sum(t.size for t in manifest.tables)


def cached(cache: Path) -> dict[Path, int]:
    """The files of a cache, each with its size."""
    found = {}
    for path in (cache / "files").rglob("*"):
        with suppress(FileNotFoundError):  # evicted meanwhile
            if path.is_file():
                found[path] = path.stat().st_size
    return found


def bytes_in(cache: Path) -> int:
    return sum(cached(cache).values())

"""The custody of the images: from the archives over records and shards to the root."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.printable import printable

MOST_OF_A_KEY = 200  # characters in an error
MOST_LISTED = 50  # archives, and shards; all are counted


def custody(dataset: Dataset, key: str | None = None) -> dict[str, Any]:
    """Return what leads from the source to the root, as a JSON object, with one record as an example.

    It is the record with the ``key``, or the first. Raises UsageError for a key that the dataset does not
    have.
    """
    manifest, shards = dataset.manifest, dataset.manifest.shards
    archives = manifest.source.get("archives")
    named = [one for one in archives if isinstance(one, dict)] if isinstance(archives, list) else []
    return {
        "layout": manifest.source["layout"],
        "archives": len(named),
        "first_archives": [{"name": str(one.get("name")), "size": _size(one)} for one in named[:MOST_LISTED]],
        "in_place": manifest.archive.name if manifest.archive else None,
        "example": _example(dataset, 0 if key is None else _number(dataset, key)),
        "content_root": manifest.content_root,
        "shards": len(shards),
        "first_shards": [shard.to_json() for shard in shards[:MOST_LISTED]],
        "writer": {str(name): str(value) for name, value in manifest.writer.items()},
        "plan": str(manifest.plan.get("sha256")),
        "root": manifest.root,
    }


def _number(dataset: Dataset, key: str) -> int:
    found = np.flatnonzero(dataset.index["key"] == key.encode("utf-8", "surrogatepass"))
    if not len(found):
        raise UsageError(f"has no record with the key {printable(key, MOST_OF_A_KEY)!r}", path=dataset.path)
    return int(found[0])


def _example(dataset: Dataset, number: int) -> dict[str, Any] | None:
    if not len(dataset):
        return None
    row = dataset.index[number]
    shard = dataset.manifest.shards[int(row["shard"])]
    return {
        "record": number,
        "key": row["key"].decode("utf-8", "replace"),
        "shard": shard.name,
        "sha256": shard.to_json()["sha256"],
        "ordinal": int(row["ordinal"]),
        "crc32c": f"{int(row['crc32c']):08x}",
    }


def _size(archive: dict[str, Any]) -> int | None:
    size = archive.get("size")
    return size if isinstance(size, int) else None

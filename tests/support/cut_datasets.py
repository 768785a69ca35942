"""Datasets cut into parts at the bounds of shards: a collection of the parts has the shards of the whole."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from shardprep.formats import Collection, collect, open_dataset
from shardprep.formats.runtime.files import hash_file
from shardprep.formats.shards.manifest import INDEX_NAME
from shardprep.formats.shards.read import write_table


def cut(whole: Path, folder: Path, *bounds: int) -> list[Path]:
    """Make datasets of the shards between these numbers of shards, and return their folders.

    Their content roots are made up: records are not hashed.
    """
    with open_dataset(whole) as dataset:
        ends = [0, *bounds, len(dataset.manifest.shards)]
    return [_part(whole, folder / f"part-{number}", *each) for number, each in enumerate(pairwise(ends))]


def _part(whole: Path, folder: Path, start: int, stop: int) -> Path:
    folder.mkdir(parents=True)
    with open_dataset(whole) as dataset:
        manifest, index = dataset.manifest, dataset.index
    shards = manifest.shards[start:stop]
    rows = index[(index["shard"] >= start) & (index["shard"] < stop)].copy()
    rows["shard"] -= start
    for shard in shards:
        os.link(whole / shard.name, folder / shard.name)
    with (folder / INDEX_NAME).open("wb") as file:
        write_table(file, rows)
    entry = manifest.table(INDEX_NAME)
    assert entry is not None
    path = folder / INDEX_NAME
    made = replace(entry, size=path.stat().st_size, sha256=hash_file(path), records=len(rows))
    part = replace(
        manifest,
        records=len(rows),
        image_bytes=int(rows["length"].sum(dtype="int64")),
        tables=(made,),
        shards=shards,
        content_root=f"blake3:{start:032x}{stop:032x}",
    )
    (folder / "manifest.json").write_bytes(part.to_bytes())
    return folder


def collected(whole: Path, folder: Path, *bounds: int) -> Path:
    """Make a collection of the parts of a dataset, and return its folder."""
    with collect(folder / "all", cut(whole, folder, *bounds)) as made:
        assert isinstance(made, Collection)
    return folder / "all"

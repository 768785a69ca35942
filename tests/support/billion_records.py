"""A program: a collection of many records without images, of which an epoch is stepped through.

Its arguments are a folder and the number of parts, each of 2**24 records. It prints its measurements as JSON.

The index files have holes: only the rows that are read are written. They are not hashed: this program seals
them itself, which a user's program has no reason to do.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from shardprep.formats import PlanOptions
from shardprep.formats.records.record import LabelSpace, official_words
from shardprep.formats.shards import read as seal
from shardprep.formats.shards.manifest import Manifest, index_dtype
from shardprep.formats.shards.read import FileEntry, table_header
from shardprep.formats.storage.open import Collection, CollectionFile, PartEntry, collection_root
from shardprep.loaders import LocalShuffle
from shardprep.loaders.loader.work import Subset, make_epoch_plan
from shardprep.loaders.order.epoch import Epoch

RECORDS, SHARDS = 1 << 24, 256  # of a part
SHARD = RECORDS // SHARDS
ROW = index_dtype(25)
HEADER = table_header(ROW, RECORDS)
NO_DIGEST = "sha256:" + "0" * 64


def made_up(number: int, counts: list[int], index: FileEntry) -> Manifest:
    """The manifest of a dataset of images that are not there, so many in each shard."""
    records = sum(counts)
    return Manifest(
        split="train",
        records=records,
        image_bytes=records * 100_000,
        partial=False,
        class_sorted=False,
        skipped=0,
        labels=LabelSpace.of(official_words()),
        source={"layout": f"part {number}"},
        plan=PlanOptions().__dict__ | {"sha256": NO_DIGEST},
        container="lmdb",
        writer={},
        tables=(index,),
        shards=tuple(
            FileEntry(f"shard-{n:05d}.lmdb", count * 100_100, NO_DIGEST, count)
            for n, count in enumerate(counts)
        ),
        content_root=f"blake3:{number:064x}",
    )


def make_part(folder: Path, number: int) -> PartEntry:
    folder.mkdir(parents=True)
    with (folder / "index.npy").open("wb") as file:
        file.write(HEADER)
        file.truncate(len(HEADER) + RECORDS * ROW.itemsize)
    size = (folder / "index.npy").stat().st_size
    manifest = made_up(number, [SHARD] * SHARDS, FileEntry("index.npy", size, NO_DIGEST, RECORDS))
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return PartEntry.of(folder.name, folder.name, manifest)


def seal_all(folder: Path) -> None:
    seal.YOUNG_NS = 0
    for part in json.loads((folder / "collection.json").read_bytes())["parts"]:
        with (folder / part["path"] / "index.npy").open() as file:
            assert seal.Seal(os.fstat(file.fileno()), part["root"]).store(file.fileno())


def peak() -> int:
    """Kilobytes of memory that this process had at the most."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


def write_rows(folder: Path, numbers: np.ndarray) -> None:
    """Write the rows of these record numbers where they belong."""
    rows = np.zeros(1, ROW)
    for number in numbers.tolist():
        part, inside = divmod(number, RECORDS)
        rows["key"], rows["label"] = f"record {number}", number % 1000
        rows["shard"], rows["ordinal"] = divmod(inside, SHARD)
        with (folder / f"part-{part:02d}/index.npy").open("r+b") as file:
            os.pwrite(file.fileno(), rows.tobytes(), len(HEADER) + inside * ROW.itemsize)


def steps(collection: Collection) -> Iterator[tuple[np.ndarray, Subset]]:
    """The places of the first steps of a rank, and what has their records."""
    subset = Subset(collection)
    options = {"seed": 1, "batch_size": 256, "rank": 3, "world_size": 8, "drop_last": True}
    epoch = Epoch(make_epoch_plan(subset, shuffle=LocalShuffle(1 << 16), **options), 5)
    return ((places, subset) for places in islice(epoch.batches(), 20))


def main(folder: Path, parts: int) -> None:
    entries = tuple(make_part(folder / f"part-{number:02d}", number) for number in range(parts))
    CollectionFile(entries, collection_root(entries)).save(folder / "collection.json")
    seal_all(folder)
    with Collection(folder) as collection:
        write_rows(folder, np.concatenate([places for places, _ in steps(collection)]))
    seal_all(folder)
    with Collection(folder) as collection:
        for places, subset in steps(collection):
            assert (subset.items_at(places, 5)["number"] == places).all()
        print(json.dumps({"records": len(collection), "peak_kb": peak()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

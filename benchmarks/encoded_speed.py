"""Encoded images out of an LMDB dataset, beside py-lmdb's own ``get`` with a copy and the same checksum.

    python benchmarks/encoded_speed.py DATASET [--rounds 9]

DATASET is one split that ``prep convert`` made, which fits into the page cache. Both read every record in
stored order, in one process, alternating; batches have 256 images. Microseconds of CPU for an image are
medians, the ratio is the median of each round's. Freed memory goes back to the system between batches unless
``--keep-memory`` is given, which is half of py-lmdb's time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import lmdb
from measuring.conditions import conditions

from shardprep import Loader
from shardprep.formats.runtime.processes import keep_freed_memory

BATCH = 256


def read_with_lmdb(files: list[lmdb.Environment]) -> int:
    """Copy each image out of the map and check its record; return the number of records."""
    count = 0
    batch: list[bytes] = []
    for file in files:
        with file.begin(buffers=True) as transaction:
            for ordinal in range(file.stat()["entries"]):
                value = transaction.get(ordinal.to_bytes(8, "big"))
                _, _, key_bytes, label, crc32c = struct.unpack_from("<BBHiI", value)
                key, image = bytes(value[12 : 12 + key_bytes]), bytes(value[12 + key_bytes :])
                head = google_crc32c.value(struct.pack("<Hi", key_bytes, label) + key)
                if google_crc32c.extend(head, image) != crc32c:
                    raise SystemExit(f"record {ordinal} is damaged")
                batch = batch if count % BATCH else []
                batch.append(image)
                count += 1
    return count


def main() -> None:
    """Measure both, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep-memory", action="store_true")
    chosen = parser.parse_args()
    if chosen.keep_memory:
        keep_freed_memory()
    shards = sorted(chosen.dataset.glob("shard-*.lmdb"))
    files = [lmdb.open(os.fspath(shard), subdir=False, readonly=True, lock=False) for shard in shards]
    with Loader(chosen.dataset, batch_size=BATCH, transform=None, shuffle=None, workers=0) as loader:
        ways: dict[str, Callable[[], int]] = {
            "py-lmdb, get + copy + CRC-32C": lambda: read_with_lmdb(files),
            "Loader, own process": lambda: sum(len(batch[0]) for batch in loader),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(chosen.rounds + 1):
            for name, read in ways.items():
                began = time.process_time()
                count = read()
                if number:  # the first round warms the caches
                    found[name].append((time.process_time() - began) / count * 1e6)
    print(conditions("shardprep", "lmdb", "numpy"))
    for name, times in found.items():
        print(f"{name:32}{statistics.median(times):8.2f} us of CPU for an image")
    peer, own = found.values()
    print(f"rate beside py-lmdb: {statistics.median(a / b for a, b in zip(peer, own, strict=True)):.2f}")


if __name__ == "__main__":
    main()

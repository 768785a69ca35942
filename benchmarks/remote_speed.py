"""Training from object storage beside a local copy: images/s, the first batch, and bytes that come.

    pip install 'shardprep[remote]' localbucket
    python benchmarks/remote_speed.py SCRATCH [--images 4000] [--room 0.5]

An S3 server runs on this machine (localbucket): what is compared is the work of the loader, not a network.
Encoded images are delivered, which is the most that storage has to feed: decoding takes longer than both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from conditions import conditions

from shardprep import Loader, LocalShuffle, PlanOptions, convert, make_sample, read_manifest

CLASSES = 20
SHARD_BYTES = 4 << 20
EPOCHS = 3
BATCH = 64


@dataclass(frozen=True)
class Measured:
    """The seconds until the first batch, and of each epoch images/s and MB that came."""

    first_batch: float
    rates: tuple[float, ...]
    downloaded: tuple[float, ...]

    def row(self, name: str) -> str:
        rates = ", ".join(f"{rate:,.0f}" for rate in self.rates)
        downloaded = ", ".join(f"{megabytes:,.0f}" for megabytes in self.downloaded)
        return f"| {name} | {self.first_batch:.2f} | {rates} | {downloaded} |"


def made(scratch: Path, images: int) -> Path:
    """The dataset, in a folder that is a bucket."""
    dataset = scratch / "server" / "bucket" / "train"
    if not dataset.exists():
        make_sample(scratch / "archives", classes=CLASSES, train_per_class=images // CLASSES)
        options = PlanOptions(shard_size=SHARD_BYTES)
        convert(scratch / "archives", dataset, split="train", plan_options=options)
    return dataset


@contextmanager
def served(root: Path) -> Iterator[None]:
    """Serve the folders in ``root`` as buckets of S3, which the environment then names."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "localbucket", str(root), "--port", str(port)]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "NO_PROXY": "127.0.0.1",
    }
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _answers(port):
                time.sleep(0.05)
            yield
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measured(path: Path | str, window: int, **options: Any) -> Measured:
    """Read some epochs."""
    began, rates, came = time.perf_counter(), [], [0]
    first = 0.0
    with Loader(path, batch_size=BATCH, shuffle=LocalShuffle(window), workers=2, **options) as loader:
        for _ in range(EPOCHS):
            epoch, images = time.perf_counter(), 0
            for _, labels in loader:
                first = first or time.perf_counter() - began
                images += len(labels)
            rates.append(images / (time.perf_counter() - epoch))
            came.append(loader.stats().storage.downloaded_bytes)
    return Measured(first, tuple(rates), tuple((after - before) / 1e6 for before, after in pairwise(came)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--room", type=float, default=0.5)
    options = parser.parse_args()
    scratch = options.scratch.resolve()
    dataset, cache = made(scratch, options.images), scratch / "cache"
    manifest, window = read_manifest(dataset), options.images // 20
    print(conditions("numpy", "obstore"))
    print(f"{manifest.records:,} images, {manifest.size / 1e6:,.0f} MB in {len(manifest.shards)} shards")
    print("| | first batch, s | images/s of each epoch | MB that came in each |\n|---|---|---|---|")
    print(measured(dataset, window).row("local copy"))
    with served(dataset.parent.parent):
        for share in (1.2, options.room):
            shutil.rmtree(cache, ignore_errors=True)
            found = measured("s3://bucket/train", window, cache=cache, cache_limit=int(manifest.size * share))
            print(found.row("URL, room for all" if share > 1 else f"URL, room for {share:.0%}"))


if __name__ == "__main__":
    main()

"""Conversion compared with copying, verification with hashing: the same bytes and number of processes.

    python benchmarks/images.py /tmp/images --count 9000
    python benchmarks/convert_speed.py /tmp/images /tmp/scratch

The copier reads the files one by one in the same order, writes them to one file per process and computes
their SHA-256. Rounds alternate; the page cache is warm; compare medians and ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from measuring.conditions import conditions


def copy(files: list[Path], target: Path) -> str:
    """Copy files to one and hash what is copied."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for file in files:
            data = file.read_bytes()
            digest.update(data)
            out.write(data)
    return digest.hexdigest()


def copy_all(files: list[Path], scratch: Path, workers: int) -> None:
    parts = [files[n::workers] for n in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(copy, parts, [scratch / f"copy-{n}" for n in range(workers)]))


def convert(source: Path, output: Path, container: str, workers: int) -> None:
    command = [sys.executable, "-m", "shardprep", "convert", source, output, "--split", "train"]
    subprocess.run(
        [*command, "--format", container, "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL
    )


def hash_all(folder: Path, workers: int) -> None:
    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(digest, sorted(folder.iterdir())))


def verify(folder: Path, workers: int) -> None:
    from shardprep.formats import verify as verify_dataset

    verify_dataset(folder, level="full", workers=workers).raise_for_findings()


def seconds(call: Callable[[], None]) -> float:
    os.sync()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    files = sorted(args.images.rglob("*.jpg"))
    size = sum(len(f.read_bytes()) for f in files)  # this also warms the page cache
    print(conditions("shardprep", "lmdb", "h5py", "blake3", "google-crc32c"))
    print(f"{len(files)} images, {size / 1e9:.2f} GB, {args.workers} workers, {args.rounds} rounds")
    args.scratch.mkdir(parents=True, exist_ok=True)
    calls: dict[str, Callable[[], None]] = {
        "copy + sha256": lambda: copy_all(files, args.scratch, args.workers),
        "prep convert lmdb": lambda: convert(args.images, args.scratch / "lmdb", "lmdb", args.workers),
        "prep convert hdf5": lambda: convert(args.images, args.scratch / "hdf5", "hdf5", args.workers),
        "hashlib.sha256": lambda: hash_all(args.scratch / "lmdb", args.workers),
        "verify --level full": lambda: verify(args.scratch / "lmdb", args.workers),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for container in ("lmdb", "hdf5"):
            shutil.rmtree(args.scratch / container, ignore_errors=True)
        for name, call in calls.items():
            times[name].append(seconds(call))
    report(times, size)


def report(times: dict[str, list[float]], size: int) -> None:
    base = {
        "prep convert lmdb": "copy + sha256",
        "prep convert hdf5": "copy + sha256",
        "verify --level full": "hashlib.sha256",
    }
    for name, values in times.items():
        median = statistics.median(values)
        line = f"{name:22} median {median:6.2f} s ({min(values):.2f} to {max(values):.2f}), {size / median / 1e6:6.0f} MB/s"
        if name in base:
            ratios = [a / b for a, b in zip(values, times[base[name]], strict=True)]
            line += f", {statistics.median(ratios):.2f}x the time of {base[name]}"
        print(line)


if __name__ == "__main__":
    main()

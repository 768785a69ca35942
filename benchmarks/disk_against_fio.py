"""`prep bench-disk` compared with fio: the same file, block sizes, buffers and page cache.

    python benchmarks/disk_against_fio.py /data/large.file --rounds 5

Both read the whole file forward, or 4,096 blocks of record size at random places, each once, one at a time or
sixteen at once; from memory repeatedly for two seconds, because one pass would mainly measure the start of
the readers. Before a cold pass the file's pages are dropped, which mincore confirms; before a warm one the
file is read. fio's engine is psync with its defaults, in threads: each of its processes would have its own
session, and so as large a share of a busy processor as all programs of another session together. A round is
prep, fio, fio, prep; the ratios are medians of those of each round. If other programs run, the ratio of the
best rounds says more, because they only slow rounds down.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measuring.conditions import conditions

from shardprep.loaders.measuring.disk import COLD, RECORD_BYTES, OpenFiles, Pattern, Pieces, drop_pages, read

UNLIMITED = 1e6  # seconds
BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 16)
WARM_SECONDS = 2
WARM_BYTES = 40 << 30  # more than any memory delivers in that time


@dataclass(frozen=True)
class Case:
    """One way to read the file; ``block`` in bytes, ``depth`` processes."""

    random: bool
    block: int
    depth: int
    cold: bool

    def __str__(self) -> str:
        pattern = f"random, {self.depth} at once" if self.random else f"sequential, {self.block >> 10} KiB"
        return f"{pattern}, {'cold' if self.cold else 'warm'}"


CASES = [
    *(Case(False, block, 1, cold) for block in BLOCKS for cold in (True, False)),
    *(Case(True, RECORD_BYTES, depth, cold) for depth in DEPTHS for cold in (True, False)),
]
COLD_ROUNDS = 3  # times as many, because a disk that other programs use is less steady than memory


def by_package(path: Path, case: Case) -> float:
    """Bytes per second, by this package's reading."""
    with ExitStack() as stack:
        files = OpenFiles.of([path], stack)
        pattern = pattern_of(case)
        pieces = pattern.pieces(files)
        lay(files, pieces, pattern, cold=case.cold)
        if case.cold:
            return read(files.descriptors, pieces, pattern, seconds=UNLIMITED)[0]
        again = np.tile(pieces, (-(-WARM_BYTES // (len(pieces) * pattern.block)), 1))
        return read(files.descriptors, again, pattern, seconds=WARM_SECONDS)[0]


def pattern_of(case: Case) -> Pattern:
    """The whole file forward, or record-sized blocks of it."""
    return Pattern.of_records(case.block, depth=case.depth) if case.random else Pattern(case.block)


def by_fio(path: Path, case: Case) -> float:
    """Bytes per second, by fio."""
    with ExitStack() as stack:
        files = OpenFiles.of([path], stack)
        pattern = pattern_of(case)
        pieces = pattern.pieces(files)
        lay(files, pieces, pattern, cold=case.cold)
    reads = max(1, len(pieces) // case.depth)
    region = max(1, os.path.getsize(path) // pattern.block // case.depth) * pattern.block  # noqa: PTH202
    size = reads * pattern.block if case.random else region
    command = [
        *("fio", "--name=peer", f"--filename={path}", "--readonly", "--ioengine=psync", "--thread"),
        *(f"--rw={'randread' if case.random else 'read'}", f"--bs={pattern.block}", f"--size={region}"),
        *(f"--numjobs={case.depth}", f"--offset_increment={region if case.depth > 1 else 0}"),
        *([f"--io_size={size}"] if case.cold else ["--time_based", f"--runtime={WARM_SECONDS}"]),
        *("--group_reporting", "--invalidate=0", "--randrepeat=0", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def lay(files: OpenFiles, pieces: Pieces, pattern: Pattern, *, cold: bool) -> None:
    """Read the file into memory, or drop it from there. Raises OSError where the kernel keeps it."""
    if not cold:
        whole = Pattern(1 << 20)
        read(files.descriptors, whole.pieces(files), whole, seconds=UNLIMITED)
    elif (kept := drop_pages(files.descriptors, pieces, pattern.block)) > COLD:
        raise OSError(f"cannot read cold: {kept:.0%} of the pages stayed in memory")


def compare(path: Path, case: Case, rounds: int) -> list[tuple[float, float]]:
    """(this package's, fio's) rates of each round, in an order that a slowing disk does not affect."""
    found = []
    for _ in range(rounds):
        first, *by_peer, last = (way(path, case) for way in (by_package, by_fio, by_fio, by_package))
        found.append((statistics.harmonic_mean((first, last)), statistics.harmonic_mean(by_peer)))
    return found


def ratio(found: list[tuple[float, float]]) -> float:
    return statistics.median(own / fio for own, fio in found)


def of_best(found: list[tuple[float, float]]) -> float:
    """The ratio of the rounds that were disturbed least."""
    return max(own for own, _ in found) / max(fio for _, fio in found)


def report(path: Path, rounds: int) -> None:
    print(f"{'':32}{'prep, MB/s':>12}{'fio, MB/s':>12}{'ratio':>8}{'of best':>9}   quartiles")
    for case in CASES:
        found = compare(path, case, rounds * COLD_ROUNDS if case.cold else rounds)
        own, fio = (statistics.median(column) / 1e6 for column in zip(*found, strict=True))
        low, high = np.percentile([a / b for a, b in found], (25, 75))
        spread = f"{low:.2f} to {high:.2f} of {len(found)}"
        print(
            f"{case!s:32}{own:12,.0f}{fio:12,.0f}{ratio(found):8.3f}{of_best(found):9.3f}   {spread}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="100 MB to 1 GiB, not being read by other programs")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(conditions("shardprep", "numpy"))
    print(subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip())
    print(f"{arguments.file}, {arguments.file.stat().st_size / 1e6:,.0f} MB, {arguments.rounds} rounds\n")
    report(arguments.file, arguments.rounds)

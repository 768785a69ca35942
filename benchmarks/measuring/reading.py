"""Reading without decoding: the loader's ``transform=None`` compared with a plain read() of the shards."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from measuring.data import Data, warm

from shardprep.loaders import Loader
from shardprep.loaders.loader.loader import READ_AHEAD_BYTES
from shardprep.loaders.measuring.disk import drop_file, resident_share

PIECE = 1 << 20
START = 2.0  # seconds for the workers to start, which is not measured here
COLD = 0.01  # the greatest share of a file in memory that still counts as cold


def plain(shards: list[Path], *, cold: bool, whole: bool) -> float:
    """MB/s of reading the files one after the other, each as a whole or in pieces into one buffer."""
    lay(shards, cold=cold)
    buffer, size, began = bytearray(PIECE), 0, time.perf_counter()
    for path in shards:
        with path.open("rb", buffering=0) as file:
            size += len(file.read()) if whole else sum(iter(lambda f=file: f.readinto(buffer), 0))
    return size / (time.perf_counter() - began) / 1e6


def loaded(folder: Path, shards: list[Path], data: Data, *, cold: bool, read_ahead: int) -> float:
    """MB/s of encoded images that reach the main process in one epoch, in stored order."""
    with Loader(
        folder,
        batch_size=data.batch,
        workers=data.workers,
        drop_last=False,
        read_ahead=read_ahead,
        rank=0,
        world_size=1,
    ) as loader:
        time.sleep(START)
        lay(shards, cold=cold)
        size, began = 0, time.perf_counter()
        for images, _ in loader:
            size += sum(map(len, images))
        return size / (time.perf_counter() - began) / 1e6


def lay(shards: list[Path], *, cold: bool) -> None:
    """Read the files into memory, or drop them from there. Raises OSError where the kernel keeps them."""
    if not cold:
        return warm(shards)
    for path in shards:
        with path.open("rb") as file:
            drop_file(file.fileno())
    if (share := max(map(resident_share, shards))) > COLD:
        raise OSError(f"cold could not be had: {share:.0%} of a shard stayed in memory")
    return None


def report(data: Data, rounds: int) -> None:
    """Print one line for each container and cache; the ratios are medians of those of each round."""
    ways = ("read()", "into one buffer", "Loader", "not ahead")
    print(
        "\nReading without decoding, MB/s; Loader against read() of whole shards / against one reused buffer"
    )
    print(f"{'':11}" + "".join(f"{way:>16}" for way in ways))
    for folder in (data.lmdb, data.hdf5):
        shards = sorted(path for path in folder.iterdir() if path.suffix in (".lmdb", ".h5"))
        for cold in (False, True):
            name = f"{folder.name} {'cold' if cold else 'warm'}"
            try:
                found = [_round(folder, shards, data, cold=cold) for _ in range(rounds)]
            except OSError as error:
                print(f"{name:11} {error}")
            else:
                print(f"{name:11}" + _line(found))


def _round(folder: Path, shards: list[Path], data: Data, *, cold: bool) -> tuple[float, float, float, float]:
    return (
        plain(shards, cold=cold, whole=True),
        plain(shards, cold=cold, whole=False),
        loaded(folder, shards, data, cold=cold, read_ahead=READ_AHEAD_BYTES),
        loaded(folder, shards, data, cold=cold, read_ahead=0),
    )


def _line(found: list[tuple[float, float, float, float]]) -> str:
    rates = "".join(f"{statistics.median(column):16,.0f}" for column in zip(*found, strict=True))
    whole, buffer = (statistics.median(row[2] / row[n] for row in found) for n in (0, 1))
    return f"{rates}   {whole:.2f}x / {buffer:.2f}x"

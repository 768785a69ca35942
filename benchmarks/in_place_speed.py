"""Loading from the official tars in place, compared with loading from LMDB shards of the same images.

    python benchmarks/in_place_speed.py FOLDER

FOLDER gets a miniature in the official packaging (by default 168 MB), its index and its shards, unless they
are there.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from itertools import product
from pathlib import Path

from measuring.conditions import conditions
from measuring.reading import START, lay

from shardprep.formats import PlanOptions, convert, make_sample, open_dataset
from shardprep.loaders import GlobalShuffle, Loader, LocalShuffle, SortedByClass, TrainTransform
from shardprep.loaders.order.epoch import Shuffle

BATCH = 256
WAYS = {
    "in place": PlanOptions(container="tar", order="archive", shard_size=1 << 30),
    "LMDB": PlanOptions(shard_size=64 << 20),
}
SHUFFLES = {"stored order": None, "LocalShuffle": LocalShuffle("64MiB"), "GlobalShuffle": GlobalShuffle()}


def prepare(folder: Path, classes: int, images: int) -> dict[str, Path]:
    """Make what is missing; return the training split's dataset of each way."""
    archives = folder / "archives"
    if not archives.exists():
        make_sample(archives, classes=classes, train_per_class=images, val=1, test=1)
    found = {name: folder / name.replace(" ", "-") for name in WAYS}
    for name, options in WAYS.items():
        if not (found[name] / "manifest.json").exists():
            began = time.perf_counter()
            convert(archives, found[name], split="train", plan_options=options, workers=2)
            print(f"made {name} in {time.perf_counter() - began:.1f} s")
    return found


def rate(dataset: Path, shuffle: Shuffle | None, *, decoded: bool, cold: bool, workers: int) -> float:
    """Images per second of one epoch, from its first request to its last batch."""
    with Loader(
        dataset,
        batch_size=BATCH,
        transform=TrainTransform(224) if decoded else None,
        shuffle=shuffle,
        workers=workers,
        drop_last=False,
        rank=0,
        world_size=1,
    ) as loader:
        files = [dataset / name for name in loader.dataset.manifest.image_files]
        time.sleep(START)
        lay(files, cold=cold)
        began = time.perf_counter()
        images = sum(len(labels) for *_, labels in loader)
        return images / (time.perf_counter() - began)


def cost(dataset: Path, shuffle: Shuffle | None) -> float:
    """CPU microseconds per image of reading and checking an epoch from memory, in this process alone."""
    with Loader(
        dataset, batch_size=BATCH, shuffle=shuffle, workers=0, drop_last=False, read_ahead=0
    ) as loader:
        lay([dataset / name for name in loader.dataset.manifest.image_files], cold=False)
        began = time.process_time()
        images = sum(len(labels) for *_, labels in loader)
        return (time.process_time() - began) / images * 1e6


def report_costs(datasets: dict[str, Path], rounds: int) -> None:
    """Print the CPU of reading: the minima of rounds that alternate between the ways."""
    print("| shuffle | in place | LMDB |\n|---|---|---|")
    for name, shuffle in SHUFFLES.items():
        found = [{way: cost(path, shuffle) for way, path in datasets.items()} for _ in range(rounds)]
        least = (f"{min(costs[way] for costs in found):.1f} µs" for way in ("in place", "LMDB"))
        print(f"| {name} | {' | '.join(least)} |", flush=True)


def report(datasets: dict[str, Path], rounds: int, workers: int) -> None:
    """Print a row for each kind of reading: medians of rounds that alternate between the ways."""
    print("| page cache | batches | shuffle | in place | LMDB | ratio |\n|---|---|---|---|---|---|")
    for cold, decoded, shuffle in product((False, True), (False, True), SHUFFLES):
        found: dict[str, list[float]] = {name: [] for name in datasets}
        for number in range(rounds):
            for name in sorted(datasets, reverse=bool(number % 2)):
                found[name].append(
                    rate(datasets[name], SHUFFLES[shuffle], decoded=decoded, cold=cold, workers=workers)
                )
        ratios = [ours / theirs for ours, theirs in zip(found["in place"], found["LMDB"], strict=True)]
        ours, theirs = (f"{statistics.median(found[name]):,.0f}/s" for name in ("in place", "LMDB"))
        state, kind = ("cold" if cold else "warm"), ("decoded" if decoded else "encoded")
        print(
            f"| {state} | {kind} | {shuffle} | {ours} | {theirs} | {statistics.median(ratios):.2f} |",
            flush=True,
        )


def main() -> None:
    """Prepare, say the conditions, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--images", type=int, default=60, help="of each class")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore", SortedByClass)
    datasets = prepare(args.folder, args.classes, args.images)
    with open_dataset(datasets["LMDB"]) as dataset:
        size = dataset.manifest.image_bytes
        print(f"{len(dataset):,} images, {size / 1e6:.0f} MB, {args.workers} workers, {args.rounds} rounds")
    print(conditions("numpy", "lmdb"))
    report_costs(datasets, 3 * args.rounds)
    report(datasets, args.rounds, args.workers)


if __name__ == "__main__":
    main()

"""Flow's map in processes and batch, compared with tensorpack's and PyTorch's, where all work is transport.

    pip install torch tensorpack==0.11 -e . && python benchmarks/flow_speed.py --rounds 5

Each worker returns the same 150 KB array for every number, in batches of 256: this measures the transport of
arrays from worker processes to a batch in the main process. Every peer runs in a new process with two
workers, one pass to warm up and then passes for some seconds; a round runs all of them; ratios are medians of
those of each round.

- flow: ``Flow.from_iterable(range(n)).map(f, processes=2).batch(256)``
- flow, declared: the same with ``outputs=``, so that the workers write into the batches themselves
- torch: DataLoader over a Dataset, which makes batches in the workers
- tensorpack: MultiProcessMapDataZMQ and BatchData
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
from measuring.conditions import conditions

SHAPE = (50, 1000, 3)
ITEM = np.arange(np.prod(SHAPE), dtype=np.uint8).reshape(SHAPE)
ITEMS, BATCH, WORKERS = 5120, 256, 2

Passes = Iterator[int]
"""The items of each batch, without end."""


def make(number: int) -> np.ndarray[Any, Any]:
    return ITEM


def flow() -> Passes:
    from shardprep.loaders import Flow

    mapped = Flow.from_iterable(range(ITEMS)).map(make, processes=WORKERS)
    for batch in mapped.batch(BATCH).repeat():
        yield len(batch)


def declared() -> Passes:
    from shardprep.loaders import Flow
    from shardprep.loaders.transforms.contract import ArraySpec

    outputs = ArraySpec("image", SHAPE, "uint8")
    mapped = Flow.from_iterable(range(ITEMS)).map(make, processes=WORKERS, outputs=outputs)
    for batch in mapped.batch(BATCH).repeat():
        yield len(batch)


def torch() -> Passes:
    from torch.utils.data import DataLoader, Dataset

    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return ITEMS

        def __getitem__(self, number: int) -> Any:
            return make(number)

    loader = DataLoader(Items(), BATCH, num_workers=WORKERS, persistent_workers=True)
    while True:
        for batch in loader:
            yield len(batch)


def tensorpack() -> Passes:
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # its workers, forked after it, may hang
    from tensorpack.dataflow import BatchData, DataFromList, MultiProcessMapDataZMQ

    source = DataFromList(list(range(ITEMS)), shuffle=False)
    mapped = MultiProcessMapDataZMQ(
        source, num_proc=WORKERS, map_func=lambda number: [make(number)], buffer_size=BATCH
    )
    batches = BatchData(mapped, BATCH)
    batches.reset_state()
    while True:
        for (batch,) in batches:
            yield len(batch)


PEERS: dict[str, Callable[[], Passes]] = {
    "flow": flow,
    "declared": declared,
    "torch": torch,
    "tensorpack": tensorpack,
}


def rate(batches: Passes, seconds: float) -> float:
    """Items per second, after one pass."""
    _draw(batches, ITEMS, 0)
    began = perf_counter()
    return _draw(batches, 0, seconds) / (perf_counter() - began)


def _draw(batches: Passes, items: int, seconds: float) -> int:
    end, drawn = perf_counter() + seconds, 0
    while drawn < items or perf_counter() < end:
        drawn += next(batches)
    return drawn


def measured(peer: str, seconds: float) -> float:
    command = [sys.executable, __file__, "--peer", peer, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout.split()[-1])


def report(rounds: int, seconds: float) -> None:
    print(conditions("shardprep", "torch", "tensorpack", "numpy"))
    print(f"{ITEM.nbytes / 1e3:.0f} KB arrays, {WORKERS} workers, batches of {BATCH}, {rounds} rounds\n")
    found: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer in PEERS:
            found[peer].append(measured(peer, seconds))
    print(f"{'':12}{'items/s':>10}{'GB/s':>8}{'x torch':>10}{'x tensorpack':>14}")
    for peer, rates in found.items():
        middle = statistics.median(rates)
        ratios = [
            statistics.median(a / b for a, b in zip(rates, found[other], strict=True))
            for other in ("torch", "tensorpack")
        ]
        print(f"{peer:12}{middle:10,.0f}{middle * ITEM.nbytes / 1e9:8.2f}{ratios[0]:10.2f}{ratios[1]:14.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--peer", choices=PEERS, help="measure one only, and print its items/s")
    arguments = parser.parse_args()
    if arguments.peer:
        print(rate(PEERS[arguments.peer](), arguments.seconds))
        sys.exit()
    report(arguments.rounds, arguments.seconds)

"""The cost of the loader's own time measurements.

    python benchmarks/measuring_cost.py /tmp/scratch/lmdb

Three loaders of one worker each, one of them without all the worker's clocks, load the same small epochs in
turn; the difference of the other two is noise. The figure is CPU per image, as the kernel counts it for the
worker, because other programs affect it least; medians of the rounds' ratios. The cost of the clocks alone is
measured, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from contenders.unmeasured import MeasuredWork, UnmeasuredWork
from measuring.conditions import conditions

from shardprep.loaders import Loader, TrainTransform, Transform
from shardprep.loaders.engine.messages import CpuClock
from shardprep.loaders.loader.work import TIMED_OF
from shardprep.loaders.measuring.bench import worker_pids
from shardprep.loaders.transforms.decode import _spent, decoding_seconds

BATCH = 64


class Timed:
    """A loader with one worker, and the CPU seconds of the worker."""

    def __init__(self, path: Path, transform: Transform | None, parts: int) -> None:
        others = worker_pids()
        options = {"batch_size": BATCH, "transform": transform, "workers": 1, "rank": 0, "world_size": parts}
        self.loader = Loader(path, **options)
        (self._pid,) = worker_pids() - others

    def epoch(self) -> float:
        """CPU seconds of the worker per image of an epoch, always the same one."""
        self.loader.set_epoch(0)
        before = self._cpu()
        rows = sum(len(batch[-1]) for batch in self.loader)
        time.sleep(0.05)  # the kernel updates the figure when the worker sleeps
        return (self._cpu() - before) / rows

    def _cpu(self) -> float:
        return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[0]) * 1e-9


@contextmanager
def three(path: Path, transform: Transform | None, parts: int) -> Iterator[list[Timed]]:
    """With clocks, without, and with clocks again: the difference of two equal loaders is noise."""
    with ExitStack() as stack:
        loaders = []
        for work in (MeasuredWork, UnmeasuredWork, MeasuredWork):
            with patch("shardprep.loaders.loader.loader.ShardWork", work):
                loaders.append(Timed(path, transform, parts))
            stack.enter_context(loaders[-1].loader)
        yield loaders


def compare(path: Path, transform: Transform | None, *, parts: int, rounds: int) -> None:
    with three(path, transform, parts) as loaders:
        spent = np.array([[0.0] * 3] * (rounds + 1))
        for number in range(rounds + 1):
            for place in np.roll(range(3), number).tolist():
                spent[number, place] = loaders[place].epoch() * 1e6
    timed, untimed, again = spent[1:].T  # the first round warms up
    measured, without = np.median(timed), np.median(untimed)
    alone = clocks_alone(transform is not None)
    print(
        f"{'train crops' if transform else 'encoded bytes':14} {measured:9.2f} {without:9.2f} µs   "
        f"{_more(timed, untimed)}   {_more(again, untimed)}   {_more(again, timed)}   "
        f"{alone:.2f} µs, {alone / without:.2%}"
    )


def _more(some: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> str:
    low, middle, high = np.percentile(some / others - 1, (25, 50, 75))
    return f"{middle:+7.2%} ({low:+.1%} to {high:+.1%})"


def clocks_alone(decodes: bool, images: int = 50_000) -> float:
    """Microseconds per image of a worker's clocks alone, with leases of 32 images."""
    clock, filling, cpu, reader = np.zeros(3), np.zeros(1), np.zeros(2), CpuClock()
    before, took = reader.read(), [0.0] * 3
    began = time.process_time()
    for number in range(images):
        if number % 32 == 0:
            got = time.perf_counter()
            filling[0] += time.perf_counter() - got
            spent, before = before, reader.read()
            cpu += before - spent
            clock += took
        if decodes:
            start = time.perf_counter()
            read, decoded = time.perf_counter(), decoding_seconds()
            _spent.seconds += time.perf_counter() - time.perf_counter()
            decoding = decoding_seconds() - decoded
            took[0] += read - start
            took[1] += decoding
            took[2] += time.perf_counter() - read - decoding
        elif number % TIMED_OF == 0:
            start = time.perf_counter()
            took[0] += (time.perf_counter() - start) * TIMED_OF
    return (time.process_time() - began) / images * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print(conditions("shardprep", "numpy", "opencv-python-headless"))
    print(f"CPU per image; medians and quartiles of {args.rounds} rounds")
    heads = ("first loader", "second loader", "second against first")
    print(f"{'':14} {'clocks':>9} {'none':>9}      {''.join(f'{head:28}' for head in heads)}clocks alone")
    compare(args.dataset, TrainTransform(224), parts=16, rounds=args.rounds)
    compare(args.dataset, None, parts=2, rounds=args.rounds)


if __name__ == "__main__":
    main()

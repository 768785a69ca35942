"""Saving and loading any items, beside tensorpack's LMDBSerializer.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install tensorpack==0.11 lmdb msgpack msgpack-numpy
    python benchmarks/save_speed.py /tmp/scratch --peer /tmp/peer/bin/python

Items are (110 KB of bytes, int). Each contender saves them in a new process, then loads them in another, and
rounds alternate. Time and CPU are those of the call alone, with all of its worker processes. Compare medians
of each round's ratios; on a busy machine those of CPU.

Ratios depend on the number of items (--items 2000, 10000: processes take time to start), and on whether the
disk or the CPU limits (a scratch folder on a tmpfs has no disk).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from contenders.save_items import Items

Run = Callable[[Path, int], None]


def save_numbered(path: Path, count: int) -> None:
    """By number, in a process per CPU."""
    from shardprep import Flow

    Flow.from_iterable(Items(count)).save(path)


def save_stream(path: Path, count: int) -> None:
    """One pass over a generator, in this process."""
    from shardprep import write_dataset

    write_dataset(iter(Items(count)), path)


def load(path: Path, count: int) -> None:
    """One pass over the items."""
    from shardprep import Flow

    _check(iter(Flow.from_dataset(path)), count)


def save_tensorpack(path: Path, count: int) -> None:
    """LMDBSerializer.save, with its defaults."""
    from tensorpack.dataflow import DataFlow, LMDBSerializer

    class Data(DataFlow):  # type: ignore[misc]
        def __len__(self) -> int:
            return count

        def __iter__(self) -> Iterator[list[Any]]:
            items = Items(count)
            return (list(items[number]) for number in range(count))

    path.mkdir()
    LMDBSerializer.save(Data(), str(path / "items.lmdb"))


def load_tensorpack(path: Path, count: int) -> None:
    """LMDBSerializer.load without a shuffle, which is its fastest way."""
    from tensorpack.dataflow import LMDBSerializer

    flow = LMDBSerializer.load(str(path / "items.lmdb"), shuffle=False)
    flow.reset_state()
    _check(iter(flow), count)


def _check(items: Iterator[Any], count: int) -> None:
    found = sum(len(data) > 0 for data, _ in items)
    if found != count:
        raise SystemExit(f"{found} items of {count}")


CONTENDERS: dict[str, tuple[Run, Run]] = {
    "Flow.save": (save_numbered, load),
    "write_dataset, generator": (save_stream, load),
    "tensorpack": (save_tensorpack, load_tensorpack),
}


def one(name: str, part: int, path: Path, count: int) -> None:
    """Run one part of a contender, and print its seconds and CPU seconds."""
    run = CONTENDERS[name][part]
    if name == "tensorpack":
        import_module("tensorpack.dataflow")
    else:
        from shardprep import Flow, write_dataset  # noqa: F401 - names are imported when they are first used
    before, began = cpu_seconds(), time.perf_counter()
    run(path, count)
    print(json.dumps([time.perf_counter() - began, cpu_seconds() - before]))


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(python: str, name: str, part: int, path: Path, count: int) -> tuple[float, float]:
    """Run one part of a contender in a new process; return its seconds and CPU seconds."""
    command = [python, __file__, str(path), "--one", name, "--part", str(part), "--items", str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, cpu = json.loads(done.stdout.splitlines()[-1])
    return seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--peer", default=sys.executable, help="the Python that has tensorpack")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        one(chosen.one, chosen.part, chosen.scratch, chosen.items)
        return
    from measuring.conditions import conditions

    print(conditions("shardprep", "lmdb", "numpy"))
    report(rounds(chosen.scratch, chosen.peer, chosen.items, chosen.rounds), chosen.items)


Rounds = list[dict[str, list[tuple[float, float]]]]


def rounds(scratch: Path, peer: str, count: int, number: int) -> Rounds:
    """Return for each round and contender the seconds and CPU seconds of saving and of loading."""
    found: Rounds = []
    for _ in range(number):
        found.append({})
        for name in CONTENDERS:
            path, python = scratch / "saved", peer if name == "tensorpack" else sys.executable
            shutil.rmtree(path, ignore_errors=True)
            scratch.mkdir(parents=True, exist_ok=True)
            found[-1][name] = [measured(python, name, part, path, count) for part in (0, 1)]
            shutil.rmtree(path)
    return found


def report(found: Rounds, count: int) -> None:
    """Print items/s, CPU per item, and what tensorpack takes beside it."""
    print(f"{'':30}{'items/s':>10}{'us CPU':>8}{'x time':>8}{'x CPU':>8}  (x: tensorpack's is so much more)")
    for part, title in enumerate(("save", "load")):
        for name in CONTENDERS:
            runs, peers = [r[name][part] for r in found], [r["tensorpack"][part] for r in found]
            seconds, cpu = (statistics.median(values) for values in zip(*runs, strict=True))
            ratios = [
                statistics.median(b[n] / a[n] for a, b in zip(runs, peers, strict=True)) for n in (0, 1)
            ]
            rest = "".join(f"{ratio:>8.2f}" for ratio in ratios)
            print(f"{title + ' ' + name:30}{count / seconds:>10,.0f}{cpu / count * 1e6:>8,.0f}{rest}")


if __name__ == "__main__":
    main()

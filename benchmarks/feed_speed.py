"""The rate from a batch in memory to TensorFlow's step, and the part that a computing step hides.

    python benchmarks/images.py /tmp/images --count 5000
    python benchmarks/feed_speed.py /tmp/images /tmp/scratch

Batches are 256 x 224 x 224 x 3 bytes. The step sums one byte of every image ("ring") or every byte (the other
scenes), and the benchmark waits for it. Each contender runs in a new process per round; rounds alternate.
Compare medians, and medians of each round's ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders.feed_sources import ROWS, Batch, Ring, decoding, filling
from measuring.conditions import conditions
from measuring.data import Data, prepare
from measuring.rates import Rate, measure

PACE = 2500  # images/s
ROUND_TIMEOUT_S = 300.0

NUMPY, INLINE, QUEUE, STAGING = "iterated in numpy, no step", "step inline", "QueueInput", "StagingInput"
COPIES, SLOTS = "from_generator, fresh arrays", "from_generator, the ring's arrays"
WAYS = {
    NUMPY: "numpy_only",
    INLINE: "inline",
    QUEUE: "queue",
    f"{QUEUE}, in the graph": "queue_in_graph",
    STAGING: "staging",
    f"{STAGING}, in the graph": "staging_in_graph",
    f"{QUEUE}.to_dataset": "queue_dataset",
    SLOTS: "generator_of_slots",
    COPIES: "generator_of_copies",
    "convert_to_tensor": "converted",
}
SCENES: dict[str, tuple[str, str, Callable[[Data], Iterable[Batch]]]] = {
    "ring": ("constant batches in memory", "a_byte_each", lambda data: Ring()),
    "paced": (f"the same at {PACE:,} images/s", "every_byte", lambda data: Ring(interval=ROWS / PACE)),
    "engine": (
        "Loader with workers that write a constant",
        "every_byte",
        lambda data: filling(data.lmdb, workers=data.workers),
    ),
    "loader": (
        "Loader of train crops, LMDB",
        "every_byte",
        lambda data: decoding(data.lmdb, workers=data.workers),
    ),
}
LATENCIES: dict[str, tuple[str, Callable[[Data], Iterable[Batch]]]] = {
    "asleep": (
        f"a source that sleeps when it is asked, at {PACE:,} images/s",
        lambda data: Ring(interval=ROWS / PACE, ahead=0),
    ),
    "loading": ("Loader of train crops, 1 worker", lambda data: decoding(data.lmdb, workers=1)),
}


def run_here(what: str, data: Data, seconds: float, batches: int) -> None:
    """Run one round of a contender, print its figures, and exit without waiting for threads."""
    scene, way = what.split(".")
    result: Any
    if scene == "latency":
        result = _latency(LATENCIES[way][1](data), batches)
    else:
        from contenders import feed_ways

        _, step, source = SCENES[scene]
        steps = getattr(feed_ways, way)(source(data), getattr(feed_ways, step))
        result = measure(steps, seconds=seconds, warm_up=1)
    print(json.dumps(asdict(result)), flush=True)
    os._exit(0)


def _latency(source: Iterable[Batch], batches: int) -> Any:
    import tensorflow as tf
    from measuring import feed_latency

    tf.config.threading.set_intra_op_parallelism_threads(1)  # one core for the step, the other for the worker
    return feed_latency.measure(source, batches)


def run_apart(what: str, options: list[str]) -> dict[str, float]:
    """Run one round in a new process."""
    command = [sys.executable, __file__, *options, "--only", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROUND_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report_scene(scene: str, ways: list[str], rounds: int, options: list[str]) -> None:
    rates: dict[str, list[Rate]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            rates[way].append(Rate(**run_apart(f"{scene}.{WAYS[way]}", options)))  # type: ignore[arg-type]
    name, step, _ = SCENES[scene]
    print(f"\n{scene}: {name}; {step.replace('_', ' ')}")
    print(f"{'':34} steps/s   main's CPU   / numpy  / inline  / fresh  / ring's")
    for way in ways:
        print(f"{way:34}" + _line(rates, way), flush=True)


def _line(rates: dict[str, list[Rate]], way: str) -> str:
    steps = statistics.median(rate.images for rate in rates[way]) / ROWS
    main = statistics.median(rate.main for rate in rates[way]) * ROWS / 1e3
    ratios = [_ratio(rates[way], rates.get(other)) for other in (NUMPY, INLINE, COPIES, SLOTS)]
    return f"{steps:8,.1f} {main:9.2f} ms " + "".join(f"{ratio:>9}" for ratio in ratios)


def _ratio(rates: list[Rate], others: list[Rate] | None) -> str:
    if others is None:
        return ""
    ratio = statistics.median(a.images / b.images for a, b in zip(rates, others, strict=True))
    if ratio < 0.01:  # without any step
        return "-"
    return f"{ratio:.3f}" if ratio < 2 else f"{ratio:.1f}"


def report_latency(scene: str, rounds: int, options: list[str]) -> None:
    found = [run_apart(f"latency.{scene}", options) for _ in range(rounds)]
    print(f"\nlatency: {LATENCIES[scene][0]}; a step of one thread that takes as long")
    for part in ("load", "step"):
        print(f"{part:10}{statistics.median(each[part] for each in found):8.2f} s")
    for way in ("inline", "queue", "staging"):
        seconds = statistics.median(each[way] for each in found)
        ratio = statistics.median(each[way] / max(each["load"], each["step"]) for each in found)
        print(f"{way:10}{seconds:8.2f} s, {ratio:.3f} x the longer", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--batches", type=int, default=30, help="of an epoch for the measurement of latency")
    parser.add_argument("--scenes", nargs="*", choices=[*SCENES, *LATENCIES], default=[*SCENES, *LATENCIES])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    data = Data(args.images, args.scratch, workers=args.workers)
    if args.only:
        run_here(args.only, data, args.seconds, args.batches)
    prepare(data)
    print(conditions("shardprep", "numpy", "tensorflow-cpu", "opencv-python-headless"))
    print(f"medians of {args.rounds} rounds of {args.seconds:g} s, {args.workers} workers", flush=True)
    options = [str(args.images), str(args.scratch), f"--workers={args.workers}"]
    options += [f"--seconds={args.seconds}", f"--batches={args.batches}"]
    for scene in args.scenes:
        if scene in SCENES:
            report_scene(scene, args.ways, args.rounds, options)
        else:
            report_latency(scene, args.rounds, options)


if __name__ == "__main__":
    main()

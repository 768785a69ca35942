"""The loader compared with its ceiling and its peers, on images in the page cache.

    python benchmarks/images.py /tmp/images --count 5000
    python benchmarks/loader_speed.py /tmp/images /tmp/scratch --workers 2

Every contender delivers batches of 256 train crops of 224 x 224 to its main process, in a new process per
round; rounds alternate. A peer that is not installed is reported. Compare medians and ratios; if other
programs run, the CPU per image says more than the images per second.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from measuring import costs, reading
from measuring.conditions import conditions
from measuring.data import Data, prepare
from measuring.rates import Rate, measure

from shardprep.formats.images.decode import decoder_name

CONTENDERS = {
    "one core, plain loop": "contenders.own_contenders.one_core",
    "Loader, LMDB": "contenders.own_contenders.loader_lmdb",
    "Loader, crop-ready": "contenders.own_contenders.loader_crop_ready",
    "Loader, LMDB as in 0.1": "contenders.own_contenders.loader_whole",
    "Loader, HDF5": "contenders.own_contenders.loader_hdf5",
    "torch DataLoader, files": "contenders.peer_torch.files",
    "torch DataLoader, LMDB": "contenders.peer_torch.shards",
    "tensorpack MapDataZMQ": "contenders.peer_tensorpack.files",
    "tf.data, TFRecord": "contenders.peer_tf_data.records",
    "tf.data, INTEGER_FAST": "contenders.peer_tf_data.records_fast",
    "SPDL threads, TrainTransform": "contenders.peer_spdl.transformed",
    "SPDL threads, FFmpeg": "contenders.peer_spdl.ffmpeg",
    "FFCV, longer side 500": "contenders.peer_ffcv.longer_side",
    "Loader, shorter side 256": "contenders.own_contenders.loader_small",
    "tf.data, shorter side 256": "contenders.peer_tf_data.records_small",
    "FFCV, shorter side 256": "contenders.peer_ffcv.small",
    "read + constant, one core": "contenders.own_contenders.read_and_fill",
    "Loader, constant": "contenders.own_contenders.loader_constant",
    "eval: Loader, LMDB": "contenders.own_contenders.eval_lmdb",
    "eval: Loader, crop-ready": "contenders.own_contenders.eval_crop_ready",
}
CORE, LOADER = "one core, plain loop", "Loader, LMDB"
NO_TRANSPORT, TRANSPORT = "read + constant, one core", "Loader, constant"
ROUND_TIMEOUT_S = 300.0  # the first round of some contenders writes their files

Rounds = dict[str, list[Rate]]


def run_here(place: str, data: Data, seconds: float) -> None:
    """Run one round of a contender, print its rate, and exit without waiting for threads."""
    module, _, name = place.rpartition(".")
    batches = getattr(importlib.import_module(module), name)(data)
    print(json.dumps(asdict(measure(batches, seconds=seconds, warm_up=1))), flush=True)
    batches.close()
    os._exit(0)


def run_apart(name: str, options: list[str]) -> Rate | str:
    """Run one round in a new process; return its rate, or why there is none."""
    command = [sys.executable, __file__, *options, "--only", CONTENDERS[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ROUND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"hung for {ROUND_TIMEOUT_S:.0f} s"
    if "ModuleNotFoundError" in done.stderr:
        return "not installed"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # libraries print, too
    return Rate(**json.loads(line))


def run_all(options: list[str], rounds: int, names: list[str]) -> tuple[Rounds, dict[str, str]]:
    """Alternate the contenders; one that failed is not run again."""
    rates: Rounds = {name: [] for name in names}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        for name in [name for name in names if name not in missing]:
            result = run_apart(name, options)
            if isinstance(result, str):
                missing[name] = result
            else:
                rates[name].append(result)
    return {name: found for name, found in rates.items() if name not in missing}, missing


def median(rates: Rounds, name: str, field: str = "images") -> float:
    return statistics.median(getattr(rate, field) for rate in rates[name])


def ratio(rates: Rounds, name: str, other: str, field: str = "images") -> float:
    """The median over rounds of one contender's figure divided by another's of the same round."""
    pairs = zip(rates[name], rates[other], strict=True)
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs)


def report(rates: Rounds, missing: dict[str, str], workers: int) -> None:
    print(f"{'':26} images/s   CPU µs/image (main)  first batch  worker's memory    Loader / this (in CPU)")
    for name in rates:
        print(f"{name:26} {_line(rates, name)}")
    for name, why in missing.items():
        print(f"{name:26} {why}")
    if {CORE, LOADER} <= rates.keys():
        share, cpu = ratio(rates, LOADER, CORE) / workers, ratio(rates, CORE, LOADER, "cpu")
        main = median(rates, LOADER, "main") * 2500 / 1e6
        print(f"\nceiling: {share:.1%} of {workers} x one core; in CPU per image {cpu:.1%}")
        print(f"main process at 2,500 images/s: {main:.1%} of a core")
    if {TRANSPORT, NO_TRANSPORT} <= rates.keys():
        beyond = median(rates, TRANSPORT, "cpu") - median(rates, NO_TRANSPORT, "cpu")
        print(f"transport: {beyond:.1f} µs of CPU per image beyond reading and filling, both sides")


def _line(rates: Rounds, name: str) -> str:
    images, cpu, main, first, memory = (
        median(rates, name, field) for field in ("images", "cpu", "main", "first", "memory")
    )
    cells = f"{images:8,.0f} {cpu:13,.0f} ({main:5,.0f}) {first:10.2f} s {memory / 1e6:12,.0f} MB"
    if LOADER in rates and name not in (NO_TRANSPORT, TRANSPORT):
        cells += f" {ratio(rates, LOADER, name):13.2f}x ({ratio(rates, name, LOADER, 'cpu'):.2f}x)"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument(
        "--contenders", nargs="*", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME"
    )
    parser.add_argument("--peers-only", action="store_true", help="neither reading nor the order's costs")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    data = Data(args.images, args.scratch, workers=args.workers)
    if args.only:
        run_here(args.only, data, args.seconds)
    mean = prepare(data)
    print(
        conditions("shardprep", "numpy", "opencv-python-headless", "lmdb", "h5py"), decoder_name(), sep="; "
    )
    print(
        f"{len(data.files())} images, mean {mean / 1e3:.1f} KB, batches of {data.batch}, {data.workers} workers, "
        f"medians of {args.rounds} rounds of {args.seconds:g} s\n"
    )
    options = [
        str(args.images),
        str(args.scratch),
        "--workers",
        str(args.workers),
        "--seconds",
        str(args.seconds),
    ]
    report(*run_all(options, args.rounds, args.contenders), args.workers)
    if not args.peers_only:
        costs.report()
        reading.report(data, args.rounds)


if __name__ == "__main__":
    main()

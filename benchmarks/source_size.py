"""The size of the source: lines and modules of each package, and what common calls import and enter.

    python benchmarks/source_size.py DATASET [--beside CHECKOUT] [--rounds 5]

DATASET is one split that ``prep convert`` made. With ``--beside``, another checkout of this repository is
measured in turn, which must know the dataset's format. Calls are those that Python's profiler counts in
files of this package; seconds are medians of new processes, and on a busy machine only their ratio between
two checkouts says much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("formats", "loaders", "cli", "tests")
IMPORTED = """
import json, sys, time
started = time.perf_counter()
from shardprep import {name}
seconds = time.perf_counter() - started
print(json.dumps([sum(name.startswith("shardprep") for name in sys.modules), seconds]))
"""
ENTERED = """
import json, sys
from shardprep import Loader, open_dataset
found = []
def note(frame, event, _):
    if event == "call" and "shardprep" in frame.f_globals.get("__name__", ""):
        found.append(frame.f_code.co_filename)
def counted(call):
    call()  # what is made once, is not counted
    found.clear()
    sys.setprofile(note)
    call()
    sys.setprofile(None)
    return len(found), len(set(found))
with open_dataset(sys.argv[1]) as dataset:
    record = counted(lambda: dataset[5])
with Loader(sys.argv[1], batch_size=1, workers=0) as loader:
    batches = iter(loader)
    batch = counted(lambda: next(batches))
print(json.dumps([record, batch]))
"""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkouts = [ROOT, *filter(None, [options.beside])]
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for checkout in checkouts:
        print(f"\n{checkout}")
        print_sizes(checkout)
        (calls, files), (batch_calls, batch_files) = json.loads(run(checkout, ENTERED, str(options.dataset)))
        print(
            f"dataset[5]: {calls} calls in {files} files; batch of one record: {batch_calls} in {batch_files}"
        )
    print()
    for name in ("open_dataset", "Loader"):
        rounds = [[imported(checkout, name) for checkout in checkouts] for _ in range(options.rounds)]
        for number, checkout in enumerate(checkouts):
            seconds = statistics.median(each[number][1] for each in rounds)
            print(
                f"from shardprep import {name}: {rounds[0][number][0]} modules, {seconds:.2f} s ({checkout})"
            )


def print_sizes(checkout: Path) -> None:
    """Print the lines and modules of each package, and of each top-level folder."""
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for top in TOPS:
        for path in (checkout / top).rglob("*.py"):
            parts = path.relative_to(checkout).parts[:-1]
            for name in {top, "/".join(parts[:2])}:
                lines[name] += len(path.read_text().splitlines())
                modules[name] += 1
    for name in sorted(lines):
        if name in TOPS or not name.startswith("tests"):
            print(f"{name:24}{modules[name]:5} modules {lines[name]:8,} lines")


def imported(checkout: Path, name: str) -> tuple[int, float]:
    """Return the package's modules that importing a name imports, and the seconds that it takes."""
    modules, seconds = json.loads(run(checkout, IMPORTED.format(name=name)))
    return modules, seconds


def run(checkout: Path, program: str, *words: str) -> str:
    """Return what a program prints, run with a checkout's package."""
    environ = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()

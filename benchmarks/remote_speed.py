"""Training from object storage beside a local copy and other libraries: images/s, and bytes that come.

    pip install 'shardprep[remote]' localbucket
    python benchmarks/remote_speed.py SCRATCH [--images 4000] [--room 0.5] [--peer-python PYTHON]

An S3 server runs on this machine (localbucket): what is compared is the work of the loader, not a network.
Encoded images are delivered, which is the most that storage has to feed: decoding takes longer than both.
Each library reads its own format with shards of one size, in a new process per round; rounds alternate.
PYTHON is an interpreter with the peers, if it is another one; one that is missing or fails is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from measuring.conditions import conditions
from measuring.counted_server import Counted, counted_server
from measuring.remote_child import EPOCHS, Settings

from shardprep import PlanOptions, convert, make_sample, open_dataset

HERE = Path(__file__).resolve().parent
CLASSES = 20
SHARD_BYTES = 4 << 20
ROUND_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
TIMED_OUT = 124  # the exit code of ``timeout``
MODULES = {
    "`Loader`": "contenders.own_remote",
    "MosaicML Streaming": "contenders.peer_streaming",
    "litData": "contenders.peer_litdata",
}
FOLDERS = {
    "contenders.own_remote": "train",
    "contenders.peer_streaming": "mds",
    "contenders.peer_litdata": "litdata",
}


@dataclass(frozen=True)
class Round:
    """The seconds until the first batch, and of each epoch images/s and MB that came."""

    first_batch: float
    rates: tuple[float, ...]
    downloaded: tuple[float, ...]


@dataclass(frozen=True)
class Contender:
    """A library, and what it reads with room for how many bytes."""

    name: str
    module: str
    url: str
    limit: int

    def row(self, rounds: list[Round | str]) -> str:
        done = [each for each in rounds if isinstance(each, Round)]
        failed = [each for each in rounds if isinstance(each, str)]
        name = f"{self.name} ({len(failed)} of {len(rounds)} rounds {failed[0]})" if failed else self.name
        if not done:
            return f"| {name} | | | |"
        first = statistics.median(each.first_batch for each in done)
        rates, came = medians([each.rates for each in done]), medians([each.downloaded for each in done])
        return f"| {name} | {first:.1f} | {rates} | {came} |"


def medians(figures: list[tuple[float, ...]]) -> str:
    return ", ".join(f"{statistics.median(epoch):,.0f}" for epoch in zip(*figures, strict=True))


def write_own(scratch: Path, bucket: Path, images: int) -> Path:
    """Write the dataset, and its images as files for the peers; the folder of these."""
    folder = scratch / "images"
    if not folder.exists():
        make_sample(scratch / "archives", classes=CLASSES, train_per_class=images // CLASSES)
        options = PlanOptions(shard_size=SHARD_BYTES)
        convert(scratch / "archives", bucket / "train", split="train", plan_options=options)
        partial = folder.with_suffix(".partial")
        partial.mkdir()
        with open_dataset(bucket / "train") as dataset:
            for number, record in enumerate(dataset):
                (partial / f"{number:07}-{record.label}").write_bytes(record.image)
        partial.rename(folder)
    return folder


def write_peer(python: str, module: str, images: Path, folder: Path) -> None:
    """Write the images in the format of a peer, if it is installed."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = child(python, module, "write", str(images), str(partial), str(SHARD_BYTES))
    if not folder.exists() and subprocess.run(command, cwd=HERE, capture_output=True).returncode == 0:
        partial.rename(folder)


def child(python: str, *values: str) -> list[str]:
    return [python, "-m", "measuring.remote_child", *values]


def run(python: str, contender: Contender, cache: Path, window: int, counted: Counted) -> Round | str:
    """Run one round with an empty cache; or why there is none."""
    shutil.rmtree(cache, ignore_errors=True)
    settings = Settings(contender.url, str(cache), contender.limit, window)
    command = ["timeout", str(ROUND_TIMEOUT_S), *child(python, contender.module, "read", settings.dumped())]
    lines, came = [], [counted.sent]
    log = cache.with_name("stderr")
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=errors) as reader,
    ):
        for line in reader.stdout or ():
            if line.startswith(b"["):  # libraries print, too
                lines.append(json.loads(line))
                came.append(counted.sent)
            if len(lines) == EPOCHS:
                break  # not all processes of a peer end soon
        end(reader)
    if len(lines) < EPOCHS:
        timed_out = reader.returncode == TIMED_OUT
        return f"not ended after {ROUND_TIMEOUT_S:.0f} s" if timed_out else failure(log.read_text())
    rates = tuple(images / seconds for images, seconds, _ in lines)
    return Round(lines[0][2], rates, tuple((after - before) / 1e6 for before, after in pairwise(came)))


def end(reader: subprocess.Popen[bytes]) -> None:
    """Wait for a child's end, and end it if that takes long; ``timeout`` passes the signal to its group."""
    try:
        reader.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        reader.terminate()


def failure(text: str) -> str:
    if "ModuleNotFoundError" in text:
        return "not installed"
    raised = re.findall(r"^[\w.]+: .*", text, re.MULTILINE)  # further lines of its message may follow
    return f"failed: {raised[-1] if raised else text.strip()[-200:]}"


def contenders(bucket: Path, room: float, sizes: dict[str, int]) -> list[Contender]:
    found = [Contender("`Loader`, local copy", "contenders.own_remote", str(bucket / "train"), 0)]
    for share in (1.2, room):
        for name, module in MODULES.items():
            text = "room for all" if share > 1 else f"room for {share:.0%}"
            limit = int(sizes[module] * share)
            found.append(Contender(f"{name}, {text}", module, f"s3://bucket/{FOLDERS[module]}", limit))
    return found


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--room", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    options = parser.parse_args()
    scratch = options.scratch.resolve()
    peer_python = str(Path(shutil.which(options.peer_python) or options.peer_python).absolute())
    bucket = scratch / "server" / "bucket"
    images = write_own(scratch, bucket, options.images)
    pythons = dict.fromkeys(FOLDERS, peer_python) | {"contenders.own_remote": sys.executable}
    for module in ("contenders.peer_streaming", "contenders.peer_litdata"):
        write_peer(pythons[module], module, images, bucket / FOLDERS[module])
    sizes = {module: size_of(bucket / folder) for module, folder in FOLDERS.items()}
    print(conditions("numpy", "obstore"))
    print(f"{options.images:,} images, {size_of(images) / 1e6:,.0f} MB; {sizes}")
    with counted_server(bucket.parent) as counted:
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{counted.port}",
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
        found: dict[Contender, list[Round | str]] = {
            each: [] for each in contenders(bucket, options.room, sizes)
        }
        for _ in range(options.rounds):
            for each, rounds in found.items():
                rounds.append(
                    run(pythons[each.module], each, scratch / "cache", options.images // 20, counted)
                )
    print("| | first batch, s | images/s of each epoch | MB received in each |\n|---|---|---|---|")
    for each, rounds in found.items():
        print(each.row(rounds))


if __name__ == "__main__":
    main()

"""Batches from other processes: the wire compared with a bare ZeroMQ stream, and two senders with one.

    python benchmarks/wire_speed.py
    python benchmarks/images.py /tmp/images --count 10000
    python benchmarks/wire_speed.py --images /tmp/images --scratch /tmp/scratch

A batch is 64 or 256 x 224 x 224 x 3 bytes and its labels, always the same ones. "bare" is one PUSH and one
PULL socket that transfer these bytes, each array as one buffer, without any checks; "pieces" does so in
buffers of 1 MiB, as the wire does. "wire" is serve() and RemoteSource: checked, in order, copied to the
consumer's own memory. --images adds Loaders of one worker each: iterated here, served by one process, and by
two.

Every run has new processes; contenders alternate. Compare medians, and medians of each round's ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import zmq
from measuring.conditions import conditions
from measuring.data import Data, prepare

from shardprep.loaders import FakeData, Loader, LocalShuffle, TrainTransform
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.machines.codec import pack_batch
from shardprep.loaders.machines.keys import load_public, load_secret, make_keys
from shardprep.loaders.remote import ReceiverKeys, RemoteSource, SenderKeys, serve

ROWS = (64, 256)
DECODED = 64  # images in a batch, so that a few thousand images make an epoch of many steps
WINDOW = 8  # messages that a bare stream has in transit
WARM_UP = 5  # batches
ROUND_TIMEOUT_S = 300.0
ANY_PORT = "tcp://127.0.0.1:*"


class Constant:
    """A source of many batches that are all the same one."""

    batches_never_change = True

    def __init__(self, rows: int) -> None:
        (self._batch,) = FakeData(1, batch_size=rows)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> Any:
        return self._batch


def decoding(shards: Path) -> Loader:
    return Loader(
        shards,
        batch_size=DECODED,
        transform=TrainTransform(224),
        shuffle=LocalShuffle(1000),
        workers=1,
        rank=0,
        world_size=1,
    )


# A sender, in its own process


def send(what: str, endpoint: str, keys: Path | None, rows: int, shards: Path | None) -> None:
    if what == "wire":
        served = Flow.from_iterable(Constant(rows))
        serve(served, endpoint, keys=sender_keys(keys), identity="constant")
    elif what == "decoding" and shards:
        with decoding(shards) as loader:
            serve(loader, endpoint, keys=sender_keys(keys))
    else:
        send_bare(pack_batch(Constant(rows)[0]) if what == "pieces" else whole(rows), endpoint, keys)


def whole(rows: int) -> list[Any]:
    """A header, and each array as one buffer."""
    return [bytes(300), *Constant(rows)[0]]


def send_bare(parts: list[Any], endpoint: str, keys: Path | None) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, WINDOW)
    if keys:
        secure(socket, keys / "data.key_secret", keys / "train.key")
    socket.connect(endpoint)
    sending: deque[zmq.MessageTracker] = deque()
    while True:
        sending.append(socket.send_multipart(parts, copy=False, track=True))
        if len(sending) > WINDOW:
            sending.popleft().wait()


def secure(socket: zmq.Socket[bytes], secret: Path, server: Path | None) -> None:
    own = load_secret(secret)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    if server:
        socket.setsockopt(zmq.CURVE_SERVERKEY, load_public(server))
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)


# A receiver, in its own process, which starts its senders


def receive(what: str, options: argparse.Namespace) -> float:
    """Batches per second."""
    if what == "local":
        with decoding(options.shards) as loader:
            return rate_of(endless(loader), options.seconds)
    if what in ("bare", "pieces"):
        return receive_bare(what, options)
    with RemoteSource(ANY_PORT, keys=receiver_keys(options.keys)) as source, ExitStack() as stack:
        for _ in range(options.senders):
            stack.enter_context(Sender(what, source.endpoint, options))
        batches = endless(source)
        while len(source.stats().senders) < options.senders:
            next(batches)
        return rate_of(batches, options.seconds)


def receive_bare(what: str, options: argparse.Namespace) -> float:
    socket = zmq.Context().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, WINDOW)
    if options.keys:
        secure(socket, options.keys / "train.key_secret", None)
    socket.bind(ANY_PORT)
    with Sender(what, socket.getsockopt_string(zmq.LAST_ENDPOINT), options):
        return rate_of((socket.recv_multipart(copy=False) for _ in itertools.count()), options.seconds)


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        yield from batches


def rate_of(batches: Iterator[Any], seconds: float) -> float:
    for _ in range(WARM_UP):
        next(batches)
    began, count = perf_counter(), 0
    while (now := perf_counter()) < began + seconds:
        next(batches)
        count += 1
    return count / (now - began)


class Sender(subprocess.Popen[bytes]):
    """This file in another process, which ends with the context."""

    def __init__(self, what: str, endpoint: str, options: argparse.Namespace) -> None:
        words = [f"--only=send.{what}", f"--endpoint={endpoint}", f"--rows={options.rows}"]
        super().__init__([sys.executable, __file__, *words, *passed_on(options)])

    def __exit__(self, *exc: Any) -> None:
        self.kill()
        self.wait()


def passed_on(options: argparse.Namespace) -> list[str]:
    named = {"keys": options.keys, "shards": options.shards}
    return [f"--{name}={value}" for name, value in named.items() if value]


# Keys, made as prep keygen makes them


def make_keys_in(folder: Path) -> Path:
    (folder / "allowed").mkdir(mode=0o700)
    for name in ("train", "data"):
        make_keys(folder / name)
    (folder / "allowed" / "data.key").write_bytes((folder / "data.key").read_bytes())
    return folder


def receiver_keys(folder: Path | None) -> ReceiverKeys | None:
    return ReceiverKeys(folder / "train.key_secret", folder / "allowed") if folder else None


def sender_keys(folder: Path | None) -> SenderKeys | None:
    return SenderKeys(folder / "data.key_secret", folder / "train.key") if folder else None


# Printed figures


def report_streams(options: argparse.Namespace, keys: Path) -> None:
    for rows, security in itertools.product(ROWS, ("plain", "CURVE")):
        options.rows, options.keys = rows, keys if security == "CURVE" else None
        found = alternated({way: (way, 1) for way in ("bare", "pieces", "wire")}, options)
        size = sum(len(part) for part in pack_batch(Constant(rows)[0]))
        columns = [f"{way} {rate:6.1f}/s {rate * size / 1e9:5.2f} GB/s" for way, rate in medians(found)]
        columns += [f"wire / {way} {ratios(found['wire'], found[way])}" for way in ("bare", "pieces")]
        print(f"{size / 1e6:5.1f} MB  {security:5}  " + "   ".join(columns), flush=True)


def report_decoding(options: argparse.Namespace, keys: Path) -> None:
    options.keys = keys
    ways = {"local": ("local", 1), "one sender": ("decoding", 1), "two senders": ("decoding", 2)}
    found = alternated(ways, options)
    columns = [f"{way} {rate * DECODED:,.0f} images/s" for way, rate in medians(found)]
    columns += [f"one / local {ratios(found['one sender'], found['local'])}"]
    columns += [f"two / one {ratios(found['two senders'], found['one sender'])}"]
    print("decoding, CURVE  " + "   ".join(columns), flush=True)


def alternated(ways: dict[str, tuple[str, int]], options: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, (what, senders) in ways.items():
            found[way].append(apart(what, senders, options))
    return found


def apart(what: str, senders: int, options: argparse.Namespace) -> float:
    words = [f"--only=receive.{what}", f"--senders={senders}", f"--rows={options.rows}"]
    command = [sys.executable, __file__, *words, f"--seconds={options.seconds}", *passed_on(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROUND_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def medians(found: dict[str, list[float]]) -> Iterator[tuple[str, float]]:
    return ((way, statistics.median(rates)) for way, rates in found.items())


def ratios(some: list[float], others: list[float]) -> str:
    each = [a / b for a, b in zip(some, others, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--images", type=Path, help="class folders, of which scratch gets the shards")
    parser.add_argument("--scratch", type=Path)
    for name, kind in (("only", str), ("endpoint", str), ("rows", int), ("senders", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    for name in ("keys", "shards"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        end, what = options.only.split(".")
        if end == "send":
            send(what, options.endpoint, options.keys, options.rows, options.shards)
        else:
            print(json.dumps(receive(what, options)))
        return
    print(conditions("shardprep", "numpy", "pyzmq", "opencv-python-headless"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keys_in(Path(folder))
        if options.images:
            data = Data(options.images, options.scratch)
            prepare(data)
            options.rows, options.shards = DECODED, data.lmdb
            report_decoding(options, keys)
        else:
            report_streams(options, keys)


if __name__ == "__main__":
    main()

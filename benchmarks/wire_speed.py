"""Batches from another process: the wire beside a bare ZeroMQ stream, and two machines' worth of decoding beside one.

    python benchmarks/wire_speed.py
    python benchmarks/wire_speed.py --scenes decoding --images /tmp/images --scratch /tmp/scratch

A batch is 64 or 256 x 224 x 224 x 3 bytes and its labels, always the same ones. "bare" is one PUSH and one PULL socket
that pass on exactly these bytes, each array as one buffer, and look at nothing; "pieces" does so in the buffers that
the wire has; "wire" is serve() and RemoteSource: checked, in order,
copied into memory of the consumer's own. Every run has processes of its own; contenders alternate. Medians, and medians
of each round's ratios, are what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import zmq
from conditions import conditions

from shardprep.loaders import FakeData
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.frames import pack_batch
from shardprep.loaders.remote import ReceiverKeys, RemoteSource, SenderKeys, serve

ROWS = (64, 256)
WINDOW = 8  # messages that a bare stream has on their way
PATIENCE = 300.0


class Constant:
    """Many batches, of which all are the same one."""

    batches_never_change = True

    def __init__(self, rows: int) -> None:
        (self._batch,) = FakeData(1, batch_size=rows)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> Any:
        return self._batch


# One end each, in a process of its own


def send(way: str, endpoint: str, keys: Path | None, rows: int) -> None:
    if way == "wire":
        serve(Flow.from_iterable(Constant(rows)), endpoint, keys=sender_keys(keys), identity="constant")
        return
    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, WINDOW)
    if keys:
        secure(socket, keys / "data.key_secret", keys / "train.key")
    socket.connect(endpoint)
    parts = pack_batch(Constant(rows)[0]) if way == "pieces" else whole(rows)
    sending: deque[zmq.MessageTracker] = deque()
    while True:
        sending.append(socket.send_multipart(parts, copy=False, track=True))  # type: ignore[arg-type]
        if len(sending) > WINDOW:
            sending.popleft().wait()


def whole(rows: int) -> list[Any]:
    """A header, and each array as one buffer."""
    return [bytes(300), *Constant(rows)[0]]


def receive(way: str, keys: Path | None, rows: int, seconds: float) -> float:
    """Batches per second."""
    if way == "wire":
        with (
            RemoteSource("tcp://127.0.0.1:*", keys=receiver_keys(keys)) as source,
            sender(way, source.endpoint, keys, rows),
        ):
            return rate_of(iter(source), seconds)
    socket = zmq.Context().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, WINDOW)
    if keys:
        secure(socket, keys / "train.key_secret", None)
    socket.bind("tcp://127.0.0.1:*")
    with sender(way, socket.getsockopt_string(zmq.LAST_ENDPOINT), keys, rows):
        return rate_of(iter(lambda: socket.recv_multipart(copy=False), None), seconds)


def secure(socket: Any, secret: Path, server: Path | None) -> None:
    from shardprep.loaders.remote.keys import load_public, load_secret

    own = load_secret(secret)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    if server:
        socket.setsockopt(zmq.CURVE_SERVERKEY, load_public(server))
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)


def rate_of(batches: Iterator[Any], seconds: float) -> float:
    for _ in range(5):
        next(batches)
    began, count = perf_counter(), 0
    while (now := perf_counter()) < began + seconds:
        next(batches)
        count += 1
    return count / (now - began)


def sender(way: str, endpoint: str, keys: Path | None, rows: int) -> Any:
    words = ["--only", f"send.{way}", "--endpoint", endpoint, "--rows", str(rows)]
    return Killed(words + (["--keys", str(keys)] if keys else []))


class Killed(subprocess.Popen[bytes]):
    """This file in another process, which ends with the context."""

    def __init__(self, words: list[str]) -> None:
        super().__init__([sys.executable, __file__, *words])

    def __exit__(self, *exc: Any) -> None:
        self.kill()
        self.wait()


def receiver_keys(folder: Path | None) -> ReceiverKeys | None:
    return ReceiverKeys(folder / "train.key_secret", folder / "allowed") if folder else None


def sender_keys(folder: Path | None) -> SenderKeys | None:
    return SenderKeys(folder / "data.key_secret", folder / "train.key") if folder else None


def make_keys_in(folder: Path) -> Path:
    from shardprep.loaders.remote.keys import make_keys

    (folder / "allowed").mkdir(mode=0o700)
    for name in ("train", "data"):
        make_keys(folder / name)
    (folder / "allowed" / "data.key").write_bytes((folder / "data.key").read_bytes())
    return folder


# The scenes


def report_streams(rounds: int, seconds: float, keys: Path) -> None:
    for rows in ROWS:
        for security, folder in (("plain", None), ("CURVE", keys)):
            found: dict[str, list[float]] = {"bare": [], "pieces": [], "wire": []}
            for _ in range(rounds):
                for way in found:
                    found[way].append(apart(f"receive.{way}", rows, seconds, folder))
            size = sum(len(part) for part in pack_batch(Constant(rows)[0]))
            rates = {way: statistics.median(rates) for way, rates in found.items()}
            told = [f"{way} {rate:7.1f}/s {rate * size / 1e9:5.2f} GB/s" for way, rate in rates.items()]
            told += [f"wire / {way} {_ratios(found['wire'], found[way])}" for way in ("bare", "pieces")]
            print(f"{size / 1e6:5.1f} MB  {security:5}  " + "   ".join(told), flush=True)


def _ratios(some: list[float], others: list[float]) -> str:
    ratios = [a / b for a, b in zip(some, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def apart(what: str, rows: int, seconds: float, keys: Path | None) -> float:
    words = ["--only", what, "--rows", str(rows), "--seconds", str(seconds)]
    command = [sys.executable, __file__, *words, *(["--keys", str(keys)] if keys else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        end, way = args.only.split(".")
        if end == "send":
            send(way, args.endpoint, args.keys, args.rows)
        else:
            print(json.dumps(receive(way, args.keys, args.rows, args.seconds)))
        return
    print(conditions("shardprep", "numpy", "pyzmq"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report_streams(args.rounds, args.seconds, make_keys_in(Path(folder)))


if __name__ == "__main__":
    main()

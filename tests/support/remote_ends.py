"""Sources that several machines could serve, and senders and receivers in threads and processes.

``python remote_ends.py NAME PATH ENDPOINT`` serves as a sender, and prints its stats.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardprep.loaders import Loader
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.remote import RemoteSource, SenderStats, serve
from support.faulty_proxy import listening
from support.loaded import loader_on
from support.repository import SUPPORT

ANY_PORT = "tcp://127.0.0.1:*"
TIMEOUT_S = 60.0
LARGE = 5_000_000  # numbers, of eight bytes, in a large batch

Batch = npt.NDArray[Any] | tuple[Any, ...]


# Sources, each a function of the dataset's path, so that a process can be given its name


loader = partial(loader_on, rank=0, world_size=1)
"""21 batches of 204 records."""


def numbers(path: Path) -> Flow:
    """15 batches, which can be drawn in any order."""
    return Flow.from_iterable(range(100)).shuffle(20).map(row).batch(7)


def slow_numbers(path: Path) -> Flow:
    return Flow.from_iterable(range(30)).map(slow_row).batch(1)


def odd_ones() -> Flow:
    """Numbers of which it is not known how many there are."""
    return Flow.from_callable(lambda: range(40)).filter(lambda number: number % 2 == 1)


def part_of(part: int) -> Iterator[Any]:
    for number in range(5 * (part % 8)):
        yield row(1000 * part + number)


def slow_part_of(part: int) -> Iterator[Any]:
    for number in range(8 + part):
        yield slow_row(1000 * part + number)


def noisy(number: int, rng: np.random.Generator) -> Any:
    return rng.random(3), number


def row(number: int) -> Any:
    return np.full((3, 2), number), number


def slow_row(number: int) -> Any:
    time.sleep(0.02)
    return row(number)


SOURCES: dict[str, Callable[[Path], Loader | Flow]] = {
    "loader": loader,
    "loader_with_workers": lambda path: loader(path, workers=1),
    "dropping_loader": lambda path: loader(path, drop_last=True),  # leaves out 4 records
    "numbers": numbers,
    "slow_numbers": slow_numbers,
    # 8 batches, of known number, one after the other
    "joined": lambda path: (
        Flow.from_iterable(range(20)).concat(Flow.from_iterable(range(100, 110))).map(row).batch(4)
    ),
    "odd_ones": lambda path: odd_ones().shuffle(5).map(row).batch(3),
    "slow_odd_ones": lambda path: odd_ones().map(slow_row).batch(1),
    # batches that take a while to unpickle
    "large_ones": lambda path: Flow.from_iterable(range(30)).map(lambda number: np.full(LARGE, number)),
    # 70 items of unknown number, in 8 parts of different lengths; one is empty
    "in_parts": lambda path: Flow.from_parts(part_of, parts=8),
    "slowly_in_parts": lambda path: Flow.from_parts(slow_part_of, parts=8),
    # batches that are made at random from the flow of each part
    "flows_in_parts": lambda path: Flow.from_parts(
        lambda part: Flow.from_callable(lambda: range(40)).map(noisy, random=True).batch(4), parts=3
    ),
}


def local(source: Loader | Flow, pass_number: int = 0) -> list[Any]:
    """The batches of a pass, iterated here."""
    if isinstance(source, Flow):
        return list(source.at_pass(pass_number))
    source.set_epoch(pass_number)
    return [tuple(part.copy() for part in batch) for batch in source]


def locally(name: str, path: Path, passes: int = 1) -> list[list[Any]]:
    with SOURCES[name](path) as source:
        return [local(source, number) for number in range(passes)]


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Check equality bit for bit, in the same order."""
    return [_exact(batch) for batch in some] == [_exact(batch) for batch in others]


def _exact(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(map(_exact, part))
    array = np.asarray(part)
    return array.dtype, array.shape, array.tobytes()


@contextmanager
def serving(
    make: Callable[[], Loader | Flow], endpoint: str, *, senders: int = 1, **options: Any
) -> Iterator[list[Future[SenderStats]]]:
    """Serve in threads until the receiver is closed, which must happen before the context ends."""

    def run() -> SenderStats:
        with make() as source:
            return serve(source, endpoint, **{"patience": 10, **options})

    with ThreadPoolExecutor(senders) as pool:
        yield [pool.submit(run) for _ in range(senders)]


@contextmanager
def wired(make: Callable[[], Loader | Flow], *, senders: int = 1, **options: Any) -> Iterator[RemoteSource]:
    """A receiver with these options, and threads that serve it."""
    with (
        RemoteSource(**{"endpoint": ANY_PORT, **options}) as source,
        serving(make, source.endpoint, senders=senders),
        source,
    ):
        yield source


@contextmanager
def python(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A process of Python with these arguments, which is killed at the end."""
    environ, pipe = os.environ | {"PYTHONPATH": SUPPORT}, subprocess.PIPE
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def programs(senders: int, *words: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run this file."""
    with ExitStack() as stack:
        yield [stack.enter_context(python(__file__, *words)) for _ in range(senders)]


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that calls ``answer`` with each connection; the endpoint."""
    is_over = threading.Event()

    class Connection(BaseRequestHandler):
        def handle(self) -> None:
            answer(self.request)
            is_over.wait()

    with listening(Connection) as port:
        yield f"tcp://127.0.0.1:{port}"
        is_over.set()


class Tunnel:
    """A tunnel to an endpoint of this machine that passes on what ``treat(data, is_back)`` returns."""

    def __init__(self, endpoint: str) -> None:
        self.treat: Callable[[bytes, bool], bytes] = lambda data, is_back: data
        self._target = "127.0.0.1", int(endpoint.rpartition(":")[2])
        self._stop = threading.Event()
        self._answering = answering(self._pass_on)

    def flip(self, *, back: bool) -> None:
        """Change the last bit of the next data in one direction."""

        def flipped(data: bytes, is_back: bool) -> bytes:
            if is_back is not back:
                return data
            self.treat = lambda data, is_back: data
            return data[:-1] + bytes([data[-1] ^ 1])

        self.treat = flipped

    def __enter__(self) -> Self:
        self.endpoint = self._answering.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stop.set()
        self._answering.__exit__(*raised)

    def _pass_on(self, one: socket.socket) -> None:
        with suppress(OSError), one, socket.create_connection(self._target) as other:
            while not self._stop.is_set():
                for ready in select.select([one, other], [], [], 0.05)[0]:
                    if not (data := ready.recv(100_000)):
                        return
                    (other if ready is one else one).sendall(self.treat(data, ready is other))


if __name__ == "__main__":
    name, path, endpoint = sys.argv[1:]
    with SOURCES[name](Path(path)) as source:
        print("ready", flush=True)
        print(json.dumps(serve(source, endpoint).to_json()), flush=True)

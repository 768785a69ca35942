"""One contender of remote_speed.py, in a process of its own and perhaps another interpreter.

Its module has ``open_epochs(settings)``, whose result gives the sizes of the batches of an epoch each time it
is iterated. That of a peer has ``write(images, folder, shard_bytes)``, too, which writes its own format.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

EPOCHS = 4  # the first fills the cache


@dataclass(frozen=True)
class Settings:
    """What is read: a URL or a folder, with a cache of at most ``limit`` bytes."""

    url: str
    cache: str
    limit: int
    window: int
    batch: int = 64
    workers: int = 2

    def dumped(self) -> str:
        return json.dumps(asdict(self))


def images_in(folder: Path) -> Iterator[tuple[bytes, int]]:
    """The images of a folder, whose names end with their labels."""
    for path in sorted(folder.iterdir()):
        yield path.read_bytes(), int(path.stem.rpartition("-")[2])


def read(module: str, settings: Settings) -> None:
    """Print a line for each epoch: its images, its seconds, and those until its first batch."""
    began = time.perf_counter()
    epochs = importlib.import_module(module).open_epochs(settings)
    for _ in range(EPOCHS):
        images, first = 0, 0.0
        for size in epochs:
            first = first or time.perf_counter() - began
            images += size
        print(json.dumps([images, time.perf_counter() - began, first]), flush=True)
        began = time.perf_counter()


def main(module: str, task: str, *values: str) -> None:
    if task == "write":
        images, folder, shard_bytes = values
        importlib.import_module(module).write(Path(images), Path(folder), int(shard_bytes))
    else:
        read(module, Settings(**json.loads(values[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])

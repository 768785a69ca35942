"""Readers of a cache that are killed at random moments: a program that forks them, and watches the cache.

It prints one line of JSON: what was wrong, and the most bytes that the files took.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from shardprep.formats.shards.read import FileEntry
from shardprep.formats.storage.cache import FileCache
from shardprep.formats.storage.cache_folder import CacheFolder
from shardprep.formats.storage.store import Location

READERS = 4


def read_forever(place: Location, cache: Path, limit: int, entries: list[FileEntry], seed: int) -> None:
    """Hold files in an order that was told, two at a time, and check every byte."""
    order = random.Random(seed)
    with FileCache(cache, limit, place) as files:
        while True:
            order.shuffle(entries)
            files.announce(entries)
            for number, entry in enumerate(entries):
                with files.hold(entries[number : number + 2]):
                    path = files.folder.path_of(entry)
                    if f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" != entry.sha256:
                        os._exit(9)
                files.record_position(number + 1)
                if number + 2 < len(entries):
                    files.prefetch(entries[number + 2])


def forked(*work: object) -> int:
    if (child := os.fork()) == 0:
        try:
            read_forever(*work)  # type: ignore[arg-type]
        finally:
            os._exit(8)
    return child


def main(url: str, cache: str, limit: int, kills: int, listed: list[list[object]]) -> None:
    entries = [FileEntry(*each) for each in listed]  # type: ignore[arg-type]
    place, folder, chosen = Location.parse(url), CacheFolder(Path(cache)), random.Random(0)
    folder.make()
    work = (place, Path(cache), limit, entries)
    readers = [forked(*work, number) for number in range(READERS)]
    wrong: list[str] = []
    largest = 0
    for kill in range(kills):
        until = time.monotonic() + chosen.uniform(0.01, 0.2)
        while time.monotonic() < until:
            with folder.critical_section():  # all files, whole or on their way, at one moment
                paths = [*folder.files.glob("*/*"), *folder.parts.iterdir()]
                largest = max(largest, sum(path.stat().st_blocks * 512 for path in paths))
            time.sleep(0.01)
        number = chosen.randrange(READERS)
        os.kill(readers[number], signal.SIGKILL)
        wrong += ended(readers[number])
        readers[number] = forked(*work, READERS + kill)
    for reader in readers:
        os.kill(reader, signal.SIGKILL)
        wrong += ended(reader)
    print(json.dumps({"wrong": wrong, "largest": largest}))


def ended(reader: int) -> list[str]:
    _, status = os.waitpid(reader, 0)
    return [] if os.WIFSIGNALED(status) else [f"a reader ended with {os.waitstatus_to_exitcode(status)}"]


if __name__ == "__main__":
    main(**json.load(sys.stdin))

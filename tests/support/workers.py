"""Functions that tests run in worker processes; spawned processes import them by name."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import ByteReader, Listing, Source


@dataclass
class PoisonedReader(ByteReader):
    """A source that kills its process when it reads one of its images."""

    reader: ByteReader
    poison: bytes

    def __enter__(self) -> "PoisonedReader":
        self.reader.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.__exit__(*exc)  # type: ignore[arg-type]

    def read(self, entry: np.void) -> bytes:
        if entry["key"] == self.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.reader.read(entry)

    def where(self, entry: np.void) -> str:
        return self.reader.where(entry)


class PoisonedSource(Source):
    """A source with one image that kills the process that reads it."""

    layout = "poisoned"
    splits = ("train",)
    description = "poisoned"

    def __init__(self, path: Path) -> None:
        self.source = recognise(path)
        self.poison = ""

    def listed(self, split: str, known: object) -> Listing:
        listing = self.source.listing(split)
        poison = listing.entries["key"][len(listing.entries) // 2]
        self.poison = poison.decode()
        return replace(listing, reader=PoisonedReader(listing.reader, poison))

"""Files of a cache that are held: they stay until they are let go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.system.descriptor import LockDescriptor
from shardprep.formats.system.owned import Owned

from .eviction import hex_of


class Held(Owned, AbstractContextManager["Held"]):
    """Files that are there, and are not evicted before :meth:`release`, or the end of this process."""

    def __init__(self) -> None:
        self._pins: dict[str, LockDescriptor] = {}
        self.came = False
        """Whether any of the files had to come first."""
        self.sizes: dict[str, int] = {}
        """The sizes of the files in bytes, by their SHA-256."""

    def add(self, entry: FileEntry, pin: LockDescriptor) -> None:
        """Hold a file by its lock."""
        self._pins[hex_of(entry)] = pin
        self.sizes[hex_of(entry)] = entry.size

    def lacks(self, entries: Iterable[FileEntry]) -> list[FileEntry]:
        """Return the files that are not held."""
        return [entry for entry in entries if hex_of(entry) not in self._pins]

    def take(self, other: Held) -> None:
        """Hold what the other one held, which holds nothing afterwards."""
        replaced = [self._pins[name] for name in other._pins.keys() & self._pins.keys()]
        self._pins |= other._pins
        self.sizes |= other.sizes
        other._pins, other.sizes = {}, {}
        for pin in replaced:
            pin.close()

    def release(self) -> None:
        """Let the files go. Idempotent."""
        pins, self._pins, self.sizes = self._pins, {}, {}
        for pin in pins.values():
            pin.close()

    def __exit__(self, *exc: object) -> None:
        self.release()

"""The folder ``.prep`` inside an output: what an unfinished conversion knows of itself.

It holds the lock, the guard against resuming with another plan, finished shards' commit records
and files being built. It is gone when the manifest is there.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .canonical import canonical_json, parse_canonical_json
from .errors import OutputBusy, PlanMismatch, UsageError
from .publish import flush_file, publish_bytes

WORKPLACE_NAME = ".prep"
OURS = re.compile(r"shard-\d{5,}\.(lmdb|h5)|(index|boxes)\.npy|(quarantine|provenance)\.json")


class Workplace:
    """One process's hold on an output folder. Not reusable, not picklable."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output / WORKPLACE_NAME
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if self.output.exists() and not self.output.is_dir():
            raise UsageError("is not a folder", path=self.output)
        self.output.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.folder.mkdir()
        refuse_link(self.folder)
        flush_file(self.output)
        flush_file(self.output.parent)
        self._lock = self._take_lock(self.folder / "lock")
        return self

    def _take_lock(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or os.fstat(descriptor).st_ino != path.stat().st_ino:
                raise BlockingIOError  # its owner finished, and removed it, while we opened it
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputBusy("another process is working on this output", path=self.output) from error
        return descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self, guard: dict[str, Any]) -> None:
        """Keep what this conversion is, or check that it is the one that was begun here.

        Raises PlanMismatch naming what differs.
        """
        path = self.folder / "plan.json"
        if not path.exists():
            publish_bytes(path, canonical_json(guard), self.folder)
            return
        begun = _parsed(path)
        differing = [name for name in guard if begun.get(name) != guard[name]]
        if differing:
            raise PlanMismatch(
                f"holds an unfinished conversion with other {', '.join(differing)}; repeat the command "
                "that began it, or add --restart to discard what it did",
                path=self.output,
            )

    def discard(self) -> None:
        """Remove all that an unfinished conversion left in the output, and nothing else."""
        for path in self.output.iterdir():
            if OURS.fullmatch(path.name):
                path.unlink()
        self._clear()
        flush_file(self.output)

    def remove(self) -> None:
        """Remove the workplace, its lock last; the lock is still held."""
        self._clear()
        (self.folder / "lock").unlink()
        self.folder.rmdir()

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()


def _parsed(path: Path) -> dict[str, Any]:
    try:
        begun: dict[str, Any] = parse_canonical_json(path.read_bytes())
    except ValueError as error:
        raise PlanMismatch(
            f"cannot be read ({error}); add --restart to discard the unfinished conversion", path=path
        ) from error
    return begun


def refuse_link(folder: Path) -> None:
    """A workplace is a folder of ours. Whoever hands out a link in its place wants other files removed."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise UsageError("is not a folder but should be; remove it", path=folder)


def refuse_busy(output: Path) -> None:
    """Raise OutputBusy at once where another process holds the output, before any work is done."""
    try:
        descriptor = os.open(output / WORKPLACE_NAME / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputBusy("another process is working on this output", path=output) from error
    finally:
        os.close(descriptor)

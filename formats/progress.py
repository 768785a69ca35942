"""The progress of long work, as the command line shows it in a bar."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable


class Progress(Protocol):
    """Receiver of the progress of a conversion, repair or verification.

    It is called from one thread, and its methods must not raise.
    """

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Begin a task of this many records and bytes (``size``); it ends with the context."""

    def at(self, records: int, size: int) -> None:
        """Update the number of records and bytes (``size``) of the task that are done."""


@runtime_checkable
class ShardProgress(Progress, Protocol):
    """A progress that is also told when a shard is done. A :class:`Progress` need not have this."""

    def shards(self, done: int, total: int) -> None:
        """Update the number of shards of the task that are done, which changed; ``at`` was called before."""


class NoProgress:
    """A progress that is not shown."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def at(self, records: int, size: int) -> None:
        """Do nothing."""


def tell_shards(progress: Progress, done: int, total: int) -> None:
    """Call ``shards`` if the progress has it."""
    if isinstance(progress, ShardProgress):
        progress.shards(done, total)

"""How long work tells how far it is; the command line draws a bar, a library user may do otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Told from one thread only. Nothing here may raise."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """A piece of work of so many records and bytes begins; it ends with the context."""

    def at(self, records: int, size: int) -> None:
        """So many records and bytes of the task are done."""


class Silent:
    """Tells nobody."""

    def note(self, text: str) -> None:
        """Nothing."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def at(self, records: int, size: int) -> None:
        """Nothing."""

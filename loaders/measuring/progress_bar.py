"""The state of a running loader or flow while its batches are drawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from shardprep.formats.progress import in_notebook
from shardprep.formats.system.owned import Owned

from .watching.last_minute import Stats, Watchable
from .watching.status import WINDOW_S, ShownStatus, StatusBar, StatusLines
from .watching.waiting import Waiting


def watched(loader: Watchable[Stats], *, title: str = "loading") -> Iterator[Any]:
    """Yield the batches of the next epoch or pass of ``loader``, a Loader or a Flow, and show its state.

    ``for images, labels in watched(train): ...`` shows some lines at the end of a terminal's stderr: the
    ``title`` and how far the epoch is, the rate over the last minute and the stage that limits, each stage's
    share of the time, and the batches that are ready. They stay in place below what the program prints, and
    are removed when the epoch ends, is left, or fails. A notebook shows one line of it, with the rate of the
    last second; elsewhere nothing is shown. It takes some microseconds per batch.
    """
    with LoaderBar(loader, total=_length(loader), title=title) as bar, closing(iter(loader)) as batches:  # type: ignore[type-var]
        yield from bar.over(batches)


def _length(loader: Any) -> int | None:
    """The number of batches; None where it is not known."""
    try:
        return len(loader)
    except TypeError:
        return None


class LoaderBar(Owned):
    """The state, if it is to be ``shown``, on a terminal or in a notebook. Not thread-safe."""

    def __init__(
        self,
        loader: Watchable[Stats],
        *,
        total: int | None = None,
        title: str = "loading",
        shown: bool = True,
    ) -> None:
        self._loader = loader
        self._status = status_of(loader, total=total, title=title) if shown else None
        self._waiting = Waiting(self._measure) if self._status and self._status.may_move_alone else None
        self._next = perf_counter() + WINDOW_S

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the batches that counts them; it holds none."""
        awaited = batches if self._waiting is None else self._waiting.over(batches)
        return map(self._passed, awaited)

    def _passed(self, batch: Any) -> Any:
        if self._status is not None:
            self._status.saw()
            if perf_counter() >= self._next:
                self._measure()
        return batch

    def _measure(self) -> None:
        if self._status is not None:
            self._next = perf_counter() + WINDOW_S
            self._status.measured(self._loader.stats())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting is not None:
            self._waiting.close()
        if self._status is not None:
            self._status.close()


def status_of(loader: Watchable[Stats], *, total: int | None, title: str) -> ShownStatus | None:
    """Return what fits the place of the output: None where it is neither a terminal nor a notebook."""
    if in_notebook():
        return StatusBar(loader, total=total, title=title)
    if not sys.stderr.isatty():
        return None
    can_move = os.environ.get("TERM", "dumb") != "dumb"  # the cursor of a dumb terminal stays in its line
    return (StatusLines if can_move else StatusBar)(loader, total=total, title=title)

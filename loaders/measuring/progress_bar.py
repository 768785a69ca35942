"""A running loader or flow, watched while its batches are drawn, or recorded as a trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from shardprep.formats.runtime.owned import Owned
from shardprep.formats.runtime.progress import in_notebook
from shardprep.loaders.engine.trace import KEEP, Trace
from shardprep.loaders.measuring.status import (
    WINDOW_S,
    StatusBar,
    StatusLines,
    WaitWatch,
    Watchable,
)

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader


def watched(loader: Watchable, *, title: str = "loading") -> Iterator[Any]:
    """Yield the batches of the next epoch or pass of ``loader``, a Loader or a Flow, and show its state.

    ``for images, labels in watched(train): ...`` shows some lines at the end of a terminal's stderr: the
    ``title`` and how far the epoch is, the rate over the last minute and the stage that limits, each stage's
    share of the time, and the batches that are ready. They stay in place below the program's output, and
    are removed when the epoch ends, is left, or fails. A notebook shows one line of it, with the rate of the
    last second; elsewhere nothing is shown. It takes some microseconds per batch.
    """
    try:
        total = len(loader)  # type: ignore[arg-type]
    except TypeError:  # of an unknown length
        total = None
    with LoaderBar(loader, total=total, title=title) as bar, closing(iter(loader)) as batches:  # type: ignore[type-var]
        yield from bar.over(batches)


class LoaderBar(Owned):
    """The state, if it is to be ``shown``, on a terminal or in a notebook. Not thread-safe."""

    def __init__(
        self,
        loader: Watchable,
        *,
        total: int | None = None,
        title: str = "loading",
        shown: bool = True,
    ) -> None:
        self._loader = loader
        self._status = _status_of(loader, total=total, title=title) if shown else None
        self._waiting = WaitWatch(self._measure) if self._status and self._status.may_move_alone else None
        self._next = perf_counter() + WINDOW_S

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the batches that counts them; it holds none."""
        if self._status is None:
            return batches
        return map(self._passed, self._waiting.over(batches) if self._waiting else batches)

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

    def __exit__(self, *exc: object) -> None:
        for shown in (self._waiting, self._status):
            if shown is not None:
                shown.close()


def _status_of(loader: Watchable, *, total: int | None, title: str) -> StatusLines | StatusBar | None:
    """Return what fits the place of the output: None where it is neither a terminal nor a notebook."""
    if in_notebook():
        return StatusBar(loader, total=total, title=title)
    if not sys.stderr.isatty():
        return None
    can_move = os.environ.get("TERM", "dumb") != "dumb"  # the cursor of a dumb terminal stays in its line
    return (StatusLines if can_move else StatusBar)(loader, total=total, title=title)


@contextmanager
def tracing(loader: Loader, *, keep: int = KEEP) -> Iterator[Trace]:
    """Record what ``loader`` does within the context; the trace stays valid after it, and after the loader.

    ``keep`` is how many of the last spans of each kind are kept. One trace at a time: a second one ends the
    first.
    """
    engine = loader.engine
    trace = engine.record(keep=keep)
    try:
        yield trace
    finally:
        engine.stop_recording(trace)

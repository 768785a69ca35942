"""A running loader or flow, watched while its batches are drawn, or recorded as a trace."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from shardprep.formats.runtime.owned import Owned, starting_thread
from shardprep.formats.runtime.progress import in_notebook
from shardprep.loaders.engine.trace import KEEP, Trace
from shardprep.loaders.measuring.status import (
    WINDOW_S,
    StatusBar,
    StatusLines,
    Watchable,
)

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader


WAIT_S = 1.0  # of a wait, after which the state is drawn again


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


class LoaderBar(Owned, Iterator[Any]):
    """The state, if it is to be ``shown``, on a terminal or in a notebook. Not thread-safe.

    On a terminal a thread draws it every second as long as the next batch is waited for. While the
    program is at its own work the thread does nothing, so that a fork there copies no lock that it holds.
    """

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
        self._batches: Iterator[Any] = iter(())
        self._next = perf_counter() + WINDOW_S
        self._waits_since: float | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if self._status and self._status.may_move_alone:
            self._thread = threading.Thread(target=self._draw, name="shardprep-watch", daemon=True)
            with starting_thread():
                self._thread.start()

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the batches that counts them; it holds none."""
        self._batches = batches
        return batches if self._status is None else self

    def __next__(self) -> Any:
        self._wait(perf_counter())
        try:
            batch = next(self._batches)
        finally:
            self._wait(None)
        if self._status is not None:
            self._status.saw()
            if perf_counter() >= self._next:
                self._measure()
        return batch

    def _wait(self, since: float | None) -> None:
        """Note since when a batch is waited for; None: it is not. Then the thread is within no drawing."""
        with self._changed:
            self._waits_since = since

    def _draw(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait(WAIT_S)
                if self._waits_since is not None and perf_counter() - self._waits_since >= WAIT_S:
                    self._measure()

    def _measure(self) -> None:
        if self._status is not None:
            self._next = perf_counter() + WINDOW_S
            self._status.measured(self._loader.stats())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread and self.made_here:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._thread.join()
        if self._status is not None:
            self._status.close()


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

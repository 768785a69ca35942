"""The state of a running loader or flow, as lines on a terminal or a bar in a notebook; and its trace."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.runtime.owners import Closable
from shardprep.formats.runtime.progress import BAR, UNCOUNTED_BAR, FittingBar, bar_class, in_notebook
from shardprep.loaders.engine.trace import KEEP, Trace
from shardprep.loaders.loader.loader import Loader
from shardprep.loaders.loader.stats import PipelineStats

if TYPE_CHECKING:
    from shardprep.loaders.flow.flow import Flow


LEVELS = "▁▂▃▄▅▆▇█"


def fit_parts(parts: Iterable[tuple[float, str]], width: int) -> str:
    """Join the texts, and drop those of the highest rank until they fit; those of rank 0 stay.

    >>> fit_parts([(0, "9 images/s"), (2, " over 60 s"), (1, ", decode limits")], 30)
    '9 images/s, decode limits'
    """
    remaining = list(parts)
    while True:
        text = "".join(text for _, text in remaining).strip()
        last = max(remaining, default=(0, ""))
        if disp_len(text) <= width or last[0] <= 0:
            return text
        remaining.remove(last)


def sparkline(values: Iterable[float], width: int = 12, *, most: float | None = None) -> str:
    """Return the values as a sparkline; more than ``width`` are averaged in groups.

    >>> sparkline([1, 2, 4, 8], 4), sparkline([0, 0, 8, 8], 2)
    ('▁▂▄█', '▁█')
    """
    numbers = np.fromiter(values, float)
    parts = np.array_split(numbers, min(width, len(numbers)))
    heights = np.array([part.mean() for part in parts]) / max(most or numbers.max(), 1e-9)
    return "".join(LEVELS[int(level)] for level in np.clip(np.ceil(heights * 8) - 1, 0, 7))


FALLBACK = os.terminal_size((80, 24))


class _Screen:
    """Blocks of lines on the terminal of stderr, which stay below everything the program prints.

    Output to ``sys.stdout`` and ``sys.stderr``, by ``print`` or a logger, moves the lines down. The cursor
    stays below them, so that a killed program leaves a usable terminal. Lines are cut to the terminal's
    width. Thread-safe.
    """

    _current: _Screen | None = None

    @classmethod
    def current(cls) -> _Screen:
        """Return the screen of the current ``sys.stderr``."""
        if cls._current is None or cls._current._terminal is not sys.stderr:
            cls._current = cls(sys.stderr)
        return cls._current

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._write: Callable[[str], int] = terminal.write
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._blocks: dict[object, Sequence[str]] = {}
        self._drawn: list[str] = []
        self._line_is_open = False  # whether the program's last line is unfinished: blocks would split it
        self._wrapped_streams: list[TextIO] = []

    @property
    def size(self) -> os.terminal_size:
        with suppress(OSError, ValueError):
            size = os.get_terminal_size(self._terminal.fileno())
            return size if size.columns and size.lines else FALLBACK
        return FALLBACK

    def put(self, block: object, lines: Sequence[str] | None) -> None:
        """Replace the lines of a block, or remove it with None; does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for stream in dict.fromkeys((sys.stderr, sys.stdout)) if not self._blocks else ():
                if stream is self._terminal or stream.isatty():
                    with suppress(AttributeError):  # some streams have no settable attributes
                        stream.write = partial(self._write_above, stream, stream.write)  # type: ignore[method-assign]
                        self._wrapped_streams.append(stream)  # reaches loggers that already hold it, too
            if lines is None:
                self._blocks.pop(block, None)
            else:
                self._blocks[block] = lines
            self._draw()
            while self._wrapped_streams and not self._blocks:
                with suppress(AttributeError):
                    del self._wrapped_streams.pop().write

    def _draw(self) -> None:
        """Redraw all blocks; none are shown while the program's last line is unfinished."""
        size, erased = self.size, self._erase_text()
        lines = [line for lines in self._blocks.values() for line in lines]
        shown = [] if self._line_is_open else [str(disp_trim(line, size.columns - 1)) for line in lines]
        self._drawn = shown[: size.lines - 1]
        self._send(erased + "".join(f"{line}\n" for line in self._drawn))

    def _erase_text(self) -> str:
        """Return the text that erases the shown lines, which a terminal made narrower has wrapped."""
        columns = self.size.columns
        rows = sum(max(1, math.ceil(disp_len(line) / columns)) for line in self._drawn)
        self._drawn = []
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""  # up by the rows, and erase to the end

    def _send(self, text: str) -> None:
        if text:
            self._write(text)
            self._terminal.flush()

    def _write_above(self, stream: TextIO, write: Callable[[str], int], text: str) -> int:
        """Erase the lines, write the text, and redraw them below."""
        if not text or os.getpid() != self._pid:  # a forked process does not know the current lines
            return write(text)
        with self._lock:
            self._send(self._erase_text())
            written = write(text)
            stream.flush()
            self._line_is_open = not text.endswith("\n")
            self._draw()
        return written


WINDOW_S = 1.0  # between two measurements
REDRAWN_S = 0.2  # between two redraws
WAIT_S = 1.0  # a wait for a batch this long redraws the state
SHOWN_PERIOD_S = 60.0  # the period of the shown rates
SHOWN_LEVELS = 60  # of the queue, one per second
MIN_SHARE = 0.005  # of the time; lesser stages are not shown


class _Lines(FittingBar, tqdm):  # type: ignore[type-arg]
    """A bar on the screen, with lines below it, made of parts with ranks for :func:`fit_parts`."""

    parts: Sequence[Sequence[tuple[float, str]]] = ()

    def display(self, *_: object) -> None:
        screen = _Screen.current()
        self.ncols = screen.size.columns - 1
        lines = (fit_parts(parts, self.ncols - 2) for parts in self.parts)
        screen.put(self, [str(self), *(f"  {line}" for line in lines if line)])

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            _Screen.current().put(self, None)


def watched(loader: Iterable[Any], *, title: str = "loading") -> Iterator[Any]:
    """Yield the batches of the next epoch or pass of ``loader``, and show its state.

    ``loader`` is a Loader, a Flow, a RemoteSource, or what to_torch or to_jax makes of one.

    ``for images, labels in watched(train): ...`` shows lines on a terminal's stderr: the ``title`` and the
    epoch's progress, the rate over the last minute and the limiting stage, each stage's share of the time,
    and the number of ready batches. They stay below the program's output, and are removed when the epoch
    ends, is left, or fails. A notebook shows one line, with the rate and the limit; elsewhere nothing is
    shown. The cost is some microseconds per batch. Raises UsageError for anything else.
    """
    source: Any = getattr(loader, "source", loader)
    total = None
    if not hasattr(source, "stats"):
        raise UsageError(
            f"watched takes a Loader or a Flow, or to_torch or to_jax of one, not {type(loader).__name__}"
        )
    with suppress(TypeError):  # a flow of unknown length
        total = len(loader)  # type: ignore[arg-type]
    with LoaderBar(source, total=total, title=title) as bar, closing(iter(loader)) as batches:  # type: ignore[type-var]
        yield from bar.over(batches)


class LoaderBar(Iterator[Any], Closable):
    """The state on a terminal or in a notebook, if it is to be ``shown``. Not thread-safe.

    On a terminal a thread redraws it every second during a wait for the next batch. While the program does
    its own work the thread is idle, so that a fork copies no lock that it holds.
    """

    _bar: Any = None
    _thread: threading.Thread | None = None

    def __init__(
        self, loader: Loader | Flow, *, total: int | None = None, title: str = "loading", shown: bool = True
    ) -> None:
        if not shown or not (in_notebook() or sys.stderr.isatty()):
            return
        self._loader: Any = loader
        self._history: deque[tuple[float, Any]] = deque([(perf_counter(), loader.stats())])  # (time, stats)
        self._rates: deque[float] = deque(maxlen=round(SHOWN_PERIOD_S))  # between successive stats
        self._levels: deque[int] = deque(maxlen=SHOWN_LEVELS)
        self._waits_since: float | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        can_move = not in_notebook() and os.environ.get("TERM", "dumb") != "dumb"  # out of its line
        self._bar = (_Lines if can_move else bar_class())(
            total=total,
            desc=printable(title),
            leave=False,
            dynamic_ncols=not can_move,
            unit="batches",
            bar_format=UNCOUNTED_BAR if total is None else BAR,
            mininterval=REDRAWN_S,
            miniters=0,
        )
        if self._bar.disable:  # by TQDM_DISABLE
            self._bar = None
        elif can_move:  # in a notebook another thread would draw below another cell
            self._thread = threading.Thread(target=self._draw, name="shardprep-watch", daemon=True)
            self._thread.start()

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the batches that counts them and keeps none."""
        self._batches = batches
        return batches if self._bar is None else self

    def __next__(self) -> Any:
        self._set_wait(perf_counter())
        try:
            batch = next(self._batches)
        finally:
            self._set_wait(None)
        if perf_counter() >= self._history[-1][0] + WINDOW_S:
            self._measure()
        self._bar.update()
        return batch

    def _set_wait(self, since: float | None) -> None:
        """Begin the wait for a batch, or end it with None, once the thread is not drawing."""
        with self._lock:
            self._waits_since = since

    def _draw(self) -> None:
        while not self._closed.wait(WAIT_S):
            with self._lock:
                if self._waits_since is not None and perf_counter() - self._waits_since >= WAIT_S:
                    self._measure()

    def _measure(self) -> None:
        """Take the stats, and show what they say of the last minute."""
        now, stats = perf_counter(), self._loader.stats()
        if isinstance(stats, PipelineStats):
            verdict = stats.since(self._history[-1][1]).verdict
            self._rates.append(verdict.rate if verdict else 0.0)
        self._history.append((now, stats))
        while len(self._history) > 2 and self._history[1][0] <= now - SHOWN_PERIOD_S:
            self._history.popleft()
        parts = list(self._parts())
        if isinstance(self._bar, _Lines):
            self._bar.parts = parts
        else:
            text = "".join(text for rank, text in parts[0] if rank <= 1)
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.refresh()

    def _parts(self) -> Iterator[list[tuple[float, str]]]:
        """Yield the parts of each line below the bar, with ranks for :func:`fit_parts`."""
        (began, first), (now, last) = self._history[0], self._history[-1]
        if not isinstance(last, PipelineStats):  # of a RemoteSource
            yield from ([(0.0, line)] for line in str(last).splitlines())
            return
        recent, seconds = last.since(first), now - began
        if verdict := recent.verdict:
            rate, period = (0, f"{verdict.rate:,.0f} {verdict.unit}/s"), (3, f" over {seconds:.0f} s")
            yield [rate, period, (2, self._course(self._rates)), (1, f", {verdict.limit} limits")]
        else:
            yield []
        yield [
            (1 - load.utilisation, f"  {load.name} {load.utilisation:.0%}")
            for load in recent.loads
            if load.utilisation >= MIN_SHARE
        ]
        engine = getattr(self._loader, "engine", None)
        if engine is not None and engine.slots:
            self._levels.append(engine.ready)
            waiting = recent.loads[-1].starved if recent.loads else 0.0
            course = self._course(self._levels, most=engine.slots)
            ready = (0, f"queue {self._levels[-1]} of {engine.slots} slots")
            yield [ready, (2, course), (1, f", the step waits {waiting:.0%}")]
        storage = getattr(recent, "storage", None)
        if storage is not None and storage.shards.missing:
            shards, speed = storage.shards, storage.received_bytes / max(seconds, WINDOW_S) / 1e6
            begun, cached = (12 * n // shards.total for n in (shards.begun, shards.begun + shards.ahead))
            course = "" if self._bar.ascii else f"{'█' * begun}{'▒' * (cached - begun)}{'░' * (12 - cached)} "
            count = (0, f"{shards.begun} of {shards.total}")
            more = (1, f" shards begun, {shards.ahead} ahead")
            yield [(0, "storage "), (3, course), count, more, (2, f", {speed:,.1f} MB/s")]

    def _course(self, values: Sequence[float], *, most: float | None = None) -> str:
        return "" if self._bar.ascii or len(values) < 2 else f" {sparkline(values, most=most)}"

    def close(self) -> None:
        if self._thread:
            self._closed.set()
            self._thread.join(WAIT_S)  # Ctrl-C may have left the lock held (cpython#148874)
        if self._bar is not None:
            self._bar.close()


def tracing(loader: Loader, *, keep: int = KEEP) -> AbstractContextManager[Trace]:
    """Trace ``loader`` within the context; the trace stays valid after it, and after the loader.

    ``keep`` is the number of the latest spans to keep of each kind. A second trace ends the first. Raises
    UsageError for anything but a Loader.
    """
    if not hasattr(loader, "engine"):
        raise UsageError(f"tracing takes a Loader, not {type(loader).__name__}")
    return loader.engine.tracing(keep=keep)

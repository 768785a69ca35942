"""Progress of long work, and bars that show it in a terminal or a notebook."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from shardprep.formats.errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
SHAPES = (BAR, BAR.removesuffix("{postfix}"), "{desc}: {percentage:3.0f}%|{bar}| {remaining} left")
UNCOUNTED_BAR = "{desc}: {n_fmt} {unit}, {elapsed}{postfix}"


class Progress(Protocol):
    """Receives the progress of a conversion, repair or verification.

    Its methods are called from one thread, and must not raise.
    """

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Start a task of this many records and bytes (``size``), which ends with the context.

        A task without records, such as a download, consists of bytes only.
        """

    def at(self, records: int, size: int) -> None:
        """Set the number of records and bytes (``size``) done."""


class NoProgress:
    """A progress that is not shown."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        return nullcontext()

    def at(self, records: int, size: int) -> None:
        """Do nothing."""


WINDOW_S = 60.0  # of the rates
LEAST_S = 1.0  # a rate over less time would show how long processes take to start


class Pace:
    """Progress and rates of a task, counted in records, or in bytes if it has no records."""

    def __init__(self, records: int, size: int, noun: str = "images") -> None:
        self.total, self.counts_bytes = records or size, size > 0 and not records
        self._noun = noun
        self._samples = deque([(time.monotonic(), 0, 0)])  # of the last minute: time, count, bytes

    def at(self, records: int, size: int) -> None:
        now = time.monotonic()
        self._samples.append((now, size if self.counts_bytes else records, size))
        while len(self._samples) > 2 and self._samples[1][0] < now - WINDOW_S:
            self._samples.popleft()

    @property
    def done(self) -> int:
        """The number of records or bytes done, at most a known ``total``."""
        return min(self._samples[-1][1], self.total or sys.maxsize)

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0

    def rates(self) -> list[str]:
        """Return images/s, and MB/s of a task with bytes; empty while they are unknown."""
        rate, bytes_per_second = self._rates()
        texts = [f"{rate:,.0f} {self._noun}/s"] if rate and not self.counts_bytes else []
        return [*texts, f"{bytes_per_second / 1e6:,.0f} MB/s"] if bytes_per_second else texts

    def left_s(self) -> float | None:
        """Return the remaining time in seconds; None while it is unknown."""
        missing, (rate, _) = self.total - self.done, self._rates()
        return missing / rate if rate else None if missing else 0.0

    def _rates(self) -> tuple[float, float]:
        (began, count, size), (now, last_count, last_size) = self._samples[0], self._samples[-1]
        if (seconds := now - began) < LEAST_S:
            return 0.0, 0.0
        return (last_count - count) / seconds, (last_size - size) / seconds


class BarProgress:
    """A progress bar on stderr or below a notebook cell, removed when the task ends.

    Counts records, which it calls ``noun``, or bytes in a task without records. If neither total is known, it
    shows only the count. Shows nothing unless it is ``visible``.
    """

    def __init__(self, noun: str = "images", *, visible: bool = True) -> None:
        self._noun, self._is_visible = noun, visible
        self._bar: tqdm[Any] | None = None
        self._pace = Pace(0, 0)

    def note(self, text: str) -> None:
        if self._is_visible:
            bar_class().write(printable(text), file=None if in_notebook() else sys.stderr)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        self._pace = pace = Pace(records, size, self._noun)
        unit = {"unit": "bytes", "unit_scale": True} if pace.counts_bytes else {"unit": self._noun}
        with bar_class()(
            total=pace.total or None,
            desc=printable(title),
            leave=False,
            bar_format=BAR if pace.total else UNCOUNTED_BAR,
            disable=not self._is_visible,
            dynamic_ncols=True,
            miniters=0,
            **unit,
        ) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        if self._bar is not None and self._is_visible:
            self._pace.at(records, size)
            self._bar.set_postfix_str(", ".join(self._pace.rates()), refresh=False)
            self._bar.update(self._pace.done - self._bar.n)


def shown(progress: Progress | None) -> Progress:
    """Return ``progress``, or by default a bar in a notebook, and no progress elsewhere."""
    return progress or (BarProgress() if in_notebook() else NoProgress())


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, by the same test as ``tqdm.auto``."""
    return "ipykernel.zmqshell" in sys.modules


def bar_class() -> type[tqdm[Any]]:
    """Return the class of bars: widgets in a notebook with ipywidgets, otherwise lines of text."""
    return _bar_class(notebook=in_notebook())


@cache
def _bar_class(*, notebook: bool) -> type[tqdm[Any]]:
    if notebook:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns without ipywidgets, and falls back to text
            from tqdm.autonotebook import tqdm  # imported late for start-up time
    else:
        from tqdm import tqdm  # imported late for start-up time
    return type("Bar", (FittingBar, tqdm), {})


class FittingBar:
    """Mixin of bars that leave out what does not fit into the terminal's width, as tqdm cuts numbers off.

    They have neither tqdm's lock in /dev/shm, which processes share, nor its monitoring thread.
    """

    monitor_interval = 0
    _lock = threading.RLock()
    format_dict: Any
    format_meter: Any

    def __str__(self) -> str:
        from tqdm.utils import disp_len  # imported late for start-up time

        values = self.format_dict
        if values["ncols"] and values["bar_format"] == BAR:
            for values["bar_format"] in SHAPES:
                if disp_len(self.format_meter(**{**values, "ncols": None})) <= values["ncols"]:
                    break
        return str(self.format_meter(**values))


def tell_shards(progress: Progress, done: int, total: int) -> None:
    """Pass the number of shards done to a progress that takes it, in a method ``shards(done, total)``."""
    if hasattr(progress, "shards"):
        progress.shards(done, total)

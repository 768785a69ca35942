"""Progress on stderr: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from tqdm import tqdm

from shardprep.formats.printable import printable
from shardprep.formats.progress import NoProgress, Progress
from shardprep.formats.system.sizes import count_of
from shardprep.formats.system.sizes import size as size_of

from .output import say
from .pace import Pace

Form = Literal["never", "plain", "bar"]

FORMS = ("auto", "never", "plain", "bar")
LINE_INTERVAL_S = 30.0
LEAST_BAR = 8  # characters of the bar itself, which gives way to nothing but the time left
BESIDE_BAR = len(": 100%|| ")


def progress_in(form: Form) -> Progress:
    """Return the progress of that form."""
    match form:
        case "bar":
            return BarProgress()
        case "plain":
            return PlainProgress()
    return NoProgress()


def form_of(chosen: str) -> Form:
    """Return the form for a value of ``--progress``: "auto" is a bar on a terminal, else lines."""
    if chosen == "auto":
        return "bar" if sys.stderr.isatty() else "plain"
    return "never" if chosen == "never" else "plain" if chosen == "plain" else "bar"


def new_bar(**options: Any) -> tqdm[Any]:
    """Return a bar on stderr that starts no thread and takes no semaphore, and is cleared at its end."""
    tqdm.set_lock(threading.RLock())  # the default lock is shared between processes, in /dev/shm
    tqdm.monitor_interval = 0  # otherwise tqdm starts a thread, and warns if the system allows none
    return tqdm(file=sys.stderr, leave=False, dynamic_ncols=True, miniters=0, **options)


def stamped(text: str) -> None:
    """Print a line to stderr after the time of day, as for a log."""
    say(f"{time.strftime('%H:%M:%S')} {text}", err=True)


class BarProgress:
    """A bar with images/s, MB/s and the time left, as far as they fit into the terminal's width."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._pace = Pace(0, 0)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        say(text, err=True)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        """Show a bar during the work; clear it at the end."""
        self._pace = Pace(records, size)
        with new_bar(
            total=self._pace.total, desc=printable(title), bar_format="{desc}: {percentage:3.0f}%|{bar}|"
        ) as bar:
            self._bar = bar
            yield

    def at(self, records: int, size: int) -> None:
        """Move the bar to this number of images and bytes."""
        if self._bar is not None:
            self._pace.at(records, size)
            room = (self._bar.format_dict["ncols"] or 80) - len(self._bar.desc) - BESIDE_BAR
            text = fitting(self._pace, room - LEAST_BAR)
            self._bar.bar_format = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
            self._bar.update(self._pace.done - self._bar.n)


def fitting(pace: Pace, width: int) -> str:
    """Return the most of rates and time left that fits into the width; at least the time left.

    >>> fitting(Pace(0, 0), 80), fitting(Pace(0, 0), 1)
    ('0 images, 0:00 left', '0:00 left')
    """
    left, rates = f"{pace.left()} left", pace.rates()
    done = size_of(pace.done) if pace.counts_bytes else f"{pace.done:,} images"
    texts = (", ".join(parts) for parts in ([done, *rates, left], [*rates, left], [*rates[:1], left]))
    return next((text for text in texts if len(text) <= width), left)


class PlainProgress:
    """Lines for a log: what is noted, each finished shard, and the state every 30 seconds."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._title, self._pace = "", Pace(0, 0)
        self._next = 0.0
        self._shards = ""
        self._shown = 0  # records or bytes, in the last line

    def note(self, text: str) -> None:
        """Print a line."""
        stamped(text)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        """Begin to print lines of this title."""
        self._title, self._pace = title, Pace(records, size)
        self._shards, self._shown = "", 0
        self._next = time.monotonic() + self._interval_s
        yield

    def at(self, records: int, size: int) -> None:
        """Print a line if it is time for one."""
        self._pace.at(records, size)
        if time.monotonic() >= self._next:
            self._print()

    def shards(self, done: int, total: int) -> None:
        """Print a line, unless the shards were found finished, and were not built."""
        self._shards = f"{done:,} of {count_of(total, 'shard')}"
        if self._shown != self._pace.done or done == total:
            self._print()

    def _print(self) -> None:
        pace = self._pace
        self._next = time.monotonic() + self._interval_s
        self._shown = pace.done
        state = [f"{pace.share:.0%}", self._shards, *pace.rates(), f"{pace.left()} left"]
        stamped(f"{self._title}: {', '.join(part for part in state if part)}")

"""Progress on stderr: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

from tqdm import tqdm

from shardprep.cli.console.output import say
from shardprep.formats.errors import printable
from shardprep.formats.runtime.progress import NoProgress, Progress
from shardprep.formats.runtime.sizes import count_of, size as size_of

WINDOW_S = 60.0
LEAST_S = 1.0  # of a rate: before, it would show how long processes take to start


class Sample(NamedTuple):
    """How much of a task was done at a time, in seconds of the monotonic clock."""

    time: float
    records: int
    size: int


class Pace:
    """How far a task of so many records and bytes is, and how fast it goes on; without records, of bytes."""

    def __init__(self, records: int, size: int) -> None:
        self._records, self.counts_bytes = records, size > 0 and not records
        self.total, self._sized = size if self.counts_bytes else records, size > 0
        self._samples = deque([Sample(time.monotonic(), 0, 0)])

    def at(self, records: int, size: int) -> None:
        """Take the number of records and bytes that are done now."""
        now = time.monotonic()
        self._samples.append(Sample(now, min(records, self._records), size))
        while len(self._samples) > 2 and self._samples[1].time < now - WINDOW_S:
            self._samples.popleft()

    @property
    def records(self) -> int:
        """The number of records that are done, at most all."""
        return self._samples[-1].records

    @property
    def done(self) -> int:
        """The number of records, or of bytes, that are done, at most all."""
        return min(self._samples[-1].size, self.total) if self.counts_bytes else self.records

    @property
    def share(self) -> float:
        """The share that is done, 0 to 1."""
        return self.done / self.total if self.total else 1.0

    def rates(self) -> list[str]:
        """Return images/s, and MB/s if there are bytes, as far as they are known."""
        images, size = self._rate("records"), self._rate("size")
        found = [] if images is None or self.counts_bytes else [f"{images:,.0f} images/s"]
        return found if size is None or not self._sized else [*found, f"{size / 1e6:,.0f} MB/s"]

    def left(self) -> str:
        """Return the time that is left, "?" if it is not known yet.

        >>> Pace(0, 0).left()
        '0:00'
        """
        rate = self._rate("size" if self.counts_bytes else "records")
        missing = self.total - self.done
        if not missing:
            return clock(0)
        return clock(missing / rate) if rate else "?"

    def _rate(self, column: str) -> float | None:
        first, last = self._samples[0], self._samples[-1]
        seconds = last.time - first.time
        return (getattr(last, column) - getattr(first, column)) / seconds if seconds >= LEAST_S else None


def clock(seconds: float) -> str:
    """Return a time in minutes and seconds, or in hours.

    >>> clock(5), clock(754.4), clock(3661)
    ('0:05', '12:34', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


Form = Literal["never", "plain", "bar"]

FORMS = ("auto", "never", "plain", "bar")
LINE_INTERVAL_S = 30.0
SHARD_INTERVAL_S = 1.0
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


def form_of(chosen: Literal["auto"] | Form) -> Form:
    """Return the form for a value of ``--progress``: "auto" is a bar on a terminal, else lines."""
    if chosen != "auto":
        return chosen
    return "bar" if sys.stderr.isatty() else "plain"


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
    """Lines for a log: what is noted, finished shards once a second, and the state every 30 seconds."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._title, self._pace = "", Pace(0, 0)
        self._next = self._printed = 0.0
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
        """Print a line, unless one was just printed, or the shards were found finished."""
        self._shards = f"{done:,} of {count_of(total, 'shard')}"
        is_due = self._shown != self._pace.done and time.monotonic() >= self._printed + SHARD_INTERVAL_S
        if is_due or done == total:
            self._print()

    def _print(self) -> None:
        pace = self._pace
        self._printed = time.monotonic()
        self._next = self._printed + self._interval_s
        self._shown = pace.done
        left = pace.left()
        state = [f"{pace.share:.0%}", self._shards, *pace.rates(), "" if left == "?" else f"{left} left"]
        stamped(f"{self._title}: {', '.join(part for part in state if part)}")


SHARE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
TEXT_ONLY = "{desc}"


class StatusLine:
    """The state of work that does not count images; ``bar_format`` is SHARE or TEXT_ONLY."""

    def __init__(self, form: Form, bar_format: str) -> None:
        self._form, self._bar_format = form, bar_format
        self._bar: tqdm[Any] | None = None
        self._next = time.monotonic() + LINE_INTERVAL_S

    def __enter__(self) -> Self:
        if self._form == "bar":
            self._bar = new_bar(total=100, bar_format=self._bar_format)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, text: str, share: float = 0.0) -> None:
        """Show the text, and the share of the work that is done; in a log at most every 30 seconds."""
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(round(share * 100) - self._bar.n)
            self._bar.refresh()
        elif self._form == "plain" and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL_S
            stamped(f"{text}, {share:.0%}" if share else text)

"""Progress on stderr: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardprep.cli.console.output import say
from shardprep.formats.errors import printable
from shardprep.formats.runtime.progress import NoProgress, bar_class
from shardprep.formats.runtime.sizes import count_of, size as size_of

if TYPE_CHECKING:
    from tqdm import tqdm

WINDOW_S = 60.0
LEAST_S = 1.0  # of a rate: before, it would show how long processes take to start


class Pace:
    """How far a task of so many records and bytes is, and how fast it goes on; without records, of bytes."""

    def __init__(self, records: int, size: int) -> None:
        self.total, self.counts_bytes = records or size, size > 0 and not records
        self._has_bytes = size > 0
        self._samples = deque([(time.monotonic(), 0, 0)])  # of the last minute: time, what is done, bytes

    def at(self, records: int, size: int) -> None:
        """Take the number of records and bytes that are done now."""
        now = time.monotonic()
        self._samples.append((now, min(size if self.counts_bytes else records, self.total), size))
        while len(self._samples) > 2 and self._samples[1][0] < now - WINDOW_S:
            self._samples.popleft()

    @property
    def done(self) -> int:
        """The number of records, or of bytes, that are done, at most all."""
        return self._samples[-1][1]

    @property
    def share(self) -> float:
        """The share that is done, 0 to 1."""
        return self.done / self.total if self.total else 1.0

    def rates(self) -> list[str]:
        """Return images/s, and MB/s if there are bytes, as far as they are known."""
        if (rates := self._rates()) is None:
            return []
        images = [] if self.counts_bytes else [f"{rates[0]:,.0f} images/s"]
        return [*images, f"{rates[1] / 1e6:,.0f} MB/s"] if self._has_bytes else images

    def left(self) -> str:
        """Return the time that is left, "?" if it is not known yet.

        >>> Pace(0, 0).left()
        '0:00'
        """
        missing, rates = self.total - self.done, self._rates()
        if not missing:
            return clock(0)
        return clock(missing / rates[0]) if rates and rates[0] else "?"

    def _rates(self) -> tuple[float, float] | None:
        (began, *first), (now, *last) = self._samples[0], self._samples[-1]
        seconds = now - began
        return (
            ((last[0] - first[0]) / seconds, (last[1] - first[1]) / seconds) if seconds >= LEAST_S else None
        )


def clock(seconds: float) -> str:
    """Return a time in minutes and seconds, or in hours.

    >>> clock(5), clock(754.4), clock(3661)
    ('0:05', '12:34', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


FORMS = ("auto", "never", "plain", "bar")
LINE_INTERVAL_S = 30.0
SHARD_INTERVAL_S = 1.0
LEAST_BAR = 8  # characters of the bar itself, which gives way to nothing but the time left
BESIDE_BAR = len(": 100%|| ")

SHARE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
TEXT_ONLY = "{desc}"


class CommandProgress(NoProgress):
    """The progress of a command, which is not shown."""

    @contextmanager
    def status(self, bar_format: str) -> Iterator[Callable[..., None]]:
        """Show the text and the share of the work that the yielded function is called with.

        ``bar_format`` is SHARE or TEXT_ONLY.
        """
        yield lambda text, share=0.0: None


def progress_in(form: str) -> CommandProgress:
    """Return the progress of one of FORMS: "auto" is a bar on a terminal, else lines."""
    if form == "auto":
        form = "bar" if sys.stderr.isatty() else "plain"
    kinds: dict[str, type[CommandProgress]] = {"bar": BarProgress, "plain": PlainProgress}
    return kinds.get(form, CommandProgress)()


def stamped(text: str) -> None:
    """Print a line to stderr after the time of day, as for a log."""
    say(f"{time.strftime('%H:%M:%S')} {text}", err=True)


class BarProgress(CommandProgress):
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
        form = "{desc}: {percentage:3.0f}%|{bar}|"
        with _bar(total=self._pace.total, desc=printable(title), bar_format=form) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        """Move the bar to this number of images and bytes."""
        if self._bar is not None:
            self._pace.at(records, size)
            room = (self._bar.format_dict["ncols"] or 80) - len(self._bar.desc) - BESIDE_BAR
            text = fitting(self._pace, room - LEAST_BAR)
            self._bar.bar_format = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
            self._bar.update(self._pace.done - self._bar.n)

    @contextmanager
    def status(self, bar_format: str) -> Iterator[Callable[..., None]]:
        """Show a bar with the text."""
        with _bar(total=100, bar_format=bar_format) as bar:

            def show(text: str, share: float = 0.0) -> None:
                bar.set_description_str(text, refresh=False)
                bar.update(round(share * 100) - bar.n)
                bar.refresh()

            yield show


def _bar(**options: Any) -> tqdm[Any]:
    return bar_class()(file=sys.stderr, leave=False, dynamic_ncols=True, miniters=0, **options)


def fitting(pace: Pace, width: int) -> str:
    """Return the most of rates and time left that fits into the width; at least the time left.

    >>> fitting(Pace(0, 0), 80), fitting(Pace(0, 0), 1)
    ('0 images, 0:00 left', '0:00 left')
    """
    left, rates = f"{pace.left()} left", pace.rates()
    done = size_of(pace.done) if pace.counts_bytes else f"{pace.done:,} images"
    texts = (", ".join(parts) for parts in ([done, *rates, left], [*rates, left], [*rates[:1], left]))
    return next((text for text in texts if len(text) <= width), left)


class PlainProgress(CommandProgress):
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

    @contextmanager
    def status(self, bar_format: str) -> Iterator[Callable[..., None]]:
        """Print a line with the text every 30 seconds."""
        due = time.monotonic() + self._interval_s

        def show(text: str, share: float = 0.0) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + self._interval_s
                stamped(f"{text}, {share:.0%}" if share else text)

        yield show

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
LEAST_S = 1.0  # a rate over less time would show how long processes take to start


class Pace:
    """Progress and rates of a task, counted in records, or in bytes if it has no records."""

    def __init__(self, records: int, size: int) -> None:
        self.total, self.counts_bytes = records or size, size > 0 and not records
        self._has_bytes = size > 0
        self._samples = deque([(time.monotonic(), 0, 0)])  # of the last minute: time, count, bytes

    def at(self, records: int, size: int) -> None:
        now = time.monotonic()
        self._samples.append((now, min(size if self.counts_bytes else records, self.total), size))
        while len(self._samples) > 2 and self._samples[1][0] < now - WINDOW_S:
            self._samples.popleft()

    @property
    def done(self) -> int:
        """The number of records or bytes done, at most ``total``."""
        return self._samples[-1][1]

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0

    def rates(self) -> list[str]:
        """Return images/s, and MB/s for a task with bytes; empty while they are unknown."""
        if (rates := self._rates()) is None:
            return []
        images = [] if self.counts_bytes else [f"{rates[0]:,.0f} images/s"]
        return [*images, f"{rates[1] / 1e6:,.0f} MB/s"] if self._has_bytes else images

    def left(self) -> str:
        """Return the remaining time, "?" while it is unknown.

        >>> Pace(0, 0).left()
        '0:00'
        """
        missing, rates = self.total - self.done, self._rates()
        if not missing:
            return clock(0)
        return clock(missing / rates[0]) if rates and rates[0] else "?"

    def _rates(self) -> tuple[float, float] | None:
        (began, count, size), (now, last_count, last_size) = self._samples[0], self._samples[-1]
        if (seconds := now - began) < LEAST_S:
            return None
        return (last_count - count) / seconds, (last_size - size) / seconds


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, from an hour on with the hours.

    >>> clock(5), clock(754.4), clock(3661)
    ('0:05', '12:34', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


FORMS = ("auto", "never", "plain", "bar")
LINE_INTERVAL_S = 30.0
SHARD_INTERVAL_S = 1.0
LEAST_BAR = 8  # characters of the bar itself, which only the remaining time may shorten
BESIDE_BAR = len(": 100%|| ")

SHARE = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
TEXT_ONLY = "{desc}"


class CommandProgress(NoProgress):
    """The progress of a command; this one shows nothing."""

    @contextmanager
    def status(self, bar_format: str) -> Iterator[Callable[..., None]]:
        """Yield a function that shows a text and the share of the work done, as SHARE or TEXT_ONLY."""
        yield lambda text, share=0.0: None


def progress_in(form: str) -> CommandProgress:
    """Return the progress in one of FORMS: "auto" is a bar on a terminal, else lines."""
    if form == "auto":
        form = "bar" if sys.stderr.isatty() else "plain"
    kinds: dict[str, type[CommandProgress]] = {"bar": CommandBar, "plain": PlainProgress}
    return kinds.get(form, CommandProgress)()


def stamped(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}", err=True)


class CommandBar(CommandProgress):
    """A bar with images/s, MB/s and the remaining time, as far as they fit into the terminal's width."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._pace = Pace(0, 0)

    def note(self, text: str) -> None:
        say(text, err=True)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        self._pace = Pace(records, size)
        form = "{desc}: {percentage:3.0f}%|{bar}|"
        with _bar(total=self._pace.total, desc=printable(title), bar_format=form) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        if self._bar is not None:
            self._pace.at(records, size)
            room = (self._bar.format_dict["ncols"] or 80) - len(self._bar.desc) - BESIDE_BAR
            text = fitting(self._pace, room - LEAST_BAR)
            self._bar.bar_format = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
            self._bar.update(self._pace.done - self._bar.n)

    @contextmanager
    def status(self, bar_format: str) -> Iterator[Callable[..., None]]:
        with _bar(total=100, bar_format=bar_format) as bar:

            def show(text: str, share: float = 0.0) -> None:
                bar.set_description_str(text, refresh=False)
                bar.update(round(share * 100) - bar.n)
                bar.refresh()

            yield show


def _bar(**options: Any) -> tqdm[Any]:
    return bar_class()(file=sys.stderr, leave=False, dynamic_ncols=True, miniters=0, **options)


def fitting(pace: Pace, width: int) -> str:
    """Return the count, rates and remaining time, without those that do not fit; the time always stays.

    >>> fitting(Pace(0, 0), 80), fitting(Pace(0, 0), 1)
    ('0 images, 0:00 left', '0:00 left')
    """
    left, rates = f"{pace.left()} left", pace.rates()
    done = size_of(pace.done) if pace.counts_bytes else f"{pace.done:,} images"
    texts = (", ".join(parts) for parts in ([done, *rates, left], [*rates, left], [*rates[:1], left]))
    return next((text for text in texts if len(text) <= width), left)


class PlainProgress(CommandProgress):
    """Lines for a log: notes, finished shards at most once a second, and the state every 30 seconds."""

    def __init__(self, interval_s: float = LINE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._title, self._pace = "", Pace(0, 0)
        self._next = self._printed = 0.0
        self._shards = ""
        self._shown = 0  # records or bytes in the last line

    def note(self, text: str) -> None:
        stamped(text)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        self._title, self._pace = title, Pace(records, size)
        self._shards, self._shown = "", 0
        self._next = time.monotonic() + self._interval_s
        yield

    def at(self, records: int, size: int) -> None:
        self._pace.at(records, size)
        if time.monotonic() >= self._next:
            self._print()

    def shards(self, done: int, total: int) -> None:
        """Print a line after progress, at most once a second, and when all shards are done."""
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
        due = time.monotonic() + self._interval_s

        def show(text: str, share: float = 0.0) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + self._interval_s
                stamped(f"{text}, {share:.0%}" if share else text)

        yield show

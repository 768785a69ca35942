"""Progress on stderr: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from shardprep.cli.console.output import say
from shardprep.formats.runtime.progress import BarProgress, NoProgress, Pace, bar_class
from shardprep.formats.runtime.sizes import count_of

FORMS = ("auto", "never", "plain", "bar")
LINE_INTERVAL_S = 30.0
SHARD_INTERVAL_S = 1.0


class CommandProgress(NoProgress):
    """The progress of a command; this one shows nothing."""

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows a text in the place of the one before."""
        yield lambda text: None


def progress_in(form: str) -> CommandProgress:
    """Return the progress in one of FORMS: "auto" is a bar on a terminal, else lines."""
    if form == "auto":
        form = "bar" if sys.stderr.isatty() else "plain"
    kinds: dict[str, type[CommandProgress]] = {"bar": CommandBar, "plain": PlainProgress}
    return kinds.get(form, CommandProgress)()


def stamped(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}", err=True)


class CommandBar(BarProgress, CommandProgress):
    """A bar on a terminal."""

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        with bar_class()(bar_format="{desc}", leave=False, dynamic_ncols=True) as bar:
            yield bar.set_description_str


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
        left = pace.left_s()
        remaining = "" if left is None else f"{timedelta(seconds=round(left))} left"
        state = [f"{pace.share:.0%}", self._shards, *pace.rates(), remaining]
        stamped(f"{self._title}: {', '.join(part for part in state if part)}")

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        due = time.monotonic() + self._interval_s

        def show(text: str) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + self._interval_s
                stamped(text)

        yield show

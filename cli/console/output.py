"""Text output: numbers, tables, JSON and progress bars."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

from shardprep.formats.printable import MOST_CHARACTERS, printable

MOST_IN_LINE = 4 * MOST_CHARACTERS  # an error has a path, a shard, a key and a message


BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} images, {rate_fmt}{postfix}, {remaining} left"


def size(count: float) -> str:
    """Return a number of bytes in decimal units, as for disks and rates.

    >>> size(999), size(123456), size(147.9e9)
    ('999 B', '123.5 KB', '147.9 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.95 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError  # pragma: no cover - the loop ends at GB


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count_of(1, "shard"), count_of(1281167, "image"), count_of(2, "class")
    ('1 shard', '1,281,167 images', '2 classes')
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line of text, made printable, because it may quote names from files."""
    click.echo(printable(text, MOST_IN_LINE), err=err)


def print_fields(fields: Mapping[str, object], indent: str = "  ") -> None:
    """Print names and values in two columns, each made printable and on one line."""
    shown = {printable(name): printable(str(value)) for name, value in fields.items()}
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"{indent}{name:<{width}}  {value}")


def print_json(value: Any) -> None:
    """Print one JSON object to stdout; its strings are escaped as JSON requires."""
    click.echo(json.dumps(value, indent=2))


class TerminalProgress:
    """A progress bar with images/s, MB/s and time left; silent if stderr is not a terminal."""

    def __init__(self) -> None:
        tqdm.set_lock(threading.RLock())  # the default lock is shared between processes, in /dev/shm
        tqdm.monitor_interval = 0  # otherwise tqdm starts a thread, and warns if the system allows none
        self._shown = sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._began = 0.0

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            say(text, err=True)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        """Show a bar during the work; clear it at the end."""
        self._began = time.monotonic()
        with tqdm(
            total=records,
            desc=title,
            unit=" images",
            disable=not self._shown,
            leave=False,
            bar_format=BAR,
            dynamic_ncols=True,
        ) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        """Move the bar to this number of images and bytes."""
        if self._bar is not None and self._shown:
            rate = size / max(time.monotonic() - self._began, 1e-9) / 1e6
            self._bar.set_postfix_str(f"{rate:,.0f} MB/s", refresh=False)
            self._bar.update(records - self._bar.n)

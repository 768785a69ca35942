"""A progress bar on stderr, drawn only where that is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} images, {rate_fmt}{postfix}, {remaining} left"


class TerminalProgress:
    """Images/s, MB/s and time left; silent where stderr is not a terminal."""

    def __init__(self) -> None:
        tqdm.set_lock(threading.RLock())  # its own would be shared between processes, in /dev/shm
        self._shown = sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._began = 0.0

    def note(self, text: str) -> None:
        """A line above the bar."""
        if self._shown:
            click.echo(text, err=True)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        """A bar while the work lasts; it is wiped at the end."""
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
        """Move the bar to so many images and bytes."""
        if self._bar is not None and self._shown:
            rate = size / max(time.monotonic() - self._began, 1e-9) / 1e6
            self._bar.set_postfix_str(f"{rate:,.0f} MB/s", refresh=False)
            self._bar.update(records - self._bar.n)

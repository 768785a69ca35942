"""Progress of long work, and bars that show it in a terminal or a notebook."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
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


@runtime_checkable
class ShardProgress(Progress, Protocol):
    """An optional extension of :class:`Progress` that also receives the number of shards done."""

    def shards(self, done: int, total: int) -> None:
        """Set the number of shards done. Called after ``at``, whenever the number changes."""


class NoProgress:
    """A progress that is not shown."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        return nullcontext()

    def at(self, records: int, size: int) -> None:
        """Do nothing."""


class BarProgress:
    """A progress bar on stderr or below a notebook cell, removed when the task ends.

    Counts records, which it calls ``noun``, or bytes in a task without records. If neither total is known, it
    shows only the count. Shows nothing unless it is ``visible``.
    """

    def __init__(self, noun: str = "images", *, visible: bool = True) -> None:
        self._noun, self._is_visible = noun, visible
        self._bar: tqdm[Any] | None = None
        self._began = 0.0

    def note(self, text: str) -> None:
        if self._is_visible:
            bar_class().write(text, file=None if in_notebook() else sys.stderr)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        self._began = time.monotonic()
        unit = {"unit": "bytes", "unit_scale": True} if size and not records else {"unit": self._noun}
        total, shape = records or size or None, BAR if records or size else UNCOUNTED_BAR
        with bar_class()(
            total=total, desc=title, leave=False, bar_format=shape, disable=not self._is_visible, **unit
        ) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        if self._bar is not None and self._is_visible:
            seconds = max(time.monotonic() - self._began, 1e-9)
            rates = [f"{records / seconds:,.0f} {self._noun}/s"] if records else []
            self._bar.set_postfix_str(", ".join([*rates, f"{size / seconds / 1e6:,.0f} MB/s"]), refresh=False)
            self._bar.update((records or size) - self._bar.n)


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
    return type("Bar", (_OwnLock, tqdm), {})


class _OwnLock:
    """Mixin of bars, without tqdm's lock in /dev/shm that processes share, or its monitoring thread."""

    monitor_interval = 0
    _lock = threading.RLock()


def tell_shards(progress: Progress, done: int, total: int) -> None:
    """Pass the number of shards done to a progress that takes it."""
    if isinstance(progress, ShardProgress):
        progress.shards(done, total)

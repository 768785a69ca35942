"""The progress of long work, and the bars that show it on a terminal or in a notebook."""

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
    """Receiver of the progress of a conversion, repair or verification.

    It is called from one thread, and its methods must not raise.
    """

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Begin a task of this many records and bytes (``size``); it ends with the context.

        Without records it is a task of bytes alone, as a download.
        """

    def at(self, records: int, size: int) -> None:
        """Update the number of records and bytes (``size``) of the task that are done."""


@runtime_checkable
class ShardProgress(Progress, Protocol):
    """A progress that is also told when a shard is done. A :class:`Progress` need not have this."""

    def shards(self, done: int, total: int) -> None:
        """Update the number of shards of the task that are done, which changed; ``at`` was called before."""


class NoProgress:
    """A progress that is not shown."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def at(self, records: int, size: int) -> None:
        """Do nothing."""


class BarProgress:
    """A progress bar on stderr or below a notebook's cell, removed when the task ends.

    Records are shown as ``noun``; a task without records as bytes, or, if its size is not known either, by
    their number alone. Nothing is shown if this is not ``visible``.
    """

    def __init__(self, noun: str = "images", *, visible: bool = True) -> None:
        self._noun, self._is_visible = noun, visible
        self._bar: tqdm[Any] | None = None
        self._began = 0.0

    def note(self, text: str) -> None:
        """Print a line."""
        if self._is_visible:
            bar_class().write(text, file=None if in_notebook() else sys.stderr)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        """Show a bar during the work."""
        self._began = time.monotonic()
        unit = {"unit": "bytes", "unit_scale": True} if size and not records else {"unit": self._noun}
        total, shape = records or size or None, BAR if records or size else UNCOUNTED_BAR
        with bar_class()(
            total=total, desc=title, leave=False, bar_format=shape, disable=not self._is_visible, **unit
        ) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        """Move the bar, and show the rates."""
        if self._bar is not None and self._is_visible:
            seconds = max(time.monotonic() - self._began, 1e-9)
            rates = [f"{records / seconds:,.0f} {self._noun}/s"] if records else []
            self._bar.set_postfix_str(", ".join([*rates, f"{size / seconds / 1e6:,.0f} MB/s"]), refresh=False)
            self._bar.update((records or size) - self._bar.n)


def shown(progress: Progress | None) -> Progress:
    """Return ``progress``; where it is None a bar in a notebook, and elsewhere one that is not shown."""
    return progress or (BarProgress() if in_notebook() else NoProgress())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, as ``tqdm.auto`` finds out."""
    return "ipykernel.zmqshell" in sys.modules


def bar_class() -> type[tqdm[Any]]:
    """Return the class of bars: widgets in a notebook that has ipywidgets, otherwise lines of text."""
    return _bar_class(notebook=in_notebook())


@cache
def _bar_class(*, notebook: bool) -> type[tqdm[Any]]:
    if notebook:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets tqdm warns, and takes a line of text
            from tqdm.autonotebook import tqdm  # start-up time
    else:
        from tqdm import tqdm  # start-up time
    return type("Bar", (_OwnLock, tqdm), {})


class _OwnLock:
    """Part of a bar: no lock that processes share in /dev/shm, and no monitoring thread."""

    monitor_interval = 0
    _lock = threading.RLock()


def tell_shards(progress: Progress, done: int, total: int) -> None:
    """Call ``shards`` if the progress has it."""
    if isinstance(progress, ShardProgress):
        progress.shards(done, total)

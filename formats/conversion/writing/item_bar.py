"""A progress bar of items with their rate, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardprep.formats.progress import bar_class, in_notebook

if TYPE_CHECKING:
    from tqdm import tqdm

_KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} items, {elapsed}<{remaining}{postfix}"
_UNKNOWN = "{desc}: {n_fmt} items, {elapsed}{postfix}"


class ItemBar:
    """A bar that is removed when the task ends; nothing is shown where there is no terminal or notebook."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._began = 0.0
        self._is_shown = sys.stderr.isatty() or in_notebook()

    def note(self, text: str) -> None:
        """Print a line."""
        if self._is_shown:
            bar_class().write(text, file=sys.stderr)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        """Show a bar during the work; ``records`` is 0 where their number is not known."""
        self._began = time.monotonic()
        shape = _KNOWN if records else _UNKNOWN
        with bar_class()(
            total=records or None, desc=title, leave=False, bar_format=shape, disable=not self._is_shown
        ) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        """Move the bar, and show the rates in items and bytes."""
        if self._bar is not None and self._is_shown:
            seconds = max(time.monotonic() - self._began, 1e-9)
            rates = f"{records / seconds:,.0f} items/s, {size / seconds / 1e6:,.0f} MB/s"
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(records - self._bar.n)

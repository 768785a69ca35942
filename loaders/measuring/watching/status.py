"""What is shown of a running loader or flow: lines on a terminal, or a bar in a notebook."""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import Any, Protocol

from tqdm import tqdm

from shardprep.formats.printable import printable
from shardprep.formats.progress import bar_class
from shardprep.formats.system.owned import Owned

from .last_minute import LastMinute, Stats, Watchable
from .status_text import queue_line, rate_line, stages_line, storage_line
from .terminal_block import TerminalBlock

WINDOW_S = 1.0  # between two measurements
REDRAWN_S = 0.2  # between two states on a terminal
KEPT_LEVELS = 60  # of the queue, one for each second
KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} batches, {elapsed}<{remaining}{postfix}"
NARROW = "{desc}: {percentage:3.0f}%|{bar}| {remaining} left"
NARROW_WIDTH = 60  # characters; below it the bar would have no room beside the counts
ENDLESS = "{desc}: {n_fmt} batches, {elapsed}{postfix}"


class ShownStatus(Protocol):
    """A state that is shown, and removed when it is closed."""

    def saw(self) -> None:
        """Count a batch."""

    def measured(self, stats: Stats) -> None:
        """Show what was counted until now; called once in a second."""

    @property
    def may_move_alone(self) -> bool:
        """Whether :meth:`measured` may be called by another thread, while a batch is waited for."""

    def close(self) -> None:
        """Remove what is shown. Idempotent."""


class StatusLines(Owned):
    """Lines on a terminal: how far the epoch is, rate and limit, the stages, the queue, and the downloads.

    Thread-safe.
    """

    may_move_alone = True

    def __init__(self, loader: Watchable[Stats], *, total: int | None, title: str) -> None:
        self._engine: Any = getattr(loader, "engine", None)
        self._total, self._title = total, printable(title)
        self._count, self._began = 0, perf_counter()
        self._minute = LastMinute(self._began, loader.stats())
        self._levels: deque[int] = deque(maxlen=KEPT_LEVELS)
        self._block = TerminalBlock()
        self._lock = threading.Lock()
        self._next = 0.0
        self._draw()

    def saw(self) -> None:
        """Count a batch, and draw if it is time for it."""
        self._count += 1
        if perf_counter() >= self._next:
            with self._lock:
                self._draw()

    def measured(self, stats: Stats) -> None:
        """Draw the lines with these stats."""
        with self._lock:
            self._minute.add(perf_counter(), stats)
            if self._engine is not None:
                self._levels.append(self._engine.ready)
            self._draw()

    def close(self) -> None:
        """Remove the lines."""
        self._block.close()

    def _draw(self) -> None:
        self._block.show([line for line in self._lines() if line])
        self._next = perf_counter() + REDRAWN_S

    def _lines(self) -> list[str]:
        width, sparkline = self._block.width, self._block.is_unicode
        known, room = self._minute.stats, width - 2
        parts = [rate_line(self._minute, room, sparkline=sparkline), stages_line(known.loads, room)]
        if self._levels and self._engine.slots:
            waiting = known.loads[-1].starved if known.loads else 0.0
            levels = list(self._levels)
            parts.append(queue_line(levels, self._engine.slots, waiting, room, sparkline=sparkline))
        storage = getattr(known, "storage", None)
        if storage is not None and storage.shards.missing:
            rate = storage.received_bytes / max(self._minute.seconds, WINDOW_S)
            parts.append(storage_line(storage.shards, rate, room, sparkline=sparkline))
        return [self._bar(width), *(f"  {part}" for part in parts if part)]

    def _bar(self, width: int) -> str:
        known = KNOWN if width >= NARROW_WIDTH else NARROW
        return tqdm.format_meter(
            self._count,
            self._total,  # type: ignore[arg-type]  # of an unknown length it is None
            perf_counter() - self._began,
            ncols=width,
            prefix=self._title,
            ascii=not self._block.is_unicode,
            bar_format=ENDLESS if self._total is None else known,
        )


class StatusBar(Owned):
    """A bar of one line, which a notebook shows below the cell."""

    may_move_alone = False  # a notebook shows what another thread draws below another cell

    def __init__(self, loader: Watchable[Stats], *, total: int | None, title: str) -> None:
        self._before = loader.stats()
        self._bar = bar_class()(
            total=total,
            desc=title,
            leave=False,
            dynamic_ncols=True,
            bar_format=ENDLESS if total is None else KNOWN,
        )

    def saw(self) -> None:
        """Move the bar by a batch."""
        self._bar.update()

    def measured(self, stats: Stats) -> None:
        """Show the rate since the last call."""
        self._bar.set_postfix_str(text_of(stats.since(self._before)), refresh=False)
        self._before = stats

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def text_of(stats: Stats) -> str:
    """``1,234 images/s, decode limits``; empty where nothing was delivered."""
    verdict = stats.verdict
    return f"{verdict.rate:,.0f} {verdict.unit}/s, {verdict.limit} limits" if verdict else ""

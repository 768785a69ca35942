"""A progress bar with a running loader's rate and the stage that limits it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shardprep.formats.progress import bar_class, in_notebook
from shardprep.formats.system.owned import Owned

if TYPE_CHECKING:
    from shardprep.loaders.loader.epoch_loader import EpochLoader
    from shardprep.loaders.loader.stats import LoaderStats

WINDOW_S = 1.0  # of the rate and the verdict
KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} batches, {elapsed}<{remaining}{postfix}"
ENDLESS = "{desc}: {n_fmt} batches, {elapsed}{postfix}"


def watched(loader: EpochLoader, *, title: str = "loading") -> Iterator[tuple[Any, ...]]:
    """Yield the batches of ``loader``'s next epoch, with a bar on a terminal or in a notebook.

    ``for images, labels in watched(train): ...`` shows ``title``, the rate and the stage that limits, of the
    last second; the bar is removed when the epoch ends. It takes some microseconds per batch.
    """
    with LoaderBar(loader, total=len(loader), title=title) as bar, closing(iter(loader)) as batches:  # type: ignore[type-var]
        yield from map(bar.passed, batches)  # a loop variable would hold one longer


class LoaderBar(Owned):
    """A bar, if it is to be ``shown``, on a terminal or in a notebook. Not thread-safe."""

    def __init__(
        self, loader: EpochLoader, *, total: int | None = None, title: str = "loading", shown: bool = True
    ) -> None:
        self._loader = loader
        self._bar = bar_class()(
            total=total,
            desc=title,
            disable=not (shown and (sys.stderr.isatty() or in_notebook())),
            leave=False,
            dynamic_ncols=True,
            bar_format=ENDLESS if total is None else KNOWN,
        )
        self._before, self._since = loader.stats(), perf_counter()

    def passed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Count a batch and return it."""
        self.saw()
        return batch

    def saw(self) -> None:
        """Count one more batch."""
        if self._bar.disable:
            return
        self._bar.update()
        if perf_counter() >= self._since + WINDOW_S:
            self._show_rate()

    def _show_rate(self) -> None:
        now = self._loader.stats()
        self._bar.set_postfix_str(text_of(now.since(self._before)), refresh=False)
        self._before, self._since = now, perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def text_of(stats: LoaderStats) -> str:
    """``1,234 images/s, decode limits``; empty where nothing was delivered."""
    verdict = stats.verdict
    return f"{verdict.rate:,.0f} images/s, {verdict.limit} limits" if verdict else ""

"""A progress bar with the rate of a running loader or flow and the stage that limits it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from shardprep.formats.progress import bar_class, in_notebook
from shardprep.formats.system.owned import Owned

if TYPE_CHECKING:
    from shardprep.loaders.loader.bottleneck import Verdict

WINDOW_S = 1.0  # of the rate and the verdict
KNOWN = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} batches, {elapsed}<{remaining}{postfix}"
ENDLESS = "{desc}: {n_fmt} batches, {elapsed}{postfix}"


class Stats(Protocol):
    """Counts and times of a loader or a flow."""

    @property
    def verdict(self) -> Verdict | None: ...

    def since(self, before: Any) -> Self: ...


S = TypeVar("S", bound=Stats, covariant=True)


class Watchable(Protocol[S]):
    """A Loader or a Flow."""

    def __iter__(self) -> Iterator[Any]: ...

    def stats(self) -> S: ...


def watched(loader: Watchable[Stats], *, title: str = "loading") -> Iterator[Any]:
    """Yield the batches of the next epoch or pass of ``loader``, a Loader or a Flow, with a bar.

    ``for images, labels in watched(train): ...`` shows ``title``, the rate and the stage that limits, of the
    last second, on a terminal's stderr or in a notebook; the bar is removed when the epoch ends. It takes
    some microseconds per batch.
    """
    with LoaderBar(loader, total=_length(loader), title=title) as bar, closing(iter(loader)) as batches:  # type: ignore[type-var]
        yield from map(bar.passed, batches)  # a loop variable would hold one longer


def _length(loader: Any) -> int | None:
    """The number of batches; None where it is not known."""
    try:
        return len(loader)
    except TypeError:
        return None


class LoaderBar(Owned):
    """A bar, if it is to be ``shown``, on a terminal or in a notebook. Not thread-safe."""

    def __init__(
        self,
        loader: Watchable[Stats],
        *,
        total: int | None = None,
        title: str = "loading",
        shown: bool = True,
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

    def passed(self, batch: Any) -> Any:
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


def text_of(stats: Stats) -> str:
    """``1,234 images/s, decode limits``; empty where nothing was delivered."""
    verdict = stats.verdict
    return f"{verdict.rate:,.0f} {verdict.unit}/s, {verdict.limit} limits" if verdict else ""

"""Passes over a source of batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from shardprep.formats.errors import UsageError

PassT = TypeVar("PassT", bound=Iterator[Any])
Source = Iterable[Any] | Callable[[], Iterable[Any]]
SINGLE_ITEMS = (str, bytes, bytearray, Mapping)  # one item, although it can be iterated


class Passes:
    """The passes over ``source``: a Loader, another iterable, or a function that returns an iterable.

    Beginning a second pass of an iterator raises UsageError. Not thread-safe. A pickled copy starts over.
    """

    def __init__(self, source: Source) -> None:
        if isinstance(source, SINGLE_ITEMS) or not (isinstance(source, Iterable) or callable(source)):
            raise UsageError(f"batches come from an iterable, or a function that returns one, not {source!r}")
        self.source = source
        self._peeked: tuple[Any, Iterator[Any]] | None = None
        self._latest: Iterator[Any] | None = None  # of a source that has iterators, or is one

    def begin(self) -> _Pass:
        """Begin the next pass, including a batch that was peeked at."""
        if self._peeked is None:
            return self._begin_pass()
        (first, rest), self._peeked = self._peeked, None
        return _Pass(rest, first)

    def peek(self) -> Any:
        """Return the next pass's first batch without consuming it. Raises UsageError for an empty source."""
        if self._peeked is None:
            batches = self._begin_pass()
            for first in batches:
                self._peeked = first, batches
                break
            else:
                raise UsageError(
                    "the source is empty, so the form of its batches is unknown; give a signature"
                )
        return self._peeked[0]

    def _begin_pass(self) -> _Pass:
        items = self.source if isinstance(self.source, Iterable) else check_items(self.source(), self.source)
        if isinstance(items, Iterator) and items is self._latest:
            raise UsageError(
                "this is the same iterator as in the pass before, but an iterator has one pass: give a list, a "
                "Loader, or a function that returns a new iterator each time"
            )
        self._latest = items if isinstance(items, Iterator) else None
        return _Pass(iter(items))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source,)

    def __len__(self) -> int:
        """Number of batches of the next pass. Raises TypeError if it is unknown."""
        return len(self.source)  # type: ignore[arg-type]

    def state(self) -> Any:
        """Return the source's state, None if it has no ``state_dict``."""
        for name in ("state_or_none", "state_dict"):
            if callable(method := getattr(self.source, name, None)):
                return method()
        return None

    def load_state(self, state: Any, **options: Any) -> None:
        """Make the next pass continue from a state. Raises UsageError if the source takes none."""
        load_state_dict = getattr(self.source, "load_state_dict", None)
        if not callable(load_state_dict):
            raise UsageError("the source of this input has no state to load; give it a Loader or a Flow")
        load_state_dict(state, **options)
        self.close()

    def close(self) -> None:
        """End a pass that was only peeked at. Idempotent."""
        if self._peeked is not None:
            (_, rest), self._peeked = self._peeked, None
            end_pass(rest)

    @property
    def batches_never_change(self) -> bool:
        """Whether the source never changes a delivered batch, so that it need not be copied."""
        return bool(getattr(self.source, "batches_never_change", False))

    @property
    def fixed_length(self) -> int | None:
        """Number of batches in every pass; None if it is unknown or differs between passes."""
        try:
            length = len(self)
        except TypeError:
            return None
        return length if getattr(self.source, "batches_per_epoch", length) == length else None


def check_items(items: object, function: object) -> Iterable[Any]:
    """Return the items that a function returned. Raises UsageError unless they can be iterated."""
    if isinstance(items, SINGLE_ITEMS) or not isinstance(items, Iterable):
        name = getattr(function, "name", getattr(function, "__qualname__", type(function).__name__))
        raise UsageError(f"{name} returned an object of type {type(items).__name__}, which has no items")
    return items


def end_pass(batches: Iterator[Any]) -> None:
    """Close an unfinished pass; generators clean up at once."""
    close = getattr(batches, "close", None)
    if callable(close):
        close()


@contextmanager
def ending(batches: PassT) -> Iterator[PassT]:
    """Context that ends the pass (:func:`end_pass`), like ``closing``, but ``close`` may be missing."""
    try:
        yield batches
    finally:
        end_pass(batches)


@contextmanager
def ending_all(passes: list[Iterator[Any]]) -> Iterator[list[Iterator[Any]]]:
    """Context that ends all of the passes."""
    with ExitStack() as opened:
        for batches in passes:
            opened.callback(end_pass, batches)
        yield passes


class _Pass(Iterator[Any]):
    """The batches of one pass: ``first``, then those of an iterator.

    Never calls ``iter`` on the iterator, because that restarts some. Keeps no delivered batch, because that
    would occupy its slot. Closing ends the iterator even before the first batch, which a generator cannot.
    """

    remaining: float = math.inf  # batches before the end, which is then drawn with the last batch

    def __init__(self, batches: Iterator[Any], *first: Any) -> None:
        self._batches = batches
        self._first = list(first)

    def __next__(self) -> Any:
        try:
            batch = self._first.pop() if self._first else next(self._batches)
            self.remaining -= 1
            if not self.remaining:
                with suppress(StopIteration):
                    self._first.append(next(self._batches))
        except BaseException:
            self.close()
            raise
        return batch

    def close(self) -> None:
        self._first.clear()
        end_pass(self._batches)


def refuse_sampler(source: object) -> None:
    """Raise UsageError if the caller's caller is a PyTorch sampler, which picks items by number.

    A DataLoader makes one for anything but its own IterableDataset, and checks nothing else before its
    workers fail.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith(("torch.utils.data.", "torchdata.stateful")):
        raise UsageError(
            f"a {type(source).__name__} is iterated, and has workers of its own: write "
            "DataLoader(to_torch(loader), batch_size=None), with to_torch from shardprep, or iterate it without a "
            "DataLoader"
        )

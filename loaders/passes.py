"""Whatever batches come from, as one pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ..formats.errors import UsageError

Source = Iterable[Any] | Callable[[], Iterable[Any]]


class Passes:
    """The passes over ``source``: a Loader, a list, anything that can be iterated, or a function that returns it.

    An iterator (a generator, say) has one pass; asking for another raises UsageError, because a silent
    empty epoch is what nobody means. Not thread-safe.
    """

    def __init__(self, source: Source) -> None:
        if not isinstance(source, Iterable) and not callable(source):
            raise UsageError(f"batches come from an iterable, or a function that returns one, not {source!r}")
        self.source = source
        self._peeked: tuple[Any, Iterator[Any]] | None = None
        self._spent = False

    def begin(self) -> Iterator[Any]:
        """The next pass; one that was peeked at begins with what was seen."""
        if self._peeked is None:
            return self._fresh()
        (first, rest), self._peeked = self._peeked, None
        return _with_first(first, rest)

    def peek(self) -> Any:
        """The first batch of the next pass, without taking it. Raises UsageError for an empty source."""
        if self._peeked is None:
            batches = self._fresh()
            for first in batches:
                self._peeked = first, batches
                break
            else:
                raise UsageError("the source is empty, so its batches' form is unknown; give a signature")
        return self._peeked[0]

    def _fresh(self) -> Iterator[Any]:
        if isinstance(self.source, Iterator):
            if self._spent:
                raise UsageError(
                    "an iterator gives one pass; give a list, a Loader or a function that returns a fresh one"
                )
            self._spent = True
        return iter(self.source if isinstance(self.source, Iterable) else self.source())

    def __len__(self) -> int:
        """How many batches the next pass has. TypeError where nobody knows."""
        return len(self.source)  # type: ignore[arg-type]

    @property
    def steady_length(self) -> int | None:
        """How many batches every pass has, None where it is unknown or differs between passes."""
        try:
            length = len(self)
        except TypeError:
            return None
        return length if getattr(self.source, "batches_per_epoch", length) == length else None


def end(batches: Iterator[Any]) -> None:
    """Let go of a pass that is not finished; generators clean up at once."""
    close = getattr(batches, "close", None)
    if callable(close):
        close()


def _with_first(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    held = [first]
    del first
    try:
        yield from chain(_popped(held), rest)
    finally:
        end(rest)


def _popped(held: list[Any]) -> Iterator[Any]:
    """Yields without keeping: a batch that is held keeps its slot."""
    while held:
        yield held.pop()

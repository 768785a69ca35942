"""Whatever batches come from, as one pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
        if isinstance(source, str | bytes | bytearray | Mapping) or not (
            isinstance(source, Iterable) or callable(source)
        ):
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
        return _asked_once(iter(self.source if isinstance(self.source, Iterable) else self.source()))

    def __len__(self) -> int:
        """How many batches the next pass has. TypeError where nobody knows."""
        return len(self.source)  # type: ignore[arg-type]

    def state(self) -> Any:
        """Where the source is, None for one without ``state_dict``."""
        for name in ("state_or_none", "state_dict"):
            if callable(method := getattr(self.source, name, None)):
                return method()
        return None

    def load_state(self, state: Any) -> None:
        """Have the next pass begin where the state was taken. Raises UsageError for a source without state."""
        load_state_dict = getattr(self.source, "load_state_dict", None)
        if not callable(load_state_dict):
            raise UsageError("the source of this input has no state to load; give it a Loader")
        self.close()
        load_state_dict(state)

    def close(self) -> None:
        """End a pass that was peeked at and not begun. Idempotent."""
        if self._peeked is not None:
            (_, rest), self._peeked = self._peeked, None
            end(rest)

    @property
    def batches_never_change(self) -> bool:
        """Whether the source promises to leave alone what it has delivered, so that nobody need copy it."""
        return bool(getattr(self.source, "batches_never_change", False))

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


def _asked_once(batches: Iterator[Any]) -> Iterator[Any]:
    """The same from an iterator that is asked for nothing but the next: some begin anew on ``iter``."""
    try:
        while True:
            try:
                held = [next(batches)]
            except StopIteration:
                return
            yield held.pop()
    finally:
        end(batches)


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

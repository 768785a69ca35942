"""Items that can be had by number, in any process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, runtime_checkable

from shardprep.formats.errors import UsageError


class NumberedItems(ABC):
    """Items with the numbers 0 to ``len`` - 1, each the same whenever it is picked."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of items."""

    @abstractmethod
    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield the items of these numbers, in their order."""

    def elsewhere(self) -> NumberedItems | None:
        """Return the same items as worker processes can pick them; None where only this process can."""
        return self


@runtime_checkable
class OffersNumbers(Protocol):
    """An iterable, such as a Flow, that knows whether its items have numbers."""

    def by_number(self) -> NumberedItems | None:
        """Return the items by number; None where they have none."""


class SequenceItems(NumberedItems):
    """The elements of a sequence: anything with ``[]`` and ``len``."""

    def __init__(self, sequence: Any) -> None:
        self._sequence = sequence

    def __len__(self) -> int:
        return len(self._sequence)

    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        return (self._item(number) for number in numbers)

    def _item(self, number: int) -> Any:
        """Return an item. Raises StopIteration as RuntimeError, because it would end the items silently."""
        try:
            return self._sequence[number]
        except StopIteration as error:
            name = type(self._sequence).__name__
            raise RuntimeError(f"item {number} of the {name} raised StopIteration") from error


def numbered_items(samples: Any) -> NumberedItems | None:
    """Return the items of ``samples`` by number, None for an iterable that has no numbers.

    Raises UsageError for what has no items, and for one item in place of several.
    """
    if isinstance(samples, NumberedItems):
        return samples
    if isinstance(samples, OffersNumbers):
        return samples.by_number()
    if isinstance(samples, str | bytes | bytearray | Mapping):
        raise UsageError(f"a {type(samples).__name__} is one item, not several; give a list of items")
    if not isinstance(samples, Iterator) and isinstance(samples, Sized) and hasattr(samples, "__getitem__"):
        return SequenceItems(samples)
    if not isinstance(samples, Iterable):
        raise UsageError(f"a {type(samples).__name__} has no items; give a list, a generator or a Flow")
    return None

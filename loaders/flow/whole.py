"""Whole numbers that a user gives: sizes, counts, seeds."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import SupportsIndex

from ...formats.errors import UsageError
from .length import Length


def whole(value: object, name: str, *, least: int) -> int:
    """The value as an int; numpy's integers will do. UsageError for booleans, floats and what is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise UsageError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return operator.index(value)


def seed_of(value: object) -> int:
    """A seed that random streams can be drawn from. Raises UsageError."""
    seed = whole(value, "a seed", least=0)
    if seed >= 1 << 64:
        raise UsageError(f"a seed must be below 2**64, not {seed}")
    return seed


def within(numbers: Iterable[int], length: Length) -> Iterator[int]:
    """The numbers as they come. Raises IndexError for one that no item has, UsageError for what is no whole number."""
    count = length.items
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, SupportsIndex):
            raise UsageError(f"items are picked by whole numbers, not by {number!r}")
        if not 0 <= number < count:
            raise IndexError(f"item {number} of {count}")
        yield number

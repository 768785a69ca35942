"""Checks of numbers that a user gives: sizes, counts, seeds, seconds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import SupportsIndex

from shardprep.formats.errors import UsageError

from .length import Length


def checked_int(value: object, name: str, *, least: int) -> int:
    """Return the value, a Python or numpy integer, as an int.

    Raises UsageError for booleans, floats, and numbers below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise UsageError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return operator.index(value)


def seed_of(value: object) -> int:
    """Return the value as a seed: an int below 2**64. Raises UsageError."""
    seed = checked_int(value, "a seed", least=0)
    if seed >= 1 << 64:
        raise UsageError(f"a seed must be below 2**64, not {seed}")
    return seed


def within(numbers: Iterable[int], length: Length) -> Iterator[int]:
    """Yield the numbers unchanged.

    Raises IndexError for a number that no item has, UsageError for a value that is no whole number.
    """
    count = length.items
    for number in numbers:
        is_int = type(number) is int  # asked first: SupportsIndex takes 10 us
        if not is_int and (isinstance(number, bool) or not isinstance(number, SupportsIndex)):
            raise UsageError(f"items are picked by whole numbers, not by {number!r}")
        if not 0 <= number < count:
            raise IndexError(f"item {number} of {count}")
        yield number


def seconds_of(value: object, name: str, *, above: float | None = None) -> float:
    """Return the value as a float.

    Raises UsageError unless it is a finite number: at least 0, or more than ``above`` where that is given.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        seconds = float(value)
        if (seconds >= 0 if above is None else seconds > above) and seconds < math.inf:
            return seconds
    least = "0 or more" if above is None else f"more than {above:g}"
    raise UsageError(f"{name} must be a number of seconds, {least}, not {value!r}")

"""Sizes in bytes to and from text such as "256MiB", whole numbers and functions from users, and counts."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from inspect import signature
from typing import Any, SupportsIndex

from shardprep.formats.errors import UsageError

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}".upper(): base ** (power + 1)
    for infix, base in (("B", 1000), ("iB", 1024), ("", 1024))
    for power, prefix in enumerate("KMGT")
}


def parse_bytes(text: str) -> int:
    """Parse a size such as "256MiB", "1GB", "64K" (K, M, G and T alone are powers of 1024) or "4096".

    Ignores case, and drops fractions of a byte. Raises ValueError for any other text.

    >>> parse_bytes("256MiB"), parse_bytes("1.5 GB"), parse_bytes("64K")
    (268435456, 1500000000, 65536)
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size such as 256MiB")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])


def byte_count(text: object, *, of: str) -> int:
    """Parse ``"2GiB"`` or ``"1.5 GB"``. The unit must end in B, because a bare number is ambiguous.

    Raises UsageError, which names the quantity ``of``, for any other text.
    """
    with suppress(ValueError):
        if isinstance(text, str) and text.endswith("B"):
            return parse_bytes(text)
    raise UsageError(f"{of} is a whole number or a size as '2GiB', not {text!r}")


def checked_int(value: object, name: str, *, least: int) -> int:
    """Return a Python or numpy integer as an int. Raises UsageError for anything else, even booleans."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise UsageError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return operator.index(value)


def seed_of(value: object) -> int:
    """Return the value as a seed: an int below 2**64. Raises UsageError."""
    seed = checked_int(value, "a seed", least=0)
    if seed >= 1 << 64:
        raise UsageError(f"a seed must be below 2**64, not {seed}")
    return seed


def takes(call: Callable[..., Any], arguments: int) -> bool:
    """Whether the callable takes this many arguments; True if it has no known signature."""
    try:
        signature(call, follow_wrapped=False).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        pass
    return True


def size(count: float) -> str:
    """Format a number of bytes in decimal units.

    >>> size(999), size(123456), size(147.9e9)
    ('999 B', '123.5 KB', '147.9 GB')
    """
    for unit in ("B", "KB", "MB"):
        if count < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def count_of(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> count_of(1, "shard"), count_of(1281167, "image"), count_of(2, "class"), count_of(2, "batch")
    ('1 shard', '1,281,167 images', '2 classes', '2 batches')
    """
    plural = noun + ("es" if noun.endswith(("s", "ch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def records_of(number: int, *, has_images: bool, has_labels: bool) -> str:
    """Format a number of records, naming missing images and labels.

    >>> records_of(300, has_images=True, has_labels=True), records_of(1, has_images=False, has_labels=True)
    ('300 images', '1 record without images')
    """
    lacks = [name for name, there in (("images", has_images), ("labels", has_labels)) if not there]
    without = f" without {' or '.join(lacks)}" if lacks else ""
    return count_of(number, "image" if has_images else "record") + without


def round_step(least: float) -> float:
    """Round a positive number up to 1, 2, 5 or 10 times a power of ten.

    >>> round_step(3), round_step(0.5), round_step(70)
    (5.0, 0.5, 100.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))

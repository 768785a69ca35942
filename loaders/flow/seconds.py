"""Times that a user gives."""

from __future__ import annotations

import math
from numbers import Real

from ...formats.errors import UsageError


def seconds_of(value: object, name: str, *, above: float | None = None) -> float:
    """The value as a float. UsageError for what is no finite number of at least 0, or not ``above`` that bound."""
    if isinstance(value, Real) and not isinstance(value, bool):
        seconds = float(value)
        if (seconds >= 0 if above is None else seconds > above) and seconds < math.inf:
            return seconds
    least = "0 or more" if above is None else f"more than {above:g}"
    raise UsageError(f"{name} must be a number of seconds, {least}, not {value!r}")

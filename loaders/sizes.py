"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from ..formats.errors import UsageError

UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def byte_count(text: object, *, of: str) -> float:
    """The bytes of ``"2GiB"`` or ``"1.5 GB"``; ``of`` says in the UsageError what was to be measured."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B)", text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{of} is a number or a size as '2GiB', not {text!r}")
    return float(match[1]) * float(UNITS[match[2]])

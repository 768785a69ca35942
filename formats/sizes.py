"""Sizes in bytes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}".upper(): base ** (power + 1)
    for infix, base in (("B", 1000), ("iB", 1024), ("", 1024))
    for power, prefix in enumerate("KMGT")
}


def parse_bytes(text: str) -> int:
    """A size in bytes from "256MiB", "1GB", "64K" (K, M, G, T alone are powers of 1024), "4096".

    Upper and lower case are the same; a part of a byte is left out. Raises ValueError for what is no size.

    >>> parse_bytes("256MiB"), parse_bytes("1.5 GB"), parse_bytes("64K")
    (268435456, 1500000000, 65536)
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size such as 256MiB")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])

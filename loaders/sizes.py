"""Sizes in bytes that stand where a number of something else may stand, too."""

from __future__ import annotations

from ..formats.errors import UsageError
from ..formats.sizes import parse_bytes


def byte_count(text: object, *, of: str) -> int:
    """The bytes of ``"2GiB"`` or ``"1.5 GB"``; the unit ends in B, lest a bare number be taken for bytes.

    ``of`` says in the UsageError what was to be measured.
    """
    try:
        if isinstance(text, str) and text.endswith("B"):
            return parse_bytes(text)
    except ValueError:
        pass
    raise UsageError(f"{of} is a number or a size as '2GiB', not {text!r}")

"""A column as it is asked for: its name, its kind, and where its values come from."""

from __future__ import annotations

from typing import NamedTuple

from shardprep.formats.errors import UsageError

from .schema import OF_CLASSES, Field


class ColumnChoice(NamedTuple):
    """A column's ``name``, its ``kind`` (empty: that of its values) and the text of its ``origin``."""

    name: str
    kind: str
    origin: str


def column_choice(text: str, form: str) -> ColumnChoice:
    """Return the parts of ``NAME[:KIND][=ORIGIN]``; ``form`` is how an error says what was expected.

    Raises UsageError for a name or a kind that no column has.
    """
    head, _, origin = text.partition("=")
    name, _, kind = head.partition(":")
    name, kind = name.strip(), kind.strip()
    if not name or (":" in head and not kind):
        raise UsageError(f"expected {form}, not {text!r}")
    Field(name, kind or "bytes", ("a",) if kind in OF_CLASSES else ())
    return ColumnChoice(name, kind, origin)

"""The kinds of a table's columns: as chosen, or guessed from all cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shardprep.formats.columns.column_choice import ColumnChoice
from shardprep.formats.columns.numeric import INT64
from shardprep.formats.columns.schema import OF_CLASSES, RESERVED, Field
from shardprep.formats.errors import UsageError
from shardprep.formats.sources.labelled_list.classes import MAX_CLASSES

from .cell_values import names_in

_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,19}\s*", re.ASCII)
_FILES = ("image", "bytes")
ADVICE = "choose columns with --column NAME:KIND=HEADER"


class CellKind:
    """The kind of one column, narrowed by each of its cells; ``header`` is its name in the table.

    Guessed kinds are int, float, text, and json for values of JSON that are none of them. Cells of CSV are
    text (``typed`` is False): an empty one is no integer, and a float that is NaN.
    """

    def __init__(self, header: str, choice: ColumnChoice | None = None, *, typed: bool) -> None:
        self.header = header
        self._choice = choice
        self._typed = typed
        self._found = ""
        self._has_empty = False
        self._classes: dict[str, None] = {}
        if choice and choice.kind in _FILES:
            raise UsageError(
                f"the column {choice.name} of kind {choice.kind} cannot come from a table; give a folder of "
                "images with --pair"
            )

    def add(self, cell: Any) -> None:
        """Take a cell into account. Raises ValueError for names that cannot be classes."""
        if self._choice is None:
            self._narrow(cell)
        elif self._choice.kind in OF_CLASSES:
            self._classes.update(dict.fromkeys(names_in(cell, self._choice.kind, typed=self._typed)))
            if len(self._classes) > MAX_CLASSES:
                raise ValueError(f"has a class of {self.header!r} that is one more than {MAX_CLASSES}")

    @property
    def field(self) -> Field:
        """The field of all cells so far. Raises UsageError if the header is no column's name."""
        if self._choice:
            return Field(self._choice.name, self._choice.kind, tuple(sorted(self._classes)))
        name = f"{self.header}_" if self.header.lower() in RESERVED else self.header
        try:
            return Field(name, self.guess)
        except UsageError as error:
            raise UsageError(f"the table's column {self.header!r}: {error.message}; {ADVICE}") from error

    @property
    def guess(self) -> str:
        """The kind that all cells so far fit."""
        if self._found == "int" and self._has_empty:
            return "float"
        return self._found or "text"

    def _narrow(self, cell: Any) -> None:
        if not self._typed and not cell.strip():
            self._has_empty = True
            return
        found = _kind_of_value(cell) if self._typed else _kind_of_text(cell, self._found)
        if self._found in ("", found) or (self._found, found) == ("int", "float"):
            self._found = found
        elif (self._found, found) != ("float", "int"):
            self._found = "json" if self._typed else "text"


def cell_kinds(
    names: Sequence[str], choices: Iterable[ColumnChoice], used: Iterable[str], *, typed: bool
) -> dict[int, CellKind]:
    """Return the kinds by the place of their column: the chosen ones, or all but those in ``used``.

    Raises UsageError for a header that is not there.
    """
    chosen = list(choices)
    if not chosen:
        left = [name for name in names if name not in set(used)]
        return {names.index(name): CellKind(name, typed=typed) for name in left}
    for choice in chosen:
        if choice.origin not in names:
            there = ", ".join(names)[:200]
            raise UsageError(f"the table has no column {choice.origin!r}; its columns are: {there}")
    if len({choice.origin for choice in chosen}) != len(chosen):
        raise UsageError("a column of the table is chosen twice; choose each once")
    return {names.index(c.origin): CellKind(c.origin, c, typed=typed) for c in chosen}


def _kind_of_text(cell: str, guess: str) -> str:
    if guess == "text":
        return guess
    if _INTEGER.fullmatch(cell) and INT64.min <= int(cell) <= INT64.max:
        return "int"
    try:
        float(cell)
    except ValueError:
        return "text"
    return "text" if "_" in cell else "float"


def _kind_of_value(cell: Any) -> str:
    if isinstance(cell, str):
        return "text"
    if type(cell) is int and INT64.min <= cell <= INT64.max:
        return "int"
    return "float" if isinstance(cell, float) else "json"

"""The contract of the values of a column that is joined to a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

from shardprep.formats.columns.schema import Field


class JoinedValues(AbstractContextManager["JoinedValues"], ABC):
    """The encoded values of a column for some records, in their stored order.

    Entering opens them for this process, and copies and pickles are made while they are closed. Not
    thread-safe. Entering raises SourceDamaged if they changed since the join was planned.
    """

    @abstractmethod
    def only(self, first: int, last: int) -> Self:
        """Return the values of the records from ``first`` to before ``last`` alone."""

    @abstractmethod
    def bytes_of(self, records: int) -> int:
        """Return about how many bytes the values of all ``records`` take; to be called while closed."""

    @abstractmethod
    def data(self, number: int) -> bytes:
        """Return a value. Raises BadValue, DataError and OSError."""

    @abstractmethod
    def where(self, number: int) -> str:
        """Return the place of a value, for messages."""


@dataclass(frozen=True)
class JoinedColumn:
    """A column to join: its field, its values, and what the manifest keeps of where they come from."""

    field: Field
    values: JoinedValues
    custody: Mapping[str, Any]

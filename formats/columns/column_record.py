"""A record with columns, which are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardprep.formats.records.record import Record


class ColumnValues(Mapping[str, Any]):
    """The values of a record's columns by name, each read at its first use. Pickled with all values.

    ``read(name)`` returns a value; for a name that is not in ``names`` it is not called.
    """

    def __init__(self, names: tuple[str, ...], read: Callable[[str], Any]) -> None:
        self._names = names
        self._read = read
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            if name not in self._names:
                known = ", ".join(self._names) or "none"
                raise KeyError(f"there is no column {name!r}; the columns are: {known}")
            self._known[name] = self._read(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<columns {', '.join(self._names)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (dict(self),)


def _loaded(values: dict[str, Any]) -> ColumnValues:
    return ColumnValues(tuple(values), values.__getitem__)


class ColumnRecord(Record):
    """A record with columns, which are values of :attr:`columns`, and also ``record["mask"]``."""

    _columns: Mapping[str, Any]
    _is_crop_ready: bool

    @classmethod
    def of(cls, record: Record, columns: Mapping[str, Any]) -> ColumnRecord:
        """Return the record with these columns."""
        return _with_columns(tuple(record), columns, record.crop_ready)

    @property
    def crop_ready(self) -> bool:
        return self._is_crop_ready

    @property
    def columns(self) -> Mapping[str, Any]:
        return self._columns

    def __getitem__(self, name: Any) -> Any:
        return self._columns[name] if isinstance(name, str) else super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_columns, (tuple(self), self._columns, self._is_crop_ready)


def _with_columns(parts: tuple[Any, ...], columns: Mapping[str, Any], is_crop_ready: bool) -> ColumnRecord:
    made = ColumnRecord(*parts)
    made._columns, made._is_crop_ready = columns, is_crop_ready
    return made

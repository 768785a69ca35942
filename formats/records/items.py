"""The form of saved items, and records with columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.record import NO_COLUMNS, Record
from shardprep.formats.records.schema import RESERVED
from shardprep.formats.runtime.json_record import matches
from shardprep.formats.runtime.lazy import cached_property


class ColumnValues(Mapping[str, Any]):
    """The values of a record's columns by name, each read on first use. Pickled with all values.

    ``read(name)`` returns the value of one of the ``names``.
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
    """A record with columns: its :attr:`columns` by name, or ``record["mask"]``."""

    _columns: Mapping[str, Any] = NO_COLUMNS
    _is_crop_ready: bool = False

    @classmethod
    def of(cls, record: Record, columns: Mapping[str, Any]) -> ColumnRecord:
        return _with_columns(tuple(record), columns, record.crop_ready)

    @property
    def crop_ready(self) -> bool:
        return self._is_crop_ready

    @property
    def columns(self) -> Mapping[str, Any]:
        return self._columns

    def __getitem__(self, name: Any) -> Any:
        return self._columns[name] if isinstance(name, str) else super().__getitem__(name)

    def _replace(self, **values: Any) -> Self:
        return _with_columns(tuple(super()._replace(**values)), self._columns, self._is_crop_ready)  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_columns, (tuple(self), self._columns, self._is_crop_ready)


def _with_columns(parts: tuple[Any, ...], columns: Mapping[str, Any], is_crop_ready: bool) -> ColumnRecord:
    made = ColumnRecord(*parts)
    made._columns, made._is_crop_ready = columns, is_crop_ready
    return made


FORMS = ("dict", "tuple", "list", "value", "record")
LAYOUT = "items"  # in a manifest's source


@dataclass(frozen=True)
class ItemForm:
    """The ``form`` of all items, one of FORMS, and the ``names`` of their parts, in order.

    The names "key", "image" and "label" of a dict or a record are the record's own; all others are columns.
    ``is_named`` is whether labels are given as names. ``classes`` are the names of the labels 0, 1, ...
    unless they are in sorted order.
    """

    form: str
    names: tuple[str, ...]
    is_named: bool = False
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, item: Any) -> ItemForm:
        """Return the form of an item. Raises BadValue for a dict with keys that are not text."""
        if isinstance(item, Record):
            own = ("key", "label", "image") if item.image else ("key", "label")
            return cls("record", (*own, *item.columns))
        if isinstance(item, dict):
            if not all(isinstance(name, str) for name in item):
                raise BadValue("is a dict with names that are not text")
            return cls("dict", tuple(map(str, item)))
        if isinstance(item, tuple | list):
            form = "tuple" if isinstance(item, tuple) else "list"
            return cls(form, tuple(map(str, range(len(item)))))
        return cls("value", ("value",))

    @cached_property
    def own(self) -> frozenset[str]:
        """The record's own names among those of the items: "key", "image" and "label"."""
        return frozenset(self.names).intersection(RESERVED if self.form in ("dict", "record") else ())

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.own)

    def parts(self, item: Any) -> Mapping[str, Any]:
        """Return the parts of an item by name. Raises BadValue if it has another form."""
        if self.form == "dict" and type(item) is dict and item.keys() == self._known:
            return item
        if self._type is not None and type(item) is self._type and len(item) == len(self.names):
            return dict(zip(self.names, item, strict=True))
        found = ItemForm.of(item)
        if found.form != self.form or set(found.names) != self._known:
            raise BadValue(f"is {found.described}, expected {self.described}")
        if self.form == "dict":
            return item  # type: ignore[no-any-return]
        if self.form == "record":
            return {"key": item.key, "label": item.label, "image": item.image, **item.columns}
        return dict(zip(self.names, [item] if self.form == "value" else item, strict=True))

    @cached_property
    def _known(self) -> set[str]:
        return set(self.names)

    @cached_property
    def _type(self) -> type[Any] | None:
        return {"tuple": tuple, "list": list}.get(self.form)

    @property
    def described(self) -> str:
        """The form in words, for messages."""
        if self.form == "value":
            return "a bare value"
        if self.form in ("tuple", "list"):
            return f"a {self.form} of {len(self.names)}"
        return f"a {self.form} of {', '.join(sorted(self.names)) or 'nothing'}"

    def item(self, key: str, label: int, image: bytes, values: Sequence[Any]) -> Any:
        """Return the item with these ``values`` of :attr:`columns`."""
        match self.form:
            case "tuple":
                return tuple(values)
            case "list":
                return list(values)
            case "value":
                return values[0]
            case "record":
                record = Record(key, label, image)
                columns = dict(zip(self.columns, values, strict=True))
                return ColumnRecord.of(record, columns) if columns else record
        parts = {"key": key, "label": label, "image": image} | dict(zip(self.columns, values, strict=True))
        return {name: parts[name] for name in self.names}

    def to_json(self) -> dict[str, Any]:
        """Return the form for a manifest's ``source``."""
        kept: dict[str, Any] = {"items": self.form, "names": list(self.names)}
        if self.is_named:
            kept["labels"] = "names"
        return kept | ({"classes": list(self.classes)} if self.classes else {})

    @classmethod
    def of_manifest(cls, source: Mapping[str, Any]) -> ItemForm | None:
        """Return the form in a manifest's ``source``; None for a dataset that was not made from items.

        Raises ManifestDamaged for an unknown form.
        """
        if "items" not in source:
            return None
        form, names, classes = source["items"], source.get("names", ""), source.get("classes", [])
        if form not in FORMS or not matches(names, [str]) or not matches(classes, [str]):
            raise ManifestDamaged("does not state the form of its items; save them again")
        return cls(form, tuple(names), source.get("labels") == "names", tuple(classes))

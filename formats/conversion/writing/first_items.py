"""The first items, of which the form and the schema of all are found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.found_schema import FIRST_ITEMS, as_schema, found_schema
from shardprep.formats.columns.item_form import ItemForm
from shardprep.formats.columns.schema import Field, Schema
from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import SPACES

from .item_coder import EncodedItem, ItemCoder, bad_item
from .numbered_items import NumberedItems, numbered_items

GivenSchema = Schema | Mapping[str, str] | Sequence[Field]


@dataclass(frozen=True)
class OpenedItems:
    """All items: by number, or as ``rest``, an iterator over all; the coder, and the first items encoded."""

    coder: ItemCoder
    first: tuple[EncodedItem, ...]
    numbered: NumberedItems | None
    rest: Iterator[Any]


def opened_items(
    samples: Iterable[Any] | NumberedItems, schema: GivenSchema | None, classes: Sequence[str] | None
) -> OpenedItems:
    """Look at the first items. Raises UsageError for no items, or a schema or classes that do not fit them.

    Raises BadItem for an item that differs from the others.
    """
    if isinstance(samples, Dataset):
        schema = samples.schema if schema is None else schema
        classes = samples.classes if classes is None and samples.label_space == SPACES[0] else classes
    numbered = numbered_items(samples)
    rest: Iterator[Any] = iter(())
    found: list[Any] = []
    if numbered is None and isinstance(samples, Iterable):
        rest = iter(samples)
        found = list(islice(rest, FIRST_ITEMS))
        rest = chain(found, rest)
    elif numbered is not None:
        found = list(numbered.pick(range(min(FIRST_ITEMS, len(numbered)))))
    if not found:
        raise UsageError("there are no items to save")
    coder = _coder(found, schema, classes)
    first = tuple(coder.encode(number, item) for number, item in enumerate(found))
    return OpenedItems(coder, first, numbered, rest)


def _coder(first: Sequence[Any], schema: GivenSchema | None, classes: Sequence[str] | None) -> ItemCoder:
    form = _form(first[0])
    rows = [_parts(form, number, item) for number, item in enumerate(first)]
    if not form.columns and "image" not in form.own:
        raise UsageError("the items have neither an image nor a column, and nothing would be saved")
    form, names = _labelled(form, rows[0], classes)
    if schema is None:
        return ItemCoder(form, _found(rows, form), is_found=True, classes=names)
    return ItemCoder(form, _given(schema, form), is_found=False, classes=names)


def _form(item: Any) -> ItemForm:
    try:
        return ItemForm.of(item)
    except BadValue as error:
        raise bad_item(0, error.message) from error


def _parts(form: ItemForm, number: int, item: Any) -> Mapping[str, Any]:
    try:
        return form.parts(item)
    except BadValue as error:
        raise bad_item(number, error.message) from error


def _found(rows: Sequence[Mapping[str, Any]], form: ItemForm) -> Schema:
    try:
        return found_schema(rows, form.columns)
    except BadValue as error:
        raise bad_item(int(error.key or 0), error.message) from error


def _given(schema: GivenSchema, form: ItemForm) -> Schema:
    columns, own = as_schema(schema)
    named = {*columns.names, *own} if own else {*columns.names, *form.own}
    if missing := sorted(set(form.names) ^ named):
        raise UsageError(
            f"the schema and the items differ in {', '.join(missing)}: the items are {form.described}"
        )
    return Schema(columns[name] for name in form.columns)


def _labelled(
    form: ItemForm, row: Mapping[str, Any], classes: Sequence[str] | None
) -> tuple[ItemForm, tuple[str, ...]]:
    """Return the form with how its labels are given, and the names of the classes."""
    names = tuple(classes or ())
    if isinstance(classes, str) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise UsageError("classes are a list of names, each of which is there once")
    is_named = "label" in form.own and isinstance(row["label"], str)
    if names and "label" not in form.own:
        raise UsageError("classes are for items with a label: a dict with the name 'label'")
    if is_named and not names:
        raise UsageError("the labels are names; give classes=, the names of all classes")
    in_order = () if list(names) == sorted(names) else names
    return replace(form, is_named=is_named, classes=in_order), names

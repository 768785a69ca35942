"""The columns that are asked for, found and matched with a dataset's records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shardprep.formats.columns.column_choice import ColumnChoice, column_choice
from shardprep.formats.columns.schema import Schema
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.errors import UsageError
from shardprep.formats.system.user_path import user_path

from .array_values import of_array
from .dataset_values import of_dataset
from .joined_values import JoinedColumn
from .matching import Keys
from .table_values import of_table


def requested(
    columns: Mapping[str, str | os.PathLike[str]], manifest: Manifest, keys: Keys
) -> list[JoinedColumn]:
    """Return the columns to join to the dataset with these keys, in order.

    Raises UsageError for columns that cannot be, and what finding and matching their values raises.
    """
    if not columns:
        raise UsageError("name one column or more to join")
    choices = [column_choice(name, "NAME or NAME:KIND") for name in columns]
    Schema({choice.name: "bytes" for choice in choices})
    if len({choice.name for choice in choices}) != len(choices):
        raise UsageError("a column is named twice")
    origins = [os.fspath(origin) for origin in columns.values()]
    return [_found(choice, origin, manifest, keys) for choice, origin in zip(choices, origins, strict=True)]


def _found(choice: ColumnChoice, origin: str, manifest: Manifest, keys: Keys) -> JoinedColumn:
    path, part = _parts(origin)
    if not path.exists():
        raise UsageError(
            f"does not exist; the column {choice.name} comes from a dataset or a file", path=path
        )
    if path.is_dir():
        return of_dataset(path, part, choice, keys, manifest.split)
    if path.suffix.lower() != ".npy":
        return of_table(path.resolve(), part or choice.name, choice, keys)
    if part:
        raise UsageError("is an array, which has no columns", path=path)
    return of_array(path.resolve(), choice, manifest.records)


def _parts(origin: str) -> tuple[Path, str]:
    """Return the path, and the name of a column in it after the last ``#``, empty without one."""
    path = user_path(origin)
    if path.exists() or "#" not in origin:
        return path, ""
    place, _, part = origin.rpartition("#")
    return user_path(place), part

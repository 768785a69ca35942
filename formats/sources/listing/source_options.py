"""The options of reading a source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardprep.formats.columns.column_choice import ColumnChoice, column_choice
from shardprep.formats.errors import UsageError

_KEPT = {
    "follow_symlinks": bool,
    "val_fraction": float,
    "path_column": str,
    "label_column": str,
    "columns": list,
    "pairs": list,
    "coco": str,
}


@dataclass(frozen=True)
class SourceOptions:
    """Options of a conversion that say how its source is read.

    ``follow_symlinks`` reads the files and folders that links in an image tree, or to the files of a list,
    point to, within the source or not. ``val_fraction``, above 0 and below 1, splits a source that has train
    only: it is the part of each class that becomes val. For lists of images: ``root`` is the folder that the
    paths begin at (None: the list's own). For lists and tables of metadata, ``path_column`` and
    ``label_column`` are the names of the columns in a CSV file, or of the keys in a file of JSON lines (None:
    the usual ones).

    For columns beside key, label and image: ``columns`` chooses those of ``metadata.csv`` or
    ``metadata.jsonl``, each as ``"NAME:KIND"`` or ``"NAME:KIND=HEADER"`` (none: all, with guessed kinds).
    ``pairs`` are folders of images that belong to the images, each as ``"NAME=FOLDER"``, relative to the
    split's folder or to the source, or absolute. ``coco`` is the path of COCO's instances, relative to the
    source. All but ``root`` are kept in the manifest. Raises UsageError.
    """

    follow_symlinks: bool = False
    val_fraction: float | None = None
    root: str | os.PathLike[str] | None = None
    path_column: str | None = None
    label_column: str | None = None
    columns: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    coco: str | None = None

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UsageError(f"the val fraction must be above 0 and below 1, not {self.val_fraction}")
        for name in ("columns", "pairs"):
            if isinstance(given := getattr(self, name), str):
                raise UsageError(f"{name} is one text; give several, such as [{given!r}]")
            object.__setattr__(self, name, tuple(given))
        self.column_choices, self.pair_choices  # noqa: B018 - what is no choice is an error here

    @property
    def column_choices(self) -> tuple[ColumnChoice, ...]:
        """The columns of a table; the origin is the header."""
        choices = tuple(column_choice(text, "NAME:KIND or NAME:KIND=HEADER") for text in self.columns)
        for choice, text in zip(choices, self.columns, strict=True):
            if not choice.kind:
                raise UsageError(f"expected NAME:KIND or NAME:KIND=HEADER, not {text!r}")
        return tuple(choice._replace(origin=choice.origin or choice.name) for choice in choices)

    @property
    def pair_choices(self) -> tuple[ColumnChoice, ...]:
        """The paired folders; the origin is the folder."""
        choices = tuple(column_choice(text, "NAME=FOLDER") for text in self.pairs)
        for choice, text in zip(choices, self.pairs, strict=True):
            if choice.kind or not choice.origin:
                raise UsageError(f"expected NAME=FOLDER, not {text!r}")
        return choices

    @property
    def for_lists(self) -> dict[str, str]:
        """The options in use that only lists have, by name."""
        return self._given("root", "path_column", "label_column")

    @property
    def for_columns(self) -> dict[str, str]:
        """The options in use that only sources with columns have, by name."""
        return self._given("columns", "pairs", "coco")

    def _given(self, *names: str) -> dict[str, str]:
        return {name: str(value) for name in names if (value := getattr(self, name)) not in (None, ())}

    @property
    def in_use(self) -> dict[str, Any]:
        """The options that the manifest keeps and that are in use, by name."""
        return self.kept(*_KEPT)

    def kept(self, *names: str) -> dict[str, Any]:
        """Return those of the named options that are in use, as the manifest keeps them."""
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, False, ())
        }

    @classmethod
    def of_manifest(cls, source: Mapping[str, Any]) -> SourceOptions:
        """Return the options in a manifest's ``source``, which may hold anything. Raises UsageError."""
        found = {name: source[name] for name, kind in _KEPT.items() if type(source.get(name)) is kind}
        for name in ("columns", "pairs"):
            if not all(isinstance(text, str) for text in found.get(name, ())):
                del found[name]
        return cls(**found)

"""The options of reading a source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardprep.formats.errors import UsageError

_KEPT = {"follow_symlinks": bool, "val_fraction": float, "path_column": str, "label_column": str}


@dataclass(frozen=True)
class SourceOptions:
    """Options of a conversion that say how its source is read.

    ``follow_symlinks`` reads the files and folders that links in an image tree, or to the files of a list,
    point to, within the source or not. ``val_fraction``, above 0 and below 1, splits a source that has train
    only: it is the part of each class that becomes val. For lists of images: ``root`` is the folder that the
    paths begin at (None: the list's own), ``path_column`` and ``label_column`` are the names of the columns
    in a CSV file, or of the keys in a file of JSON lines (None: the usual ones). All but ``root`` are kept in
    the manifest. Raises UsageError.
    """

    follow_symlinks: bool = False
    val_fraction: float | None = None
    root: str | os.PathLike[str] | None = None
    path_column: str | None = None
    label_column: str | None = None

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UsageError(f"the val fraction must be above 0 and below 1, not {self.val_fraction}")

    @property
    def for_lists(self) -> dict[str, str]:
        """The options in use that only lists have, by name."""
        names = ("root", "path_column", "label_column")
        return {name: str(value) for name in names if (value := getattr(self, name)) is not None}

    @property
    def in_use(self) -> dict[str, Any]:
        """The options that the manifest keeps and that are in use, by name."""
        return self.kept(*_KEPT)

    def kept(self, *names: str) -> dict[str, Any]:
        """Return those of the named options that are in use, as the manifest keeps them."""
        return {name: value for name in names if (value := getattr(self, name)) not in (None, False)}

    @classmethod
    def of_manifest(cls, source: Mapping[str, Any]) -> SourceOptions:
        """Return the options in a manifest's ``source``, which may hold anything. Raises UsageError."""
        return cls(**{name: source[name] for name, kind in _KEPT.items() if type(source.get(name)) is kind})

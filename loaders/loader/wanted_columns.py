"""The parts of a record that a loader reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.errors import UsageError
from shardprep.loaders.transforms.columns import IMAGE


class WantedColumns(NamedTuple):
    """The columns that are read, in order; ``names`` also has "image" where that is read.

    ``are_chosen`` is False for a dataset without columns of which nothing was chosen.
    """

    names: tuple[str, ...]
    entries: tuple[ColumnEntry, ...]
    are_chosen: bool

    @property
    def with_image(self) -> bool:
        """Whether images are read."""
        return IMAGE in self.names

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[str] | None) -> Self:
        """Return the columns of these names, None for all. Raises UsageError for others, and for none."""
        there = ((IMAGE,) if manifest.has_images else ()) + manifest.schema.names
        if isinstance(names, str):
            raise UsageError(f"columns must be a list of names, such as ({names!r},), not {names!r}")
        chosen = there if names is None else tuple(names)
        for name in chosen:
            if name not in there or chosen.count(name) > 1:
                raise UsageError(f"columns has {name!r}; it may have each of {', '.join(there)} once")
        if not chosen:
            raise UsageError(f"columns is empty; it may have {', '.join(there)}")
        columns = manifest.columns
        entries = tuple(columns[name] for name in chosen if name != IMAGE) if columns else ()
        return cls(chosen, entries, names is not None or manifest.columns is not None)

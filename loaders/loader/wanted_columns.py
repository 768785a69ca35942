"""The parts of a record that a loader reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.columns.schema import Field
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.table_checks import box_columns
from shardprep.formats.errors import UsageError
from shardprep.loaders.transforms.columns import IMAGE, AsColumns
from shardprep.loaders.transforms.contract import ArraySpec


class WantedColumns(NamedTuple):
    """The columns that are read, in order; ``names`` also has "image" where that is read.

    ``boxes`` are the names by which a transform has those of the table of boxes, which are in ``names`` only
    if they were chosen. ``are_chosen`` is False for a dataset without columns of which nothing was chosen.
    """

    names: tuple[str, ...]
    entries: tuple[ColumnEntry, ...]
    boxes: tuple[str, ...]
    are_chosen: bool

    @property
    def with_image(self) -> bool:
        """Whether images are read."""
        return IMAGE in self.names

    @property
    def as_columns(self) -> AsColumns:
        """The transform that delivers these columns as they are."""
        fields = [entry.field for entry in self.entries]
        rows = tuple(spec for field in fields if (spec := _row_of(field)))
        return AsColumns(self.names, rows, tuple(field.name for field in fields if field.kind == "json"))

    @property
    def mean_bytes(self) -> float:
        """The mean bytes of a record's values that have different sizes, without the image."""
        shards = [shard for entry in self.entries for shard in entry.shards]
        return sum(shard.size for shard in shards) / self.entries[0].table.records if shards else 0

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[str] | None) -> Self:
        """Return the columns of these names, None for all. Raises UsageError for others, and for none."""
        stored = ((IMAGE,) if manifest.has_images else ()) + manifest.schema.names
        boxes = box_columns(manifest)
        there = stored + boxes
        if isinstance(names, str):
            raise UsageError(f"columns must be a list of names, such as ({names!r},), not {names!r}")
        chosen = stored if names is None else tuple(names)
        for name in chosen:
            if name not in there or chosen.count(name) > 1:
                raise UsageError(f"columns has {name!r}; it may have each of {', '.join(there)} once")
        if not chosen:
            raise UsageError(f"columns is empty; it may have {', '.join(there)}")
        columns = manifest.columns
        entries = tuple(columns[name] for name in chosen if name in columns.schema) if columns else ()
        wanted = boxes if names is None else tuple(name for name in chosen if name in boxes)
        return cls(chosen, entries, wanted, names is not None or manifest.columns is not None)


def _row_of(field: Field) -> ArraySpec | None:
    """Return the row of a value of a fixed size: labels are int64, as the dataset's are; None for others."""
    dtype = field.codec.dtype
    if dtype is None:
        return None
    base, shape = dtype.subdtype or (dtype, ())
    return ArraySpec(field.name, shape, "int64" if field.kind == "label" else base.newbyteorder("=").name)

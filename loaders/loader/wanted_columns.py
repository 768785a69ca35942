"""The parts of a record that a loader reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from shardprep.formats.columns.open_columns import PartFiles
from shardprep.formats.columns.schema import Field
from shardprep.formats.dataset.record_set import RecordSet
from shardprep.formats.dataset.table_checks import box_columns
from shardprep.formats.errors import UsageError
from shardprep.loaders.transforms.columns import IMAGE, AsColumns
from shardprep.loaders.transforms.contract import ArraySpec


class WantedColumns(NamedTuple):
    """The columns that are read, in order; ``names`` also has "image" where that is read.

    ``fields`` are those that are stored as columns. ``boxes`` are the names by which a transform has those of
    the table of boxes, which are in ``names`` only if they were chosen. ``are_chosen`` is False for a dataset
    without columns of which nothing was chosen.
    """

    names: tuple[str, ...]
    fields: tuple[Field, ...]
    boxes: tuple[str, ...]
    are_chosen: bool

    @property
    def with_image(self) -> bool:
        """Whether images are read."""
        return IMAGE in self.names

    @property
    def as_columns(self) -> AsColumns:
        """The transform that delivers these columns as they are."""
        rows = tuple(spec for field in self.fields if (spec := _row_of(field)))
        return AsColumns(self.names, rows, tuple(field.name for field in self.fields if field.kind == "json"))

    def files_of(self, dataset: RecordSet) -> tuple[PartFiles, ...]:
        """Return the files that are read of each part."""
        names = [field.name for field in self.fields]
        return tuple(part.files(dataset.label_space, names, self.boxes) for part in dataset.parts)

    @classmethod
    def of(cls, dataset: RecordSet, names: Sequence[str] | None) -> Self:
        """Return the columns of these names, None for all. Raises UsageError for others, and for none."""
        first = dataset.parts[0].manifest
        stored = ((IMAGE,) if first.has_images else ()) + dataset.schema.names
        boxes = _boxes_of(dataset)
        there = stored + boxes
        if isinstance(names, str):
            raise UsageError(f"columns must be a list of names, such as ({names!r},), not {names!r}")
        chosen = stored if names is None else tuple(names)
        for name in chosen:
            if name not in there or chosen.count(name) > 1:
                raise UsageError(f"columns has {name!r}; it may have each of {', '.join(there)} once")
        if not chosen:
            raise UsageError(f"columns is empty; it may have {', '.join(there)}")
        fields = {field.name: field for field in dataset.schema}
        wanted = boxes if names is None else tuple(name for name in chosen if name in boxes)
        own = tuple(fields[name] for name in chosen if name in fields)
        return cls(chosen, own, wanted, names is not None or bool(fields))


def _boxes_of(dataset: RecordSet) -> tuple[str, ...]:
    """The names of the columns of boxes, which all parts have."""
    names = [box_columns(part.manifest) for part in dataset.parts]
    return names[0] if all(names) else ()


def mean_bytes(parts: Iterable[PartFiles]) -> float:
    """The mean bytes of a record's values that have different sizes, without the image."""
    counts = [(sum(s.size for c in part.columns for s in c.shards), part.records) for part in parts]
    return sum(size for size, _ in counts) / max(1, sum(records for _, records in counts))


def _row_of(field: Field) -> ArraySpec | None:
    """Return the row of a value of a fixed size: labels are int64, as the dataset's are; None for others."""
    dtype = field.codec.dtype
    if dtype is None:
        return None
    base, shape = dtype.subdtype or (dtype, ())
    return ArraySpec(field.name, shape, "int64" if field.kind == "label" else base.newbyteorder("=").name)

"""A joined column of another dataset's records: their images, or one of their columns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.column_choice import ColumnChoice
from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.schema import Field
from shardprep.formats.dataset.dataset import Dataset, open_unreplaced
from shardprep.formats.dataset.manifest import read_manifest
from shardprep.formats.dataset.splits import splits_of
from shardprep.formats.dataset.table_checks import checked_index
from shardprep.formats.errors import UsageError

from .joined_values import JoinedColumn, JoinedValues
from .matching import Keys, matched


def of_dataset(folder: Path, column: str, choice: ColumnChoice, keys: Keys, split: str) -> JoinedColumn:
    """Return the column of the dataset in ``folder``, or of its split of that name.

    ``column`` is the name of one of its columns, empty for its images. Raises UsageError, SourceIncomplete,
    and what reading a dataset raises.
    """
    folder = splits_of(folder).get(split, folder)
    manifest = read_manifest(folder)
    if not column and not manifest.has_images:
        raise UsageError("has no images; name one of its columns as FOLDER#COLUMN", path=folder)
    found = manifest.schema[column] if column else Field(choice.name, "image")
    if choice.kind not in ("", found.kind):
        raise UsageError(f"holds the kind {found.kind}, not {choice.kind}; leave out the kind", path=folder)
    places = matched(keys, checked_index(folder, manifest)["key"], folder)
    custody = {"name": choice.name, "root": manifest.root} | ({"column": column} if column else {})
    values = DatasetValues(folder.resolve(), manifest.root, column, places)
    return JoinedColumn(Field(choice.name, found.kind, found.classes), values, custody)


@dataclass
class DatasetValues(JoinedValues):
    """The values at ``places``, which are numbers of records of the dataset in ``folder``."""

    folder: Path
    root: str
    column: str
    places: npt.NDArray[np.int64]
    _dataset: Dataset | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> DatasetValues:
        self._dataset = open_unreplaced(self.folder, self.root)
        return self

    def __exit__(self, *exc: object) -> None:
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            dataset.close()

    def only(self, first: int, last: int) -> DatasetValues:
        return replace(self, places=self.places[first:last])

    def bytes_of(self, records: int) -> int:
        with open_unreplaced(self.folder, self.root) as dataset:
            lengths = dataset.columns[self.column].lengths() if self.column else dataset.index["length"]
            return int(lengths[self.places].sum(dtype=np.int64))

    def data(self, number: int) -> bytes:
        if self._dataset is None:
            raise ValueError("the values are closed")
        place = int(self.places[number])
        if not self.column:
            return self._dataset[place].image
        row = self._dataset.index[place]
        at = RecordPlace(place, int(row["shard"]), int(row["ordinal"]), row["key"].item())
        return self._dataset.columns[self.column].data(at)

    def where(self, number: int) -> str:
        return f"{self.folder}, record {self.places[number]}"

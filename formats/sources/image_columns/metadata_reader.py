"""The reader of images and of their rows in a table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shardprep.formats.columns.schema import Field
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.image_columns.tables.cell_values import encoded_cell
from shardprep.formats.sources.image_columns.tables.table_form import TableForm
from shardprep.formats.sources.listing.source import ByteReader
from shardprep.formats.sources.listing.tree_reader import TreeReader
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

ROW_COLUMNS = (("image_length", "<i8"), ("row_length", "<i8"))
"""The columns of the entries beside those of every source; an entry's offset is that of its row."""


@dataclass
class MetadataReader(ByteReader):
    """Reader of images below a folder, and of the rows of the table at ``path``, each read in its place.

    ``identity`` is that of the table when it was listed, ``cells`` are the places of the fields in a row.
    """

    images: TreeReader
    path: Path
    identity: Identity
    form: TableForm
    fields: tuple[Field, ...]
    cells: tuple[int, ...]
    _table: ArchiveFile | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> MetadataReader:
        self._table = ArchiveFile(self.path, self.identity).__enter__()
        self.images = replace(self.images)  # a copy of this reader shares its part, so that it opens another
        self.images.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.images.__exit__(kind, *rest)
        if self._table is not None:
            table, self._table = self._table, None
            table.__exit__(kind)

    @property
    def is_open(self) -> bool:
        return self._table is not None

    def read(self, entry: np.void) -> bytes:
        return self.images.read(entry)

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        if self._table is None:
            raise ValueError("the reader is closed")
        length, offset = int(entry["row_length"]), int(entry["offset"])
        data = self._table.read_at(length, offset)
        if len(data) < length:
            raise SourceDamaged("ends before its last row does; start again", path=self.path)
        with foreign_file(self.path, "start again", place=lambda: f"the row at byte {offset}: "):
            row = self.form.cells(data)
        typed = not self.form.delimiter
        cells = zip(self.fields, self.cells, strict=True)
        return tuple(encoded_cell(field, row[place], typed=typed) for field, place in cells)

    def where(self, entry: np.void) -> str:
        return self.images.where(entry)

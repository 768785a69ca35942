"""The records of fake batches, by number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from shardprep.formats.images.png_file import png_of
from shardprep.formats.records.record import Record


class FakeDataset(AbstractContextManager["FakeDataset"]):
    """The records of a FakeData by number, in the place of a Dataset: ``len``, iteration and ``classes``.

    ``made_by(number)`` returns a record's image and label. Pixels become PNG files, which decode to them.
    """

    def __init__(self, made_by: Callable[[int], tuple[Any, int]], *, records: int, classes: int) -> None:
        self._made_by = made_by
        self._records = records
        self._classes = classes

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, number: int) -> Record:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        number %= len(self)
        image, label = self._made_by(number)
        encoded = bytes(image) if isinstance(image, memoryview) else png_of(image)
        return Record(self.key(number), label, encoded)

    def __iter__(self) -> Iterator[Record]:
        return (self[number] for number in range(len(self)))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; label *i* is that of ``classes[i]``."""
        digits = len(str(self._classes - 1))
        return tuple(f"class{number:0{digits}}" for number in range(self._classes))

    def key(self, number: int) -> str:
        """Return the key of the record with this number."""
        return f"fake/{number}"

    def __repr__(self) -> str:
        return f"<FakeDataset: {len(self):,} records of {self._classes:,} classes>"

    def close(self) -> None:
        """Does nothing: no file is open."""

    def __exit__(self, *exc: object) -> None:
        self.close()
